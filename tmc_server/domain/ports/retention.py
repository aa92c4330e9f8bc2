"""Retention: closed messages and the archive's lists of what may be removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.manifest import Removal
from tmc_server.domain.numbers import MessageNumber, Shard


@dataclass(frozen=True, slots=True)
class Position:
    """How far the lists of an archive were worked off. run: "": none yet.  number: the last one looked at; 0: none."""

    run: str
    number: MessageNumber


class ClosedWork(Protocol):
    """Closed messages of the shards of one database that this server holds, for the retention duty. All block."""

    def held_shards(self) -> Sequence[Shard]: ...
    def now(self) -> int:
        """Milliseconds by the database's clock."""

    def position(self, shard: Shard) -> Position: ...
    def old(
        self, shard: Shard, after: MessageNumber, before_ms: int, limit: int, rows: int
    ) -> tuple[Sequence[MessageNumber], MessageNumber | None]:
        """Look at messages with numbers above `after`, at most `rows`. Returns: `limit` of those closed before that moment,
        ascending, and the number that the next look begins after; None: there are no more.
        """

    def remove(
        self, shard: Shard, numbers: Sequence[MessageNumber], before_ms: int, then: Position | None = None
    ) -> int:
        """Remove these, as far as they are closed and were before that moment, with all that belongs to them; keep `then`.

        One commit. Returns: how many messages were removed; those not closed stay, which is no error.
        """

    def forget(self, before_ms: int, limit: int) -> int:
        """Remove what is kept for late callers only and is older, at most `limit` of each kind. Returns: how many."""


class RemovalLists(Protocol):
    """What archive runs say may be removed. Blocks; raises ListUnreadable."""

    def removals(self) -> Sequence[Removal]:
        """Return the lists of every published run, in the order of their names."""

    def numbers(self, run: str, shard: Shard) -> Sequence[MessageNumber]:
        """Return the numbers of one run that `removals` gave, and one shard, ascending."""


class ListUnreadable(Exception):
    """A manifest, or a list that it promises, is missing or damaged: nothing of that run is removed. The text says which."""
