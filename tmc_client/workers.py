"""Threads that run handlers from a plain queue, because an executor's futures cost more than most handlers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
HANDLERS = "tmc-handlers"  # the thread with the event loop of a consumer's `async def` handlers


class Workers:
    """A pool of `count` daemon threads: a hanging handler does not keep the process alive. Work must not raise."""

    def __init__(self, count: int) -> None:
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        for _ in range(count):
            self._add()

    @property
    def count(self) -> int:
        """Threads that take work."""
        return len(self._threads)

    def submit(self, work: Work) -> None:
        self._waiting.put(work)

    def replace(self, hanging: threading.Thread) -> None:
        """Start a thread in place of one whose work hangs; if that work ever ends, its thread exits too."""
        if hanging in self._threads:  # a batch hangs with all its messages
            self._threads.discard(hanging)
            self._add()

    def stop(self) -> None:
        """Let the threads end once the queued work is done; does not wait for that."""
        for _ in list(self._threads):
            self._waiting.put(None)

    def _add(self) -> None:
        thread = threading.Thread(target=self._run, name=f"tmc-handler-{next(self._numbers)}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
            if threading.current_thread() not in self._threads:
                return
