"""What requests and duties need from the outside, on one page."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.operations import Operation


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a message for one subscription, ready to be handed over. shard, number, subscription name its row."""

    shard: int
    number: int
    subscription: int
    attempt: int
    topic: int
    producer: int
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class Outlet(Protocol):
    """Where copies leave the center. Called from lane and duty threads; must not block and must not raise."""

    def reserve(self, subscription: int, wanted: int) -> int:
        """How many copies (0..wanted) may be handed over now. Each must be followed by `deliver` or `release`."""

    def release(self, subscription: int, count: int) -> None:
        """Give reserved room back: the transaction did not commit."""

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Hand over reserved copies after their rows were committed. What cannot be delivered comes back as GiveBack."""


class Performer(Protocol):
    """Durable execution of operations: the group commit."""

    def perform(self, operations: Sequence[tuple[int, Operation]]) -> Awaitable[None]:
        """Run (shard, operation) pairs; done when every operation has its answer. Raises QueueFull, ShuttingDown.

        Cancelling the awaiting task leaves the operations running; call from the event loop's thread only.
        """


class CatalogSource(Protocol):
    """The server's copy of the catalog."""

    @property
    def current(self) -> Catalog:
        """The newest copy that was read."""

    def fresh(self) -> Catalog:
        """The copy, if it is young enough to submit with. Raises CatalogStale."""
