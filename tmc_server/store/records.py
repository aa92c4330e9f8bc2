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
    """The record that a row has. prefix: of its columns.  others: fields that go by no column.

    A field that the row has no column for keeps its default. Raises ValueError: a number has no name.
    """
    columns = row._mapping
    values = {
        name: convert(columns[prefix + name])
        for name, convert, has_default in _fields(kind)
        if name not in others and not (has_default and prefix + name not in columns)
    }
    return kind(**values, **others)


def columns_of(record: Any, prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The values of a row, by column; numbers for enums and booleans."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in leave_out}
    return {prefix + name: int(value) if isinstance(value, bool | IntEnum) else value for name, value in values.items()}


def columns_for(kind: type, prefix: str = "") -> list[sa.Column[Any]]:
    """The columns of the numbers that operators set, and of the enums and booleans beside them."""
    small = {name for name, convert, _ in _fields(kind) if convert is not _unchanged}
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
def _fields(kind: Any) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Name, how its value is read, and whether there is a default."""
    types = get_type_hints(kind)
    return tuple(
        (
            each.name,
            types[each.name]
            if isinstance(types[each.name], type)
            and issubclass(types[each.name], int | IntEnum)
            and types[each.name] is not int
            else _unchanged,
            each.default is not MISSING or each.default_factory is not MISSING,
        )
        for each in fields(kind)
        if each.init
    )


def _unchanged(value: Any) -> Any:
    return value
