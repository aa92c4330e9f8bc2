"""Ensure that a session stays in one database transaction, from the start of a block or handler to its commit.

The guarantees depend on it: a message is sent if and only if the rows written with it commit, and an effect is stored
if and only if its inbox row is. A transaction can end early in several ways, each detected differently:

    session.rollback(), .close(), savepoints    by the session's events
    connection.commit(), .rollback()            by the engine's events
    a deadlock, DDL, COMMIT sent as text        by a savepoint, which does not outlive its transaction, and by drivers
                                                that know at no cost whether a transaction is open

The savepoint costs two statements: SAVEPOINT when the transaction begins, RELEASE SAVEPOINT before it is committed. If
the first statement is ours and the driver takes several at once, SAVEPOINT is sent with it. It is not used with SQLite and
psycopg, whose drivers know everything. On PostgreSQL an error that was swallowed is detected too: a commit would then roll
back without a word. asyncpg would commit what comes after a COMMIT or ROLLBACK sent as text statement by statement, so the
next statement is refused.
Events are registered only once, on the Session class and on each engine: SQLAlchemy takes half a millisecond for it,
and no thread may do it while another runs the same event.

What the session writes through a second connection is not in this transaction: see local/elsewhere.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.elements import RollbackToSavepointClause, SavepointClause

from tmc_client import errors
from tmc_client.local import Recorder
from tmc_client.local.driver_level import go_to_the_second, leaves_statements
from tmc_client.local.elsewhere import connection_of, refuse_elsewhere, writer_of

_KEY = "tmc_one_transaction"
_PSYCOPG = ("psycopg", "psycopg_async", "psycopg2")
_IDLE, _IN_ERROR = 0, 3  # libpq's PQTRANS_IDLE, PQTRANS_INERROR
_BY_CONNECTION: WeakKeyDictionary[sa.Connection, OneTransaction] = WeakKeyDictionary()
_ENGINES: WeakSet[sa.Engine] = WeakSet()  # with our listeners
_AnySavepoint = SessionTransaction | tuple[sa.Connection, str]


class _Witness(Protocol):
    """Detects whether one connection has left its transaction. first: a statement that it needs before the next one; "": none."""

    first: str

    def look(self) -> bool:
        """Return whether it may still be the same transaction.

        Called before and after each statement; must not send one itself.
        """

    def holds(self) -> bool:
        """Return whether it is still the same transaction. Called once, before the commit."""


class _Savepoint:
    """A private savepoint: the database drops it when the transaction ends, for whatever reason."""

    def __init__(self, connection: sa.Connection, name: str) -> None:
        self._connection, self._name = connection, name
        self._asks = connection.dialect.driver == "asyncpg"
        self._begun = False  # asyncpg's adapter begins with the first statement
        self.first = f"SAVEPOINT {name}"

    def look(self) -> bool:
        if not self._asks:
            return True
        is_open = in_transaction(self._connection)
        self._begun = self._begun or is_open is True
        return is_open is not False or not self._begun

    def holds(self) -> bool:
        try:
            self._release()
        except sa.exc.DBAPIError as exc:
            if exc.connection_invalidated:
                raise
            return False
        return True

    def _release(self) -> None:
        self._connection.exec_driver_sql(f"RELEASE SAVEPOINT {self._name}")


class _SavepointOfDialect(_Savepoint):
    """Oracle and SQL Server have statements of their own for it, and none that releases it."""

    def __init__(self, connection: sa.Connection, name: str) -> None:
        super().__init__(connection, name)
        self.first = ""
        connection.dialect.do_savepoint(connection, name)

    def _release(self) -> None:
        self._connection.dialect.do_release_savepoint(self._connection, self._name)


def _has_savepoint_statements(dialect: sa.Dialect) -> bool:
    """Return whether savepoints are those of the SQL standard."""
    kind: Any = type(dialect)
    return all(
        getattr(kind, name) is getattr(DefaultDialect, name) for name in ("do_savepoint", "do_release_savepoint")
    )


class _Nothing:
    """For a connection that is refused, or that is first used after verification."""

    first = ""

    def look(self) -> bool:
        return True

    def holds(self) -> bool:
        return True


class _DriverSays:
    """SQLite and psycopg: the driver knows at no cost whether a transaction is open, and is asked after every statement."""

    first = ""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._open = in_transaction(connection)
        self._held = True

    def look(self) -> bool:
        is_open = in_transaction(self._connection)
        if self._open and not is_open:
            self._held = False
        self._open = is_open
        return self._held

    def holds(self) -> bool:
        return self.look() and not _has_failed(self._connection)


def _has_failed(connection: sa.Connection) -> bool:
    """PostgreSQL: after an error, COMMIT would roll back without a word."""
    if connection.dialect.driver not in _PSYCOPG or connection.invalidated:
        return False
    driver: Any = connection.connection.driver_connection
    return int(driver.info.transaction_status) == _IN_ERROR


def in_transaction(connection: sa.Connection) -> bool | None:
    """Return whether a transaction is open, no matter who sent BEGIN.

    None: its driver does not know, or the connection is lost.
    """
    if connection.invalidated or connection.closed:
        return None
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        return bool(driver.in_transaction)
    if connection.dialect.driver == "asyncpg":
        return bool(driver.is_in_transaction())
    if connection.dialect.driver in _PSYCOPG:
        return int(driver.info.transaction_status) != _IDLE
    return None


def watched(session: Session) -> bool:
    """Return whether a block or a handler is open on it."""
    return _KEY in session.info


def commits_by_itself(connection: sa.Connection) -> bool:
    """Return whether the driver commits every statement, whatever SQLAlchemy assumes. Asks the driver, not the database."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        # Programs that send BEGIN from an event, as SQLAlchemy recommends, have disabled the driver's transactions.
        own = driver.isolation_level is not None and getattr(driver, "autocommit", None) is not True
        return not own and not in_transaction(connection)
    try:
        return bool(connection.dialect.detect_autocommit_setting(driver))
    except (AttributeError, NotImplementedError):
        return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


