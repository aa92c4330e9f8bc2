"""Turn delivery results (ack, nack, give back) into operations and retry them until the store accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tmc_common.eventlog import EventLog
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.operations import THE_CENTER, Ack, GiveBack, Nack, Operation
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy
from tmc_server.domain.ports.work import Performer
from tmc_server.errors import Retryable, ShuttingDown

log = EventLog("tmc.delivery")

_Outcome = Ack | Nack | GiveBack

_PAUSE_S = 1.0
_AT_ONCE = 500  # less than any queue of the group commit takes


class CopyAnswers:
    """Called from any thread; works on the loop. `performer` is set when the group commit exists.

    raise_alert: kind, subscription, detail.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, catalog: CatalogSource) -> None:
        self._loop = loop
        self._catalog = catalog
        self.performer: Performer | None = None
        self.raise_alert: Callable[[str, SubscriptionNumber, str], None] = lambda _kind, _subscription, _detail: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unstored: dict[SubscriptionNumber, set[tuple[Shard, MessageNumber]]] = {}

    def unstored(self, subscription: SubscriptionNumber) -> frozenset[tuple[Shard, MessageNumber]]:
        """Return the messages whose copies have an outcome that is not stored yet: no second copy may be made meanwhile."""
        return frozenset(self._unstored.get(subscription, ()))

    def give_back(self, copies: Sequence[Copy], after_ms: int = 0, tried_ms: int | None = None) -> None:
        """The copies were not delivered: make them due again after `after_ms`, without counting the attempt.

        tried_ms: see `GiveBack`.
        """
        self._start(
            [
                GiveBack(
                    shard=copy.shard,
                    app=THE_CENTER,
                    number=copy.number,
                    subscription=copy.subscription,
                    attempt=copy.attempt,
                    after_ms=after_ms,
                    tried_ms=tried_ms,
                )
                for copy in copies
            ]
        )

    def acknowledge(self, copies: Sequence[Copy]) -> None:
        """They were forwarded: done."""
        self._start(
            [
                Ack(shard=copy.shard, app=THE_CENTER, number=copy.number, subscription=copy.subscription)
                for copy in copies
            ]
        )

    def refuse(self, copies: Sequence[Copy], error: str, *, final: bool = False) -> None:
        """The target refused them: nack the copies. final: they are FAILED at once, not retried by the policy."""
        subscriptions = self._catalog.current.subscriptions

        def nack(copy: Copy) -> Nack:
            policy = subscriptions[copy.subscription].policy
            return Nack(
                shard=copy.shard,
                app=THE_CENTER,
                number=copy.number,
                subscription=copy.subscription,
                attempt=copy.attempt,
                policy=policy,
                error=error[:500],
                reject=final,
            )

        self._start([nack(copy) for copy in copies])

    def complain(self, subscription: SubscriptionNumber, detail: str) -> None:
        """The target of a subscription has been refusing for a while: alert its owner."""
        self.raise_alert("queue refuses", subscription, detail)

    def _start(self, operations: Sequence[_Outcome]) -> None:
        for operation in operations:
            self._unstored.setdefault(operation.subscription, set()).add((operation.shard, operation.number))
        try:
            self._loop.call_soon_threadsafe(self._spawn, operations)
        except RuntimeError:  # the loop is closed: the rows come again at their due time
            log.debug("answers_after_stop", "%d answers came after the end", len(operations))

    def _spawn(self, operations: Sequence[_Outcome]) -> None:
        for start in range(0, len(operations), _AT_ONCE):
            task = self._loop.create_task(self._store(operations[start : start + _AT_ONCE]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _store(self, operations: Sequence[_Outcome]) -> None:
        try:
            await self._perform(operations)
        finally:
            for operation in operations:
                self._unstored[operation.subscription].discard((operation.shard, operation.number))

    async def _perform(self, operations: Sequence[Operation]) -> None:
        while operations:
            assert self.performer is not None
            try:
                answers = await self.performer.perform(operations)
                operations = [
                    operation
                    for operation, answer in zip(operations, answers, strict=True)
                    if isinstance(answer, Retryable)
                ]
            except ShuttingDown:
                log.warning("copies_left", "%d copies wait for their next due time: this server stops", len(operations))
                return
            except Retryable as exc:
                log.warning("answers_delayed", "%d answers are stored later: %s", len(operations), exc)
            if operations:
                await asyncio.sleep(_PAUSE_S)

    async def flush(self) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
