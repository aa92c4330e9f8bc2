"""Names of AMQP headers: what a user calls a header, and what it is called on the wire.

RabbitMQ gives some names a meaning of its own: `CC` and `BCC` route copies elsewhere (and close the channel when their
value is not an array), names that begin with `x-` belong to the broker and its plugins. Such a header of a user travels
under PREFIX and gets its own name back on arrival. Names that begin with `tmc-` are the center's; users cannot set them.
Source: RabbitMQ, "Sender-selected Distribution".
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "tmc-user-"
_ROUTING = ("cc", "bcc")


def to_wire(headers: Mapping[str, str]) -> dict[str, str]:
    """Rename what the broker would take for its own."""
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


def _is_the_brokers(name: str) -> bool:
    lowered = name.lower()
    return lowered in _ROUTING or lowered.startswith("x-")
