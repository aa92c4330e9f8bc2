"""Durable execution of operations."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import Operation


class Performer(Protocol):
    """Durable execution of operations: the group commit."""

    def perform(self, operations: Sequence[tuple[Shard, Operation]]) -> Awaitable[object]:
        """Run (shard, operation) pairs; done when every operation has its answer. Raises QueueFull, ShuttingDown.

        Cancelling the awaiting task leaves the operations running; call from the event loop's thread only.
        """
