"""Runs the console: `tmc console`, and beside `tmc dev`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette

from tmc_common.addresses import HostPort
from tmc_common.http_connections import PatientProtocol, listen
from tmc_common.proxies import proxy_options
from tmc_console.application import application
from tmc_console.center import Center
from tmc_console.sessions import Sessions
from tmc_console.sso_names import Provider
from tmc_console.view import Setting

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig:
    """listen: host:port, port 0 takes a free one.  center: host:port of a server.

    hosts: names by which browsers reach the console, besides that of `listen`.
    credentials, options: of the channel to the center; None: plaintext.
    certificate, key: PEM files of the console's own TLS; "": none.  secure: browsers reach it over TLS of a proxy.
    open_token: see Setting.  provider: whom operators can log in with, besides their tokens.
    """

    listen: str
    center: str
    hosts: Sequence[str] = ()
    credentials: grpc.ChannelCredentials | None = None
    options: Sequence[tuple[str, str | int]] = proxy_options("")
    certificate: str = ""
    key: str = ""
    secure: bool = False
    open_token: str | None = None
    provider: Provider | None = None


class _ProxiedProtocol(PatientProtocol):
    """All connections come from a proxy: it knows who they are from."""

    most_of_a_peer = PatientProtocol.most


def run(config: ConsoleConfig, on_started: Callable[[int], None]) -> None:
    """Run until SIGTERM or SIGINT. on_started: called with the port. Raises OSError: it cannot listen there."""
    listening = listen(config.listen)
    on_started(listening.getsockname()[1])
    asyncio.run(_serve(config, listening))


def run_beside(config: ConsoleConfig) -> int:
    """Run in a thread that ends with the program. Returns: the port. Raises OSError: it cannot listen there."""
    listening = listen(config.listen)
    threading.Thread(target=lambda: asyncio.run(_serve(config, listening)), name="tmc-console", daemon=True).start()
    return int(listening.getsockname()[1])


async def _serve(config: ConsoleConfig, listening: socket.socket) -> None:
    settings = uvicorn.Config(
        made(config),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=config.certificate or None,
        ssl_keyfile=config.key or None,
        timeout_graceful_shutdown=3,
        http=_ProxiedProtocol if config.secure and not config.certificate else PatientProtocol,
    )
    await uvicorn.Server(settings).serve(sockets=[listening])


def _sso(provider: Provider) -> Any:
    from tmc_console.sso import SingleSignOn  # its libraries are an extra

    return SingleSignOn(provider)


def made(config: ConsoleConfig) -> Starlette:
    """The application alone, for a server of your own."""

    def connect() -> grpc.aio.Channel:
        # Its own connection: channels to one address share one otherwise, and logins would hold up everybody else.
        options = [*config.options, ("grpc.use_local_subchannel_pool", 1)]
        if config.credentials is None:
            return grpc.aio.insecure_channel(config.center, options)
        return grpc.aio.secure_channel(config.center, config.credentials, options)

    setting = Setting(
        center=Center(connect),
        login_center=Center(connect),
        sessions=Sessions(),
        open_token=config.open_token,
        secure=config.secure or bool(config.certificate),
        sso=_sso(config.provider) if config.provider is not None else None,
    )
    return application(setting, [*config.hosts, HostPort.parse(config.listen).host, *_LOOPBACK])
