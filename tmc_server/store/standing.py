"""Count open and failed rows in the shards of one database, for the gauges.

Closed rows are never read: open rows have a due time and are found through the due indexes, failed ones are in a
table of their own. Each count stops at a limit, so one statement takes bounded time however long a backlog is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tmc_server.domain.ids import created_ms, first_number
from tmc_server.domain.numbers import NO_SUBSCRIPTION, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import Standing
from tmc_server.store.engines import Database
from tmc_server.store.leases import ShardLeases
from tmc_server.store.scanning import chunks
from tmc_server.store.tables import failed, shard_tables, waiting

COUNTED_AT_MOST = 100_000  # rows of one topic or subscription, state and shard
_UNION = 200
_NO_NUMBER = (
    "MIN(CASE WHEN 1 = 0 THEN 1 END)"  # NULL, as a number: PostgreSQL unites texts and numbers with nothing else
)
_MESSAGES, _DELIVERIES, _FAILED, _WAITING = 0, 1, 2, 3


class StandingCounts:
    """domain.ports.reading.StandingReader. limit: rows per count."""

    def __init__(
        self, database: Database, leases: ShardLeases, catalog: CatalogSource, limit: int = COUNTED_AT_MOST
    ) -> None:
        self._database = database
        self._leases = leases
        self._catalog = catalog
        self._limit = limit

    def shards(self) -> Sequence[Shard]:
        return sorted(self._leases.held())

    def count(self, shards: Sequence[Shard]) -> tuple[int, Mapping[Shard, Sequence[Standing]]]:
        found: dict[tuple[int, Shard, int, SubscriptionNumber], Any] = {}
        with self._database.reading() as connection:
            now = int(self._database.now(connection))
            for parts in chunks([part for shard in shards for part in self._parts(shard, now)], _UNION):
                for row in connection.exec_driver_sql(" UNION ALL ".join(parts)):
                    found[row[0], row[1], row[2], row[3]] = row[4:]
        return now, {shard: self._standings(shard, found) for shard in shards}

    def _standings(
        self, shard: Shard, found: Mapping[tuple[int, Shard, int, SubscriptionNumber], Any]
    ) -> Sequence[Standing]:
        made = []
        for kind, topic, subscription in self._groups(shard):
            counted = found.get((kind, shard, topic, subscription))
            failures = found.get((_FAILED, shard, topic, subscription))
            waiting = found.get((_WAITING, shard, topic, subscription), (0,))
            if counted is not None and failures is not None:
                count, late, oldest, oldest_late = counted
                made.append(
                    Standing(
                        topic=topic,
                        subscription=subscription,
                        open=count,
                        late=int(late),
                        failed=failures[0],
                        waiting=waiting[0],
                        oldest_open_ms=oldest and created_ms(oldest),
                        oldest_late_ms=oldest_late and created_ms(oldest_late),
                        oldest_failed_ms=failures[2],
                    )
                )
        return made

    def _groups(self, shard: Shard) -> list[tuple[int, int, SubscriptionNumber]]:
        catalog = self._catalog.current
        return [(_MESSAGES, topic.number, NO_SUBSCRIPTION) for topic in catalog.topics_on.get(shard, ())] + [
            (_DELIVERIES, each.topic, each.number) for each in catalog.subscriptions_on.get(shard, ())
        ]

    def _parts(self, shard: Shard, now: int) -> list[str]:
        topics = self._catalog.current.topics
        parts = []
        for kind, topic, subscription in self._groups(shard):
            if kind == _MESSAGES:
                late = f"id < {first_number(now - topics[topic].transaction_time_ms)}"
                parts.append(
                    self._open(
                        shard, kind, topic, NO_SUBSCRIPTION, shard_tables(shard).message.name, "topic_no", "id", late
                    )
                )
            else:
                late = f"due_ms <= {now} OR tried > 0"
                table = shard_tables(shard).consumption.name
                parts.append(self._open(shard, kind, topic, subscription, table, "subscription_no", "message_id", late))
                if topics[topic].ordered:
                    parts.append(self._waiting(shard, topic, subscription))
            parts.append(self._failed(shard, topic, subscription))
        return parts

    def _open(
        self,
        shard: Shard,
        kind: int,
        topic: int,
        subscription: SubscriptionNumber,
        table: str,
        by: str,
        id_: str,
        late: str,
    ) -> str:
        """SQL that counts open rows. The due index is forced, because a table scan would read closed rows."""
        index = self._database.dialect.through_index(f"{table}_due")
        some = (
            f"SELECT {id_} AS id, CASE WHEN {late} THEN 1 ELSE 0 END AS late FROM {table} {index}"
            f" WHERE {by} = {subscription or topic} AND due_ms IS NOT NULL LIMIT {self._limit}"
        )
        return (
            f"SELECT {kind} AS kind, {shard} AS shard, {topic} AS topic, {subscription} AS subscription, COUNT(*) AS rows_,"
            f" COALESCE(SUM(late), 0) AS late, MIN(id) AS oldest, MIN(CASE WHEN late = 1 THEN id END) AS oldest_late"
            f" FROM ({some}) AS some_{kind}"
        )

    def _failed(self, shard: Shard, topic: int, subscription: SubscriptionNumber) -> str:
        some = (
            f"SELECT failed_ms FROM {failed.name} WHERE shard = {shard} AND topic_no = {topic}"
            f" AND subscription_no = {subscription} LIMIT {self._limit}"
        )
        return (
            f"SELECT {_FAILED} AS kind, {shard} AS shard, {topic} AS topic, {subscription} AS subscription,"
            f" COUNT(*) AS rows_, 0 AS late, MIN(failed_ms) AS oldest, {_NO_NUMBER} AS oldest_late"
            f" FROM ({some}) AS some_{_FAILED}"
        )

    def _waiting(self, shard: Shard, topic: int, subscription: SubscriptionNumber) -> str:
        some = f"SELECT message_id FROM {waiting.name} WHERE subscription_no = {subscription} LIMIT {self._limit}"
        return (
            f"SELECT {_WAITING} AS kind, {shard} AS shard, {topic} AS topic, {subscription} AS subscription,"
            f" COUNT(*) AS rows_, 0 AS late, MIN(message_id) AS oldest, {_NO_NUMBER} AS oldest_late"
            f" FROM ({some}) AS some_{_WAITING}"
        )
