"""Holds a session to one database transaction, from the beginning of a block or a handler to its commit.

What they promise hangs on it: a message goes out if and only if the rows beside it commit, an effect happens if and only
if its note does. A transaction can end early in several ways, and each has somebody who notices:

    session.rollback(), .close(), savepoints    the session's events
    connection.commit(), .rollback()            the engine's events
    a deadlock, DDL, COMMIT sent as text        a savepoint, which lives no longer than its transaction; with SQLite
                                                the driver, which says for nothing whether a transaction is open

The savepoint costs two statements: SAVEPOINT when the transaction begins, RELEASE SAVEPOINT before it is committed.
Events are registered once, on the class of all sessions and on each engine: SQLAlchemy makes that slow (half a
millisecond) and no thread may do it while another runs the same event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.elements import RollbackToSavepointClause, SavepointClause

from tmc_client import errors

_KEY = "tmc_one_transaction"
_BY_CONNECTION: WeakKeyDictionary[sa.Connection, OneTransaction] = WeakKeyDictionary()


class Recorder(Protocol):
    """What was recorded beside the transaction, and goes away with its savepoints."""

    def position(self) -> int: ...

    def forget_since(self, position: int) -> None: ...


class _Witness(Protocol):
    """Of one transaction of one connection."""

    def look(self) -> None:
        """Before and after each statement; must not send any."""

    def holds(self) -> bool:
        """Is it still the same transaction? Asked once, before the commit."""


class _Savepoint:
    """A savepoint that nobody else knows: the database forgets it when the transaction ends, however that came."""

    def __init__(self, connection: sa.Connection, name: str) -> None:
        self._connection, self._name = connection, name
        connection.dialect.do_savepoint(connection, name)

    def look(self) -> None: ...

    def holds(self) -> bool:
        try:
            self._connection.dialect.do_release_savepoint(self._connection, self._name)
        except sa.exc.DBAPIError as exc:
            if exc.connection_invalidated:
                raise
            return False
        return True


class _Nothing:
    """Of a connection that may not be used, or comes when everything was verified."""

    def look(self) -> None: ...

    def holds(self) -> bool:
        return True


class _DriverSays:
    """SQLite: a savepoint outside a transaction would begin one, but the driver always knows whether one is open."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._open = in_transaction(connection)
        self._held = True

    def look(self) -> None:
        is_open = in_transaction(self._connection)
        if self._open and not is_open:
            self._held = False
        self._open = is_open

    def holds(self) -> bool:
        self.look()
        return self._held


def in_transaction(connection: sa.Connection) -> bool:
    """SQLite: has BEGIN been sent, by the driver or by anybody else?"""
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


