"""Messages by key, through the index of keys. Nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.views import MessageView
from tmc_server.store.engines import ShardMap
from tmc_server.store.rows import message_view
from tmc_server.store.tables import shard_tables

_LAST = "\U0010ffff"  # no character comes behind it


class SqlKeySearch:
    """domain.ports.reading.KeySearch. The index begins with topic and environment: both are named in every query."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def messages(
        self,
        topics: Mapping[Shard, Sequence[int]],
        key: str,
        is_beginning: bool,
        after: tuple[str, MessageNumber] | None,
        limit: int,
    ) -> list[MessageView]:
        found: list[MessageView] = []
        for shard, numbers in topics.items():
            message = shard_tables(shard).message
            tags = sa.select(message.c.producer_tag).where(message.c.topic_no.in_(numbers)).distinct()
            columns = [column for column in message.c if column.name != "body"]
            wanted = message.c.message_key.between(key, key + _LAST) if is_beginning else message.c.message_key == key
            query = sa.select(*columns).where(message.c.topic_no.in_(numbers), wanted)
            if after is not None:
                same = sa.and_(message.c.message_key == after[0], message.c.id < after[1])
                query = query.where(sa.or_(message.c.message_key > after[0], same))
            query = query.order_by(message.c.message_key, message.c.id.desc()).limit(limit)
            with self._shards.shards[shard].reading() as connection:
                known = list(connection.execute(tags).scalars())
                rows = connection.execute(query.where(message.c.producer_tag.in_(known))) if known else ()
                found += [message_view(shard, row) for row in rows]
        return sorted(found, key=lambda view: (view.key, -view.number))[:limit]
