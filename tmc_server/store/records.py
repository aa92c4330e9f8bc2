"""Rows to records of the domain and back, by the names of their fields."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar, get_type_hints

import sqlalchemy as sa

from tmc_server.domain.declared import bounds

Record = TypeVar("Record")


def record_of(kind: Callable[..., Record], row: Any, prefix: str = "", **others: Any) -> Record:
    """Return the record of a row. prefix: of its columns.  others: fields that have no column of their name.

    Raises ValueError: an enum has no such number.
    """
    columns = row._mapping
    values = {name: convert(columns[prefix + name]) for name, convert in _fields(kind) if name not in others}
    return kind(**values, **others)


def columns_of(record: Any, prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a row, by column; numbers for enums and booleans."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in leave_out}
    return {prefix + name: int(value) if isinstance(value, bool | IntEnum) else value for name, value in values.items()}


def columns_for(kind: type, prefix: str = "") -> list[sa.Column[Any]]:
    """Return columns for the numbers that operators set, and for the enums and booleans beside them."""
    small = {name for name, convert in _fields(kind) if convert is not _unchanged}
    return [
        sa.Column(
            prefix + each.name,
            sa.SmallInteger if each.name in small else sa.BigInteger,
            nullable=False,
            server_default=str(int(each.default)),
        )
        for each in fields(kind)
        if each.default is not MISSING
        and (each.name in small or (each.name in bounds(kind) and isinstance(each.default, int)))
    ]


@cache
def _fields(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return the names, and how each value is read."""
    types = get_type_hints(kind)
    return tuple((each.name, _reader(types[each.name])) for each in fields(kind))


def _reader(kind: Any) -> Callable[[Any], Any]:
    is_enum_or_bool = isinstance(kind, type) and issubclass(kind, bool | IntEnum)
    return kind if is_enum_or_bool else _unchanged


def _unchanged(value: Any) -> Any:
    return value
