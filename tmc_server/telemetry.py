"""Logs: structlog over the standard library. Never a body, a key, a token or a URL with a password. And the metrics' port."""

from __future__ import annotations

import logging
import sys
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import start_http_server

from tmc_server.config import LogConfig
from tmc_server.metrics import METRICS
from tmc_server.printable import escaped, without_secrets


def configure_logging(config: LogConfig) -> None:
    """One line per event on standard error; JSON unless a person is looking."""
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[Any] = [structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, stamp]
    readable = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    chain: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # Before the renderer, which would show the variables of each frame, passwords among them.
        structlog.processors.format_exc_info,
        _mask,
        *([_escape, renderer] if readable else [structlog.processors.JSONRenderer()]),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(processors=chain, foreign_pre_chain=shared)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tmc").setLevel(config.level.upper())
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # we say ourselves what a lost connection means


def _mask(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Libraries name the URLs that they could not reach."""
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in event.items()}


def _escape(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """An event is one line; the stack below it is indented, so that no line of an error's text passes for an event."""
    stacks = ("exception", "stack")
    return {
        key: "\n".join(f"    {escaped(line)}" for line in str(value).split("\n")) if key in stacks else _as_line(value)
        for key, value in event.items()
    }


def _as_line(value: object) -> object:
    return escaped(value) if isinstance(value, str) else value  # the renderer shows others by repr, which escapes


class MetricsEndpoint:
    """/metrics for Prometheus, one per process. listen: host:port, port 0 for a free one; "": none."""

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Raises OSError when the port is taken."""
        if self._listen:
            host, _, port = self._listen.rpartition(":")
            self._server, self._thread = start_http_server(int(port), host, METRICS.registry)

    @property
    def port(self) -> int:
        """0: it does not listen."""
        return self._server.server_port if self._server is not None else 0

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)
