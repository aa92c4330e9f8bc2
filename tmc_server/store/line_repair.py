"""Repair lines: heads that are closed, order modes that changed, subscriptions that were removed.

Closing a head advances its line in the same transaction, so there is little to find. But a change of the catalog touches
no rows, and a line must not stay blocked because rows were changed by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.numbers import MessageNumber, OrderHash, OrderSequence, Shard, SubscriptionNumber
from tmc_server.domain.ordering import OrderMode, releases_next
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.ordering import Repaired
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import repeating
from tmc_server.store.leases import ShardLeases
from tmc_server.store.lines import Lines
from tmc_server.store.statements import statements_of
from tmc_server.store.transaction import Transaction

LINE_KEPT_MS = 86_400_000  # a line without messages is forgotten after this time; clocks are not set back as far


class SqlLineWork:
    """domain.ports.ordering.LineWork over the shards of one database."""

    def __init__(self, writer: ShardWriter, leases: ShardLeases, catalog: CatalogSource) -> None:
        self._writer = writer
        self._leases = leases
        self._catalog = catalog

    def held_shards(self) -> Sequence[Shard]:
        return sorted(self._leases.held())

    def repair(
        self, shard: Shard, subscription: SubscriptionNumber, after: OrderHash, limit: int, wait: bool = False
    ) -> Repaired:
        known, stale = self._catalog.current.subscriptions[subscription], self._catalog.in_use()[1]
        if stale and not known.is_removed:
            return Repaired(after=None)
        page = self._read(shard, subscription, after, limit)
        suspects = sorted(each for each, line in page.items() if _needs_repair(known, line))
        end = max(page) if len(page) == limit else None
        if not suspects:
            return Repaired(after=end, examined=len(page))
        strays = {each for each in suspects if page[each].strays}
        done = self._repair(shard, subscription, suspects, strays, limit, wait)
        more = done.released + done.cancelled == limit  # of these lines
        return done + Repaired(after=after if more else end, examined=len(page))

    def _read(
        self, shard: Shard, subscription: SubscriptionNumber, after: OrderHash, limit: int
    ) -> Mapping[OrderHash, Any]:
        """Read without locks: what is found is examined again under the locks of its lines."""
        database = self._writer.database
        with database.reading() as connection:
            which = {"subscription": subscription, "after": after, "limit": limit}
            before = (database.now(connection) - LINE_KEPT_MS) * 1_000
            rows = connection.execute(statements_of(shard).lines.page, {**which, "before": before})
            return {OrderHash(row.order_hash): row for row in rows}

    @repeating
    def _repair(
        self,
        shard: Shard,
        subscription: SubscriptionNumber,
        suspects: Sequence[OrderHash],
        strays: Collection[OrderHash],
        limit: int,
        wait: bool,
    ) -> Repaired:
        """strays: those of the suspects that have entries of deliveries that do not wait."""
        with self._writer.database.connection() as connection, self._writer.transaction(connection, shard) as tx:
            known = tx.catalog.subscriptions[subscription]
            if tx.catalog_is_stale and not known.is_removed:
                return Repaired(after=None)
            with Lines(tx, {(subscription, each) for each in suspects}, wait) as lines:
                mine = [each for each in suspects if (subscription, each) not in lines.busy]
                if not mine:
                    return Repaired(after=None)
                dropped = _drop_strays(tx, subscription, sorted(set(strays).intersection(mine)))
                return _mend(tx, known, lines, mine, limit) + Repaired(after=None, dropped=dropped)

    def note(self, shard: Shard, actor: str, subject: str, reason: str) -> None:
        with self._writer.database.connection() as connection, self._writer.transaction(connection, shard) as tx:
            tx.note(actor, "repair order", subject, reason)


def _needs_repair(subscription: Subscription, line: Any) -> bool:
    if line.strays or line.idle:
        return True
    if line.waits and (subscription.is_removed or subscription.order is OrderMode.OFF):
        return True
    return _is_broken(subscription, line)


def _is_broken(subscription: Subscription, line: Any) -> bool:
    """Return whether deliveries wait without a head, or the head is one that releases the next."""
    if not line.head_id:
        return bool(line.waits)
    return line.state is None or releases_next(ConsumptionState(line.state), subscription.order)


def _mend(tx: Transaction, subscription: Subscription, lines: Lines, mine: Sequence[OrderHash], limit: int) -> Repaired:
    released = cancelled = 0
    if subscription.is_removed or subscription.order is OrderMode.OFF:
        waiting = tx.rows(tx.sql.lines.waiting, subscription=subscription.number, ids=mine, limit=limit)
        if subscription.is_removed:
            cancelled = _cancel(tx, subscription.number, lines, waiting)
        else:
            lines.release(subscription, waiting, in_turn=False)
            released = len(waiting)
    before = (tx.now - LINE_KEPT_MS) * 1_000
    now_mine = tx.rows(tx.sql.lines.states, subscription=subscription.number, ids=mine, before=before)
    broken = [OrderHash(line.order_hash) for line in now_mine if _is_broken(subscription, line)]
    scheduled = lines.advance(subscription, dict.fromkeys(broken))
    return Repaired(
        after=None,
        scheduled=scheduled,
        released=released,
        cancelled=cancelled,
        forgotten=_forget(tx, subscription.number, now_mine),
    )


def _drop_strays(tx: Transaction, subscription: SubscriptionNumber, strays: Sequence[OrderHash]) -> int:
    """Drop entries of the waiting table whose deliveries are not WAITING: somebody changed rows by hand."""
    return tx.execute(tx.sql.lines.drop_strays, subscription=subscription, ids=strays).rowcount if strays else 0


def _cancel(tx: Transaction, subscription: SubscriptionNumber, lines: Lines, waiting: Sequence[Any]) -> int:
    lines.leave(subscription, [(OrderHash(row.order_hash), OrderSequence(row.sequence)) for row in waiting])
    numbers = sorted(MessageNumber(row.message_id) for row in waiting)
    if numbers:
        tx.change(tx.sql.lines.cancel, len(numbers), subscription=subscription, ids=numbers, now=tx.now)
    return len(numbers)


def _forget(tx: Transaction, subscription: SubscriptionNumber, lines: Collection[Any]) -> int:
    """Lines without messages for so long that a new line's first sequence is greater than their last."""
    idle = sorted(OrderHash(line.order_hash) for line in lines if line.idle)
    if idle:
        tx.change(tx.sql.lines.forget, len(idle), subscription=subscription, ids=idle)
    return len(idle)
