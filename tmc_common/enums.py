"""Open enums: a newer center may send numbers that this program has no name for."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor


def name_of(enum: EnumDescriptor, number: int, prefix: str = "") -> str:
    """The name of a value without the prefix; the number of one that is not known here."""
    known = enum.values_by_number.get(number)
    return str(number) if known is None else str(known.name).removeprefix(prefix)
