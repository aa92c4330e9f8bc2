"""Stop a transaction at one of its points, while the test does something else."""

from __future__ import annotations

import threading


class Parking:
    """A hook that stops its thread at one point, once."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.parked = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point and not self.parked.is_set():
            self.parked.set()
            assert self.go_on.wait(20)
