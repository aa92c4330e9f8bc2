"""Messages by key, through the index of keys. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.views import MessageView
from tmc_server.store.engines import ShardMap
from tmc_server.store.rows import message_view
from tmc_server.store.tables import shard_tables

_MOST_OF_A_KEY = 1_000  # one is live, the others were rolled back
_LAST = "\U0010ffff"  # no character comes behind it


class SqlKeySearch:
    """domain.ports.reading.KeySearch. The index of keys begins with topic and environment: both are named in every query."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def messages(
        self, topics: Mapping[Shard, Sequence[int]], key: str, is_beginning: bool, after: str, limit: int
    ) -> list[MessageView]:
        found: list[MessageView] = []
        for shard, numbers in topics.items():
            with self._shards.shards[shard].reading() as connection:
                for topic, tag in _environments(connection, shard, numbers):
                    found += _page(connection, shard, (topic, tag), _Keys(key, is_beginning, after), limit)
        found.sort(key=lambda view: (view.key, -view.number))
        end = limit
        while 0 < end < len(found) and found[end].key == found[end - 1].key:
            end += 1  # the messages of a key stay together
        return found[:end]


class _Keys(NamedTuple):
    key: str
    is_beginning: bool
    after: str


def _environments(connection: sa.Connection, shard: Shard, topics: Sequence[int]) -> list[tuple[int, str]]:
    """Topics with each of their environments: by jumps through the index, whatever the number of messages."""
    message = shard_tables(shard).message
    found: list[tuple[int, str]] = []
    for topic in topics:
        tag: str | None = ""
        while tag is not None:
            least = sa.select(sa.func.min(message.c.producer_tag))
            tag = connection.execute(
                least.where(message.c.topic_no == topic, message.c.producer_tag > tag)
            ).scalar_one_or_none()
            if tag is not None:
                found.append((topic, tag))
    return found


def _page(
    connection: sa.Connection, shard: Shard, where: tuple[int, str], keys: _Keys, limit: int
) -> Sequence[MessageView]:
    message = shard_tables(shard).message
    topic, tag = where
    columns = [column for column in message.c if column.name != "body"]
    query = sa.select(*columns).where(message.c.topic_no == topic, message.c.producer_tag == tag)
    if not keys.is_beginning:
        rows = connection.execute(query.where(message.c.message_key == keys.key).limit(_MOST_OF_A_KEY)).fetchall()
        return [message_view(shard, row) for row in rows]
    some = query.where(message.c.message_key.between(keys.key, keys.key + _LAST))
    if keys.after:
        some = some.where(message.c.message_key > keys.after)
    rows = connection.execute(some.order_by(message.c.message_key).limit(limit)).fetchall()
    if len(rows) == limit:
        last = rows[-1].message_key
        rest = connection.execute(query.where(message.c.message_key == last).limit(_MOST_OF_A_KEY)).fetchall()
        rows = [*(row for row in rows if row.message_key != last), *rest]
    return [message_view(shard, row) for row in rows]
