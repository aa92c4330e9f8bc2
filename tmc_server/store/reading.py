"""Look-ups for operators and owners. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.alerts import ABOUT_A_MESSAGE
from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.placement import MoveStep
from tmc_server.domain.ports.servers import MoveProgress, ServerView, ShardPlace
from tmc_server.domain.views import (
    AttemptView,
    ConsumptionView,
    DeliveryJob,
    MessageDetail,
    MessageView,
    OperatorAct,
    RaisedAlert,
)
from tmc_server.errors import StoreUnavailable
from tmc_server.store.auditing import act_of
from tmc_server.store.engines import ShardMap, is_over, over
from tmc_server.store.nodes import server_runs
from tmc_server.store.records import record_of
from tmc_server.store.rows import consumption_view, heads_of, message_view
from tmc_server.store.shard_map import place_of, stored_map
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import alert, audit, bulk_item, lease, shard_move, shard_tables

_PAUSES = ("pause topic", "resume topic", "pause subscription", "resume subscription")  # in turns


class Reader:
    """All methods block; call them in a thread. Raise StoreUnavailable."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def message(self, shard: Shard, number: MessageNumber) -> MessageView | None:
        table = shard_tables(shard).message
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(sa.select(table).where(table.c.id == number)).one_or_none()
        return None if row is None else message_view(shard, row)

    def message_by_key(
        self, shard: Shard, topic: int, key: str, tag: str | None, live_only: bool
    ) -> MessageView | None:
        """The newest message of that key. tag None: of any environment."""
        table = shard_tables(shard).message
        query = sa.select(table).where(table.c.topic_no == topic, table.c.message_key == key)
        if tag is not None:
            query = query.where(table.c.producer_tag == tag)
        if live_only:
            query = query.where(table.c.live == 1)
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(query.order_by(table.c.id.desc()).limit(1)).one_or_none()
        return None if row is None else message_view(shard, row)

    def detail(self, message: MessageView) -> MessageDetail:
        tables = shard_tables(message.shard)
        consumption, attempt = tables.consumption, tables.attempt
        with self._shards.shards[message.shard].reading() as connection:
            consumptions = connection.execute(
                sa.select(consumption)
                .where(consumption.c.message_id == message.number)
                .order_by(consumption.c.subscription_no)
            ).fetchall()
            heads = heads_of(connection, consumptions)
            attempts = connection.execute(
                sa.select(attempt).where(attempt.c.message_id == message.number).order_by(attempt.c.id)
            ).fetchall()
        return MessageDetail(
            message,
            [consumption_view(message.shard, row, heads) for row in consumptions],
            [record_of(AttemptView, row, subscription=row.subscription_no) for row in attempts],
        )

    def consumption(
        self, shard: Shard, number: MessageNumber, subscription: SubscriptionNumber
    ) -> ConsumptionView | None:
        table = shard_tables(shard).consumption
        query = sa.select(table).where(table.c.message_id == number, table.c.subscription_no == subscription)
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(query).one_or_none()
            heads = heads_of(connection, [row] if row is not None else [])
        return None if row is None else consumption_view(shard, row, heads)

    def acts(self, message: MessageView, subscriptions: Sequence[SubscriptionNumber]) -> list[OperatorAct]:
        subjects = [f"message {message.number}"]
        subjects += [f"{subjects[0]} subscription {each}" for each in subscriptions]
        query = sa.select(audit).where(audit.c.subject.in_(subjects)).order_by(audit.c.id)
        return sorted(map(act_of, self._everywhere(message.shard, query)), key=lambda each: each.at_ms)

    def _everywhere(self, shard: Shard, query: sa.Select[Any]) -> list[Any]:
        """Return rows from where a shard is, and from where it may have been before, as far as that answers."""
        here, found = self._shards.holder(shard), list[Any]()
        for database in self._shards.homes:
            with nullcontext() if database is here else suppress(StoreUnavailable), database.reading() as connection:
                found += connection.execute(query).all()
        return found

    def pauses(self, subjects: Sequence[str], since_ms: int) -> list[OperatorAct]:
        query = (
            sa.select(audit)
            .where(audit.c.subject.in_(subjects), audit.c.action.in_(_PAUSES), audit.c.at_ms >= since_ms)
            .order_by(audit.c.id)
        )
        before = (audit.c.action.in_(_PAUSES), audit.c.at_ms < since_ms)
        with self._shards.catalog.reading() as connection:
            acts = [act_of(row) for row in connection.execute(query)]
            for subject in subjects:
                last = sa.select(audit).where(audit.c.subject == subject, *before).order_by(audit.c.id.desc()).limit(1)
                row = connection.execute(last).one_or_none()
                if row is not None and row.action in _PAUSES[::2]:
                    acts.insert(0, act_of(row))
            return acts

    def bulk_items(self, message: MessageView) -> list[DeliveryJob]:
        query = (
            sa.select(bulk_item)
            .where(bulk_item.c.message_id == message.number, bulk_item.c.shard == message.shard)
            .order_by(bulk_item.c.job_id)
        )
        with self._shards.shards[message.shard].reading() as connection:
            rows = connection.execute(query).fetchall()
        return [record_of(DeliveryJob, row, job=row.job_id, subscription=row.subscription_no) for row in rows]

    def alerts(self, message: MessageView) -> list[RaisedAlert]:
        raised = (alert.c.kind.in_(ABOUT_A_MESSAGE), alert.c.message_id == message.number)
        query = sa.select(alert).where(*raised, alert.c.shard == message.shard).order_by(alert.c.id)
        found = [
            RaisedAlert(kind=row.kind, subscription=row.subscription_no, detail=row.detail, at_ms=row.created_ms)
            for row in self._everywhere(message.shard, query)
        ]
        return sorted(found, key=lambda each: each.at_ms)

    def now(self, shard: Shard) -> int:
        database = self._shards.shards[shard]
        with database.reading() as connection:
            return database.now(connection)

    def is_gone(self, shard: Shard, number: MessageNumber) -> bool:
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(statements_of(shard).retained).one_or_none()
        return row is not None and number < first_number(row.horizon_ms)

    def servers(self) -> list[ServerView]:
        catalog = self._shards.catalog
        with catalog.reading() as connection:
            now = catalog.now(connection)
            runs = server_runs(connection)
        shards: dict[int, list[Shard]] = {}
        for database in self._shards.databases:
            if self._shards.shards_in(database):
                with database.reading() as connection:
                    held = (
                        sa.select(lease)
                        .where(sa.not_(over(lease.c.expires_ms, database.now(connection))))
                        .order_by(lease.c.shard)
                    )
                    for row in connection.execute(held):
                        shards.setdefault(row.owner, []).append(row.shard)
        return [
            ServerView(run, not is_over(run.expires_ms, now), sorted(shards.get(run.incarnation, ()))) for run in runs
        ]

    def shard_places(self) -> list[ShardPlace]:
        with self._shards.catalog.reading() as connection:
            moves = {row.shard: self._progress(row) for row in connection.execute(sa.select(shard_move))}
            return [replace(place, move=moves.get(place.shard)) for place in stored_map(connection)]

    def _progress(self, row: Any) -> MoveProgress:
        target = self._shards.by_identity.get(row.target)
        return MoveProgress(
            database=row.target,
            address=place_of(target) if target is not None else "",
            step=MoveStep(row.step),
            copied_rows=row.copied,
            expected_rows=row.expected,
            started_ms=row.started_ms,
            updated_ms=row.updated_ms,
        )
