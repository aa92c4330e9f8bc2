"""The transaction of an SQLAlchemy session or connection. An AsyncSession gives its blocking side, in the greenlet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tmc_client import errors
from tmc_client.local import Recorder, Rows, causes
from tmc_client.local.driver_level import driver_behind, execute
from tmc_client.local.drivers import Driver
from tmc_client.local.elsewhere import writer_of
from tmc_client.local.engines import engine_beside, in_schemas, schemas_of, shares_connections
from tmc_client.local.marker import ROLLED_BACK, STATE, insert_marker
from tmc_client.local.one_transaction import OneTransaction, watched
from tmc_client.tables import looking, outbox, raise_if_lacking

log = logging.getLogger("tmc_client.transaction")


class SessionTransaction:
    """See LocalTransaction. The session stays open at the end."""

    def __init__(self, session: Session) -> None:
        self.handle: Any = session
        self._session = session
        self._watch: OneTransaction | None = None
        self._schemas: Mapping[str | None, str | None] | None = None

    @property
    def dialect(self) -> sa.Dialect:
        return self._engine.dialect

    @property
    def is_shared(self) -> bool:
        """Return whether all threads of the program work with its one connection."""
        return shares_connections(self._engine)

    @property
    def engine(self) -> sa.Engine | None:
        if isinstance(writer_of(self._session), sa.Connection) or self.is_shared:
            return None  # a second connection would wait for the program's, or commit what it has open
        return self._engine

    @property
    def _engine(self) -> sa.Engine:
        """Return the engine with the schemas of this transaction's connection, for statements in other ones."""
        return in_schemas(writer_of(self._session).engine, self._schemas)

    @property
    def _bind(self) -> sa.Engine | sa.Connection:
        """Return where to look after `roll_back`: a connection that the program holds might be the only one of its pool."""
        writer = writer_of(self._session)
        return writer if isinstance(writer, sa.Connection) else self._engine

    @property
    def _watched(self) -> OneTransaction:
        if self._watch is None:
            raise errors.InvalidRequest("This transaction has not begun.")
        return self._watch

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        self._refuse_foreign()
        watch = OneTransaction(self._session, place, recorder=recorder, lends_commit=lends_commit)
        watch.begin()
        self._watch = watch

    @property
    def is_of_a_test(self) -> bool:
        """Return whether its commit is a savepoint of a transaction that the connection has open, in a test that has said so."""
        from tmc_client.recording import is_asked_for

        if not is_asked_for():
            return False
        bind = writer_of(self._session)
        is_open = isinstance(bind, sa.Connection) and bind.in_transaction()
        return is_open and self._session.join_transaction_mode == "create_savepoint"

    def _refuse_foreign(self) -> None:
        if self.is_of_a_test and not self._session.in_nested_transaction():
            return
        bind = writer_of(self._session)
        foreign = isinstance(bind, sa.Connection) and bind.in_transaction() and not self._session.in_transaction()
        if self._session.in_nested_transaction() or foreign:
            raise errors.InvalidRequest(
                "center.transaction() owns the commit: it cannot run inside a savepoint or a transaction of the "
                "connection that the session is bound to. Open it around those."
            )

    def check(self) -> None:
        self._watched.check()

    def verify(self) -> None:
        self._session.flush()
        if not self.committed:
            self._watched.verify()

    @property
    def committed(self) -> bool:
        return self._watched.committed

    def commit(self) -> None:
        self._watched.commit()

    def roll_back(self) -> None:
        self._watched.roll_back()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    @contextmanager
    def savepoint(self) -> Iterator[object]:
        with self._session.begin_nested():
            yield self.handle

    def run(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Rows:
        connection, driver, first = self._ready()
        if driver is None:
            found: Rows = connection.execute(statement, dict(parameters))
            return found
        return execute(connection, driver, *driver.text.of(statement, parameters), first=first)

    def insert(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        connection, driver, first = self._ready()
        if driver is None:
            connection.execute(table.insert(), list(rows))
            return
        for text, values in driver.inserts(connection.connection.dbapi_connection, table, rows):
            execute(connection, driver, text, values, first=first)
            first = ""

    def _ready(self) -> tuple[sa.Connection, Driver | None, str]:
        """The connection for a statement of ours; its driver, None: SQLAlchemy has to compile it; what comes before it."""
        connection, first = self._watched.connection()
        self._schemas = schemas_of(connection)
        driver = driver_behind(connection)
        if driver is None and first:
            connection.exec_driver_sql(first)
            first = ""
        return connection, driver, first

    lasting = None

    def insert_outbox(self, rows: Sequence[Mapping[str, Any]], schema: str = "") -> Sequence[int]:
        assert not schema, "a session's own options say where its tables are"
        connection, driver, first = self._ready()
        if driver is None:
            inserted = [connection.execute(outbox.insert(), dict(row)).inserted_primary_key for row in rows]
            return [key[0] for key in inserted if key is not None]
        if first:
            connection.exec_driver_sql(first)
        raw, returning = connection.connection.dbapi_connection, connection.dialect.insert_returning
        return driver.insert_numbered(raw, outbox, rows, returning, partial(execute, connection, driver))

    def is_duplicate(self, exc: BaseException) -> bool:
        # On SQLite, a snapshot that is outdated by another write is an OperationalError. A listener may have raised its own.
        module: Any = self._engine.dialect.loaded_dbapi
        kinds = (sa.exc.IntegrityError, sa.exc.OperationalError, module.IntegrityError, module.OperationalError)
        return any(isinstance(each, kinds) for each in causes(exc))

    def is_lost(self, exc: BaseException) -> bool:
        return any(isinstance(each, sa.exc.DBAPIError) and each.connection_invalidated for each in causes(exc))

    def explain(self, exc: BaseException, *tables: sa.Table) -> None:
        raise_if_lacking(exc, self._bind, *tables)

    def fence(self, row: Mapping[str, Any]) -> int | None:
        try:
            bind = writer_of(self._session)
            if isinstance(bind, sa.Connection):
                return _fence(nullcontext(bind), row)
            if shares_connections(bind.engine):
                return _fence(bind.engine.connect(), row)
            own = engine_beside(self._engine)
            try:
                return _fence(own.connect(), row)
            finally:
                own.dispose()
        except Exception:
            log.warning("whether the commit took effect is not known yet", exc_info=True)
            return None

    def read(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Sequence[Any]:
        with looking(self._bind) as connection:
            return connection.execute(statement, dict(parameters)).fetchall()


def _fence(opened: AbstractContextManager[sa.Connection], row: Mapping[str, Any]) -> int | None:
    """See LocalTransaction. Raises what the database raises."""
    with opened as connection:
        try:
            with connection.begin() as transaction:
                if insert_marker(connection.execute, connection.dialect.name, row):
                    return ROLLED_BACK
                transaction.rollback()
                return None
        except sa.exc.IntegrityError:
            with connection.begin():
                found: int | None = connection.execute(STATE, {"of": row["message_id"]}).scalar()
                return found


class CoreTransaction(SessionTransaction):
    """Of a connection that the program works with directly: over a session that only we use, one per connection."""

    def __init__(self, connection: sa.Connection) -> None:
        session = _SESSIONS.get(connection)
        if session is None:
            session = _SESSIONS[connection] = Session(bind=connection, join_transaction_mode="control_fully")
        super().__init__(session)
        self.handle = self._connection = connection

    def _refuse_foreign(self) -> None:
        managed = getattr(self._connection, "_trans_context_manager", None) is not None
        if managed or self._connection.in_nested_transaction():
            raise errors.InvalidRequest(
                "center.transaction() owns the commit: it cannot run inside engine.begin(), connection.begin() or a savepoint. "
                "Take the connection from engine.connect(), and open the block around savepoints."
            )

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        super().begin(place, recorder=recorder, lends_commit=lends_commit)
        self._session.connection()  # watched from here on

    def stop(self) -> None:
        super().stop()
        if not watched(self._session):
            self._session.close()
            _SESSIONS.pop(self._connection, None)


_SESSIONS: WeakKeyDictionary[sa.Connection, Session] = WeakKeyDictionary()
