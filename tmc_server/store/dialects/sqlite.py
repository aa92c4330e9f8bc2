"""SQLite: WAL, synchronous FULL, BEGIN IMMEDIATE, one writer at a time, one server per file."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy import event

from tmc_server.store.dialects.contract import (
    DatabaseTaken,
    Failure,
    Finding,
    Insertion,
    Recording,
    Refusal,
    insert_all_or_none,
)
from tmc_server.store.dialects.hosts import Hosts

# Our own writers take turns: who locks the file is somebody else.
_AWAY = (
    "is locked",
    "disk I/O error",
    "disk is full",
    "readonly database",
    "unable to open",
    "out of memory",
    "interrupted",
)


class SQLite:
    """See contract.Dialect."""

    has_one_writer = True
    locking_reads_see_inserts = True  # nothing else writes meanwhile
    clock = None
    port = 0

    def hosts(self, url: sa.URL) -> Hosts:
        return Hosts(url, "SELECT 1")

    def engines(self, url: sa.URL, hosts: Hosts, pool_size: int, patient: bool) -> tuple[sa.Engine, sa.Engine]:
        arguments = {"timeout": 5.0, "check_same_thread": False}
        engine = sa.create_engine(
            url, pool_size=pool_size, max_overflow=8, poolclass=sa.pool.QueuePool, connect_args=arguments
        )
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
        return engine, engine

    def once(self, url: sa.URL) -> sa.Engine:
        return sa.create_engine(url, poolclass=sa.pool.NullPool)

    def failure_of(self, exc: sa.exc.DBAPIError) -> Failure:
        if "no such table" in str(exc.orig):
            return Failure.TABLE_MISSING
        away = any(part in str(exc.orig) for part in _AWAY)
        return Failure.UNAVAILABLE if away or isinstance(exc, sa.exc.InterfaceError) else Failure.FAULT

    def refusal_of(self, exc: sa.exc.DBAPIError) -> Refusal | None:
        return None  # there are files, and no users

    @contextmanager
    def snapshot(self, connection: sa.Connection) -> Iterator[None]:
        yield  # one deferred transaction: everything is as at its first read

    def exclusive_lock(self, url: sa.URL, hosts: Hosts, engine: sa.Engine) -> FileLock:
        return FileLock(url)

    @contextmanager
    def migrating(self, url: sa.URL, connection: sa.Connection) -> Iterator[sa.Connection]:
        yield connection  # the one server of the file holds its lock already

    def create_database(self, url: sa.URL) -> None:
        """Connecting makes the file."""

    def settings(self, connection: sa.Connection, batch_bytes: int) -> list[Finding]:
        def pragma(name: str) -> str:
            return str(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())

        version = str(connection.exec_driver_sql("SELECT sqlite_version()").scalar_one())
        journal, synchronous = pragma("journal_mode"), pragma("synchronous")
        numbers = tuple(int(part) for part in version.split(".")[:2])
        return [
            Finding(setting="sqlite_version", value=version, must="be 3.35 or newer", ok=numbers >= (3, 35)),
            Finding(setting="journal_mode", value=journal, must="be wal", ok=journal == "wal"),
            Finding(setting="synchronous", value=synchronous, must="be 2 (FULL)", ok=synchronous in ("2", "3")),
        ]

    def replication(self, connection: sa.Connection) -> list[Finding]:
        return []

    def hold_for_move(self, connection: sa.Connection) -> bool:
        return True  # the lock of the file keeps everybody away

    def wait_briefly(self) -> str:
        return "PRAGMA busy_timeout = 1000"

    def recording(self, connection: sa.Connection, recording: Recording) -> list[str]:
        def only(version: str) -> str:
            return "" if recording.shard is None else f"WHEN {version}.shard = {recording.shard} "

        return [
            f"CREATE TRIGGER IF NOT EXISTS {name} AFTER {event} ON {recording.table} FOR EACH ROW {only(version)}"
            f"BEGIN {recording.insert(version)}; END"
            for name, event, version in recording.each
        ]

    def recording_no_more(self, recording: Recording) -> list[str]:
        return [f"DROP TRIGGER IF EXISTS {name}" for name, _event, _version in recording.each]

    def renaming(self, names: Mapping[str, str]) -> list[str]:
        return [f"ALTER TABLE {old} RENAME TO {new}" for old, new in names.items()]

    def through_index(self, index: str) -> str:
        return f"INDEXED BY {index}"

    def literal(self, value: int | bytes) -> str:
        return f"x'{value.hex()}'" if isinstance(value, bytes) else str(int(value))

    def insert(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> None:
        row = f"({', '.join('?' * len(into.columns))})"
        parameters = tuple(values[name] for values in rows for name in into.columns)
        verb = "REPLACE" if into.replaces else "INSERT"
        connection.exec_driver_sql(f"{verb} INTO {into.head} {', '.join([row] * len(rows))}", parameters)

    def insert_free(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        return insert_all_or_none(self, connection, into, rows)


class FileLock:
    """See contract.ExclusiveLock. In memory there is nobody else."""

    def __init__(self, url: sa.URL) -> None:
        self._path = url.database
        self._handle: IO[str] | None = None
        _LOCKS.add(self)

    def hold(self) -> None:
        if self._handle is not None or self._path in (None, "", ":memory:"):
            return
        handle = Path(f"{self._path}.lock").open("w")  # noqa: SIM115 - held as long as the server lives
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            handle.close()
            raise DatabaseTaken(
                f"Another server uses {self._path}: SQLite serves one server, stop the other or use MariaDB."
            ) from exc
        self._handle = handle

    def refuse_beside_another(self) -> None:
        self.hold()

    def let_go(self) -> None:
        """The lock is a file of its own: it is held until no connection is open."""

    def close(self) -> None:
        """Let go of it. In a forked child, it stays the parent's, and ends with it."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_in_child)


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: sa.Connection) -> None:
    # A deferred transaction that turns from reading to writing may fail at once, whatever the busy timeout says.
    reading = connection.get_execution_options().get("tmc_reading", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
