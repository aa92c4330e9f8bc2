"""python -m tmc_client.consume MODULE:CONSUMER [PROCESSES]: run a Consumer of a module until a signal stops it.

The same as `tmc consume`, for programs that install the client alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tmc_client.consumer import Consumer
from tmc_common.supervisor import Supervisor


def load(reference: str) -> Consumer:
    """The Consumer that MODULE:NAME means; the current directory is searched first. Raises ValueError."""
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ValueError(f"{reference!r} names no consumer: give MODULE:NAME, for example shop.consumers:consumer")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise ValueError(f"{reference!r}: there is no module {exc.name!r} to import from here") from exc
    found = getattr(module, name, None)
    if not isinstance(found, Consumer):
        raise ValueError(f"{reference!r} is no tmc_client.Consumer but {found!r}")
    return found


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
