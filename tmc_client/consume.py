"""python -m tmc_client.consume MODULE:CONSUMER [PROCESSES]: run a Consumer of a module until a signal stops it.

The same as `tmc consume`, for programs that install the client alone.
"""

from __future__ import annotations

import os
import sys

from tmc_client import loading
from tmc_client.consumer import Consumer
from tmc_common.supervisor import Supervisor


def load(reference: str) -> Consumer:
    """The Consumer that MODULE:NAME means. Raises ValueError."""
    return loading.load(reference, Consumer, "shop.consumers:consumer")


def run(reference: str, processes: int = 1) -> int:
    """Returns: the exit code. Raises ValueError."""
    if processes == 1:
        load(reference).run()
        return 0
    command = ["-m", "tmc_client.consume", reference]
    return Supervisor([(command, os.environ)] * processes).run()


def main() -> None:
    """The command."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    try:
        raise SystemExit(run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 1))
    except ValueError as exc:
        print(exc, file=sys.stderr)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    main()
