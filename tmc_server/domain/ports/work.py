"""Durable execution of operations."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from tmc_server.domain.operations import Answer, Operation


class Performer(Protocol):
    """Durable execution of operations: the group commit."""

    def perform(self, operations: Sequence[Operation]) -> Awaitable[list[Answer]]:
        """Run operations of one app. Returns: one answer per operation, in order. Raises QueueFull, ShuttingDown.

        Cancelling the awaiting task leaves the operations running; call from the event loop's thread only.
        """
