"""Which of the 32 shards keeps a message. Fixed when the topic is created: 32 and crc32 are a promise to stored data."""

from __future__ import annotations

from enum import IntEnum
from zlib import crc32

from tmc_server.domain.numbers import Shard

SHARDS = 32


class MoveStep(IntEnum):
    """How far a shard is on its way to another database."""

    UNDOING = 1  # it stays where it is
    COPYING = 2
    FOLLOWING = 3  # what changes where it is, is changed there too
    FROZEN = 4  # nobody can use it
    MOVED = 5  # it is used there; where it was, its messages are kept


def shard_of(table_index: int, spread: int, key: str) -> Shard:
    """table_index: the topic's first shard, 0..31.  spread: over how many shards its keys go, 1..32."""
    return Shard((table_index + crc32(key.encode()) % spread) % SHARDS)


def shards_of(table_index: int, spread: int) -> list[Shard]:
    """Return all shards that may hold messages of a topic."""
    return sorted(Shard((table_index + i) % SHARDS) for i in range(spread))


def is_among(shard: Shard, table_index: int, spread: int) -> bool:
    """Return whether it is one of these."""
    return (shard - table_index) % SHARDS < spread


def table_index_for(name: str) -> int:
    """The shard of a topic whose creator did not choose one."""
    return crc32(name.encode()) % SHARDS
