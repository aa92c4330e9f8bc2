"""Logging with structlog, never a body, key, token or URL with a password; and the metrics endpoint."""

from __future__ import annotations

import asyncio
import email
import logging
import os
import socket
import sys
import time
from threading import Thread
from typing import Any

import structlog
from prometheus_client.exposition import choose_encoder

from tmc_common.addresses import HostPort
from tmc_common.eventlog import EVENT_NAME
from tmc_common.printable import escaped, without_secrets
from tmc_server.config import LogConfig
from tmc_server.metrics import METRICS

_REQUEST_BYTES = 16_384


def configure_logging(config: LogConfig) -> None:
    """One line per event on standard error; JSON unless a person is looking."""
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[Any] = [structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, stamp]
    named = structlog.stdlib.ExtraAdder(allow=[EVENT_NAME])
    readable = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    chain: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # Before the renderer, which would show the variables of each frame, passwords among them.
        structlog.processors.format_exc_info,
        _mask,
        *([_escape, renderer] if readable else [structlog.processors.JSONRenderer()]),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=chain, foreign_pre_chain=shared if readable else [*shared, named]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tmc").setLevel(config.level.upper())
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # we log lost connections ourselves


def _mask(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Libraries name the URLs that they could not reach."""
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in event.items()}


def _escape(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Write an event as one line, its stack indented, so that no line of an error's text looks like an event."""
    stacks = ("exception", "stack")
    return {
        key: "\n".join(f"    {escaped(line)}" for line in str(value).split("\n")) if key in stacks else _as_line(value)
        for key, value in event.items()
    }


def _as_line(value: object) -> object:
    return escaped(value) if isinstance(value, str) else value  # the renderer shows others by repr, which escapes


SILENT_S = 30.0  # an event loop that runs no callback for so long hangs


class MetricsEndpoint:
    """/metrics for Prometheus, /healthz and /readyz, one per process. listen: host:port, port 0 for a free one; "": none.

    is_ready: what /readyz says; /healthz says whether the server's event loop runs: `beat` is called by it every second.

    One thread serves all connections. Each gets one response, and `patience_s` to request and read it; beyond
    `connections` at once the oldest is dropped, so that idle connections cannot block scrapes.
    """

    def __init__(self, listen: str, patience_s: float = 10.0, connections: int = 64) -> None:
        self.is_ready = False
        self._beat_at: float | None = None
        self._listen = listen
        self._patience_s = patience_s
        self._most = connections
        self._open: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._thread: Thread | None = None

    def beat(self) -> None:
        """The server's event loop is alive. The first call begins the watch."""
        self._beat_at = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Return whether the event loop has been heard of lately."""
        return self._beat_at is None or time.monotonic() - self._beat_at < SILENT_S

    def start(self) -> None:
        """Answers scrapes when it returns. Raises OSError whose text is for the operator: the port is taken, or no such host."""
        if not self._listen:
            return
        host, port = HostPort.parse(self._listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as exc:
            why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else "no such host"
            raise OSError(
                f"Cannot listen on {self._listen} for metrics ({why}): set "
                "[telemetry] listen (TMC_TELEMETRY__LISTEN) to another address, or stop what uses it."
            ) from exc
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="tmc-metrics", daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._accept, sock=self._socket, limit=_REQUEST_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()

    @property
    def port(self) -> int:
        """0: it does not listen."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else 0

    @property
    def connections(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def stop(self) -> None:
        """Close the port and every connection."""
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._loop.close()
            self._server = self._thread = self._loop = self._socket = None

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        if len(self._open) >= self._most:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[me] = None
        try:
            async with asyncio.timeout(self._patience_s):
                writer.write(_answer(await reader.readuntil(b"\r\n\r\n"), self.is_ready, self.is_alive))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()  # no request came, or the response was not read
        finally:
            self._open.pop(me, None)


def _answer(request: bytes, is_ready: bool, is_alive: bool) -> bytes:
    """The whole response to one request head."""
    line, _, fields = request.partition(b"\r\n")
    method, _, rest = line.decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", "text/plain", b"")
    if path == "/healthz":
        status, body = ("200 OK", b"ok\n") if is_alive else ("503 Service Unavailable", b"the event loop hangs\n")
        return _response(status, "text/plain", body, with_body=method == "GET")
    if path == "/readyz":
        status, body = ("200 OK", b"ready\n") if is_ready else ("503 Service Unavailable", b"starting or stopping\n")
        return _response(status, "text/plain", body, with_body=method == "GET")
    if path not in ("/", "/metrics"):
        return _response("404 Not Found", "text/plain", b"")
    accept = email.message_from_bytes(fields).get("Accept", "")
    encode, content_type = choose_encoder(accept)
    series: bytes = encode(METRICS.registry)
    return _response("200 OK", content_type, series, with_body=method == "GET")


def _response(status: str, content_type: str, body: bytes, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
