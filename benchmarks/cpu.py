"""CPU time of processes and of all that they started, from the system's accounting."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def seconds_of(roots: Iterable[int]) -> float:
    """CPU seconds of these processes, of those below them, and of those below that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system, its own and of children that it has waited for
    wanted = set(roots)
    return sum(count for pid, count in ticks.items() if _is_below(pid, wanted, parents)) / _TICKS_PER_S


def _is_below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid and pid not in roots:
        pid = parents.get(pid, 0)
    return pid != 0
