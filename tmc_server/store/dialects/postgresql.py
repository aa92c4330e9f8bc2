"""PostgreSQL over psycopg: READ COMMITTED, synchronous commits, UTC, short lock waits, index scans."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from tmc_common.clocks import CLOCK_MS
from tmc_server.errors import StoreUnavailable
from tmc_server.store.dialects.contract import (
    ANSWER_S,
    CONNECT_S,
    EXCLUSIVE_WAIT_S,
    LOCK_WAIT_S,
    MIGRATION_WAIT_S,
    Failure,
    Finding,
    Insertion,
    Recording,
    Refusal,
)
from tmc_server.store.dialects.hosts import Hosts
from tmc_server.store.dialects.pools import POOL, reading_transaction, test_after_rest, transactions_and_reads
from tmc_server.store.dialects.session_lock import SessionLock

_OLDEST = 14
# Numbers of advisory locks; each database has its own.
_EXCLUSIVE = 7_631_203_001
_MIGRATING = 7_631_203_002
_MOVING = 7_631_203_003

_LATER_S = 2  # a server that lives ends the statement first, and the connection stays


class SqlState(StrEnum):
    """SQLSTATEs by the server's own names."""

    READ_ONLY_SQL_TRANSACTION = "25006"  # a standby, or somebody said so
    IDLE_IN_TRANSACTION_SESSION_TIMEOUT = "25P03"
    TRANSACTION_TIMEOUT = "25P04"
    INVALID_CATALOG_NAME = "3D000"
    SERIALIZATION_FAILURE = "40001"
    DEADLOCK_DETECTED = "40P01"
    INSUFFICIENT_PRIVILEGE = "42501"
    UNDEFINED_TABLE = "42P01"
    DUPLICATE_DATABASE = "42P04"
    UNIQUE_VIOLATION = "23505"
    LOCK_NOT_AVAILABLE = "55P03"


