"""What waits for an operator, by its errors. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from tmc_server.domain.numbers import NO_MESSAGE, NO_SUBSCRIPTION, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.reading import FailureGroup
from tmc_server.store.descriptions import Described, descriptions
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.tables import failed, shard_tables

_MINUTES = 60
_MINUTE_MS = 60_000


class _Name(NamedTuple):
    topic: int
    subscription: SubscriptionNumber
    fingerprint: str


@dataclass(kw_only=True)
class _Found:
    """databases: where there are some; the one with the last failure at the end."""

    count: int = 0
    first_ms: int = 1 << 62
    last_ms: int = 0
    per_minute: list[int] = field(default_factory=lambda: [0] * _MINUTES)
    databases: list[Database] = field(default_factory=list)


class SqlFailures:
    """domain.ports.reading.FailureReader."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def groups(
        self, topics: Collection[int], subscriptions: Collection[SubscriptionNumber], limit: int
    ) -> tuple[int, list[FailureGroup], bool]:
        found: dict[_Name, _Found] = {}
        now = 0
        wanted = (failed.c.topic_no.in_(sorted(topics)), failed.c.subscription_no.in_(sorted(subscriptions)))
        for database in self._shards.databases:
            held = self._shards.shards_in(database)
            if not held:
                continue
            here = (*wanted, failed.c.shard.in_(held))  # what was left behind by a move is not counted
            with database.snapshot() as connection:
                now = database.now(connection)
                for row in connection.execute(_totals(here)):
                    group = found.setdefault(_name(row), _Found())
                    group.count += row.rows
                    group.first_ms = min(group.first_ms, row.first_ms)
                    group.databases.insert(0 if row.last_ms < group.last_ms else len(group.databases), database)
                    group.last_ms = max(group.last_ms, row.last_ms)
                for row in connection.execute(_minutes(here, now - _MINUTES * _MINUTE_MS)):
                    found[_name(row)].per_minute[min(int(row.minute), _MINUTES - 1)] += row.rows
        largest = sorted(found.items(), key=lambda item: -item[1].count)
        return now, [self._group(name, group) for name, group in largest[:limit]], len(found) > limit

    def _group(self, name: _Name, group: _Found) -> FailureGroup:
        newest = (
            sa.select(failed.c.shard, failed.c.message_id)
            .where(
                failed.c.topic_no == name.topic,
                failed.c.subscription_no == name.subscription,
                failed.c.fingerprint == name.fingerprint,
                failed.c.shard.in_(self._shards.shards_in(group.databases[-1])),
            )
            .limit(1)
        )
        with group.databases[-1].reading() as connection:
            row = connection.execute(newest).one_or_none()
            error = _error(connection, name, row) if row is not None else ""  # it may have been decided meanwhile
        return FailureGroup(
            topic=name.topic,
            subscription=name.subscription,
            fingerprint=name.fingerprint,
            count=group.count,
            first_ms=group.first_ms,
            last_ms=group.last_ms,
            per_minute=group.per_minute,
            shard=Shard(row.shard) if row is not None else Shard(0),
            number=MessageNumber(row.message_id) if row is not None else NO_MESSAGE,
            error=error,
        )


def _name(row: Any) -> _Name:
    return _Name(row.topic_no, row.subscription_no, row.fingerprint)


def _error(connection: sa.Connection, name: _Name, row: Any) -> str:
    if name.subscription == NO_SUBSCRIPTION:
        message = shard_tables(row.shard).message
        answer = sa.select(message.c.check_answer).where(message.c.id == row.message_id)
        return connection.execute(answer).scalar_one_or_none() or ""
    delivery = Described(number=row.message_id, subscription=name.subscription, topic=name.topic, failed=True)
    return descriptions(connection, row.shard, [delivery])[row.message_id, name.subscription].error


_GROUP = (failed.c.topic_no, failed.c.subscription_no, failed.c.fingerprint)


def _totals(wanted: Sequence[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    counts = (
        sa.func.count().label("rows"),
        sa.func.min(failed.c.failed_ms).label("first_ms"),
        sa.func.max(failed.c.failed_ms).label("last_ms"),
    )
    return sa.select(*_GROUP, *counts).where(*wanted).group_by(*_GROUP)


def _minutes(wanted: Sequence[sa.ColumnElement[bool]], from_ms: int) -> sa.Select[Any]:
    minute = ((failed.c.failed_ms - from_ms) // _MINUTE_MS).label("minute")
    query = sa.select(*_GROUP, minute, sa.func.count().label("rows")).where(*wanted, failed.c.failed_ms >= from_ms)
    return query.group_by(
        *_GROUP, sa.text("minute")
    )  # by name: its values are parameters, and PostgreSQL compares texts
