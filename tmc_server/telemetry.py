"""Logs: structlog over the standard library. Never a body, a key, a token or a URL with a password."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from tmc_server.config import LogConfig


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
