"""What statements are made of: guards, hints, inserts of many rows, and lists of ids."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import sqlalchemy as sa

from tmc_server.store.dialects import dialect_of
from tmc_server.store.dialects.contract import Insertion
from tmc_server.store.tables import FAMILY


def by_ids(column: sa.Column[Any], name: str = "ids") -> sa.ColumnElement[bool]:
    return column.in_(sa.bindparam(name, expanding=True))


_IDS = re.compile(r"\(__\[POSTCOMPILE_ids[^\]]*\]\)")


def by_primary(statement: Any, table: sa.Table) -> Any:
    """Lock by primary key only: a plan over the due index takes locks in another order and deadlocks against acks."""
    for name in FAMILY:
        hint = dialect_of(name).through_index("PRIMARY")
        if isinstance(statement, sa.Select):
            statement = statement.with_hint(table, hint, name)
        else:
            statement = statement.with_hint(hint, dialect_name=name)
    return statement


def through_index(query: sa.Select[Any], table: sa.Table, index: str) -> sa.Select[Any]:
    """Read a table through this index, whatever the statistics say. The dialects of SQLite find it by themselves."""
    for name in FAMILY:
        query = query.with_hint(table, dialect_of(name).through_index(index), name)
    return query


def number_of(inserted: sa.CursorResult[Any]) -> int:
    """Return the number that the database gave to the row of an INSERT."""
    key = inserted.inserted_primary_key
    assert key is not None
    return int(key[0])


def has_state(column: sa.Column[Any], states: tuple[int, ...]) -> sa.ColumnElement[bool]:
    return sa.or_(*(column == int(state) for state in states))


class InsertRows:
    """INSERT of many rows as one statement, whatever their number.

    The drivers' own executemany sends a statement per 64 KiB or per row. Values: int, str, bytes, None.
    """

    def __init__(self, table: sa.Table, without: Sequence[str] = (), replaces: bool = False) -> None:
        """without: columns that begin with their default.  replaces: a row that is there already takes the new values."""
        names = [column.name for column in table.columns if column.autoincrement is not True]
        self._into = Insertion(
            table=table.name,
            columns=[name for name in names if name not in without],
            keys=[column.name for column in table.primary_key],
            replaces=replaces,
        )

    @property
    def columns(self) -> Sequence[str]:
        return self._into.columns

    def run(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """rows: one dictionary each, with every column. Raises IntegrityError: no row of this call is in."""
        dialect_of(connection.dialect.name).insert(connection, self._into, rows)

    def run_free(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        """Insert what clashes with nothing, see Dialect.insert_free. Returns: the first column of what is in."""
        return dialect_of(connection.dialect.name).insert_free(connection, self._into, rows)


@cache
def _maker(columns: tuple[str, ...]) -> Callable[[Iterable[Any]], Any]:
    """Return what makes rows with these columns; all shards share it."""
    kind: Any = namedtuple  # whose fields are known later than type checkers expect
    make: Callable[[Iterable[Any]], Any] = kind("_Row", columns)._make
    return make


class ByIds:
    """A statement whose `ids` are rendered as literals, because an expanding parameter costs more than the query.

    Compiled once per dialect; all other parameters stay bound.
    """

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._prepared: dict[str, tuple[str, str, list[str], Mapping[str, Any]]] = {}

    @cached_property
    def _row(self) -> Callable[[Iterable[Any]], Any]:
        return _maker(tuple(self._statement.selected_columns.keys()))

    def rows(self, connection: sa.Connection, ids: Sequence[int | bytes], **values: Any) -> list[Any]:
        """Return the rows of a SELECT as named tuples: SQLAlchemy's look up their columns eight times as slowly."""
        return list(map(self._row, self.run(connection, ids, **values).fetchall()))

    def run(self, connection: sa.Connection, ids: Sequence[int | bytes], **values: Any) -> sa.CursorResult[Any]:
        """ids: not empty."""
        dialect = connection.dialect
        if dialect.name not in self._prepared:
            compiled = self._statement.compile(dialect=dialect)
            head, tail = _IDS.split(str(compiled))
            order = [name for name in compiled.positiontup if name != "ids"]
            self._prepared[dialect.name] = (head, tail, order, compiled.params)
        head, tail, order, fixed = self._prepared[dialect.name]
        numbers = ",".join(map(dialect_of(dialect.name).literal, ids))
        parameters = tuple(values[name] if name in values else fixed[name] for name in order)
        return connection.exec_driver_sql(f"{head}({numbers}){tail}", parameters)
