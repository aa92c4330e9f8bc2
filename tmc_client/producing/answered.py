"""What was submitted and is not marked yet in a ledger that nothing can write to in the background."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tmc_client.forks import watch_forks

SETTLE_BATCH = 16


class Answered:
    """Messages whose submit was answered; the next block on their ledger marks them. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: the parent marks its own."""
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[str]] = {}

    def add(self, ledger_id: bytes, message_ids: Sequence[str]) -> None:
        with self._lock:
            self._waiting.setdefault(ledger_id, []).extend(message_ids)

    def take(self, ledger_id: bytes, *, at_least: int) -> Sequence[str]:
        """A multiple of SETTLE_BATCH, and more than `at_least` if there are: blocks of any size settle faster than they add."""
        with self._lock:
            waiting = self._waiting.get(ledger_id, [])
            count = min(len(waiting), at_least + 2 * SETTLE_BATCH) // SETTLE_BATCH * SETTLE_BATCH
            taken, self._waiting[ledger_id] = waiting[:count], waiting[count:]
            return taken
