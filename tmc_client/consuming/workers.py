"""Threads that run handlers, because an executor's futures cost more than most handlers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


class Workers:
    """A pool of `count` daemon threads: a hanging handler does not keep the process alive.

    work: takes one piece of work and does it; returns False if there will be no more. Must not raise.
    """

    def __init__(self, count: int, work: Callable[[], bool]) -> None:
        self._work = work
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        for _ in range(count):
            self._add()

    @property
    def count(self) -> int:
        """Threads that take work."""
        return len(self._threads)

    def replace(self, hanging: threading.Thread) -> None:
        """Start a thread in place of one whose work hangs; if that work ever ends, its thread exits too."""
        if hanging in self._threads:  # a batch hangs with all its messages
            self._threads.discard(hanging)
            self._add()

    def _add(self) -> None:
        thread = threading.Thread(target=self._run, name=f"tmc-handler-{next(self._numbers)}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while self._work() and threading.current_thread() in self._threads:
            continue
