"""Settings that operators give, declared once as fields of a record: the default, the bounds, whether it may change."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import ClassVar, Protocol, TypeVar

Setting = TypeVar("Setting", int, str)


class Declared(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a number, or of the count of characters of a text."""

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
