"""MariaDB and MySQL: READ COMMITTED, strict mode, utf8mb4, UTC, short lock waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from functools import partial
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
    insert_all_or_none,
)
from tmc_server.store.dialects.hosts import Hosts
from tmc_server.store.dialects.pools import POOL, reading_transaction, test_after_rest, transactions_and_reads
from tmc_server.store.dialects.session_lock import SessionLock

_PACKET_MARGIN = 2 << 20


class ErrorNumber(IntEnum):
    """Numbers of the server and of its client library, by their own names."""

    EE_WRITE = 3
    EE_OUTOFMEMORY = 5
    ER_CHECKREAD = 1020
    ER_DISK_FULL = 1021
    ER_ERROR_ON_READ = 1024
    ER_ERROR_ON_WRITE = 1026
    ER_GET_ERRNO = 1030
    ER_OUTOFMEMORY = 1037
    ER_OUT_OF_SORTMEMORY = 1038
    ER_CON_COUNT_ERROR = 1040
    ER_OUT_OF_RESOURCES = 1041
    ER_BAD_HOST_ERROR = 1042
    ER_HANDSHAKE_ERROR = 1043
    ER_DBACCESS_DENIED_ERROR = 1044
    ER_ACCESS_DENIED_ERROR = 1045
    ER_UNKNOWN_COM_ERROR = 1047
    ER_BAD_DB_ERROR = 1049
    ER_SERVER_SHUTDOWN = 1053
    ER_WRONG_DB_NAME = 1102
    ER_RECORD_FILE_FULL = 1114
    ER_HOST_IS_BLOCKED = 1129
    ER_HOST_NOT_PRIVILEGED = 1130
    ER_CANT_CREATE_THREAD = 1135
    ER_TABLEACCESS_DENIED_ERROR = 1142
    ER_NO_SUCH_TABLE = 1146
    ER_ABORTING_CONNECTION = 1152
    ER_NET_PACKETS_OUT_OF_ORDER = 1156
    ER_NET_READ_ERROR = 1158
    ER_NET_READ_INTERRUPTED = 1159
    ER_NET_ERROR_ON_WRITE = 1160
    ER_NET_WRITE_INTERRUPTED = 1161
    ER_ERROR_DURING_COMMIT = 1180
    ER_CRASHED_ON_USAGE = 1194
    ER_TOO_MANY_USER_CONNECTIONS = 1203
    ER_LOCK_WAIT_TIMEOUT = 1205
    ER_LOCK_TABLE_FULL = 1206
    ER_LOCK_DEADLOCK = 1213
    ER_CANT_UPDATE_WITH_READLOCK = 1223
    ER_USER_LIMIT_REACHED = 1226
    ER_OPTION_PREVENTS_STATEMENT = 1290
    ER_QUERY_INTERRUPTED = 1317
    ER_TOO_MANY_CONCURRENT_TRXS = 1637
    ER_ACCESS_DENIED_NO_PASSWORD_ERROR = 1698
    ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION = 1792
    ER_READ_ONLY_MODE = 1836
    ER_INNODB_READ_ONLY = 1874
    ER_TEMP_FILE_WRITE_FAILURE = 1878
    ER_CONNECTION_KILLED = 1927
    ER_STATEMENT_TIMEOUT = 1969  # MariaDB's
    CR_CONNECTION_ERROR = 2002
    CR_CONN_HOST_ERROR = 2003
    CR_UNKNOWN_HOST = 2005
    CR_SERVER_GONE_ERROR = 2006
    CR_SERVER_HANDSHAKE_ERR = 2012
    CR_SERVER_LOST = 2013
    CR_COMMANDS_OUT_OF_SYNC = 2014
    CR_SSL_CONNECTION_ERROR = 2026
    CR_MALFORMED_PACKET = 2027
    CR_SERVER_LOST_EXTENDED = 2055
    ER_QUERY_TIMEOUT = 3024
    ER_MYSQL_ACCOUNT_LOCKED = 3118
    ER_CLIENT_INTERACTION_TIMEOUT = 4031
    ER_ACCOUNT_LOCKED = 4151  # MariaDB's


_FAILURES = {
    **dict.fromkeys(ErrorNumber, Failure.UNAVAILABLE),
    ErrorNumber.ER_LOCK_WAIT_TIMEOUT: Failure.ROW_WAITED,
    ErrorNumber.ER_LOCK_DEADLOCK: Failure.CONFLICT,
    ErrorNumber.ER_NO_SUCH_TABLE: Failure.TABLE_MISSING,
    ErrorNumber.ER_CHECKREAD: Failure.CONFLICT,  # the row changed since the snapshot
}

_REFUSED = {
    ErrorNumber.ER_DBACCESS_DENIED_ERROR,
    ErrorNumber.ER_ACCESS_DENIED_ERROR,
    ErrorNumber.ER_ACCESS_DENIED_NO_PASSWORD_ERROR,
    ErrorNumber.ER_MYSQL_ACCOUNT_LOCKED,
    3955,  # MySQL's ER_USER_ACCESS_DENIED_FOR_USER_ACCOUNT_BLOCKED_BY_PASSWORD_LOCK
}

_REFUSES_WRITES = (ErrorNumber.ER_OPTION_PREVENTS_STATEMENT, ErrorNumber.ER_READ_ONLY_MODE)


class MySQL:
    """See contract.Dialect."""

    has_one_writer = False
    locking_reads_see_inserts = True
    clock = CLOCK_MS["mysql"]
    port = 3306

    def hosts(self, url: sa.URL) -> Hosts:
        # A user with all privileges may write where others may not. MariaDB 12 has words for it, older ones have 0 and 1.
        return Hosts(url, "SELECT CAST(@@global.read_only AS CHAR) IN ('0', 'OFF')")

    def engines(self, url: sa.URL, hosts: Hosts, pool_size: int, patient: bool) -> tuple[sa.Engine, sa.Engine]:
        return transactions_and_reads(partial(_engine, url, hosts, pool_size, patient))

    def once(self, url: sa.URL) -> sa.Engine:
        engine = sa.create_engine(url, poolclass=sa.pool.NullPool, connect_args={"connect_timeout": CONNECT_S})
        self.hosts(url).lead(engine)
        return engine

    def failure_of(self, exc: sa.exc.DBAPIError) -> Failure:
        number = exc.orig.args[0] if exc.orig is not None and exc.orig.args else None
        if number in _FAILURES:
            return _FAILURES[number]
        lost = exc.connection_invalidated or isinstance(exc, sa.exc.InterfaceError)
        return Failure.UNAVAILABLE if lost else Failure.FAULT

    def refusal_of(self, exc: sa.exc.DBAPIError) -> Refusal | None:
        number = exc.orig.args[0] if exc.orig is not None and exc.orig.args else None
        if number == ErrorNumber.ER_BAD_DB_ERROR:
            return Refusal.DATABASE
        return Refusal.USER if number in _REFUSED else None

    def snapshot(self, connection: sa.Connection) -> AbstractContextManager[None]:
        return reading_transaction(
            connection,
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
            "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
        )

    def exclusive_lock(self, url: sa.URL, hosts: Hosts, engine: sa.Engine) -> SessionLock:
        name = f"tmc_server_{url.database}"

        def take(connection: sa.Connection) -> bool:
            return bool(connection.exec_driver_sql(f"SELECT GET_LOCK('{name}', {EXCLUSIVE_WAIT_S})").scalar_one() == 1)

        def is_free(connection: sa.Connection) -> bool:
            return bool(connection.exec_driver_sql(f"SELECT IS_FREE_LOCK('{name}')").scalar_one())

        return SessionLock(url, hosts, engine, take, is_free)

    @contextmanager
    def migrating(self, url: sa.URL, connection: sa.Connection) -> Iterator[sa.Connection]:
        own = connection.execution_options(isolation_level="AUTOCOMMIT")
        name = f"tmc_init_{url.database}"
        if own.exec_driver_sql(f"SELECT GET_LOCK('{name}', {MIGRATION_WAIT_S})").scalar_one() != 1:
            raise StoreUnavailable("Another tmc init is still at work: wait for it, then repeat.")
        try:
            yield own
        finally:
            own.exec_driver_sql(f"DO RELEASE_LOCK('{name}')")

    def create_database(self, url: sa.URL) -> None:
        server = self.once(url._replace(database=None))
        try:
            with server.connect() as connection:
                known = connection.exec_driver_sql("SHOW DATABASES").scalars().all()
                if url.database not in known:
                    quoted = connection.dialect.identifier_preparer.quote_identifier(str(url.database))
                    connection.exec_driver_sql(f"CREATE DATABASE IF NOT EXISTS {quoted} CHARACTER SET utf8mb4")
        except sa.exc.OperationalError as exc:
            where = url.render_as_string(hide_password=True)
            raise StoreUnavailable(f"Cannot reach {where}: check address, user and rights.") from exc
        finally:
            server.dispose()

    def settings(self, connection: sa.Connection, batch_bytes: int) -> list[Finding]:
        variables: dict[str, Any] = dict(connection.exec_driver_sql("SHOW VARIABLES").fetchall())

        def check(name: str, must: str, ok: bool) -> Finding:
            return Finding(setting=name, value=str(variables.get(name, "absent")), must=must, ok=ok)

        def is_on(name: str) -> bool:
            return str(variables.get(name, "OFF")).upper() in ("ON", "1")

        version = str(variables["version"])
        oldest = (10, 6) if "MariaDB" in version else (8, 0)
        isolation = variables.get("transaction_isolation") or variables.get("tx_isolation")
        need = 2 * batch_bytes + _PACKET_MARGIN  # a binary byte may take two in a statement
        return [
            check("version", "be MariaDB 10.6 or MySQL 8.0, or newer", _numbers(version) >= oldest),
            check(
                "innodb_flush_log_at_trx_commit",
                "be 1: an answered message must survive a power cut",
                str(variables.get("innodb_flush_log_at_trx_commit")) == "1",
            ),
            check(
                "sync_binlog",
                "be 1 while the binary log is on",
                not is_on("log_bin") or str(variables.get("sync_binlog")) == "1",
            ),
            check("innodb_doublewrite", "be ON", str(variables.get("innodb_doublewrite", "ON")).upper() != "OFF"),
            check("wsrep_on", "be OFF: Galera may lose or fork decisions", not is_on("wsrep_on")),
            check("sql_mode", "be strict", "STRICT_ALL_TABLES" in str(variables.get("sql_mode"))),
            check("max_allowed_packet", f"be at least {need}", int(variables["max_allowed_packet"]) >= need),
            check("character_set_connection", "be utf8mb4", variables.get("character_set_connection") == "utf8mb4"),
            Finding(
                setting="transaction isolation",
                value=str(isolation),
                must="be READ-COMMITTED",
                ok=isolation == "READ-COMMITTED",
            ),
        ]

    def replication(self, connection: sa.Connection) -> list[Finding]:
        """Variables have MariaDB's names, or those of MySQL 8.0.26 and later."""
        shown = "SHOW GLOBAL VARIABLES LIKE 'rpl_semi_sync%%'", "SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync%%'"
        values: dict[str, Any] = {}
        for query in shown:
            values |= {name.lower(): value for name, value in connection.exec_driver_sql(query)}

        def check(mariadb: str, mysql: str, must: str, is_good: Callable[[str], bool]) -> Finding:
            name = f"rpl_semi_sync_{mysql if f'rpl_semi_sync_{mysql}' in values else mariadb}"
            value = str(values.get(name, "absent"))
            return Finding(setting=name, value=value, must=must, ok=is_good(value))

        wait = "be 3600000 or more: after that time the primary answers without a replica"
        return [
            check("master_status", "source_status", "be ON: the primary waits for replicas", "ON".__eq__),
            check("master_clients", "source_clients", "be 1 or more", lambda value: value not in ("0", "absent")),
            check("master_wait_no_slave", "source_wait_no_replica", "not be OFF", lambda value: value != "OFF"),
            check("master_wait_point", "source_wait_point", "be AFTER_SYNC", "AFTER_SYNC".__eq__),
            check("master_timeout", "source_timeout", wait, lambda value: value.isdigit() and int(value) >= 3_600_000),
        ]

    def hold_for_move(self, connection: sa.Connection) -> bool:
        lock = f"SELECT GET_LOCK(CONCAT('tmc_move_', DATABASE()), {LOCK_WAIT_S})"
        return bool(connection.exec_driver_sql(lock).scalar_one() == 1)

    def wait_briefly(self) -> str:
        return "SET SESSION lock_wait_timeout = 1"

    def recording(self, connection: sa.Connection, recording: Recording) -> list[str]:
        def body(version: str) -> str:
            insert = recording.insert(version)
            return (
                insert if recording.shard is None else f"IF {version}.shard = {recording.shard} THEN {insert}; END IF"
            )

        # MySQL knows no CREATE TRIGGER IF NOT EXISTS before 8.0.29.
        query = "SELECT trigger_name FROM information_schema.triggers WHERE trigger_schema = DATABASE()"
        there = set(connection.exec_driver_sql(query).scalars())
        return [
            f"CREATE TRIGGER {name} AFTER {event} ON {recording.table} FOR EACH ROW {body(version)}"
            for name, event, version in recording.each
            if name not in there
        ]

    def recording_no_more(self, recording: Recording) -> list[str]:
        return [f"DROP TRIGGER IF EXISTS {name}" for name, _event, _version in recording.each]

    def renaming(self, names: Mapping[str, str]) -> list[str]:
        return [f"RENAME TABLE {', '.join(f'{old} TO {new}' for old, new in names.items())}"]

    def through_index(self, index: str) -> str:
        return f"FORCE INDEX ({index})"

    def literal(self, value: int | bytes) -> str:
        return f"x'{value.hex()}'" if isinstance(value, bytes) else str(int(value))

    def insert(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> None:
        """The driver would format every value by several calls of Python."""
        verb = "REPLACE" if into.replaces else "INSERT"
        connection.exec_driver_sql(f"{verb} INTO {into.head} {into.rows(rows, _literal)}")

    def insert_free(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        return insert_all_or_none(self, connection, into, rows)


def _engine(url: sa.URL, hosts: Hosts, pool_size: int, patient: bool, **options: Any) -> sa.Engine:
    limits = {} if patient else {"read_timeout": ANSWER_S, "write_timeout": ANSWER_S}
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        connect_args={"connect_timeout": CONNECT_S, "charset": "utf8mb4", **limits},
        **POOL,
        **options,
    )
    hosts.lead(engine)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "handle_error", _leave_a_replica)
    test_after_rest(engine, hosts.test(lambda connection: connection.ping()))
    return engine


def _leave_a_replica(context: sa.engine.ExceptionContext) -> None:
    """Give up a connection to a server that only reads, as after a failover: a new one may lead to the other."""
    if context.original_exception.args and context.original_exception.args[0] in _REFUSES_WRITES:
        context.is_disconnect = True


def _prepare(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO'")
    cursor.execute(f"SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = {LOCK_WAIT_S}")
    cursor.execute("SELECT VERSION()")
    if "MariaDB" in cursor.fetchone()[0]:
        cursor.execute("SET SESSION idle_transaction_timeout = 5")
    cursor.close()


def _literal(value: int | str | bytes | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(int(value))
    return f"x'{value.hex()}'" if isinstance(value, bytes) else f"_utf8mb4 x'{value.encode().hex()}'"


def _numbers(version: str) -> tuple[int, ...]:
    digits = version.split("-")[0].split(".")
    return tuple(int(part) for part in digits[:2] if part.isdigit())
