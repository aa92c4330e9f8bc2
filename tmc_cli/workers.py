"""Several server processes on one machine: each is a full server on a port of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tmc_common.addresses import HostPort
from tmc_server.config import Config, ConfigError

_MODULE = "tmc_cli"


def worker_commands(config: Config, path: str | None, count: int) -> Sequence[tuple[Sequence[str], Mapping[str, str]]]:
    """(arguments, environment) of `count` workers. Raises ConfigError: this configuration is for one process.

    Worker i listens on the configured ports + i, its metrics and its advertised address likewise.
    """
    if config.delivery.kind == "builtin":
        raise ConfigError("Built-in delivery is for one process: use one worker, or delivery.kind rabbitmq.")
    arguments = ["-m", _MODULE, "serve", *(["--config", path] if path else [])]
    shifted = {
        "TMC_SERVER__LISTEN": config.server.listen,
        "TMC_HTTP__LISTEN": config.http.listen,
        "TMC_TELEMETRY__LISTEN": config.telemetry.listen,
        "TMC_CONSUL__ADVERTISE": config.consul.advertise,
    }
    return [
        (
            arguments,
            os.environ
            | {"TMC_SERVER__WORKERS": "1"}
            | {name: _shifted(value, number) for name, value in shifted.items() if value},
        )
        for number in range(count)
    ]


def _shifted(address: str, by: int) -> str:
    """Add `by` to the port of an address; port 0, which means any free port, stays 0."""
    host, port = HostPort.parse(address)
    return str(HostPort(host, port + by if port else 0))
