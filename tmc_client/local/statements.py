"""Our statements as text for a DB-API driver. One source for all libraries: the tables and queries are SQLAlchemy's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

_PAGE, _PAGE_BYTES = 500, 1 << 20
_VARIABLES = 999  # of a statement, where SQLite is older than 3.32


class Text:
    """For one dialect. paramstyle: "qmark" or "format", the two forms with positions."""

    def __init__(self, dialect: sa.Dialect) -> None:
        self.dialect = dialect

    def of(self, statement: Any, parameters: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Text and parameters. Statements that are constants of a module are compiled once."""
        compiled = _compiled(statement, self.dialect)
        values = compiled.construct_params(dict(parameters))
        return str(compiled), [values[name] for name in compiled.positiontup or ()]

    def insert(
        self, table: sa.Table, rows: Sequence[Mapping[str, Any]], *, marks_binary: bool = False, schema: str = ""
    ) -> tuple[str, list[Any]]:
        """One INSERT of these rows: text and parameters. marks_binary: the driver says itself which values are binary."""
        columns = tuple(rows[0])
        begin, row = _insert(table, columns, self.dialect, marks_binary, schema)
        return begin + ", ".join([row] * len(rows)), [each[column] for each in rows for column in columns]

    def pages(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield pages that are small enough for one statement: in parameters, and in bytes."""
        most = _PAGE
        if rows and self.dialect.name == "sqlite":
            most = min(most, _VARIABLES // len(rows[0]))
        page: list[Mapping[str, Any]] = []
        size = 0
        for row in rows:
            length = sum(len(value) for value in row.values() if isinstance(value, bytes | str))
            if page and (len(page) == most or size + length > _PAGE_BYTES):
                yield page
                page, size = [], 0
            page.append(row)
            size += length
        if page:
            yield page


class Found:
    """What a cursor found, as tuples, whatever the program's connection makes of rows."""

    def __init__(self, cursor: Any) -> None:
        self.rowcount: int = cursor.rowcount
        self.lastrowid: int = getattr(cursor, "lastrowid", 0)
        found = cursor.fetchall() if cursor.description else []
        self._rows: list[Any] = [tuple(row.values()) if isinstance(row, Mapping) else tuple(row) for row in found]
        cursor.close()

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> Sequence[Any]:
        return self._rows


@lru_cache(maxsize=256)
def _compiled(statement: Any, dialect: sa.Dialect) -> Any:
    return statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})


@lru_cache
def _insert(
    table: sa.Table, columns: tuple[str, ...], dialect: sa.Dialect, marks_binary: bool, schema: str
) -> tuple[str, str]:
    mark = "?" if dialect.paramstyle == "qmark" else "%s"
    unmarked = dialect.name == "mysql" and not marks_binary  # the server would check them as text
    marks = [f"_binary {mark}" if unmarked and _is_binary(table, column) else mark for column in columns]
    name = table.name
    if schema:
        name = f"{dialect.identifier_preparer.quote_identifier(schema)}.{name}"
    return f"INSERT INTO {name} ({', '.join(columns)}) VALUES ", f"({', '.join(marks)})"


def _is_binary(table: sa.Table, column: str) -> bool:
    return isinstance(table.c[column].type, sa.LargeBinary)
