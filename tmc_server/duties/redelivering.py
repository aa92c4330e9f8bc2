"""Deliver what is due: first tries that nobody had room for, retries, and the end of those that used up their tries.

A row is claimed, with its next due time and attempt number, before anything is sent; so a copy that always fails
cannot stop its neighbours, and a crash after the claim costs one interval, never a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ports import DueWork

_EXHAUSTED_EVERY = 20  # passes: who has no room is looked through for used-up rows only so often


@dataclass(frozen=True)
class Redelivered:
    """What one pass did. True when something moved: there may be more."""

    delivered: int = 0
    failed: int = 0
    cancelled: int = 0

    def __bool__(self) -> bool:
        return bool(self.delivered or self.failed or self.cancelled)


class Redelivering:
    """page: rows of one subscription claimed in one transaction."""

    def __init__(self, work: Sequence[DueWork], page: int = 200) -> None:
        self._work = work
        self._page = page
        self._passes: Counter[tuple[int, int]] = Counter()

    def run_once(self) -> Redelivered:
        """One pass over all due subscriptions; each gets at most one page, so a busy one does not hold up the rest."""
        moved: Counter[ConsumptionState] = Counter()
        for work in self._work:
            for shard, subscription in work.due():
                result = work.claim(shard, subscription, self._page, exhausted_only=False)
                if not result:
                    result = self._look_for_exhausted(work, shard, subscription)
                moved.update(result)
        return Redelivered(
            moved[ConsumptionState.SCHEDULED], moved[ConsumptionState.FAILED], moved[ConsumptionState.CANCELLED]
        )

    def _look_for_exhausted(self, work: DueWork, shard: int, subscription: int) -> dict[ConsumptionState, int]:
        """Nobody has room for this subscription: rows at their limit still have to become FAILED."""
        turn = self._passes[shard, subscription]
        self._passes[shard, subscription] = (turn + 1) % _EXHAUSTED_EVERY
        if turn:
            return {}
        return dict(work.claim(shard, subscription, self._page, exhausted_only=True))
