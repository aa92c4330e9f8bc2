"""Deliver what is due: first attempts that had no room before, and retries; fail rows whose attempts are used up.

A row is claimed, with its next due time and attempt number, before anything is sent; so a copy that always fails
cannot block others, and a crash after the claim delays a message by one interval but never loses it. Before a second
copy goes into a queue, the queue is inspected: while the first may still be in it, the row is postponed, uncounted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ports.delivery import Claimed, DueWork, Outlet
from tmc_server.errors import StoreUnavailable
from tmc_server.metrics import METRICS

_RESTART_S = 60.0  # a consumer that restarts is no reason to alert anybody
_FORGOTTEN_S = 600.0  # above the longest time for which rows are held before the next look
_EXHAUSTED_EVERY = 20  # passes between searches for exhausted rows while a subscription has no room


class Redelivering:
    """page: rows of one subscription claimed in one transaction.

    on_abandoned: called with a queue that nobody has read for as long as a consumer may take to start again.
    """

    def __init__(
        self,
        work: Sequence[DueWork],
        outlet: Outlet,
        page: int = 200,
        on_abandoned: Callable[[SubscriptionNumber, QueueLook], None] = lambda _subscription, _look: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._outlet = outlet
        self._page = page
        self._on_abandoned = on_abandoned
        self._monotonic = monotonic
        self._unread: dict[SubscriptionNumber, tuple[float, float]] = {}  # first and last seen without a consumer
        self._passes: Counter[tuple[Shard, SubscriptionNumber]] = Counter()

    def run_once(self) -> bool:
        """One pass over all due subscriptions. Returns: something moved, there may be more."""
        return bool(self.one_pass().moved)

    def one_pass(self) -> Claimed:
        """Give each due subscription at most one page, so that a busy one does not hold up the rest.

        A failure does not stop the others; the first one is raised after all have had their turn.
        """
        total = Claimed()
        failure: Exception | None = None
        for work in self._work:
            looks: dict[SubscriptionNumber, QueueLook | None] = {}
            for shard, subscription in work.due():
                try:
                    if subscription not in looks:
                        looks[subscription] = self._outlet.look(subscription)
                    total += self._turn(work, shard, subscription, looks[subscription])
                except StoreUnavailable:
                    raise  # that is everybody's
                except Exception as exc:  # noqa: BLE001 - raised below
                    failure = failure or exc
        METRICS.redelivered.inc(total.delivered)
        METRICS.held.inc(total.held)
        if failure is not None:
            raise failure
        return total

    def _turn(self, work: DueWork, shard: Shard, subscription: SubscriptionNumber, look: QueueLook | None) -> Claimed:
        if look is None:
            self._unread.pop(subscription, None)
            return Claimed()  # its broker is away: nothing is sent, counted or given up meanwhile
        claimed = work.claim(shard, subscription, self._page, look, exhausted_only=False)
        if not claimed.moved:
            claimed = self._look_for_exhausted(work, shard, subscription, look)
        if look.consumers:
            self._unread.pop(subscription, None)
        elif claimed.held and self._unread_s(subscription) >= _RESTART_S:
            self._on_abandoned(subscription, look)
        return claimed

    def _unread_s(self, subscription: SubscriptionNumber) -> float:
        """Return for how many seconds it was seen without a consumer. Nobody looks while nothing is due."""
        now = self._monotonic()
        first, last = self._unread.get(subscription, (now, now))
        if now - last > _FORGOTTEN_S:
            first = now
        self._unread[subscription] = (first, now)
        return now - first

    def _look_for_exhausted(
        self, work: DueWork, shard: Shard, subscription: SubscriptionNumber, look: QueueLook
    ) -> Claimed:
        """Fail rows at their limit while the outlet has no room for this subscription."""
        turn = self._passes[shard, subscription]
        self._passes[shard, subscription] = (turn + 1) % _EXHAUSTED_EVERY
        if turn:
            return Claimed()
        return work.claim(shard, subscription, self._page, look, exhausted_only=True)
