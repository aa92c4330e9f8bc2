"""Runs the door in the loop of the server. Needs `tmc-center[http]`."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from tmc_common.eventlog import EventLog
from tmc_common.http_connections import PatientProtocol, listen
from tmc_server.certificates import KeyPair, Renewal
from tmc_server.config import TlsConfig
from tmc_server.http.door import Door

log = EventLog("tmc.http")

_KEEP_ALIVE_S = 75  # longer than proxies keep a connection that they do not use
_HANDSHAKE_S = 5.0  # of TLS


class _Protocol(PatientProtocol):
    """One connection. Any peer may have many of them: proxies have."""

    def state(self) -> dict[str, Any]:
        """Return whom the client's certificate names, if it showed one."""
        shown = self.transport.get_extra_info("peercert")
        return {"certificate": _names(shown)} if shown else {}

    def is_one_too_many(self) -> bool:
        """Return whether there are more connections than there may be."""
        return len(self.connections) > self.most


def _names(shown: Mapping[str, Any]) -> Mapping[str, Iterable[bytes]]:
    """Return whom a certificate names, as gRPC says it."""
    subject = [pair for part in shown.get("subject", ()) for pair in part]
    alternative = [name for _, name in shown.get("subjectAltName", ()) if isinstance(name, str)]
    return {
        "x509_subject_alternative_name": [name.encode() for name in alternative],
        "x509_common_name": [name.encode() for kind, name in subject if kind == "commonName"],
    }


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: they are for the server as a whole."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with a limit for the handshake of TLS, which uvicorn does not have."""
        config = self.config
        protocol: Any = config.http_protocol_class
        assert sockets is not None

        def made() -> Any:
            return protocol(config=config, server_state=self.server_state, app_state={})

        limit = _HANDSHAKE_S if config.ssl else None
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                made, sock=each, ssl=config.ssl, ssl_handshake_timeout=limit, backlog=config.backlog
            )
            for each in sockets
        ]
        self.started = True


def _following(tls: TlsConfig) -> ssl.SSLContext:
    """Return a context whose connections get the certificate as the files are when they begin."""
    renewal = Renewal(tls)

    def made(pair: KeyPair) -> ssl.SSLContext:
        context = pair.context()
        if tls.client_authority:
            context.load_verify_locations(tls.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    current = made(renewal.pair)

    def at_handshake(connection: ssl.SSLObject, *_: object) -> None:
        """A connection has a copy of the certificate it began with, so it takes a context of its own."""
        nonlocal current
        if (pair := renewal.renewed()) is not None:
            current = made(pair)
        connection.context = current

    first = made(renewal.pair)
    first.sni_callback = at_handshake
    return first


class HttpServer:
    """Listens from the start; serves from `start` to `stop`. die: it ended by itself.

    Raises OSError, CertificateUnusable: it cannot listen there, or use the certificate.
    """

    def __init__(self, door: Door, address: str, tls: TlsConfig, connections: int, die: Callable[[], None]) -> None:
        self._door = door
        self._die = die
        config = uvicorn.Config(
            door,
            http=type("_LimitedProtocol", (_Protocol,), {"most": connections}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # strangers would fill the log with what is no HTTP
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        if tls.certificate:
            config.ssl = _following(tls)
        self._server = _Server(config)
        self._listening = listen(address)
        self.port: int = self._listening.getsockname()[1]
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to serve, in a task of the running loop."""
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._listening]))
        self._serving.add_done_callback(self._ended)
        self._door.is_serving = True
        log.info("http_started", "serving JSON over HTTP on port %d", self.port)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        self._door.is_serving = False
        error = None if serving.cancelled() else serving.exception()
        if error is not None or not self._server.should_exit:
            log.error("http_failed", "calls over HTTP are no longer served", exc_info=error)
            self._die()

    async def stop(self, seconds: float) -> None:
        """Accept no more, answer open calls, for so long at most, then close all connections."""
        self._server.config.timeout_graceful_shutdown = math.ceil(seconds)
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving])

    def close(self) -> None:
        """Release the port of a server that was never started."""
        self._listening.close()
