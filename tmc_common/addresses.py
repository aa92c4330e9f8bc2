"""host:port as text, and whether it is on this machine: one rule for the SDK, the server and `tmc`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple


class HostPort(NamedTuple):
    """host: a name or an address, without brackets.  port: 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.in_url}:{self.port}"

    @property
    def in_url(self) -> str:
        """The host as a URL has it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def is_unspecified(self) -> bool:
        """0.0.0.0 or [::]: every address of this machine, and none that others could call."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """host:port, an IPv6 address in brackets. Raises ValueError."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535
        if not host or not is_port or (":" in host) != bracketed:
            raise ValueError(f"{text!r} is not HOST:PORT; an IPv6 address goes in brackets")
        return cls(host, int(port))

    @classmethod
    def parse_all(cls, text: str) -> Sequence[HostPort]:
        """One or several, with commas between them. Raises ValueError."""
        return [cls.parse(each.strip()) for each in text.split(",")]


def is_loopback(address: str) -> bool:
    """Return whether a key may be sent to this address in the clear.

    address: host:port. No name is resolved: `localhost` is the only name that counts, and an invalid or ambiguous
    address is not loopback.
    """
    try:
        host = HostPort.parse(address).host
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def each_host(url: str) -> Sequence[str]:
    """A URL for each host of one that may have several.

    >>> each_host("amqp://user:password@one:5672,two:5672/%2F")
    ['amqp://user:password@one:5672/%2F', 'amqp://user:password@two:5672/%2F']
    """
    # Not by urlsplit, which takes no comma before an address in brackets.
    scheme, slashes, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user, at, hosts = place.rpartition("@")
    return [f"{scheme}{slashes}{user}{at}{host.strip()}{slash}{path}" for host in hosts.split(",")]
