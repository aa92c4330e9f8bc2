"""Times, ages and tables as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import typer

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def when(ms: int) -> str:
    """A time; "": none."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC" if ms else ""


def age(ms: int) -> str:
    """Write a time in the largest unit that fits."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= size:
            return f"{ms // size} {unit}"
    return f"{max(0, ms) // 1_000} s"


def duration_ms(text: str) -> int:
    """Milliseconds of 90s, 10m, 2h or 1d; "": 0. Raises BadParameter."""
    if not text:
        return 0
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|min|h|d)", text.replace(" ", ""))
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time such as 90s, 10m, 2h or 1d")
    return int(match[1]) * _UNITS_MS[match[2]]


def bar(done: int, total: int, width: int = 30) -> str:
    """Return how far something has come."""
    filled = width * min(done, total) // total if total else width
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]