_FAILURES: dict[str, Failure] = {
    SqlState.LOCK_NOT_AVAILABLE: Failure.ROW_WAITED,
    SqlState.SERIALIZATION_FAILURE: Failure.CONFLICT,
    SqlState.DEADLOCK_DETECTED: Failure.CONFLICT,
    SqlState.READ_ONLY_SQL_TRANSACTION: Failure.UNAVAILABLE,
    SqlState.IDLE_IN_TRANSACTION_SESSION_TIMEOUT: Failure.UNAVAILABLE,
    SqlState.TRANSACTION_TIMEOUT: Failure.UNAVAILABLE,
    SqlState.INVALID_CATALOG_NAME: Failure.UNAVAILABLE,
    SqlState.INSUFFICIENT_PRIVILEGE: Failure.UNAVAILABLE,
    SqlState.UNDEFINED_TABLE: Failure.TABLE_MISSING,
}
_MADE_MEANWHILE = (SqlState.DUPLICATE_DATABASE, SqlState.UNIQUE_VIOLATION)  # by another tmc init
_CLASSES_AWAY = {
    "08",  # connection exception
    "28",  # invalid authorization
    "53",  # insufficient resources: disk full, too many connections
    "57",  # operator intervention: shutdown, canceled, starting up
    "58",  # system error: I/O
}
_SETTINGS = {
    "TimeZone": "UTC",
    "lock_timeout": f"{LOCK_WAIT_S}s",
    "idle_in_transaction_session_timeout": "5s",
    "standard_conforming_strings": "on",  # our literals rely on it
    "bytea_output": "hex",
    # Each of our statements has an index to go by. The planner does not know that: tables that were empty when they were
    # looked at last are full a second later, and a scan of a whole one locks rows in another order than our neighbors do.
    "enable_seqscan": "off",
    "jit": "off",  # it pays for queries of seconds
    # A machine that lost its power holds the lock of the one server no longer than this.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


_REFUSED = re.compile(
    "password authentication failed|no password supplied|no pg_hba.conf entry|permission denied for database"
    '|role ".*" (does not exist|is not permitted)'
)


class PostgreSQL:
    """See contract.Dialect."""

    has_one_writer = False
    locking_reads_see_inserts = False
    clock = CLOCK_MS["postgresql"]
    port = 5432

    def hosts(self, url: sa.URL) -> Hosts:
        return Hosts(url, "SELECT current_setting('transaction_read_only') = 'off'")

    def engines(self, url: sa.URL, hosts: Hosts, pool_size: int, patient: bool) -> tuple[sa.Engine, sa.Engine]:
        return transactions_and_reads(partial(_engine, url, hosts, pool_size, patient))

    def once(self, url: sa.URL, **options: Any) -> sa.Engine:
        limits = {"connect_timeout": CONNECT_S}
        engine = sa.create_engine(url, poolclass=sa.pool.NullPool, connect_args=limits, **options)
        self.hosts(url).lead(engine)
        return engine

    def failure_of(self, exc: sa.exc.DBAPIError) -> Failure:
        state = _state_of(exc)
        if state is None:
            lost = exc.connection_invalidated or isinstance(exc, sa.exc.OperationalError | sa.exc.InterfaceError)
            return Failure.UNAVAILABLE if lost else Failure.FAULT
        return _FAILURES.get(state, Failure.UNAVAILABLE if state[:2] in _CLASSES_AWAY else Failure.FAULT)

    def refusal_of(self, exc: sa.exc.DBAPIError) -> Refusal | None:
        # The errors of a connection that was never made have no code; the server's sentences may be translated.
        text = str(exc.orig)
        if re.search('database ".*" does not exist', text):
            return Refusal.DATABASE
        return Refusal.USER if _REFUSED.search(text) else None

    def snapshot(self, connection: sa.Connection) -> AbstractContextManager[None]:
        return reading_transaction(
            connection,
            "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
        )

    def exclusive_lock(self, url: sa.URL, hosts: Hosts, engine: sa.Engine) -> SessionLock:
        def take(connection: sa.Connection) -> bool:
            connection.exec_driver_sql(f"SET lock_timeout = '{EXCLUSIVE_WAIT_S}s'")
            try:
                connection.exec_driver_sql(f"SELECT pg_advisory_lock({_EXCLUSIVE})")
            except sa.exc.OperationalError as exc:
                if _state_of(exc) == SqlState.LOCK_NOT_AVAILABLE:
                    return False
                raise
            return True

        def is_free(connection: sa.Connection) -> bool:
            look = f"SELECT pg_try_advisory_xact_lock_shared({_EXCLUSIVE})"  # several may look at the same moment
            return bool(connection.exec_driver_sql(look).scalar_one())

        return SessionLock(url, hosts, engine, take, is_free)

    @contextmanager
    def migrating(self, url: sa.URL, connection: sa.Connection) -> Iterator[sa.Connection]:
        """One transaction: a creation that is cut short leaves nothing."""
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{MIGRATION_WAIT_S}s'")
        try:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATING})")
        except sa.exc.OperationalError as exc:
            if _state_of(exc) == SqlState.LOCK_NOT_AVAILABLE:
                raise StoreUnavailable("Another tmc init is still at work: wait for it, then repeat.") from exc
            raise
        may_create = "COALESCE(has_schema_privilege(current_schema(), 'CREATE'), false)"
        encoding, user, may = connection.exec_driver_sql(
            f"SELECT current_setting('server_encoding'), current_user, {may_create}"
        ).one()
        if not may:
            raise StoreUnavailable(
                f"The user {user!r} may not create tables in {url.database!r}: make it the owner of the database, or "
                f"GRANT CREATE ON SCHEMA public TO {user}."
            )
        if encoding != "UTF8":
            raise StoreUnavailable(
                f"The database {url.database!r} is encoded in {encoding}, and that cannot be changed: create another one with "
                "ENCODING 'UTF8' TEMPLATE template0."
            )
        yield connection

    def create_database(self, url: sa.URL) -> None:
        where = url.render_as_string(hide_password=True)
        try:
            with self.once(url).connect():
                return
        except sa.exc.OperationalError as exc:
            if self.refusal_of(exc) is not Refusal.DATABASE:
                raise StoreUnavailable(f"Cannot reach {where}: check address, user and rights.") from exc
        server = self.once(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
        quoted = server.dialect.identifier_preparer.quote_identifier(str(url.database))
        try:
            with server.connect() as connection:
                connection.exec_driver_sql(f"CREATE DATABASE {quoted} ENCODING 'UTF8' TEMPLATE template0")
        except sa.exc.DBAPIError as exc:
            if _state_of(exc) not in _MADE_MEANWHILE:
                raise StoreUnavailable(
                    f"There is no database {url.database!r} at {where}, and this user cannot create it: "
                    f"CREATE DATABASE {quoted} ENCODING 'UTF8' TEMPLATE template0."
                ) from exc

    def settings(self, connection: sa.Connection, batch_bytes: int) -> list[Finding]:
        def check(name: str, must: str, good: str) -> Finding:
            value = str(connection.exec_driver_sql(f"SHOW {name}").scalar_one())
            return Finding(setting=name, value=value, must=must, ok=value == good)

        version, number, is_standby, process = connection.exec_driver_sql(
            "SELECT current_setting('server_version'), CAST(current_setting('server_version_num') AS int),"
            " pg_is_in_recovery(), pg_backend_pid()"
        ).one()
        driver: Any = connection.connection.driver_connection
        is_direct = process == driver.info.backend_pid
        return [
            Finding(
                setting="server_version",
                value=version,
                must=f"be PostgreSQL {_OLDEST} or newer",
                ok=number >= _OLDEST * 10_000,
            ),
            check("fsync", "be on: an answered message must survive a power cut", "on"),
            check("full_page_writes", "be on", "on"),
            check("server_encoding", "be UTF8", "UTF8"),
            check("transaction_isolation", "be read committed", "read committed"),
            Finding(
                setting="server",
                value="a standby" if is_standby else "a primary",
                must="be a primary: give its address",
                ok=not is_standby,
            ),
            Finding(
                setting="connection",
                value="direct" if is_direct else "through a pooler",
                must="be direct: sessions have settings and locks of their own, and the center has a pool",
                ok=is_direct,
            ),
        ]

    def replication(self, connection: sa.Connection) -> list[Finding]:
        standbys, commit, following = connection.exec_driver_sql(
            "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),"
            " (SELECT count(*) FROM pg_stat_replication WHERE COALESCE(sync_state, 'sync') IN ('sync', 'quorum'))"
        ).one()
        without = "without them a standby may lack what was answered"
        return [
            Finding(
                setting="synchronous_standby_names",
                value=standbys or "empty",
                must=f"name standbys, since any program that follows the log counts for '*': {without}",
                ok=bool(standbys) and "*" not in standbys,
            ),
            Finding(setting="synchronous standbys", value=str(following), must="follow", ok=following > 0),
            Finding(
                setting="synchronous_commit",
                value=commit,
                must="be on or remote_apply",
                ok=commit in ("on", "remote_apply"),
            ),
        ]

    def hold_for_move(self, connection: sa.Connection) -> bool:
        return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_MOVING})").scalar_one())

    def wait_briefly(self) -> str:
        # Longer than deadlock_timeout, a second: only then does an autovacuum that is in the way give up.
        return "SET lock_timeout = '1500ms'"

    def recording(self, connection: sa.Connection, recording: Recording) -> list[str]:
        def insert(version: str) -> str:
            only = "" if recording.shard is None else f"IF {version}.shard = {recording.shard} THEN "
            return f"{only}{recording.insert(version)};{' END IF;' if only else ''}"

        body = f"IF TG_OP = 'DELETE' THEN {insert('OLD')} ELSE {insert('NEW')} END IF; RETURN NULL;"
        return [
            f"CREATE OR REPLACE FUNCTION {recording.log}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$",
            f"CREATE OR REPLACE TRIGGER {recording.log} AFTER INSERT OR UPDATE OR DELETE ON {recording.table}"
            f" FOR EACH ROW EXECUTE FUNCTION {recording.log}()",
        ]

    def recording_no_more(self, recording: Recording) -> list[str]:
        return [f"DROP FUNCTION IF EXISTS {recording.log}() CASCADE"]  # with its trigger, whatever the table is called

    def renaming(self, names: Mapping[str, str]) -> list[str]:
        return [f"ALTER TABLE {old} RENAME TO {new}" for old, new in names.items()]

    def through_index(self, index: str) -> str:
        return ""  # there are no hints; see enable_seqscan

    def literal(self, value: int | bytes) -> str:
        return f"'\\x{value.hex()}'::bytea" if isinstance(value, bytes) else str(int(value))

    def insert(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> None:
        _execute(connection, _insert(into, rows) + (_on_conflict(into) if into.replaces else ""))

    def insert_free(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        """A transaction does not survive a statement that fails, so none does."""
        inserted = f"{_insert(into, rows)} ON CONFLICT DO NOTHING RETURNING {into.columns[0]}"
        return set(_execute(connection, inserted).scalars())


def _execute(connection: sa.Connection, statement: str) -> sa.CursorResult[Any]:
    """Run text with values in it: given parameters, even none, the driver would look for their places."""
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _insert(into: Insertion, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the values as literals: the driver would format every value by several calls of Python."""
    return f"INSERT INTO {into.head} {into.rows(rows, _literal)}"


def _on_conflict(into: Insertion) -> str:
    values = ", ".join(f"{name} = excluded.{name}" for name in into.columns if name not in into.keys)
    return f" ON CONFLICT ({', '.join(into.keys)}) DO UPDATE SET {values}"


def _literal(value: int | str | bytes | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    return "'" + without_nul(value).replace("'", "''") + "'"


def without_nul(text: str) -> str:
    """PostgreSQL has no text with U+0000 in it. Free text alone may have one, such as an error that a handler reports."""
    return text.replace("\0", "\ufffd")


def _state_of(exc: sa.exc.DBAPIError) -> str | None:
    """The SQLSTATE; None: the driver itself raised it, such as for a lost connection."""
    return getattr(exc.orig, "sqlstate", None)


def _engine(url: sa.URL, hosts: Hosts, pool_size: int, patient: bool, **options: Any) -> sa.Engine:
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        paramstyle="format",
        connect_args={
            "connect_timeout": CONNECT_S,
            "tcp_user_timeout": ANSWER_S * 1000,
            "client_encoding": "utf8",
            "prepare_threshold": None,  # few statements come twice: ids are written into them
        },
        **POOL,
        **options,
    )
    hosts.lead(engine, None if patient else _bounded_connection().connect)
    event.listen(engine, "connect", lambda connection, _record: _prepare(connection, patient))
    event.listen(engine, "handle_error", _leave_a_standby)
    test_after_rest(engine, hosts.test(_ping))
    return engine


def _leave_a_standby(context: sa.engine.ExceptionContext) -> None:
    """Give up a connection to a server that only reads, as after a failover: a new one may lead to the other."""
    if getattr(context.original_exception, "sqlstate", None) == SqlState.READ_ONLY_SQL_TRANSACTION:
        context.is_disconnect = True


@cache
def _bounded_connection() -> Any:
    import psycopg  # optional: there may be no PostgreSQL

    class Bounded(psycopg.Connection[Any]):
        """Gives up on a server that says nothing, such as one that is stopped: its own time limit does not run then."""

        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
            return super().wait(_within(gen, self, ANSWER_S + _LATER_S), *arguments, **named)

    return Bounded


def _within(waiting: Generator[Any, Any, Any], connection: Any, seconds: float) -> Generator[Any, Any, Any]:
    """Pass on what a driver's generator waits for; end the connection if it waits for longer.

    The driver resumes it several times a second, with 0 as long as nothing happens.
    """
    until = time.monotonic() + seconds
    try:
        wanted = next(waiting)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                connection.pgconn.finish()
            wanted = waiting.send(ready)
    except StopIteration as exc:
        return exc.value


def _prepare(connection: Any, patient: bool) -> None:
    connection.adapters.register_dumper(str, _text_dumper())
    limits = {"statement_timeout": "0" if patient else f"{ANSWER_S}s"}
    if patient:
        limits["idle_in_transaction_session_timeout"] = "0"
    calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in {**_SETTINGS, **limits}.items())
    autocommit, connection.autocommit = connection.autocommit, True
    # Only a relaxed setting of the role or the database is overruled: others, such as remote_apply, are stricter.
    strict = (
        "CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END"
    )
    connection.execute(f"SELECT set_config('synchronous_commit', {strict}, false), {calls}")
    connection.autocommit = autocommit


@cache
def _text_dumper() -> Any:
    from psycopg.types.string import StrDumper

    class WithoutNul(StrDumper):
        """Text in parameters."""

        def dump(self, obj: str) -> Any:
            return super().dump(without_nul(obj))

    return WithoutNul


def _ping(connection: Any) -> None:
    autocommit, connection.autocommit = connection.autocommit, True
    try:
        connection.execute("")
    finally:
        with suppress(Exception):
            connection.autocommit = autocommit
