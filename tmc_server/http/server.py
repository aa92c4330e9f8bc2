"""Runs the door in the loop of the server. Needs `tmc-center[http]`."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from tmc_common.eventlog import EventLog
from tmc_common.http_connections import PatientProtocol, listen
from tmc_server.config import TlsConfig
from tmc_server.http.door import Door

log = EventLog("tmc.http")

_KEEP_ALIVE_S = 75  # longer than proxies keep a connection that they do not use
_SHUTDOWN_S = 20  # for calls that run when the server stops


class _Protocol(PatientProtocol):
    """One connection. The doorkeeper limits them, so one peer may have many: proxies have."""

    most_of_a_peer = sys.maxsize

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        shown = transport.get_extra_info("peercert")
        if shown:
            self.app_state = {"certificate": _names(shown)}
        super().connection_made(transport)


def _names(shown: Mapping[str, Any]) -> Mapping[str, Iterable[bytes]]:
    """Return whom a certificate names, as gRPC says it."""
    subject = [pair for part in shown.get("subject", ()) for pair in part]
    return {
        "x509_subject_alternative_name": [name.encode() for _, name in shown.get("subjectAltName", ())],
        "x509_common_name": [name.encode() for kind, name in subject if kind == "commonName"],
    }


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: they are for the server as a whole."""
        yield


class HttpServer:
    """Listens from the start; serves from `start` to `stop`. Raises OSError: it cannot listen there."""

    def __init__(self, door: Door, address: str, tls: TlsConfig, connections: int) -> None:
        self._door = door
        self._listening = listen(address)
        self.port: int = self._listening.getsockname()[1]
        self._serving: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                door,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # strangers would fill the log with what is no HTTP
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=connections,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
                ssl_certfile=tls.certificate,
                ssl_keyfile=tls.key,
                ssl_ca_certs=tls.client_authority,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_authority else ssl.CERT_NONE,
            )
        )

    def start(self) -> None:
        """Start to serve, in a task of the running loop."""
        self._door.is_serving = True
        log.info("http_started", "serving JSON over HTTP on port %d", self.port)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._listening]))

    def leave(self) -> None:
        """Say that this server stops, while it still serves."""
        self._door.is_serving = False

    async def stop(self) -> None:
        """Accept no more, answer open calls, then close all connections."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    def close(self) -> None:
        """Release the port of a server that was never started."""
        self._listening.close()
