"""Records of the domain to messages of the protos and back, by the names of their fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar, get_type_hints

from google.protobuf.message import Message

from tmc_server.errors import InvalidField

Sent = TypeVar("Sent", bound=Message)
Record = TypeVar("Record")


def filled(kind: Callable[..., Sent], record: object, **others: Any) -> Sent:
    """Return the message of a record, which has each of its fields. others: those that it has not, or that differ."""
    names = [each.name for each in _fields(kind) if each.name not in others]
    return kind(**{name: getattr(record, name) for name in names}, **others)


def record_from(kind: Callable[..., Record], sent: Any, within: str = "", **others: Any) -> Record:
    """Return the record that a message gives. What it leaves unset keeps its default.

    within: the path of the message, for errors.  others: fields that are not the message's.
    Raises InvalidField: an enum has no such value.
    """
    values = {}
    for name, enum in _enums(kind).items():
        known = sent.DESCRIPTOR.fields_by_name.get(name)
        if name in others or known is None or (known.has_presence and not sent.HasField(name)):
            continue
        value = getattr(sent, name)
        if known.is_repeated:
            value = dict(value) if known.message_type is not None else tuple(value)
        elif enum is not None:
            if not value:
                continue
            value = named(enum, value, f"{within}{name}")
        values[name] = value
    return kind(**values, **others)


def named(enum: type[IntEnum], number: int, field: str) -> Any:
    """Raises InvalidField: the enum has no such value."""
    if number not in tuple(enum):
        *names, last = (each.name for each in enum)
        raise InvalidField(field, f"be {', '.join(names)} or {last}")
    return enum(number)


@cache
def _fields(kind: Any) -> Any:
    return tuple(kind.DESCRIPTOR.fields)


@cache
def _enums(kind: Any) -> dict[str, type[IntEnum] | None]:
    """The enum of each field of a record; None: it has none."""
    types = get_type_hints(kind)
    return {
        each.name: types[each.name]
        if isinstance(types[each.name], type) and issubclass(types[each.name], IntEnum)
        else None
        for each in fields(kind)
        if each.init
    }
