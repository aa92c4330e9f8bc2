"""Look-ups for operators and owners. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.servers import ServerView, ShardPlace
from tmc_server.domain.views import AttemptView, CheckView, ConsumptionView, MessageDetail, MessageView
from tmc_server.store.copies import parse_headers
from tmc_server.store.engines import ShardMap
from tmc_server.store.nodes import server_runs
from tmc_server.store.shard_map import stored_map
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import lease, order, shard_tables

_Heads = Mapping[tuple[SubscriptionNumber, int], MessageNumber]


class Reader:
    """All methods block; call them in a thread. Raise StoreUnavailable."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def message(self, shard: Shard, number: MessageNumber) -> MessageView | None:
        table = shard_tables(shard).message
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(sa.select(table).where(table.c.id == number)).one_or_none()
        return None if row is None else _message(shard, row)

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
        return None if row is None else _message(shard, row)

    def detail(self, message: MessageView) -> MessageDetail:
        tables = shard_tables(message.shard)
        consumption, attempt = tables.consumption, tables.attempt
        with self._shards.shards[message.shard].reading() as connection:
            consumptions = connection.execute(
                sa.select(consumption)
                .where(consumption.c.message_id == message.number)
                .order_by(consumption.c.subscription_no)
            ).fetchall()
            heads = _heads(connection, consumptions)
            attempts = connection.execute(
                sa.select(attempt).where(attempt.c.message_id == message.number).order_by(attempt.c.id)
            ).fetchall()
        return MessageDetail(
            message,
            [_consumption(message.shard, row, heads) for row in consumptions],
            [
                AttemptView(subscription=row.subscription_no, attempt=row.attempt, at_ms=row.at_ms, error=row.error)
                for row in attempts
            ],
        )

    def messages(
        self,
        shards: Sequence[Shard],
        topic: int,
        state: MessageState | None,
        from_ms: int,
        to_ms: int,
        after: tuple[Shard, MessageNumber],
        limit: int,
    ) -> list[MessageView]:
        """Up to `limit` after (shard, number), in the order of shard and number; without bodies."""
        found: list[MessageView] = []
        for shard in shards:
            if shard < after[0] or len(found) >= limit:
                continue
            table = shard_tables(shard).message
            columns = [column for column in table.c if column.name != "body"]
            query = sa.select(*columns).where(table.c.topic_no == topic)
            query = query.where(table.c.id > (after[1] if shard == after[0] else -1))
            if state is not None:
                query = query.where(table.c.state == int(state))
            if from_ms:
                query = query.where(table.c.created_ms >= from_ms)
            if to_ms:
                query = query.where(table.c.created_ms < to_ms)
            with self._shards.shards[shard].reading() as connection:
                rows = connection.execute(query.order_by(table.c.id).limit(limit - len(found))).fetchall()
            found += [_message(shard, row) for row in rows]
        return found

    def consumptions(
        self,
        shards: Sequence[Shard],
        subscriptions: Sequence[SubscriptionNumber],
        state: ConsumptionState | None,
        after: tuple[Shard, MessageNumber],
        limit: int,
    ) -> list[ConsumptionView]:
        """Up to about `limit` after (shard, number): a message's rows stay together on one page."""
        found: list[ConsumptionView] = []
        for shard in shards:
            if shard < after[0] or len(found) >= limit or not subscriptions:
                continue
            table = shard_tables(shard).consumption
            query = sa.select(table).where(table.c.subscription_no.in_(list(subscriptions)))
            query = query.where(table.c.message_id > (after[1] if shard == after[0] else -1))
            if state is not None:
                query = query.where(table.c.state == int(state))
            query = query.order_by(table.c.message_id, table.c.subscription_no).limit(limit - len(found))
            with self._shards.shards[shard].reading() as connection:
                rows = connection.execute(query).fetchall()
                if len(rows) == limit - len(found):
                    last = rows[-1].message_id
                    rest = query.limit(None).where(
                        table.c.message_id == last, table.c.subscription_no > rows[-1].subscription_no
                    )
                    rows = [*rows, *connection.execute(rest).fetchall()]
                heads = _heads(connection, rows)
            found += [_consumption(shard, row, heads) for row in rows]
        return found

    def consumption(
        self, shard: Shard, number: MessageNumber, subscription: SubscriptionNumber
    ) -> ConsumptionView | None:
        table = shard_tables(shard).consumption
        query = sa.select(table).where(table.c.message_id == number, table.c.subscription_no == subscription)
        with self._shards.shards[shard].reading() as connection:
            row = connection.execute(query).one_or_none()
            heads = _heads(connection, [row] if row is not None else [])
        return None if row is None else _consumption(shard, row, heads)

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
                    held = sa.select(lease).where(lease.c.expires_ms > database.now(connection)).order_by(lease.c.shard)
                    for row in connection.execute(held):
                        shards.setdefault(row.owner, []).append(row.shard)
        return [ServerView(run, run.expires_ms > now, sorted(shards.get(run.incarnation, ()))) for run in runs]

    def shard_places(self) -> list[ShardPlace]:
        with self._shards.catalog.reading() as connection:
            return stored_map(connection)


def _message(shard: Shard, row: Any) -> MessageView:
    values = row._mapping
    return MessageView(
        shard=shard,
        number=row.id,
        topic=row.topic_no,
        producer=row.producer_no,
        producer_tag=row.producer_tag,
        key=row.message_key,
        state=MessageState(row.state),
        body=values.get("body"),
        content_type=row.content_type,
        headers=parse_headers(row.headers),
        delay_ms=row.delay_ms,
        created_ms=row.created_ms,
        decided_ms=row.decided_ms,
        attempt_id=row.attempt_id,
        digest=row.digest,
        check=CheckView(
            attempt=row.check_attempt,
            checked=row.checked,
            due_ms=row.due_ms,
            unreached_ms=row.unreached_ms,
            target=row.check_target,
            last_answer=row.check_answer,
        ),
    )


def _heads(connection: sa.Connection, consumptions: Sequence[Any]) -> _Heads:
    """Whose turn it is in the lines of those that wait."""
    hashes: dict[SubscriptionNumber, list[int]] = {}
    for row in consumptions:
        if row.state == ConsumptionState.WAITING:
            hashes.setdefault(row.subscription_no, []).append(row.order_hash)
    return {
        (subscription, row.order_hash): MessageNumber(row.head_id)
        for subscription, wanted in hashes.items()
        for row in connection.execute(
            sa.select(order.c.order_hash, order.c.head_id).where(
                order.c.subscription_no == subscription, order.c.order_hash.in_(wanted)
            )
        )
    }


def _consumption(shard: Shard, row: Any, heads: _Heads) -> ConsumptionView:
    return ConsumptionView(
        shard=shard,
        number=row.message_id,
        subscription=row.subscription_no,
        state=ConsumptionState(row.state),
        attempt=row.attempt,
        tried=row.tried,
        due_ms=row.due_ms,
        created_ms=row.created_ms,
        closed_ms=row.closed_ms,
        tried_ms=row.tried_ms,
        extended=row.extended,
        sequence=row.sequence,
        waits_for=(heads.get((row.subscription_no, row.order_hash)) if row.state == ConsumptionState.WAITING else None),
    )
