"""Proxies between us and the center: none, unless somebody asks for one.

gRPC itself follows `http_proxy` and its like, which are meant for browsers: calls to this machine would go to the company's
proxy, and the key with them.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

VARIABLE = "TMC_PROXY"
_used: dict[str, None] = {}  # by this process


def proxy_options(proxy: str | None = None) -> tuple[tuple[str, str | int], ...]:
    """Options of a gRPC channel. proxy: http://HOST:PORT, which takes CONNECT; None: TMC_PROXY of the environment; "": none.

    Raises ValueError: it is no such URL.
    """
    asked_for = os.environ.get(VARIABLE, "") if proxy is None else proxy
    if not asked_for:
        return (("grpc.enable_http_proxy", 0),)
    try:
        parts = urlsplit(asked_for)
        is_proxy = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # its text may quote a part of the password
        is_proxy = False
    if not is_proxy:
        raise ValueError(f"{without_password(asked_for)!r} is no proxy: give http://HOST:PORT (proxy=, {VARIABLE})")
    _used[without_password(asked_for)] = None
    return (("grpc.enable_http_proxy", 1), ("grpc.http_proxy", asked_for))


def by_proxy() -> str:
    """Name the proxy that this process uses, for the text of a call's failure; "": none."""
    return f" (calls go through the proxy {' or '.join(_used)}, as proxy= or {VARIABLE} says)" if _used else ""


def without_password(proxy: str) -> str:
    """Return it as it may be shown."""
    scheme, slashes, rest = proxy.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"
