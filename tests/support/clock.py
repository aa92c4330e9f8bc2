"""A clock that moves when told to."""

from __future__ import annotations


class ManualClock:
    """Milliseconds since the epoch."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)
