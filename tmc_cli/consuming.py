"""`tmc consume`: needs the client alone."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tmc_cli import fail
from tmc_client.consume import run as run_consumer
from tmc_common.printable import escaped, without_secrets


def run(args: Sequence[str], prog_name: str) -> None:
    """Consume until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog=prog_name, description="Run a consumer until SIGTERM or SIGINT.")
    parser.add_argument("consumer", metavar="MODULE:NAME", help="a tmc_client.Consumer")
    parser.add_argument("--processes", type=int, default=1, help="number of processes")
    parser.add_argument(
        "--health-port", type=int, help="serve /healthz on this port; further processes on the ports after it"
    )
    options = parser.parse_args(args)
    if options.processes < 1:
        parser.error("--processes must be 1 or more")
    configure_logging()
    try:
        raise SystemExit(run_consumer(options.consumer, options.processes, options.health_port))
    except (ValueError, OSError) as exc:
        fail(exc)


def configure_logging() -> None:
    """Log as the server does if its libraries are installed; with the client alone, log plain lines."""
    try:
        from tmc_server import telemetry
        from tmc_server.config import ConfigError, load
    except ModuleNotFoundError:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        return
    try:
        telemetry.configure_logging(load(None).log)
    except ConfigError as exc:
        fail(exc)


class _Plain(logging.Formatter):
    """One record, one line, except for the stack of an exception, which is indented."""

    def format(self, record: logging.LogRecord) -> str:
        first, *stack = super().format(record).split("\n") if record.exc_info else [super().format(record)]
        return "\n    ".join(escaped(without_secrets(line)) for line in (first, *stack))
