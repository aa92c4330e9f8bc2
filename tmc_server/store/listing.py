"""Messages and deliveries page by page, by age over all shards. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sqlalchemy as sa

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_SUBSCRIPTION, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.reading import Span
from tmc_server.domain.views import ConsumptionView, MessageView
from tmc_server.store.descriptions import Described, Description, descriptions
from tmc_server.store.engines import ShardMap
from tmc_server.store.rows import consumption_view, heads_of, message_view
from tmc_server.store.sql import through_index
from tmc_server.store.tables import failed, shard_tables

_SLACK_MS = 3_600_000  # message numbers carry a server's time, created_ms is the database's

_View = TypeVar("_View", MessageView, ConsumptionView)


class Lister:
    """domain.ports.reading.RowLister. A page asks every shard for as many rows as it may have, and keeps the first of all.

    topics: the numbers of all topics.
    """

    def __init__(self, shards: ShardMap, topics: Callable[[], Iterable[int]]) -> None:
        self._shards = shards
        self._topics = topics

    def messages(
        self, shards: Sequence[Shard], topics: Collection[int] | None, state: MessageState | None, span: Span
    ) -> list[MessageView]:
        def read(connection: sa.Connection, shard: Shard) -> list[MessageView]:
            table = shard_tables(shard).message
            columns = [column for column in table.c if column.name != "body"]
            query = _made(sa.select(*columns), table.c.id, span, table.c.created_ms)
            query = _paged(query, table.c.id, shard, span)
            if topics is not None:
                query = query.where(table.c.topic_no.in_(sorted(topics)))
            if state is not None:
                query = query.where(table.c.state == int(state))
            if state is MessageState.PREPARED:
                # The due index leads to them, topic by topic; by age, all closed messages would be read.
                wanted = sorted(self._topics() if topics is None else topics)
                query = query.where(table.c.topic_no.in_(wanted), table.c.due_ms.is_not(None))
                query = through_index(query, table, f"{table.name}_due")
            if state is MessageState.CHECK_FAILED:
                query = query.where(table.c.id.in_(_undecided(shard)))
            return [message_view(shard, row) for row in connection.execute(query.limit(span.limit))]

        return self._merged(shards, read, span)[: span.limit]

    def consumptions(
        self,
        shards: Sequence[Shard],
        subscriptions: Mapping[SubscriptionNumber, int],
        state: ConsumptionState | None,
        fingerprint: str,
        span: Span,
    ) -> list[ConsumptionView]:
        def read(connection: sa.Connection, shard: Shard) -> list[ConsumptionView]:
            table = shard_tables(shard).consumption
            query = sa.select(table).where(table.c.subscription_no.in_(sorted(subscriptions)))
            query = _paged(_made(query, table.c.message_id, span), table.c.message_id, shard, span)
            if state is not None:
                query = query.where(table.c.state == int(state))
            if state is ConsumptionState.SCHEDULED:
                query = query.where(table.c.due_ms.is_not(None))
            if state is ConsumptionState.FAILED:
                query = query.join(failed, _is_failure(table, shard, subscriptions, fingerprint))
            # A message's deliveries stay together, so its last page may be longer.
            rows = list(connection.execute(query.order_by(table.c.subscription_no).limit(span.limit)))
            if len(rows) == span.limit:
                last = rows[-1]
                rest = query.where(
                    table.c.message_id == last.message_id, table.c.subscription_no > last.subscription_no
                )
                rows += connection.execute(rest)
            heads = heads_of(connection, rows)
            return [consumption_view(shard, row, heads) for row in rows]

        found = self._merged(shards if subscriptions else (), read, span)
        end = span.limit
        while 0 < end < len(found) and _place(found[end]) == _place(found[end - 1]):
            end += 1
        return self._described(found[:end], subscriptions)

    def _described(
        self, page: Sequence[ConsumptionView], topics: Mapping[SubscriptionNumber, int]
    ) -> list[ConsumptionView]:
        wanted: dict[Shard, list[Described]] = {}
        for view in page:
            delivery = Described(
                number=view.number,
                subscription=view.subscription,
                topic=topics[view.subscription],
                failed=view.state is ConsumptionState.FAILED,
            )
            wanted.setdefault(view.shard, []).append(delivery)
        found: dict[Shard, Mapping[tuple[MessageNumber, SubscriptionNumber], Description]] = {}
        for shard, deliveries in wanted.items():
            with self._shards.shards[shard].reading() as connection:
                found[shard] = descriptions(connection, shard, deliveries)
        return [_with(view, found[view.shard][view.number, view.subscription]) for view in page]

    def _merged(
        self, shards: Sequence[Shard], read: Callable[[sa.Connection, Shard], list[_View]], span: Span
    ) -> list[_View]:
        found: list[_View] = []
        for shard in shards:
            with self._shards.shards[shard].reading() as connection:
                found += read(connection, shard)
        return sorted(found, key=_place, reverse=span.newest_first)


def _with(view: ConsumptionView, said: Description) -> ConsumptionView:
    return replace(view, key=said.key, error=said.error, fingerprint=said.fingerprint)


def _place(view: MessageView | ConsumptionView) -> tuple[MessageNumber, Shard]:
    return (view.number, view.shard)


def _made(
    query: sa.Select[Any], number: sa.Column[int], span: Span, created_ms: sa.Column[int] | None = None
) -> sa.Select[Any]:
    """created_ms: None: the time inside the message number is exact enough."""
    slack_ms = 0 if created_ms is None else _SLACK_MS
    if span.from_ms:
        query = query.where(number >= first_number(span.from_ms - slack_ms))
    if span.to_ms:
        query = query.where(number < first_number(span.to_ms + slack_ms))
    if created_ms is not None and span.from_ms:
        query = query.where(created_ms >= span.from_ms)
    if created_ms is not None and span.to_ms:
        query = query.where(created_ms < span.to_ms)
    return query


def _paged(query: sa.Select[Any], number: sa.Column[int], shard: Shard, span: Span) -> sa.Select[Any]:
    if span.after is not None:
        after_shard, after = span.after
        if span.newest_first:
            query = query.where(number <= after if shard < after_shard else number < after)
        else:
            query = query.where(number >= after if shard > after_shard else number > after)
    return query.order_by(number.desc() if span.newest_first else number)


def _undecided(shard: Shard) -> sa.Select[Any]:
    """Select what waits for an operator, which has a table of its own."""
    return sa.select(failed.c.message_id).where(failed.c.shard == shard, failed.c.subscription_no == NO_SUBSCRIPTION)


def _is_failure(
    table: sa.Table, shard: Shard, subscriptions: Mapping[SubscriptionNumber, int], fingerprint: str
) -> sa.ColumnElement[bool]:
    """Return the condition of deliveries that failed. fingerprint: of their error; "": any."""
    same = (
        failed.c.shard == shard,
        failed.c.topic_no.in_(sorted(set(subscriptions.values()))),
        failed.c.subscription_no == table.c.subscription_no,
        failed.c.message_id == table.c.message_id,
    )
    return sa.and_(*same, failed.c.fingerprint == fingerprint) if fingerprint else sa.and_(*same)
