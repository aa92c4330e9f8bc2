"""What operators may set, declared once, with the record it is a field of: default, bounds, and its column's name."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import ClassVar, Protocol, TypeVar

Setting = TypeVar("Setting", int, str)


class Declared(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a number, or of the characters of a text."""

    low: int
    high: int


def setting(default: Setting, low: int, high: int, *, may_change: bool = False) -> Setting:
    """A field of a dataclass. may_change: also after it is registered."""
    return field(default=default, metadata={"bounds": Bounds(low, high), "may_change": may_change})


def bounds(record: Declared | type[Declared]) -> dict[str, Bounds]:
    """Return the bounds by field, in their order. record: a dataclass or an instance of one."""
    return {each.name: each.metadata["bounds"] for each in fields(record) if "bounds" in each.metadata}


def changeable(record: Declared | type[Declared]) -> dict[str, Bounds]:
    """The bounds of what may change, by field."""
    return {each.name: each.metadata["bounds"] for each in fields(record) if each.metadata.get("may_change")}
