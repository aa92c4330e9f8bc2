"""A message in the outbox, and what became of an attempt to send it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, Protocol

from tmc_common.protocol import message_pb2


class State(IntEnum):
    """Numbers are stored; never reuse one."""

    UNSENT = 1
    SENT = 2
    FAILED = 3  #: given up: refused too often, or too old


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row. attempt_id: the same in every attempt, so that the center stores a repeated message once.

    line: of its order key, while it is not sent; "": it has no order key.  tries: how often the target refused it.
    damage: why the row cannot be read, e.g. headers that the database cut off; "": it can.
    """

    id: int
    topic: str
    key: str
    order_key: str
    line: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    delay_ms: int
    attempt_id: bytes
    created_ms: int
    tries: int = 0
    damage: str = ""

    @classmethod
    def of(cls, row: Any) -> Entry:
        headers, damage = _headers(row.headers)
        return cls(
            id=row.id,
            topic=row.topic,
            key=row.message_key,
            order_key=row.order_key,
            line=row.line or "",
            body=row.body,
            content_type=row.content_type,
            headers=headers,
            delay_ms=row.delay_ms,
            attempt_id=row.attempt_id,
            created_ms=row.created_ms,
            tries=row.tries,
            damage=damage,
        )

    @classmethod
    def of_columns(cls, number: int, columns: Mapping[str, Any]) -> Entry:
        """Return what was just written. columns: see store.columns_of."""
        return cls.of(SimpleNamespace(id=number, **columns))

    def request(self) -> message_pb2.PublishRequest:
        """Return it as the center takes it."""
        return message_pb2.PublishRequest(
            topic=self.topic,
            key=self.key,
            order_key=self.order_key,
            body=self.body,
            content_type=self.content_type,
            headers=self.headers,
            delay_ms=self.delay_ms,
            attempt_id=self.attempt_id,
        )


def _headers(stored: str) -> tuple[dict[str, str], str]:
    """Return the headers, with why they cannot be read; "": they can."""
    try:
        found = json.loads(stored)
    except ValueError as exc:
        return {}, f"its headers in the outbox are damaged: {exc}"
    if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
        return found, ""
    return {}, "its headers in the outbox are no texts by name"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A row that a session wrote. Its id may be of another message by now: one that was rolled back gives it back."""

    id: int
    attempt_id: bytes


def line_of(topic: str, order_key: str) -> str:
    """32 hexadecimal digits, or "" without an order key: databases may compare text without regard to case and accents."""
    if not order_key:
        return ""
    return hashlib.blake2b(f"{topic}\0{order_key}".encode(), digest_size=16).hexdigest()


class Trouble(Enum):
    """Why a message was not sent."""

    REFUSED = "refused"  #: the target does not take this message: counted, and given up at the limit
    LATER = "later"  #: the target takes it later: tried again, others are not affected
    AWAY = "away"  #: the target takes nothing at the moment


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a target says of a message that it did not take. error: one sentence."""

    trouble: Trouble
    error: str


class Target(Protocol):
    """Where an outbox sends to. Thread-safe: direct sends and a relay use it at the same time.

    delays: whether it delivers a message with a delay after that.
    """

    @property
    def delays(self) -> bool: ...

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Send all of them. Returns when each is taken for good (None) or not, in the order of the entries."""

    def close(self) -> None: ...
