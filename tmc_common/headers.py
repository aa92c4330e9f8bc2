"""Names of AMQP headers: translation between the user's names and those on the wire.

RabbitMQ gives some names a meaning of its own: `CC` and `BCC` route copies elsewhere (and close the channel when
their value is not an array), names that begin with `x-` belong to the broker and its plugins. User headers with such
names are sent with PREFIX and renamed on arrival. Names that begin with `tmc-` are the center's; users cannot set
them, except FORWARD_KEY.
Source: RabbitMQ, "Sender-selected Distribution".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "tmc-user-"
ORDER_KEY = "tmc-order-key"
"""The order key of a message; set by the center, kept with the message's own headers and signed with them."""
SEQUENCE = "tmc-sequence"
"""Added to a copy of a message with an order key: its place among the messages of that key, in decimal."""
REPLAY_OF = "tmc-replay-of"
"""In a message that an operator sent again: the id of the original."""
REPLAY_TO = "tmc-replay-to"
"""In a message that an operator sent again to one subscriber: the number of the subscription."""
REPLAY_KEYS = "replay."
"""Keys of replays begin with it; producers cannot use such keys."""
FORWARD_KEY = "tmc-forward-key"
"""By which a message brings its own routing key or partition key; the one name that users may set."""
CONTEXT_HEADERS = frozenset(
    {
        "traceparent",
        "tracestate",
        "baggage",
        "b3",
        "x-b3-traceid",
        "x-b3-spanid",
        "x-b3-parentspanid",
        "x-b3-sampled",
        "x-b3-flags",
        "uber-trace-id",
        "x-amzn-trace-id",
        "x-cloud-trace-context",
    }
)
"""Headers that say where a message was sent from, and are no part of its content."""
CONTEXT_PREFIX = "uberctx-"
HEADERS, HEADERS_BYTES = 64, 8_192
"""What a message may carry: entries, and bytes of their names and values."""
HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ROUTING = ("cc", "bcc")


def to_wire(headers: Mapping[str, str]) -> dict[str, str]:
    """Rename the headers that the broker would interpret."""
    return {PREFIX + name if _is_the_brokers(name) else name: value for name, value in headers.items()}


def from_wire(headers: Mapping[str, object]) -> dict[str, str]:
    """The user's headers of a copy: names given back, without what the broker and the center added."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name.startswith(PREFIX):
            found[name.removeprefix(PREFIX)] = str(value)
        elif not _is_the_brokers(name):
            found[name] = str(value)
    return found


def context_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that carry the context of a trace."""
    return {name: text for name, text in headers.items() if is_context(name)}


def is_context(name: str) -> bool:
    """Return whether a header of this name carries the context of a trace, and no content."""
    lowered = name.lower()
    return lowered in CONTEXT_HEADERS or lowered.startswith(CONTEXT_PREFIX)


def fitting(headers: Mapping[str, str], context: Mapping[str, str]) -> dict[str, str]:
    """Return what the headers lack of a context, as much of it as a message may carry: baggage may be as large as all headers."""
    found: dict[str, str] = {}
    room = HEADERS_BYTES - sum(len(name) + len(text.encode()) for name, text in headers.items())
    for name, text in context.items():
        size = len(name) + len(text.encode())
        is_allowed = HEADER_NAME.fullmatch(name) and not CONTROL.search(text)
        if is_allowed and name not in headers and size <= room and len(headers) + len(found) < HEADERS:
            found[name] = text
            room -= size
    return found


def _is_the_brokers(name: str) -> bool:
    lowered = name.lower()
    return lowered in _ROUTING or lowered.startswith("x-")
