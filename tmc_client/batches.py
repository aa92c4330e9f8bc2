"""Collect the messages of a batch listener until there are enough, or the first has waited long enough."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tmc_client.runs import Run


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """max_messages: a batch is handled when it has this many messages, or when its first message has waited max_wait_s."""

    max_messages: int
    max_wait_s: float


class Batch:
    """The batches of one topic. Thread-safe: a transport adds, workers take. A worker waits here for its batch to fill."""

    def __init__(self, size: BatchSize) -> None:
        self._size = size
        self._condition = threading.Condition()
        self._waiting: list[tuple[float, Run]] = []
        self._takers = 0
        self._stopping = False

    def add(self, run: Run) -> bool:
        """Returns: another worker has to call `take`."""
        with self._condition:
            self._waiting.append((time.monotonic(), run))
            if len(self._waiting) >= self._size.max_messages:
                self._condition.notify()
            if len(self._waiting) <= self._takers * self._size.max_messages:
                return False
            self._takers += 1
            return True

    def take(self) -> list[Run]:
        """Wait for a batch. Returns: its messages; none if another worker was faster."""
        with self._condition:
            while self._waiting and not self._stopping and len(self._waiting) < self._size.max_messages:
                left_s = self._waiting[0][0] + self._size.max_wait_s - time.monotonic()
                if left_s <= 0:
                    break
                self._condition.wait(left_s)
            taken = [run for _, run in self._waiting[: self._size.max_messages]]
            del self._waiting[: len(taken)]
            self._takers -= 1
            return taken

    def stop(self) -> None:
        """Wait for nothing any more."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
