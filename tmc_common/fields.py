"""Rules for the fields of a message. The center applies them to what arrives, the SDK to what it is about to send or to store.

Each function returns the value, or raises FieldInvalid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tmc_common.headers import CONTROL, FORWARD_KEY, HEADER_NAME, HEADERS, HEADERS_BYTES, REPLAY_KEYS, REPLAY_OF

MAX_DELAY_MS = 365 * 86_400_000
BODY_BYTES = 262_144
"""The maximum size of a body, unless a center is configured otherwise."""
ROUTING_KEY_BYTES = 255  # AMQP takes no more

_TOPIC = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


class FieldInvalid(ValueError):
    """field: its name.  rule: what it must be or do, to follow "must"."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field} must {rule}.")
        self.field, self.rule = field, rule


def topic(value: str, field: str = "topic") -> str:
    if not _TOPIC.fullmatch(value):
        raise FieldInvalid(field, "be 1 to 128 characters of A-Z a-z 0-9 _ . -")
    return value


def key(value: str, field: str = "key") -> str:
    if not 1 <= len(value) <= 128 or value != value.strip() or CONTROL.search(value):
        raise FieldInvalid(field, "be 1 to 128 characters without control characters and outer spaces")
    return value


def producers_key(value: str) -> str:
    """A key that is not reserved for replays."""
    if value.startswith(REPLAY_KEYS):
        raise FieldInvalid("key", f"not begin with {REPLAY_KEYS}: such keys are for replays by operators")
    return key(value)


def line(value: str, field: str, most: int, least: int = 0) -> str:
    """One line of free text."""
    if not least <= len(value) <= most or CONTROL.search(value):
        raise FieldInvalid(field, f"be {least} to {most} characters without control characters")
    return value


def content_type(value: str) -> str:
    return line(value, "content_type", 100)


def body(value: bytes, most: int = BODY_BYTES) -> bytes:
    if len(value) > most:
        raise FieldInvalid(
            "body", f"be at most {most} bytes, not {len(value)}: store it elsewhere and send its address"
        )
    return value


def headers(value: Mapping[str, str], may_replay: bool = False) -> Mapping[str, str]:
    """may_replay: an operator sends it again, REPLAY_OF may be there."""
    if not value:
        return {}
    allowed = (FORWARD_KEY, REPLAY_OF) if may_replay else (FORWARD_KEY,)
    if len(value) > HEADERS or sum(len(name) + len(text.encode()) for name, text in value.items()) > HEADERS_BYTES:
        raise FieldInvalid("headers", f"be at most {HEADERS} entries and {HEADERS_BYTES} bytes in all")
    for name, text in value.items():
        if name.lower().startswith("tmc-") and name not in allowed:
            only_operators = f"; {REPLAY_OF} is for replays by operators" if name == REPLAY_OF else ""
            raise FieldInvalid(
                "headers", f"have names that do not begin with tmc-, other than {FORWARD_KEY}{only_operators}"
            )
        if not HEADER_NAME.fullmatch(name):
            raise FieldInvalid("headers", "have names of 1 to 64 characters of A-Z a-z 0-9 _ . -")
        if name == FORWARD_KEY and len(text.encode()) > ROUTING_KEY_BYTES:
            raise FieldInvalid("headers", f"have a {FORWARD_KEY} of at most {ROUTING_KEY_BYTES} bytes")
        if CONTROL.search(text):
            raise FieldInvalid("headers", "have values without control characters")
    return dict(value)


def between(value: int, field: str, least: int, most: int) -> int:
    if not least <= value <= most:
        raise FieldInvalid(field, f"be {least} to {most}, not {value}")
    return value


def delay_ms(value: int) -> int:
    return between(value, "delay_ms", 0, MAX_DELAY_MS)
