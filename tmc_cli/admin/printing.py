"""Listings as tables, for people. Programs read JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tmc_cli import say
from tmc_cli.admin.text import age, table, when
from tmc_common.enums import name_of
from tmc_common.printable import escaped

_TIMES_FROM_MS = 1_000_000_000_000  # what is greater is a moment, and not a duration
_LONGEST_CELL = 60


def listing(answer: Message) -> Sequence[str] | None:
    """The lines of a table. None: this is no listing."""
    fields: Sequence[Any] = answer.DESCRIPTOR.fields
    lists = [field for field in fields if field.message_type is not None]
    if len(lists) != 1 or not lists[0].is_repeated:
        return None
    above = [
        f"{field.name.replace('_', ' ')}: {_cell(field, getattr(answer, field.name))}"
        for field in fields
        if field is not lists[0] and field.name != "next_page_token" and getattr(answer, field.name)
    ]
    rows = list(getattr(answer, lists[0].name))
    columns = [field for field in lists[0].message_type.fields if _is_shown(field) and _is_used(field, rows)]
    if not rows or not columns:
        return [*above, "Nothing."]
    titles = [field.name.removesuffix("_ms").replace("_", " ").upper() for field in columns]
    cells = [[_cell(field, getattr(row, field.name)) for field in columns] for row in rows]
    token = getattr(answer, "next_page_token", "")
    return [*above, *table(titles, cells), *([f"There is more: --page-token {token}"] if token else [])]


def _is_shown(field: Any) -> bool:
    """Return whether it fits into a cell."""
    return field.message_type is None and field.type != FieldDescriptor.TYPE_BYTES


def _is_used(field: Any, rows: Sequence[Any]) -> bool:
    return any(getattr(row, field.name) for row in rows)


def _cell(field: Any, value: Any) -> str:
    if field.is_repeated:
        is_numbers = field.cpp_type == FieldDescriptor.CPPTYPE_INT32
        return _cut(_ranges(value) if is_numbers else " ".join(map(str, value)))
    if field.enum_type is not None:
        return name_of(field.enum_type, value).lower()
    if isinstance(value, bool):
        return "yes" if value else ""
    if field.name.endswith("_ms"):
        return _moment(int(value))
    return _cut(str(value))


def _moment(ms: int) -> str:
    if not ms:
        return ""
    if ms < _TIMES_FROM_MS:
        return age(ms)
    past = round(time.time() * 1000) - ms
    return f"{age(past)} ago" if past >= 0 else f"{when(ms)}"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3 7"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."


Columns = Mapping[str, str | Callable[[Any], str]]  # title: a field, or a function of a row


def enum(name: str) -> Callable[[Any], str]:
    return lambda row: name_of(row.DESCRIPTOR.fields_by_name[name].enum_type, getattr(row, name))


def moment(name: str) -> Callable[[Any], str]:
    return lambda row: when(getattr(row, name))


def since(row: Any) -> str:
    """The age of a message."""
    return age(int(time.time() * 1000) - row.created_ms)


def subscriber(row: Any) -> str:
    """app (tag); "": it is of none."""
    return f"{row.app} ({row.tag})" if row.app else ""


def printed(rows: str, columns: Columns) -> Callable[[Any], None]:
    """Print a listing with these columns. rows: the field that has them."""
    return lambda answer: print_table(columns, getattr(answer, rows), getattr(answer, "next_page_token", ""))


def print_table(columns: Columns, rows: Sequence[Any], next_page_token: str = "") -> None:
    """One line per row, and how to see the next page."""
    if not rows:
        say("None.")
        return
    cells = [
        [escaped(str(getattr(row, each)) if isinstance(each, str) else each(row)) for each in columns.values()]
        for row in rows
    ]
    for line in table(list(columns), cells):
        typer.echo(line)
    if next_page_token:
        say(f"There are more: repeat the command with --page-token {next_page_token}")
