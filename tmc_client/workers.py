"""Threads that run handlers: a queue and nothing else, since an executor's futures cost more than most handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Workers:
    """count threads. Work must not raise. Daemons: a handler that hangs does not keep the process alive."""

    def __init__(self, count: int) -> None:
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"tmc-handler-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        self._waiting.put(work)

    def stop(self) -> None:
        """End when what waits is done; does not wait for it."""
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
