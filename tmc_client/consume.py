"""Run a Consumer of a module until a signal stops it: `tmc consume` for programs that install the client alone."""

from __future__ import annotations

import os
import sys

from tmc_client.consuming import loading
from tmc_client.consuming.consumer import Consumer
from tmc_client.consuming.health import HealthEndpoint
from tmc_common.supervisor import Supervisor

_USAGE = "usage: python -m tmc_client.consume MODULE:CONSUMER [PROCESSES [HEALTH_PORT]]"


def load(reference: str) -> Consumer:
    """The Consumer that MODULE:NAME means. Raises ValueError."""
    return loading.load(reference, Consumer, "shop.consumers:consumer")


def run(reference: str, processes: int = 1, health_port: int | None = None) -> int:
    """Returns: the exit code. Raises ValueError; OSError: a port is taken.

    health_port: /healthz is served there on all addresses; by further processes on the ports after it. None: nowhere.
    """
    if processes == 1:
        consumer = load(reference)
        if health_port is not None:
            HealthEndpoint("", health_port, consumer.health)
        consumer.run()
        return 0
    command = ["-m", "tmc_client.consume", reference, "1"]
    ports = [[]] * processes if health_port is None else [[str(health_port + number)] for number in range(processes)]
    return Supervisor([([*command, *port], os.environ) for port in ports]).run()


def main() -> None:
    """The command."""
    if len(sys.argv) not in (2, 3, 4):
        raise SystemExit(_USAGE)
    try:
        raise SystemExit(run(sys.argv[1], *map(int, sys.argv[2:])))
    except (ValueError, OSError) as exc:
        print(exc, file=sys.stderr)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    main()
