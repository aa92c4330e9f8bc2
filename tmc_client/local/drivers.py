"""The DB-API drivers that a block can work with, and what differs between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import registry

from tmc_client import errors
from tmc_client.local.statements import Text

_DIALECTS = {
    "sqlite3": "sqlite",
    "MySQLdb": "mysql.mysqldb",
    "pymysql": "mysql.pymysql",
    "psycopg": "postgresql.psycopg",
}
_PSYCOPG_IDLE = 0  # libpq's PQTRANS_IDLE
_MULTI_STATEMENTS = 1 << 16  # MySQL's CLIENT_MULTI_STATEMENTS


def _takes_one(_connection: Any) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Driver:
    """name: of its module.  in_transaction: None: the driver does not know.  autocommit_off: how to turn it off.

    takes_several: whether one call may contain several statements; `nextset` then goes to the result of the next one.
    """

    name: str
    module: Any
    text: Text
    in_transaction: Callable[[Any], bool | None]
    autocommit: Callable[[Any], bool]
    takes_several: Callable[[Any], bool] = _takes_one

    @property
    def autocommit_off(self) -> str:
        calls = {"sqlite3": 'isolation_level="DEFERRED"', "psycopg": "connection.autocommit = False"}
        return calls.get(self.name, "connection.autocommit(False)")

    @property
    def dialect(self) -> sa.Dialect:
        return self.text.dialect

    def engine(self, connect: Callable[[], Any], **options: Any) -> sa.Engine:
        """An engine over connections of this driver."""
        return sa.create_engine(f"{self.dialect.name}+{self.dialect.driver}://", creator=connect, **options)

    def insert(
        self, connection: Any, table: sa.Table, rows: Sequence[Mapping[str, Any]], schema: str = ""
    ) -> tuple[str, list[Any]]:
        """One INSERT of these rows: text and parameters. connection: of this driver."""
        marks_binary = bool(getattr(connection, "_binary_prefix", False))
        return self.text.insert(table, rows, marks_binary=marks_binary, schema=schema)

    def inserts(
        self, connection: Any, table: sa.Table, rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, list[Any]]]:
        """INSERTs that together write all rows. Each: text and parameters."""
        for page in self.text.pages(rows):
            yield self.insert(connection, table, page)

    def insert_numbered(
        self,
        connection: Any,
        table: sa.Table,
        rows: Sequence[Mapping[str, Any]],
        returning: bool,
        run: Callable[[str, Sequence[Any]], Any],
        schema: str = "",
    ) -> list[int]:
        """Insert rows whose ids the database chooses. Returns: the ids, in the order of the rows.

        returning: whether the database knows INSERT ... RETURNING.  run: executes text and values.
        """
        found: list[int] = []
        for page in self.text.pages(rows):
            if not returning or (len(page) == 1 and self.dialect.name == "mysql"):
                found += [run(*self.insert(connection, table, [row], schema)).lastrowid for row in page]
            else:
                text, values = self.insert(connection, table, page, schema)
                found += sorted(number for (number,) in run(f"{text} RETURNING id", values).fetchall())
        return found

    def is_lost(self, exc: BaseException, connection: Any) -> bool:
        """Return whether the connection is gone."""
        return isinstance(exc, self.module.Error) and self.dialect.is_disconnect(exc, connection, None)


def driver_of(connection: Any) -> Driver | None:
    """Return its driver; None if it is no connection of one that is known. Raises InvalidRequest for one of asyncio.

    Asked by `__class__`, which a proxy has of what it stands for, e.g. one of OpenTelemetry.
    """
    return _driver_of(connection.__class__)


@lru_cache
def _driver_of(kind: Any) -> Driver | None:
    for parent in kind.__mro__:
        root = parent.__module__.partition(".")[0].removeprefix("_")
        if root in _DIALECTS and hasattr(kind, "cursor"):
            if "Async" in kind.__name__:
                raise errors.InvalidRequest(
                    f"{kind.__name__} is an asyncio connection: blocks over connections of a driver are blocking ones. In "
                    "asyncio programs use tmc_client.aio with an AsyncSession."
                )
            return _driver(root)
    return None


def unwrapped(connection: Any) -> Any:
    """The driver's connection behind one of an SQLAlchemy pool."""
    return getattr(connection, "dbapi_connection", None) or connection


@lru_cache
def _driver(name: str) -> Driver:
    module = importlib.import_module(name)
    kind: Any = registry.load(_DIALECTS[name])
    dialect: sa.Dialect = kind(dbapi=module, paramstyle="qmark" if name == "sqlite3" else "format")
    in_transaction, autocommit = _SAYS[name]
    return Driver(
        name=name,
        module=module,
        text=Text(dialect),
        in_transaction=in_transaction,
        autocommit=autocommit,
        takes_several=_mysqlclient_takes_several if name == "MySQLdb" else _takes_one,
    )


def plain(connection: Any) -> Any:
    """A new connection as our engines need it: it begins transactions by itself, and its rows are tuples."""
    driver = driver_of(connection)
    if driver is None:
        return connection
    if driver.name == "sqlite3":
        connection.isolation_level, connection.row_factory = "DEFERRED", None
    elif driver.name == "psycopg":
        connection.autocommit, connection.row_factory = False, driver.module.rows.tuple_row
    else:
        connection.autocommit(False)
        connection.cursorclass = driver.module.cursors.Cursor
    return connection


def _sqlite_in_transaction(connection: Any) -> bool | None:
    always = getattr(connection, "autocommit", None) is False  # Python 3.12: one is open at all times
    return None if always else bool(connection.in_transaction)


def _sqlite_autocommit(connection: Any) -> bool:
    return connection.isolation_level is None or getattr(connection, "autocommit", None) is True


def _psycopg_in_transaction(connection: Any) -> bool:
    return int(connection.info.transaction_status) != _PSYCOPG_IDLE


def _mysqlclient_takes_several(connection: Any) -> bool:
    return bool(connection.client_flag & _MULTI_STATEMENTS)


_SAYS: dict[str, tuple[Callable[[Any], bool | None], Callable[[Any], bool]]] = {
    "sqlite3": (_sqlite_in_transaction, _sqlite_autocommit),
    "psycopg": (_psycopg_in_transaction, lambda connection: bool(connection.autocommit)),
    "pymysql": (lambda _connection: None, lambda connection: bool(connection.get_autocommit())),
    "MySQLdb": (lambda _connection: None, lambda connection: bool(connection.get_autocommit())),
}
