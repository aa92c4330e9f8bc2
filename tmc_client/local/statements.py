"""Our statements as text for a DB-API driver. One source for all libraries: the tables and queries are SQLAlchemy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa


class Text:
    """For one dialect. paramstyle: "qmark" or "format", the two forms with positions."""

    def __init__(self, dialect: sa.Dialect) -> None:
        self.dialect = dialect

    def of(self, statement: Any, parameters: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Text and parameters. Statements that are constants of a module are compiled once."""
        compiled = _compiled(statement, self.dialect)
        values = compiled.construct_params(dict(parameters))
        return str(compiled), [values[name] for name in compiled.positiontup or ()]

    def insert(self, table: sa.Table, columns: Sequence[str], count: int) -> str:
        """An INSERT of `count` rows."""
        begin, row = _insert(table, tuple(columns), self.dialect)
        return begin + ", ".join([row] * count)


@lru_cache(maxsize=256)
def _compiled(statement: Any, dialect: sa.Dialect) -> Any:
    return statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})


@lru_cache
def _insert(table: sa.Table, columns: tuple[str, ...], dialect: sa.Dialect) -> tuple[str, str]:
    mark = "?" if dialect.paramstyle == "qmark" else "%s"
    marks = [f"_binary {mark}" if _is_binary(table, column) and dialect.name == "mysql" else mark for column in columns]
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ", f"({', '.join(marks)})"


def _is_binary(table: sa.Table, column: str) -> bool:
    return isinstance(table.c[column].type, sa.LargeBinary)
