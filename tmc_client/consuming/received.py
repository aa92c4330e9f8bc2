"""A copy as it was received, and the receipt that reports its outcome to the transport."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from tmc_client.errors import CodecError
from tmc_common.cloud_events import CONTENT_TYPE, KAFKA_PREFIX, read_record_headers
from tmc_common.headers import ORDER_KEY, SEQUENCE

_TRACE = ("traceparent", "tracestate")  # a posted event has these headers as attributes


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

    @classmethod
    def from_record(
        cls, headers: Iterable[tuple[str, bytes | None]] | None, value: bytes | None, *, subscriber: str = ""
    ) -> Self:
        """Read a Kafka record that a center forwarded or an outbox sent, whichever client received it, for `inbox.once`.

        subscriber: a name for what you do with a record of an outbox, which names none; records of a center name theirs.
        Raises CodecError: it is no such record.
        """
        try:
            attributes, content_type, own = read_record_headers(dict(_texts(headers or ())))
            return cls._from_attributes(attributes, subscriber, value or b"", content_type, own)
        except _MALFORMED as exc:
            raise CodecError(f"This is no record of a center or an outbox: {_wrong(exc)}.") from exc

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Self:
        """Read an event that a center posted to a webhook, whose signature you have verified, for `inbox.once`.

        event: what json.loads makes of it; of a batch, one of the list. Raises CodecError: it is no such event.
        """
        try:
            own = json.loads(event["tmcheaders"]) if "tmcheaders" in event else {}
            own |= {name: event[name] for name in _TRACE if name in event}
            if "data_base64" in event:
                body = base64.b64decode(event["data_base64"], validate=True)
            else:
                body = json.dumps(event["data"], ensure_ascii=False, separators=(",", ":")).encode()
            return cls._from_attributes(event, "", body, event.get("datacontenttype", ""), own)
        except _MALFORMED as exc:
            raise CodecError(f"This is no event of a center: {_wrong(exc)}.") from exc

    @classmethod
    def _from_attributes(
        cls, event: Mapping[str, Any], subscriber: str, body: bytes, content_type: str, headers: Mapping[str, str]
    ) -> Self:
        """Raises LookupError, ValueError."""
        subscriber = event.get("tmcsubscriber", subscriber)
        if not subscriber:
            raise ValueError("it names no subscriber, give one: from_record(..., subscriber='coupons')")
        return cls(
            id=event["id"],
            topic=event["type"],
            key=event["subject"],
            body=body,
            content_type=content_type,
            headers=headers,
            attempt=int(event.get("tmcattempt", 1)),
            producer=event["source"].rpartition("/")[2],
            subscriber=subscriber,
        )

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


_MALFORMED = (LookupError, ValueError, TypeError, AttributeError)


def _texts(headers: Iterable[tuple[str, bytes | None]]) -> Iterator[tuple[str, str]]:
    """Decode headers. Others add binary ones of their own; those of the event are texts. Raises UnicodeDecodeError."""
    for name, value in headers:
        is_the_events = name.startswith(KAFKA_PREFIX) or name == CONTENT_TYPE
        yield name, (value or b"").decode(errors="strict" if is_the_events else "replace")


def _wrong(exc: Exception) -> str:
    return f"it has no {exc}" if isinstance(exc, KeyError) else str(exc)


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
