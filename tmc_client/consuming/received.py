"""A copy as it was received, and the receipt that reports its outcome to the transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_common.headers import ORDER_KEY, SEQUENCE


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message as its handler sees it.

    attempt: 1 for the first copy.  subscriber: APP.TAG.  interval_ms: the subscription's shortest delay between two
    attempts when this copy was made; 0: the center did not send it.  redelivered: a consumer had the message before and did
    not answer, perhaps because it died over it.
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
    redelivered: bool = False

    @property
    def order_key(self) -> str:
        """Messages with the same order key are delivered one after another; "": it has none."""
        return self.headers.get(ORDER_KEY, "")

    @property
    def sequence(self) -> int | None:
        """Return its place among the messages of its order key: each has a higher number than those before it.

        None: it has no order key, or is delivered out of order, after others overtook it.
        """
        text = self.headers.get(SEQUENCE, "")
        return int(text) if text.isascii() and text.isdigit() else None


class Receipt(Protocol):
    """Reports the outcome of one copy to its transport. Thread-safe."""

    def handled(self) -> None:
        """The handler has ended, or was never started: there is room for another copy."""

    def answered(self) -> None:
        """The outcome is stored, or the center will redeliver the message: the transport may forget the copy."""

    @property
    def lost(self) -> bool:
        """Return whether the copy's connection is lost: the broker gives it to any consumer."""


OnMessage = Callable[[Message, Receipt], None]
"""Called in a transport's thread for every copy; must not block."""


class Transport(Protocol):
    """Receives copies until it is stopped. malformed: number of copies dropped because they are not the center's."""

    malformed: int

    @property
    def unread(self) -> Sequence[str]:
        """List the queues or topics that it cannot receive from now."""

    def start(self) -> None: ...
    def stop(self) -> None:
        """Stop receiving. Answers to copies already received are passed on until `close`."""

    def close(self) -> None:
        """Close the transport. Every copy has been answered by now, or will be redelivered."""
