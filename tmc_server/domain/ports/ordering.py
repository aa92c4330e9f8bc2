"""Lines of order keys that need repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.numbers import OrderHash, Shard, SubscriptionNumber

FIRST_LINE = OrderHash(-1)
"""Less than every line's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What one page of lines needed. after: where the next page begins; None: this was the last one.

    examined: lines in it.  scheduled: deliveries that waited for a head that was closed.  released, cancelled:
    deliveries that waited although order keys have no effect any more, or their subscription was removed.
    dropped: entries of deliveries that were not waiting.  forgotten: lines that have long been without messages.
    """

    after: OrderHash | None
    examined: int = 0
    scheduled: int = 0
    released: int = 0
    cancelled: int = 0
    dropped: int = 0
    forgotten: int = 0

    def __add__(self, other: Repaired) -> Repaired:
        """The sum; after: where the other page ended."""
        return Repaired(
            after=other.after,
            examined=self.examined + other.examined,
            scheduled=self.scheduled + other.scheduled,
            released=self.released + other.released,
            cancelled=self.cancelled + other.cancelled,
            dropped=self.dropped + other.dropped,
            forgotten=self.forgotten + other.forgotten,
        )

    @property
    def changed(self) -> int:
        """Deliveries that no longer wait."""
        return self.scheduled + self.released + self.cancelled + self.dropped


class LineWork(Protocol):
    """The lines of the shards of one database, for the ordering duty and for operators. All block. Raise StoreUnavailable."""

    def held_shards(self) -> Sequence[Shard]:
        """Return those that this server looks after."""

    def repair(
        self, shard: Shard, subscription: SubscriptionNumber, after: OrderHash, limit: int, wait: bool = False
    ) -> Repaired:
        """Examine up to `limit` lines after that one, and repair them. wait: for lines that are locked; else they are skipped.

        Nothing is decided with a stale catalog.
        """

    def note(self, shard: Shard, actor: str, subject: str, reason: str) -> None:
        """Record in the audit trail that an operator had lines repaired."""
