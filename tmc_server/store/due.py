"""Due consumptions and alerts of one database, as the duties see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import sqlalchemy as sa

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ports import Alert, CatalogSource
from tmc_server.store.batch import ShardWriter
from tmc_server.store.consumptions import claim_due
from tmc_server.store.engines import Database, repeated
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import alert

Part = TypeVar("Part")
_UNION = 400  # parts of one statement


class DueConsumptions:
    """domain.ports.DueWork over the shards of one database. incarnation: this server run."""

    def __init__(self, writer: ShardWriter, shards: Sequence[int], catalog: CatalogSource, incarnation: int) -> None:
        self._writer = writer
        self._shards = shards
        self._catalog = catalog
        self._incarnation = incarnation

    def due(self) -> list[tuple[int, int]]:
        placed = self._catalog.current.subscriptions_on
        parts = [
            sa.select(
                sa.literal(shard).label("shard"),
                sa.literal(s.number).label("subscription"),
                *_earliest(shard, s.number),
            )
            for shard in self._shards
            for s in placed.get(shard, ())
        ]
        found: list[tuple[int, int]] = []
        database = self._writer.database
        with database.reading() as connection:
            for chunk in _chunks(parts, _UNION):
                rows = connection.execute(sa.union_all(*chunk)).fetchall()
                now = database.now(connection)
                found += [(row.shard, row.subscription) for row in rows if row.due_ms is not None and row.due_ms <= now]
        return found

    def claim(self, shard: int, subscription: int, limit: int, exhausted_only: bool) -> Mapping[ConsumptionState, int]:
        known = self._catalog.current.subscriptions[subscription]

        def run() -> Mapping[ConsumptionState, int]:
            with self._writer.database.connection() as connection:
                sql = statements_of(shard)
                query = sql.due_consumptions
                if exhausted_only:
                    query = query.where(sql.tables.consumption.c.tried > known.policy.max_retry)
                with self._writer.transaction(connection, shard) as tx:
                    open_to_it = not known.is_removed(tx.now) and not exhausted_only
                    room = tx.reserve(subscription, limit) if open_to_it else limit
                    if not room:
                        return {}
                    due = tx.rows(query, subscription=subscription, now=tx.now, limit=room)
                    tx.reach("read")
                    return claim_due(tx, known, due)

        return repeated(run)

    def rescue(self) -> int:
        rescued = 0
        for shard in self._shards:
            for subscription in self._catalog.current.subscriptions_on.get(shard, ()):
                with self._writer.database.transaction() as connection:
                    now = self._writer.database.now(connection)
                    rescued += connection.execute(
                        statements_of(shard).orphans,
                        {"subscription": subscription.number, "now": now, "mine": self._incarnation},
                    ).rowcount
        return rescued


def _earliest(shard: int, subscription: int) -> tuple[sa.ColumnElement[int | None]]:
    consumption = statements_of(shard).tables.consumption
    earliest = sa.select(sa.func.min(consumption.c.due_ms)).where(consumption.c.subscription_no == subscription)
    return (earliest.scalar_subquery().label("due_ms"),)


def _chunks(parts: Sequence[Part], size: int) -> list[Sequence[Part]]:
    return [parts[start : start + size] for start in range(0, len(parts), size)]


class SqlAlertOutbox:
    """domain.ports.AlertOutbox over the alert table of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def unsent(self, limit: int) -> Sequence[Alert]:
        query = sa.select(alert).where(alert.c.sent_ms.is_(None)).order_by(alert.c.id).limit(limit)
        with self._database.reading() as connection:
            return [
                Alert(
                    row.id, row.kind, row.topic_no, row.shard, row.message_id, row.subscription_no, row.attempt, row.detail,
                    row.created_ms,
                )
                for row in connection.execute(query)
            ]  # fmt: skip

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
