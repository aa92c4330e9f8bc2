"""The outcome of an operation in a batch: its answer, or why to run it again."""

from __future__ import annotations

from enum import Enum

from tmc_server.domain.operations import Answer


class Wait(Enum):
    """Not an answer yet: the group commit keeps the operation and runs it again."""

    LOCKED = "another transaction holds the row: run it again shortly"
    BURIED = "it wrote a tombstone: run it again once that is committed"
    MOVED = "its shard is in another database now: run it there"


Outcome = Answer | Wait
