"""What statements are made of: guards, hints, inserts of many rows, and lists of ids."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import sqlalchemy as sa

from tmc_server.store.dialects import dialect_of
from tmc_server.store.dialects.contract import Insertion
from tmc_server.store.tables import FAMILY

_Literal = Callable[[int | bytes], str]


def by_ids(column: sa.Column[Any], name: str = "ids") -> sa.ColumnElement[bool]:
    return column.in_(sa.bindparam(name, expanding=True))


def by_pairs(owner: sa.Column[Any], column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """Return the condition of ByPairs."""
    return sa.tuple_(owner, column).in_(sa.bindparam("ids", expanding=True))


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


class Literals(ABC):
    """A statement with a gap for literals, because an expanding parameter costs more than the query.

    Compiled once per dialect; all other parameters stay bound.
    """

    _GAP: re.Pattern[str]

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._prepared: dict[str, tuple[list[str], list[str], Mapping[str, Any]]] = {}

    @cached_property
    def _row(self) -> Callable[[Iterable[Any]], Any]:
        return _maker(tuple(self._statement.selected_columns.keys()))

    def rows(self, connection: sa.Connection, **values: Any) -> list[Any]:
        """Return the rows of a SELECT as named tuples: SQLAlchemy's look up their columns eight times as slowly."""
        return list(map(self._row, self.run(connection, **values).fetchall()))

    def run(self, connection: sa.Connection, ids: Any, **values: Any) -> sa.CursorResult[Any]:
        """Run it. ids: not empty."""
        dialect = connection.dialect
        if dialect.name not in self._prepared:
            compiled = self._statement.compile(dialect=dialect)
            order = [name for name in compiled.positiontup if name != "ids"]
            self._prepared[dialect.name] = (self._GAP.split(str(compiled)), order, compiled.params)
        (head, *columns, tail), order, fixed = self._prepared[dialect.name]
        parameters = tuple(values[name] if name in values else fixed[name] for name in order)
        filled = self._filled(columns, ids, dialect_of(dialect.name).literal)
        return connection.exec_driver_sql(f"{head}({filled}){tail}", parameters)

    @abstractmethod
    def _filled(self, columns: Sequence[str], ids: Any, literal: _Literal) -> str:
        """Return what is between the parentheses. columns: those that the gap names."""


class ByIds(Literals):
    """A statement about the rows with these `ids`, a sequence of int or bytes; see `by_ids`."""

    _GAP = re.compile(r"\(__\[POSTCOMPILE_ids[^\]]*\]\)")

    def _filled(self, columns: Sequence[str], ids: Sequence[int | bytes], literal: _Literal) -> str:
        return ",".join(map(literal, ids))


class ByPairs(Literals):
    """A statement about rows of several owners, all in one; `ids`: a mapping of int to a sequence of int, see `by_pairs`.

    The condition names the columns of a key one by one: not every database reads `(a, b) IN ((1, 2), ...)` by ranges of a key.
    """

    _GAP = re.compile(r"\((\S+), (\S+)\) IN \(__\[POSTCOMPILE_ids[^\]]*\]\)")

    def _filled(self, columns: Sequence[str], ids: Mapping[int, Sequence[int]], literal: _Literal) -> str:
        owner, column = columns
        return " OR ".join(
            f"({owner} = {literal(each)} AND {column} IN ({','.join(map(literal, ids[each]))}))" for each in sorted(ids)
        )