class OneTransaction:
    """Watches one session. place: its name in error messages.  recorder: drops what rolled-back savepoints recorded.

    lends_commit: a transaction block may be opened inside; it then commits for both.
    Raises InvalidRequest: the session does not know where it writes our rows.
    """

    def __init__(
        self, session: Session, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False
    ) -> None:
        self._session = session
        self._place = place
        self._recorder = recorder
        self._lends_commit = lends_commit
        self._outer: OneTransaction | None = None
        self._writer = writer_of(session)
        self._witnesses: dict[sa.Connection, _Witness] = {}
        self._positions: dict[_AnySavepoint, int] = {}  # of the recorder, when each savepoint began
        self._lost = ""
        self._refused = ""
        self._verified = False
        self._finishing = False
        self._ours_is_next = False
        self._unsent = ""
        self.committed = False

    def begin(self) -> None:
        """Start watching the session. Raises InvalidRequest."""
        outer: OneTransaction | None = self._session.info.get(_KEY)
        if outer is not None:
            if not outer._lends_commit:
                raise errors.InvalidRequest(
                    f"A {self._place} inside a {outer._place}: the outer one owns the commit. Send inside the outer one."
                )
            outer.check()
        self._outer = outer
        self._session.info[_KEY] = self
        try:
            if self._session.in_transaction():
                self.take_part(connection_of(self._session))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop watching the session."""
        if self._outer is not None:
            self._session.info[_KEY] = self._outer
        else:
            self._session.info.pop(_KEY, None)
        for connection in self._witnesses:
            if self._outer is not None:
                _BY_CONNECTION[connection] = self._outer
            else:
                _BY_CONNECTION.pop(connection, None)

    def check(self) -> None:
        """Raise InvalidRequest when SQLAlchemy knows that the transaction has ended."""
        if not self._session.is_active or any(connection.invalidated for connection in self._witnesses):
            self.ended()
        if self._lost or self._refused:
            raise errors.InvalidRequest(self._lost or self._refused)
        refuse_elsewhere(self._session, f"a {self._place}")

    def verify(self) -> None:
        """Verify that the next commit belongs to the transaction that was begun. Raises InvalidRequest."""
        self.check()
        while (nested := self._session.get_nested_transaction()) is not None:
            nested.commit()
        if not all(witness.holds() for witness in self._witnesses.values()):
            self._ended_early()
            raise errors.InvalidRequest(self._lost)
        self._verified = True
        if self._outer is not None:
            self._outer.verify()

    def commit(self) -> None:
        """Commit for this block and for the handler around it, if any."""
        self._finishing = True
        self._session.commit()
        if self._outer is not None:
            self._outer.committed = True

    def roll_back(self) -> None:
        self._finishing = True
        try:
            self._session.rollback()
        except sa.exc.InvalidRequestError:
            transaction = self._session.get_transaction()
            if transaction is None:
                raise
            transaction.close()  # a listener to after_commit raised, and SQLAlchemy left it committed, but not closed
            self._session.expire_all()
        if self._outer is not None:
            self._outer.ended()

    def take_part(self, connection: sa.Connection) -> None:
        """Watch a connection that the session has begun to use. Raises InvalidRequest."""
        if connection in self._witnesses or self._finishing or connection.engine is not self._writer.engine:
            return
        _watch_engine(connection.engine)
        _BY_CONNECTION[connection] = self
        self._witnesses[connection] = _Nothing()
        if self.committed:
            self._refused = f"The transaction block in this {self._place} has committed for both: it must come last."
        elif commits_by_itself(connection):
            self._refused = (
                f"This connection is in AUTOCOMMIT and would commit every statement of the {self._place} by itself: use "
                "an engine without it."
            )
        self.permit()
        if not self._verified:
            self._witnesses[connection] = self._witness(connection)
            self._unsent = self._witnesses[connection].first
            if self._unsent and not self._ours_is_next:
                self._unsent = ""
                connection.exec_driver_sql(self._witnesses[connection].first)

    def _witness(self, connection: sa.Connection) -> _Witness:
        if connection.dialect.name == "sqlite" or connection.dialect.driver in _PSYCOPG:
            return _DriverSays(connection)
        kind = _Savepoint if _has_savepoint_statements(connection.dialect) else _SavepointOfDialect
        return kind(connection, f"tmc_{self._place.replace(' ', '_')}")

    def connection(self) -> tuple[sa.Connection, str]:
        """The session's connection, for a statement of ours. With it: what has to be sent before that statement, or ""."""
        self._unsent, self._ours_is_next = "", True
        try:
            return connection_of(self._session), self._unsent
        finally:
            self._ours_is_next = False

    def permit(self) -> None:
        """Permit a statement. Raises InvalidRequest again if the program swallowed the first one."""
        if self._refused:
            raise errors.InvalidRequest(self._refused)

    def look(self, connection: sa.Connection) -> None:
        """Look at the connection, before and after a statement."""
        if not self._witnesses[connection].look() and not self._finishing:
            self._ended_early()
            self._refused = self._lost

    def _ended_early(self) -> None:
        self._lost = (
            f"The database ended the transaction of this {self._place} early: by an error that was swallowed, such as a "
            "deadlock, or by DDL, COMMIT or ROLLBACK sent as a statement. The rest was rolled back and nothing was sent; "
            "let the database's errors leave it."
        )

    def refuse_commit(self) -> None:
        """Raise InvalidRequest unless the commit is ours."""
        if not self._finishing:
            raise errors.InvalidRequest(
                f"A commit inside a {self._place}: it commits by itself at its end, everything or nothing. Remove this commit."
            )

    def ended(self) -> None:
        """Record that the transaction has ended."""
        if not (self._finishing or self._lost or self.committed):
            self._lost = (
                f"The transaction of this {self._place} was rolled back inside it, so nothing of it was committed or sent. "
                "Put session.begin_nested() around what may fail, or let the error out."
            )

    def savepoint_began(self, savepoint: _AnySavepoint) -> None:
        if self._recorder is not None:
            self._positions[savepoint] = self._recorder.position()

    def savepoint_rolled_back(self, savepoint: _AnySavepoint) -> None:
        position = self._positions.pop(savepoint, None)
        if self._recorder is not None and position is not None:
            self._recorder.forget_since(position)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    watch: OneTransaction | None = session.info.get(_KEY)
    if watch is not None and not session.in_nested_transaction():
        watch.refuse_commit()


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, _transaction: SessionTransaction, connection: sa.Connection) -> None:
    watch: OneTransaction | None = session.info.get(_KEY)
    if watch is not None:
        watch.take_part(connection)


