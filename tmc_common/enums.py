"""Open enums: a newer center may send numbers that this program has no name for."""

from __future__ import annotations

import re

from google.protobuf.descriptor import EnumDescriptor


def prefix_of(enum: EnumDescriptor) -> str:
    """MessageState: MESSAGE_STATE_."""
    return re.sub("(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"


def name_of(enum: EnumDescriptor, number: int) -> str:
    """The name of a value without the prefix of its enum; the number of one that is not known here."""
    known = enum.values_by_number.get(number)
    return str(number) if known is None else str(known.name).removeprefix(prefix_of(enum))
