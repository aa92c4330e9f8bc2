"""Due consumptions of one database, as the duties see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.domain.retry import RetryPolicy
from tmc_server.store.batch import ShardWriter
from tmc_server.store.claims import claim_due
from tmc_server.store.engines import ShardMap, repeated, repeating
from tmc_server.store.journal import JournalRow, values_of
from tmc_server.store.leases import ShardLeases
from tmc_server.store.scanning import DueIndex, earliest_delivery
from tmc_server.store.statements import statements_of

_RESCUE_PAGE = 500
_RESCUE_PARTS = 50  # of it, each of one subscription and one run that is gone: so long may it take
_SERVER_GONE = "no ack, and the server that handed it over is gone; this attempt does not count"


class SqlDueWork:
    """domain.ports.delivery.DueWork over the shards of one database, as far as this server holds their leases."""

    def __init__(self, writer: ShardWriter, leases: ShardLeases, catalog: CatalogSource) -> None:
        self.database = writer.database
        self._writer = writer
        self._leases = leases
        self._catalog = catalog
        self._look = DueIndex(writer.database, leases, catalog, earliest_delivery)

    def held_shards(self) -> Mapping[Shard, int]:
        return {shard: lease.epoch for shard, lease in self._leases.held().items()}

    def due(self) -> list[tuple[Shard, SubscriptionNumber]]:
        return self._look.due()

    def claim(
        self, shard: Shard, subscription: SubscriptionNumber, limit: int, look: QueueLook, exhausted_only: bool
    ) -> Claimed:
        known = self._catalog.current.subscriptions[subscription]
        lease = self._leases.held().get(shard)
        if lease is None:
            return Claimed()

        def run() -> Claimed:
            with self._writer.database.connection() as connection:
                sql = statements_of(shard)
                query = sql.due_consumptions
                if exhausted_only:
                    query = query.where(_used_up(sql.tables.consumption, known.policy))
                with self._writer.transaction(connection, shard) as tx:
                    open_to_it = not known.is_removed and not exhausted_only
                    room = tx.reserve(subscription, limit) if open_to_it else limit
                    if not room:
                        return Claimed()
                    due = tx.rows(query, subscription=subscription, now=tx.now, limit=room)
                    tx.reach("read")
                    return claim_due(tx, tx.catalog.subscriptions[subscription], due, look, lease.guard)

        return repeated(run)

    def rescue(self, shard: Shard, gone: Mapping[int, int]) -> int | None:
        lease = self._leases.held().get(shard)
        if lease is None:
            return None
        subscriptions = self._catalog.current.subscriptions_on.get(shard, ())
        posted = [each.number for each in subscriptions if each.forward is not None and each.forward.is_webhook]
        queued = [each.number for each in subscriptions if each.number not in posted]
        anything = dict.fromkeys(gone, 0)  # what was to be posted waited in the memory of the server
        places = [(numbers, since) for numbers, since in ((queued, gone), (posted, anything)) if numbers and gone]
        return self._rescue_page(shard, places, lease.guard) if places else 0

    @repeating
    def _rescue_page(
        self, shard: Shard, places: Sequence[tuple[Sequence[int], Mapping[int, int]]], guard: Mapping[str, int]
    ) -> int:
        """Read without locks, then change by primary key: a range over the due index would deadlock against acks.

        places: subscriptions, and by run since when what it handed over to these is uncertain.
        """
        sql, database = statements_of(shard), self._writer.database
        with database.transaction() as connection:
            found: dict[tuple[SubscriptionNumber, int, int], list[int]] = {}
            for subscriptions, gone in places:
                for row in connection.execute(sql.handed_over(subscriptions, gone, _RESCUE_PAGE)):
                    part = (row.subscription_no, row.incarnation, gone[row.incarnation])
                    found.setdefault(part, []).append(row.message_id)
            return sum(
                self._rescue_from(
                    connection,
                    shard,
                    {"subscription": subscription, "gone": run, "since": since, "ids": sorted(ids), **guard},
                )
                for (subscription, run, since), ids in sorted(found.items())[:_RESCUE_PARTS]
            )

    def _rescue_from(self, connection: sa.Connection, shard: Shard, which: Mapping[str, Any]) -> int:
        """Make these deliveries of one subscription, of one run that is gone, due again."""
        sql = statements_of(shard)
        now = self._writer.database.now(connection)
        locked = connection.execute(sql.lock_rescued, {**which, "now": now}).fetchall()
        if not locked:
            return 0
        sql.insert_attempts.run(
            connection, [_gone(row, SubscriptionNumber(which["subscription"]), now) for row in locked]
        )
        mine = sorted(row.message_id for row in locked)
        return connection.execute(sql.rescue, {**which, "ids": mine, "now": now}).rowcount


def _gone(row: Any, subscription: SubscriptionNumber, now: int) -> Mapping[str, Any]:
    """Return what the journal says of an attempt whose server is gone."""
    entry = JournalRow(
        number=row.message_id,
        subscription=subscription,
        attempt=row.attempt,
        error=_SERVER_GONE,
        tried_ms=row.tried_ms,
        tried_by=row.incarnation,
        unanswered=True,
    )
    return values_of(entry, now, None)


def _used_up(consumption: sa.Table, policy: RetryPolicy) -> sa.ColumnElement[bool]:
    """`RetryPolicy.is_used_up` in SQL, but for lowered policies; parameter now."""
    is_lost = sa.and_(
        consumption.c.begun == 0, sa.or_(consumption.c.tried_ms.is_not(None), consumption.c.extended > 0)
    )  # its last attempt does not count
    by_count = sa.and_(consumption.c.tried > policy.max_retry, sa.not_(is_lost))
    if not policy.max_age_ms:
        return by_count
    since_ms = sa.func.coalesce(consumption.c.since_ms, consumption.c.created_ms)
    by_age = sa.and_(consumption.c.tried > 0, since_ms <= sa.bindparam("now") - policy.max_age_ms)
    return sa.or_(by_count, by_age)


class OpenCounts:
    """duties.counting.OpenCounter: counts in the tables, up to a limit."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def count(self, shards: Sequence[Shard], topic: int, limit: int) -> int:
        total = 0
        for shard in shards:
            with self._shards.holder(shard).reading() as connection:
                found = connection.execute(statements_of(shard).count_open, {"topic": topic, "limit": limit - total})
                total += int(found.scalar_one())
            if total >= limit:
                break
        return total

    def unacked(self, shards: Sequence[Shard], subscription: Subscription, limit: int) -> int:
        total = 0
        for shard in shards:
            parameters = {"topic": subscription.topic, "subscription": subscription.number, "limit": limit - total}
            with self._shards.holder(shard).reading() as connection:
                total += int(connection.execute(statements_of(shard).count_unacked, parameters).scalar_one())
            if total >= limit:
                return limit
        return total
