"""Run a program of ours whose clock is wrong.

usage: python -m tmc_storm.services.skewed FILE ARGUMENTS: `tmc ARGUMENTS`, with a clock that is off by the seconds in FILE, which
may change while it runs. The monotonic clock is right, as it is when somebody sets the time.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

_OFFSET = struct.Struct("d")


def set_clock(file: Path, offset_s: float) -> None:
    """Put the clock that goes by this file ahead, or back."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.write(_OFFSET.pack(offset_s))


def main(file: str, *arguments: str) -> None:
    """Run it."""
    with Path(file).open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + _OFFSET.unpack(shared[:])[0]
    time.time_ns = lambda: right_ns() + round(_OFFSET.unpack(shared[:])[0] * 1e9)
    sys.argv = ["tmc", *arguments]
    runpy.run_module("tmc_cli", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
