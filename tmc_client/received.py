"""A copy as it arrived, and what its transport wants to hear about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a handler may want to know beside the body.

    attempt: 1 for the first copy.  subscriber: APP.TAG.  interval_ms: the subscription's shortest distance between two
    tries when this copy was made; 0: the center did not say.
    """

    id: str
    topic: str
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    attempt: int
    producer: str
    subscriber: str
    interval_ms: int = 0


class Receipt(Protocol):
    """Of one copy. Called from any thread."""

    def handled(self) -> None:
        """The handler is through, or was never begun: there is room for another copy."""

    def answered(self) -> None:
        """What became of it is stored, or will come again from the center: the transport may forget it."""


OnMessage = Callable[[Message, Receipt], None]
"""Called in a transport's thread for every copy; must not block."""


class Transport(Protocol):
    """Brings copies until it is stopped. malformed: number of those dropped since the center did not make them."""

    malformed: int

    def start(self) -> None: ...
    def stop(self) -> None:
        """Take nothing more. Answers to copies that are here are still passed on until `close`."""

    def close(self) -> None:
        """Everything here is answered, or will come again."""