def commits_by_itself(connection: sa.Connection) -> bool:
    """Does the driver commit every statement, whatever SQLAlchemy believes? Asks the driver, not the database."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        # Who sends BEGIN from an event, as SQLAlchemy recommends, has switched the driver's own transactions off.
        own = driver.isolation_level is not None and getattr(driver, "autocommit", None) is not True
        return not own and not in_transaction(connection)
    try:
        return bool(connection.dialect.detect_autocommit_setting(driver))
    except (AttributeError, NotImplementedError):
        return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


class OneTransaction:
    """Watches one session. place: what this is, for sentences.  recorder: what goes away with savepoints.

    lends_commit: a transaction block may be opened inside; it then commits for both.
    """

    def __init__(
        self, session: Session, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False
    ) -> None:
        self._session = session
        self._place = place
        self._recorder = recorder
        self._lends_commit = lends_commit
        self._outer: OneTransaction | None = None
        self._witnesses: dict[sa.Connection, _Witness] = {}
        self._by_session: WeakKeyDictionary[SessionTransaction, int] = WeakKeyDictionary()
        self._by_savepoint: dict[tuple[sa.Connection, str], int] = {}
        self._lost = ""
        self._refused = ""
        self._verified = False
        self._finishing = False
        self.committed = False

    def begin(self) -> None:
        """Watch from here on. Raises InvalidRequest."""
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
                self.take_part(self._session.connection())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """The session is free again."""
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

    def verify(self) -> None:
        """Make sure that the commit that comes next is of the transaction that was begun. Raises InvalidRequest."""
        self.check()
        while (nested := self._session.get_nested_transaction()) is not None:
            nested.commit()
        if not all(witness.holds() for witness in self._witnesses.values()):
            self._lost = (
                f"The database ended the transaction of this {self._place} early: by a deadlock that was swallowed, or "
                "by DDL, COMMIT or ROLLBACK sent as a statement. The rest was rolled back and nothing was sent; let the "
                "database's errors leave it."
            )
            raise errors.InvalidRequest(self._lost)
        self._verified = True
        if self._outer is not None:
            self._outer.verify()

    def commit(self) -> None:
        """Commit for us, and for the handler that we may be in."""
        self._finishing = True
        self._session.commit()
        if self._outer is not None:
            self._outer.committed = True

    def roll_back(self) -> None:
        self._finishing = True
        self._session.rollback()
        if self._outer is not None:
            self._outer.ended()

    def take_part(self, connection: sa.Connection) -> None:
        """The session uses this connection from now on. Raises InvalidRequest."""
        if connection in self._witnesses or self._finishing:
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
            sqlite = connection.dialect.name == "sqlite"
            name = f"tmc_{self._place.replace(' ', '_')}"
            self._witnesses[connection] = _DriverSays(connection) if sqlite else _Savepoint(connection, name)

    def permit(self) -> None:
        """Before a statement. Raises InvalidRequest: an error that said why was swallowed."""
        if self._refused:
            raise errors.InvalidRequest(self._refused)

    def look(self, connection: sa.Connection) -> None:
        """Before and after a statement."""
        self._witnesses[connection].look()

    def refuse_commit(self) -> None:
        """Raise InvalidRequest unless the commit is ours."""
        if not self._finishing:
            raise errors.InvalidRequest(
                f"A commit inside a {self._place}: it commits by itself at its end, everything or nothing. Remove this commit."
            )

    def ended(self) -> None:
        """The transaction is over."""
        if not (self._finishing or self._lost or self.committed):
            self._lost = (
                f"The transaction of this {self._place} was rolled back inside it, so nothing of it was committed or sent. "
                "Put session.begin_nested() around what may fail, or let the error out."
            )

    def savepoint_began(self, savepoint: SessionTransaction | tuple[sa.Connection, str]) -> None:
        if self._recorder is None:
            return
        if isinstance(savepoint, SessionTransaction):
            self._by_session[savepoint] = self._recorder.position()
        else:
            self._by_savepoint[savepoint] = self._recorder.position()

    def savepoint_rolled_back(self, savepoint: SessionTransaction | tuple[sa.Connection, str]) -> None:
        if self._recorder is None:
            return
        if isinstance(savepoint, SessionTransaction):
            position = self._by_session.get(savepoint)
        else:
            position = self._by_savepoint.get(savepoint)
        if position is not None:
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
    """Once for each engine; of two threads that come at once the second changes nothing."""
    listeners: dict[str, Callable[..., None]] = {
        "commit": _commit,
        "rollback": _rollback,
        "before_execute": _before_execute,
        "before_cursor_execute": _before_cursor_execute,
        "after_cursor_execute": _after_cursor_execute,
    }
    for name, listener in listeners.items():
        if not event.contains(engine, name, listener):
            event.listen(engine, name, listener)


def _commit(connection: sa.Connection) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.refuse_commit()


def _rollback(connection: sa.Connection) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.ended()


def _before_execute(connection: sa.Connection, clause: Any, *_: object) -> None:
    watch = _BY_CONNECTION.get(connection)
    if watch is None:
        return
    if isinstance(clause, SavepointClause):
        if connection.dialect.name == "sqlite" and not in_transaction(connection):
            connection.exec_driver_sql("BEGIN")  # or releasing this savepoint, the outermost, would commit
        watch.savepoint_began((connection, clause.ident))
    elif isinstance(clause, RollbackToSavepointClause):
        watch.savepoint_rolled_back((connection, clause.ident))


def _before_cursor_execute(connection: sa.Connection, *_: object) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.permit()
        watch.look(connection)


def _after_cursor_execute(connection: sa.Connection, *_: object) -> None:
    if (watch := _BY_CONNECTION.get(connection)) is not None:
        watch.look(connection)
