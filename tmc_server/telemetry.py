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


def configure_logging(config: LogConfig) -> None:
    """One line per event on standard error; JSON unless a person is looking."""
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[Any] = [structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, stamp]
    readable = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if readable else structlog.processors.JSONRenderer()
    chain: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not readable:
        chain.append(structlog.processors.format_exc_info)
    formatter = structlog.stdlib.ProcessorFormatter(processors=[*chain, renderer], foreign_pre_chain=shared)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tmc").setLevel(config.level.upper())
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # we say ourselves what a lost connection means


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
