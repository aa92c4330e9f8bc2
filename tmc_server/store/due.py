"""Due consumptions and alerts of one database, as the duties see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import sqlalchemy as sa

from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ports import Alert, CatalogSource, Claimed
from tmc_server.store.batch import ShardWriter
from tmc_server.store.consumptions import claim_due
from tmc_server.store.engines import Database, repeated
from tmc_server.store.leases import ShardLeases
from tmc_server.store.scanning import Look, earliest_delivery
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import alert

_RESCUE_PAGE = 500
_UNSENT = sa.select(alert).where(alert.c.sent_ms.is_(None)).order_by(alert.c.id).limit(sa.bindparam("limit"))


class DueConsumptions:
    """domain.ports.DueWork over the shards of one database, as far as this server holds their leases."""

    def __init__(self, writer: ShardWriter, leases: ShardLeases, catalog: CatalogSource) -> None:
        self.database = writer.database
        self._writer = writer
        self._leases = leases
        self._catalog = catalog
        self._look = Look(writer.database, leases, catalog, earliest_delivery)

    def held_shards(self) -> Mapping[int, int]:
        return {shard: lease.epoch for shard, lease in self._leases.held().items()}

    def due(self) -> list[tuple[int, int]]:
        return self._look.due()

    def claim(self, shard: int, subscription: int, limit: int, look: QueueLook, exhausted_only: bool) -> Claimed:
        known = self._catalog.current.subscriptions[subscription]
        lease = self._leases.held().get(shard)
        if lease is None:
            return Claimed()

        def run() -> Claimed:
            with self._writer.database.connection() as connection:
                sql = statements_of(shard)
                query = sql.due_consumptions
                if exhausted_only:
                    query = query.where(sql.tables.consumption.c.tried > known.policy.max_retry)
                with self._writer.transaction(connection, shard) as tx:
                    open_to_it = not known.is_removed(tx.now) and not exhausted_only
                    room = tx.reserve(subscription, limit) if open_to_it else limit
                    if not room:
                        return Claimed()
                    due = tx.rows(query, subscription=subscription, now=tx.now, limit=room)
                    tx.reach("read")
                    return claim_due(tx, known, due, look, lease.guard)

        return repeated(run)

    def rescue(self, shard: int, incarnation: int, since_ms: int) -> int | None:
        lease = self._leases.held().get(shard)
        if lease is None:
            return None
        rescued = 0
        for subscription in self._catalog.current.subscriptions_on.get(shard, ()):
            which = {"subscription": subscription.number, "gone": incarnation, "since": since_ms}
            while found := repeated(partial(self._rescue_page, shard, which, lease.guard)):
                rescued += found
        return rescued

    def _rescue_page(self, shard: int, which: Mapping[str, int], guard: Mapping[str, int]) -> int:
        """Read without locks, then change by primary key: a range over the due index would deadlock against acks."""
        sql, database = statements_of(shard), self._writer.database
        with database.transaction() as connection:
            ids = sorted(connection.execute(sql.orphans, {**which, "limit": _RESCUE_PAGE}).scalars())
            if not ids:
                return 0
            now = database.now(connection)
            return connection.execute(sql.rescue, {**which, **guard, "ids": ids, "now": now}).rowcount


class SqlAlertOutbox:
    """domain.ports.AlertOutbox over the alert table of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def unsent(self, limit: int) -> Sequence[Alert]:
        with self._database.reading() as connection:
            return [
                Alert(
                    row.id, row.kind, row.topic_no, row.shard, row.message_id, row.subscription_no, row.attempt, row.detail,
                    row.created_ms,
                )
                for row in connection.execute(_UNSENT, {"limit": limit})
            ]  # fmt: skip

    def add(self, kind: str, topic: int, subscription: int, episode: int, detail: str) -> None:
        values = {"kind": kind, "topic_no": topic, "shard": 0, "message_id": 0, "subscription_no": subscription}

        def write() -> None:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                rest = {"attempt": episode, "detail": detail[:500], "created_ms": now, "sent_ms": None}
                connection.execute(alert.insert().values(**values, **rest))

        try:
            repeated(write)
        except sa.exc.IntegrityError:
            return  # this episode was told before, by another server

    def mark_sent(self, alerts: Sequence[Alert]) -> None:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            connection.execute(alert.update().where(alert.c.id.in_([a.id for a in alerts])).values(sent_ms=now))


class OpenCounts:
    """How many messages of a topic are undecided, counted in the tables; no further than a limit."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = databases  # by shard

    def count(self, shards: Sequence[int], topic: int, limit: int) -> int:
        total = 0
        for shard in shards:
            with self._databases[shard].reading() as connection:
                found = connection.execute(statements_of(shard).count_open, {"topic": topic, "limit": limit - total})
                total += int(found.scalar_one())
            if total >= limit:
                break
        return total