@event.listens_for(Session, "after_transaction_create")
def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    watch: OneTransaction | None = session.info.get(_KEY)
    if watch is not None and transaction.nested:
        watch.savepoint_began(transaction)


@event.listens_for(Session, "after_soft_rollback")
def _after_soft_rollback(session: Session, previous: SessionTransaction) -> None:
    watch: OneTransaction | None = session.info.get(_KEY)
    if watch is not None and previous.nested:
        watch.savepoint_rolled_back(previous)


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    watch: OneTransaction | None = session.info.get(_KEY)
    if watch is not None and transaction.parent is None:
        watch.ended()


def _watch_engine(engine: sa.Engine) -> None:
    """Register the listeners once per engine; if two threads race, the second changes nothing."""
    if engine in _ENGINES:
        return
    listeners: dict[str, Callable[..., Any]] = {
        "commit": _commit,
        "rollback": _rollback,
        "before_execute": _before_execute,
        "before_cursor_execute": _before_cursor_execute,
        "after_cursor_execute": _after_cursor_execute,
    }
    for name, listener in listeners.items():
        if not event.contains(engine, name, listener):
            event.listen(engine, name, listener, retval=listener is _before_execute)  # unwrapped: it is found again
    _ENGINES.add(engine)


def _commit(connection: sa.Connection) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.refuse_commit()


def _rollback(connection: sa.Connection) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.ended()


@leaves_statements
def _before_execute(
    connection: sa.Connection, clause: Any, multiparams: Any, params: Any, execution_options: Any
) -> tuple[Any, Any, Any]:
    watch = _BY_CONNECTION.get(connection)
    if watch is not None and isinstance(clause, SavepointClause):
        if connection.dialect.name == "sqlite" and not in_transaction(connection):
            connection.exec_driver_sql("BEGIN")  # or releasing this savepoint, the outermost, would commit
        watch.savepoint_began((connection, clause.ident))
    elif watch is not None and isinstance(clause, RollbackToSavepointClause):
        watch.savepoint_rolled_back((connection, clause.ident))
    return clause, multiparams, params


def _before_cursor_execute(connection: sa.Connection, *_: object) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.look(connection)
        watch.permit()


def _after_cursor_execute(
    connection: sa.Connection, cursor: Any, _statement: str, _parameters: Any, context: Any, _many: bool
) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        go_to_the_second(cursor, context)
        watch.look(connection)
