"""The transaction of a DB-API connection.

The program's own statements go past us, so that a transaction that ended early is found only at the end: by a savepoint,
which does not outlive its transaction. The error says so; what the program committed by itself stays.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.local import Recorder, Rows, causes
from tmc_client.local.drivers import Driver, driver_of, unwrapped
from tmc_client.local.marker import ROLLED_BACK, STATE, insert_marker
from tmc_client.local.statements import Found
from tmc_client.tables import no_column, no_table, outbox

log = logging.getLogger("tmc_client.transaction")

_names = itertools.count(1)


class ConnectionTransaction:
    """See LocalTransaction. The connection stays open at the end.

    For libraries that wrap such connections, subclass it: the methods from `_begin_transaction` to `_returns` say how theirs
    begin and end.
    """

    def __init__(self, connection: Any, driver: Driver | None = None) -> None:
        """Raises InvalidRequest: of no driver that is known."""
        self.handle = connection
        self.engine = None
        self._connection = unwrapped(connection)
        driver = driver or driver_of(self._connection)
        if driver is None:
            raise errors.InvalidRequest(f"{type(connection).__name__} is no connection of a driver that is known.")
        self._driver: Driver = driver
        self._place = ""
        self._recorder: Recorder | None = None
        self._outer: ConnectionTransaction | None = None
        self._lends_commit = False
        self._savepoint = ""
        self._lost = ""
        self.committed = False

    @property
    def dialect(self) -> sa.Dialect:
        return self._driver.dialect

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        self._place, self._recorder, self._lends_commit = place, recorder, lends_commit
        outer = _OPEN.get(id(self._connection))
        if outer is not None and not outer._lends_commit:
            raise errors.InvalidRequest(
                f"A {place} inside a {outer._place}: the outer one owns the commit. Send inside the outer one."
            )
        if outer is None:
            self._begin_transaction()
        else:
            outer.check()
        self._outer = outer
        self._savepoint = f"tmc_{next(_names)}"
        try:
            self._say(f"SAVEPOINT {self._savepoint}")
        except BaseException:
            self.roll_back()
            raise
        _OPEN[id(self._connection)] = self

    def _begin_transaction(self) -> None:
        if self._driver.autocommit(self._connection):
            raise errors.InvalidRequest(
                f"This connection is in AUTOCOMMIT and would commit every statement of the {self._place} by itself: turn "
                f"that off ({self._driver.autocommit_off})."
            )
        if getattr(self._connection, "_num_transactions", 0):
            raise errors.InvalidRequest(
                f"A {self._place} owns the commit: it cannot run inside connection.transaction(). Open it around that."
            )
        if self._driver.name == "sqlite3" and not self._connection.in_transaction:
            # The others begin with the first statement; here releasing a savepoint would commit. IMMEDIATE: a block writes, and
            # a transaction that begins with reading fails if somebody else writes before it does.
            self._say("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.commit()

    def _roll_back(self) -> None:
        self._connection.rollback()

    def _is_open(self) -> bool | None:
        """Return whether a transaction is open. None: the driver does not know."""
        return self._driver.in_transaction(self._connection)

    def is_lost(self, exc: BaseException) -> bool:
        return any(self._driver.is_lost(each, self._connection) for each in causes(exc))

    def _returns(self) -> bool:
        """Return whether INSERT ... RETURNING is known: MySQL does not know it, MariaDB does."""
        return self._driver.dialect.name != "mysql" or "MariaDB" in self._connection.get_server_info()

    def _say(self, text: str) -> None:
        cursor = self._connection.cursor()
        try:
            cursor.execute(text)
        finally:
            cursor.close()

    def check(self) -> None:
        if self._lost:
            raise errors.InvalidRequest(self._lost)
        if self._is_open() is False:
            self._end_early()

    def _end_early(self) -> None:
        self._lost = (
            f"The transaction of this {self._place} was ended inside it: by commit(), rollback() or `with connection:`, by an "
            "error that was swallowed, such as a deadlock, or by DDL. What was committed stays, the rest was rolled back, and "
            f"nothing was sent. Remove it: the {self._place} commits at its end. Use savepoints around what may fail."
        )
        raise errors.InvalidRequest(self._lost)

    def verify(self) -> None:
        if self.committed:
            self._refuse_more()
            return
        self.check()
        try:
            self._say(f"RELEASE SAVEPOINT {self._savepoint}")
        except self._driver.module.Error as exc:
            if self.is_lost(exc):
                raise
            self._end_early()
        if self._outer is not None:
            self._outer.verify()

    def _refuse_more(self) -> None:
        """Refuse what came after the block that committed for both, and is not committed.

        MySQL, unlike MariaDB, does not tell.
        """
        is_open = self._is_open()
        if is_open is None and self._driver.dialect.name == "mysql" and self._returns():
            is_open = bool(self.run(sa.text("SELECT @@in_transaction"), {}).fetchone()[0])
        if is_open:
            raise errors.InvalidRequest(
                f"The transaction block in this {self._place} has committed for both: it must come last."
            )

    def commit(self) -> None:
        try:
            self._commit()
        except BaseException:
            self.roll_back()  # SQLite leaves it open: a later block would commit it
            raise
        if self._outer is not None:
            self._outer.committed = True

    def roll_back(self) -> None:
        if self._outer is not None:
            self._outer._lost = f"The transaction block in this {self._outer._place} was rolled back for both."
        try:
            self._roll_back()
        except self._driver.module.Error as exc:  # a lost connection has rolled back
            log.warning("the rollback failed: %s", exc)

    def stop(self) -> None:
        if _OPEN.get(id(self._connection)) is self:
            if self._outer is not None:
                _OPEN[id(self._connection)] = self._outer
            else:
                del _OPEN[id(self._connection)]

    @contextmanager
    def savepoint(self) -> Iterator[object]:
        name, position = f"tmc_{next(_names)}", self._recorder.position() if self._recorder is not None else 0
        self._say(f"SAVEPOINT {name}")
        try:
            yield self.handle
        except BaseException:
            if self._recorder is not None:
                self._recorder.forget_since(position)
            try:
                self._say(f"ROLLBACK TO SAVEPOINT {name}")
            except self._driver.module.Error as exc:  # the transaction ended with the first error: found at the end
                log.warning("the savepoint cannot be rolled back: %s", exc)
            raise
        self._say(f"RELEASE SAVEPOINT {name}")

    def run(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Rows:
        return self._execute(*self._driver.text.of(statement, parameters))

    def insert(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        for text, values in self._driver.inserts(self._raw, table, rows):
            self._execute(text, values)

    @property
    def lasting(self) -> Any:
        return self._raw

    def insert_outbox(self, rows: Sequence[Mapping[str, Any]], schema: str = "") -> Sequence[int]:
        return self._driver.insert_numbered(self._raw, outbox, rows, self._returns(), self._execute, schema)

    @property
    def _raw(self) -> Any:
        """The driver's own connection."""
        return self._connection

    def _execute(self, text: str, values: Sequence[Any]) -> Found:
        cursor: Any = self._connection.cursor()
        cursor.execute(text, values)
        return Found(cursor)

    def is_duplicate(self, exc: BaseException) -> bool:
        return isinstance(exc, self._driver.module.IntegrityError | self._driver.module.OperationalError)

    def explain(self, exc: BaseException, *tables: sa.Table) -> None:
        if isinstance(exc, self._driver.module.ProgrammingError | self._driver.module.OperationalError):
            for table in tables:
                if sentence := self._lacking(table):
                    raise errors.InvalidRequest(sentence) from exc

    def _lacking(self, table: sa.Table) -> str:
        """Name the missing table or column, found with statements that find no row."""
        if self._can_read(table, *table.c):
            return ""
        if not self._can_read(table, sa.literal_column("1")):
            return "" if not self._can_read(None, sa.literal_column("1")) else no_table(table)
        missing = (column for column in table.c if not self._can_read(table, column))
        return no_column(next(missing), self._driver.dialect)

    def _can_read(self, table: sa.Table | None, *columns: sa.ColumnElement[Any]) -> bool:
        query = sa.select(*columns)
        try:
            self.read(query.where(sa.false()) if table is None else query.select_from(table).where(sa.false()), {})
        except self._driver.module.Error:
            return False
        return True

    def fence(self, row: Mapping[str, Any]) -> int | None:
        try:
            with self._alone():
                return ROLLED_BACK if insert_marker(self.run, self._driver.dialect.name, row) else None
        except self._driver.module.IntegrityError:
            found = self.read(STATE, {"of": row["message_id"]})
            return int(found[0][0]) if found else None
        except Exception:
            log.warning("whether the commit took effect is not known yet", exc_info=True)
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A transaction of its own, after `roll_back`. Raises what the driver raises: it was rolled back."""
        try:
            yield
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise

    def read(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Sequence[Any]:
        try:
            return self.run(statement, parameters).fetchall()
        finally:
            self.roll_back()


_OPEN: dict[int, ConnectionTransaction] = {}
