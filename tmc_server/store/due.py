"""Due consumptions and alerts of one database, as the duties see them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ports.alerts import Alert
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.domain.retry import RetryPolicy
from tmc_server.store.batch import ShardWriter
from tmc_server.store.claims import claim_due
from tmc_server.store.engines import Database, StoreConflict, repeated
from tmc_server.store.leases import ShardLeases
from tmc_server.store.scanning import DueIndex, earliest_delivery
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import alert, notice

_RESCUE_PAGE = 500
_SERVER_GONE = "no ack, and the server that handed it over is gone; this attempt does not count"
EPISODE_MS = 60_000  # between two notices of one group
_SAMPLES = 5
_UNSENT = sa.select(alert).where(alert.c.sent_ms.is_(None)).order_by(alert.c.id).limit(sa.bindparam("limit"))

_DUE_NOTICES = (
    sa.select(notice)
    .where(notice.c.sink == sa.bindparam("sink"), notice.c.due_ms <= sa.bindparam("now"))
    .order_by(notice.c.due_ms, notice.c.id)
    .limit(sa.bindparam("limit"))
)


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

    def rescue(self, shard: Shard, incarnation: int, since_ms: int) -> int | None:
        lease = self._leases.held().get(shard)
        if lease is None:
            return None
        rescued = 0
        for subscription in self._catalog.current.subscriptions_on.get(shard, ()):
            which = {"subscription": subscription.number, "gone": incarnation, "since": since_ms}
            while found := repeated(partial(self._rescue_page, shard, which, lease.guard)):
                rescued += found
        return rescued

    def _rescue_page(self, shard: Shard, which: Mapping[str, int], guard: Mapping[str, int]) -> int:
        """Read without locks, then change by primary key: a range over the due index would deadlock against acks."""
        sql, database = statements_of(shard), self._writer.database
        with database.transaction() as connection:
            ids = sorted(
                connection.execute(sql.handed_over_by_gone_servers, {**which, "limit": _RESCUE_PAGE}).scalars()
            )
            if not ids:
                return 0
            rescued = {**which, **guard, "ids": ids, "now": database.now(connection)}
            connection.execute(sql.journal_rescued, {**rescued, "incarnation": 0, "error": _SERVER_GONE})
            return connection.execute(sql.rescue, rescued).rowcount


def _used_up(consumption: sa.Table, policy: RetryPolicy) -> sa.ColumnElement[bool]:
    """`RetryPolicy.is_used_up` in SQL; parameter now."""
    by_count = consumption.c.tried > policy.max_retry
    if not policy.max_age_ms:
        return by_count
    since_ms = sa.func.coalesce(consumption.c.since_ms, consumption.c.created_ms)
    by_age = sa.and_(consumption.c.tried > 0, since_ms <= sa.bindparam("now") - policy.max_age_ms)
    return sa.or_(by_count, by_age)


class SqlAlertOutbox:
    """domain.ports.alerts.AlertOutbox over the alert table of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._me = secrets.randbits(62) + 1  # marks the claims of this run

    def unsent(self, limit: int) -> Sequence[Alert]:
        """Alerts that no notice tells of yet, oldest first."""
        with self._database.reading() as connection:
            return [
                Alert(
                    id=row.id,
                    kind=row.kind,
                    topic=row.topic_no,
                    shard=row.shard,
                    number=row.message_id,
                    subscription=row.subscription_no,
                    attempt=row.attempt,
                    detail=row.detail,
                    created_ms=row.created_ms,
                )
                for row in connection.execute(_UNSENT, {"limit": limit})
            ]

    def add(self, kind: str, topic: int, subscription: SubscriptionNumber, episode: int, detail: str) -> None:
        values = {"kind": kind, "topic_no": topic, "shard": 0, "message_id": 0, "subscription_no": subscription}

        def write() -> None:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                rest = {"attempt": episode, "detail": detail[:500], "created_ms": now, "sent_ms": None}
                connection.execute(alert.insert().values(**values, **rest))

        try:
            repeated(write)
        except sa.exc.IntegrityError:
            return  # another server has written this episode already

    def group(self, sinks: Sequence[str], limit: int) -> int:
        return repeated(partial(self._group, sinks, limit))

    def _group(self, sinks: Sequence[str], limit: int) -> int:
        alerts = self.unsent(limit)
        groups: dict[tuple[str, int, int], list[Alert]] = {}
        for each in alerts:
            groups.setdefault((each.kind, each.topic, each.subscription), []).append(each)
        if alerts:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                ids = [each.id for each in alerts]
                sent = alert.update().where(alert.c.id.in_(ids), alert.c.sent_ms.is_(None)).values(sent_ms=now)
                if connection.execute(sent).rowcount != len(ids):
                    raise StoreConflict("another server groups the same alerts")
                for alike in groups.values():
                    for sink in sinks:
                        if not self._add_to_waiting(connection, sink, alike):
                            self._begin_notice(connection, sink, alike, now)
        return len(alerts)

    @staticmethod
    def _add_to_waiting(connection: sa.Connection, sink: str, alike: Sequence[Alert]) -> bool:
        """Add alerts to an unclaimed notice of their group. Returns: whether there was one."""
        found = connection.execute(_same_group(sink, alike[0]).where(notice.c.claim == 0, notice.c.due_ms.is_not(None)))
        row = found.first()
        if row is None:
            return False
        waiting = (notice.c.id == row.id, notice.c.claim == 0, notice.c.due_ms.is_not(None))
        values = {"alerts": notice.c.alerts + len(alike), "last_ms": max(each.created_ms for each in alike)}
        return connection.execute(notice.update().where(*waiting).values(values)).rowcount == 1

    @staticmethod
    def _begin_notice(connection: sa.Connection, sink: str, alike: Sequence[Alert], now: int) -> None:
        first = alike[0]
        newest = _same_group(sink, first).order_by(notice.c.id.desc()).limit(1)
        before = connection.execute(newest).first()
        due_ms = now
        if before is not None:  # one a minute: claimed by somebody, or sent
            due_ms = max(now, (before.sent_ms or now) + EPISODE_MS)
        samples = [(each.shard, each.number) for each in alike if each.number][:_SAMPLES]
        connection.execute(
            notice.insert().values(
                sink=sink,
                kind=first.kind,
                topic_no=first.topic,
                subscription_no=first.subscription,
                shard=first.shard,
                message_id=first.number,
                attempt=first.attempt,
                detail=first.detail,
                samples=json.dumps(samples),
                alerts=len(alike),
                first_ms=min(each.created_ms for each in alike),
                last_ms=max(each.created_ms for each in alike),
                claim=0,
                due_ms=due_ms,
                sent_ms=None,
            )
        )

    def claim(self, sink: str, limit: int, for_ms: int) -> Sequence[Alert]:
        due = self.due(sink, limit)
        return repeated(lambda: self.take(due, for_ms)) if due else []

    def due(self, sink: str, limit: int) -> Sequence[Any]:
        """Rows as they are; nothing is claimed."""
        with self._database.reading() as connection:
            now = self._database.now(connection)
            return list(connection.execute(_DUE_NOTICES, {"sink": sink, "now": now, "limit": limit}))

    def take(self, due: Sequence[Any], for_ms: int) -> Sequence[Alert]:
        """Claim those that are still as they were read."""
        with self._database.transaction() as connection:
            until = self._database.now(connection) + for_ms
            mine = [row for row in due if self._claim_one(connection, row, until)]
        return [
            Alert(
                id=row.id,
                kind=row.kind,
                topic=row.topic_no,
                shard=row.shard,
                number=row.message_id,
                subscription=row.subscription_no,
                attempt=row.attempt,
                detail=row.detail,
                created_ms=row.first_ms,
                count=row.alerts,
                first_ms=row.first_ms,
                last_ms=row.last_ms,
                samples=[tuple(each) for each in json.loads(row.samples)],
            )
            for row in mine
        ]

    def _claim_one(self, connection: sa.Connection, row: Any, until: int) -> bool:
        """Claim a notice unless it has changed: another server took it, or added an alert that would be lost."""
        same = (
            notice.c.id == row.id,
            notice.c.claim == row.claim,
            notice.c.due_ms == row.due_ms,
            notice.c.alerts == row.alerts,
        )
        return connection.execute(notice.update().where(*same).values(claim=self._me, due_ms=until)).rowcount == 1

    def mark_sent(self, notices: Sequence[Alert]) -> None:
        def write() -> None:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                connection.execute(self._mine(notices).values(due_ms=None, sent_ms=now))

        repeated(write)

    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        def write() -> None:
            with self._database.transaction() as connection:
                due_ms = self._database.now(connection) + after_ms
                connection.execute(self._mine(notices).values(claim=0, due_ms=due_ms))

        repeated(write)

    def _mine(self, notices: Sequence[Alert]) -> sa.Update:
        return notice.update().where(
            notice.c.id.in_([each.id for each in notices]), notice.c.claim == self._me, notice.c.due_ms.is_not(None)
        )


def _same_group(sink: str, like: Alert) -> sa.Select[Any]:
    return sa.select(notice.c.id, notice.c.sent_ms).where(
        notice.c.kind == like.kind,
        notice.c.topic_no == like.topic,
        notice.c.subscription_no == like.subscription,
        notice.c.sink == sink,
    )


class OpenCounts:
    """Counts the undecided messages of a topic in the tables, up to a limit."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = databases  # by shard

    def count(self, shards: Sequence[Shard], topic: int, limit: int) -> int:
        total = 0
        for shard in shards:
            with self._databases[shard].reading() as connection:
                found = connection.execute(statements_of(shard).count_open, {"topic": topic, "limit": limit - total})
                total += int(found.scalar_one())
            if total >= limit:
                break
        return total
