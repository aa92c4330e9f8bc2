"""Waiting for something to become true, never for an amount of time: the one place where tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T], seconds: float = 120, describe: Callable[[], object] | None = None) -> T:
    """Call `probe` until it answers something true, and return that. Raises TimeoutError with its last answer."""
    end = time.monotonic() + seconds
    pause = 0.005
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise TimeoutError(f"still {answer!r} after {seconds} s{': ' + str(describe()) if describe else ''}")
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
