"""Find what is due: one UNION ALL of MIN(due) per database, over all shards this server holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.numbers import NO_SUBSCRIPTION, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.store.engines import Database
from tmc_server.store.leases import ShardLeases
from tmc_server.store.tables import shard_tables

Part = TypeVar("Part")
Parts = Callable[[Catalog, Shard], Sequence[str]]
_UNION = 400  # parts of one statement


class DueIndex:
    """parts: one SELECT of (shard, number, due_ms) for each thing of a shard that can be due."""

    def __init__(self, database: Database, leases: ShardLeases, catalog: CatalogSource, *parts: Parts) -> None:
        self._database = database
        self._leases = leases
        self._catalog = catalog
        self._parts = parts
        self._looked_for: tuple[int, tuple[int, ...]] = (-1, ())
        self._looks: list[str] = []

    def due(self) -> list[tuple[Shard, Any]]:
        """(shard, number) with something due by the database's clock."""
        found: list[tuple[Shard, Any]] = []
        looks = self._statements()
        if looks:
            with self._database.reading() as connection:
                now = int(self._database.now(connection))
                for look in looks:
                    due = f"SELECT shard, number FROM ({look}) AS earliest WHERE due_ms <= {now}"
                    found += [(shard, number) for shard, number in connection.exec_driver_sql(due)]
        return found

    def _statements(self) -> list[str]:
        """Rebuilt when the catalog or the leases change, not twice a second."""
        catalog = self._catalog.current
        shards = tuple(sorted(self._leases.held()))
        if self._looked_for != (catalog.version, shards):
            parts = [part for shard in shards for make in self._parts for part in make(catalog, shard)]
            self._looks = [" UNION ALL ".join(chunk) for chunk in chunks(parts, _UNION)]
            self._looked_for = (catalog.version, shards)
        return self._looks


def earliest_delivery(catalog: Catalog, shard: Shard) -> list[str]:
    """Return a query for each subscription: its earliest due time."""
    table = shard_tables(shard).consumption.name
    return [_earliest(shard, table, "subscription_no", s.number) for s in catalog.subscriptions_on.get(shard, ())]


def earliest_check(catalog: Catalog, shard: Shard) -> list[str]:
    """Return a query for each topic: its earliest due time."""
    table = shard_tables(shard).message.name
    return [_earliest(shard, table, "topic_no", topic.number) for topic in catalog.topics_on.get(shard, ())]


def _earliest(shard: Shard, table: str, column: str, number: int) -> str:
    earliest = f"(SELECT MIN(due_ms) FROM {table} WHERE {column} = {int(number)})"
    return f"SELECT {int(shard)} AS shard, {int(number)} AS number, {earliest} AS due_ms"


def due_times(database: Database, catalog: Catalog) -> list[tuple[SubscriptionNumber, int]]:
    """(subscription, due_ms) of everything that waits for its time, for small centers in one database.

    NO_SUBSCRIPTION: it is a check.
    """
    parts = [
        f"SELECT {number} AS number, due_ms FROM {table} WHERE due_ms IS NOT NULL"
        for shard in sorted({*catalog.topics_on, *catalog.subscriptions_on})
        for number, table in (
            (NO_SUBSCRIPTION, shard_tables(shard).message.name),
            ("subscription_no", shard_tables(shard).consumption.name),
        )
    ]
    with database.reading() as connection:
        return [
            (SubscriptionNumber(number), int(due_ms))
            for chunk in chunks(parts, _UNION)
            for number, due_ms in connection.exec_driver_sql(" UNION ALL ".join(chunk))
        ]


def chunks(parts: Sequence[Part], size: int) -> list[Sequence[Part]]:
    return [parts[start : start + size] for start in range(0, len(parts), size)]
