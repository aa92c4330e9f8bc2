"""What the store needs of a kind of database. Each module of this package is one kind; `dialect_of` knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol

import sqlalchemy as sa

from tmc_server.store.dialects.hosts import Hosts

CONNECT_S = 5
LOCK_WAIT_S = 2  # for a row that another transaction holds
ANSWER_S = 15  # for a statement's answer, unless the engine is patient
EXCLUSIVE_WAIT_S = 10
MIGRATION_WAIT_S = 120


class Failure(Enum):
    """What an error of the driver means."""

    ROW_WAITED = "another transaction held a row for longer than we wait; ours was rolled back"
    CONFLICT = "our transaction lost against another one and was rolled back: run it again"
    UNAVAILABLE = "the database cannot be used now: ask again"
    TABLE_MISSING = "a table is not there: its shard is being moved, or the database restored"
    FAULT = "anything else"


class Refusal(Enum):
    """Why a server lets nobody in; waiting does not help."""

    USER = "the user, or its password"
    DATABASE = "there is no such database"


class DatabaseTaken(Exception):
    """Another server works on this database."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One checked setting. must: what it has to be, in words."""

    setting: str
    value: str
    must: str
    ok: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'BAD '} {self.setting} = {self.value}" + (
            "" if self.ok else f", must {self.must}"
        )


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """The target of an INSERT of many rows. replaces: rows that are there already take the new values."""

    table: str
    columns: Sequence[str]
    keys: Sequence[str]
    replaces: bool

    @cached_property
    def head(self) -> str:
        """The table with its columns, up to the rows."""
        return f"{self.table} ({', '.join(self.columns)}) VALUES"

    def rows(self, rows: Sequence[Mapping[str, Any]], literal: Callable[[Any], str]) -> str:
        """Write the rows behind it, of two columns or more. literal: writes what is no plain integer; most values are."""
        values = itemgetter(*self.columns)
        return ",".join(
            [
                f"({','.join([str(each) if type(each) is int else literal(each) for each in values(row)])})"
                for row in rows
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Changes of the rows of `table` are written into `log`, by their `keys`. shard: only rows of this one; None: all rows."""

    table: str
    log: str
    keys: Sequence[str]
    shard: int | None

    def insert(self, version: str) -> str:
        """Write the statement of a trigger. version: NEW or OLD."""
        values = ", ".join(f"{version}.{key}" for key in self.keys)
        return f"INSERT INTO {self.log} ({', '.join(self.keys)}) VALUES ({values})"

    @property
    def each(self) -> Sequence[tuple[str, str, str]]:
        """Return name, event and version of the row for three triggers."""
        events = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))
        return [(f"{self.log}_{event[0].lower()}", event, version) for event, version in events]


class ExclusiveLock(Protocol):
    """Keeps other servers away from a database. It ends with the process."""

    def hold(self) -> None:
        """Take it; repeat this to see that it still holds. Raises DatabaseTaken and errors of the driver."""

    def refuse_beside_another(self) -> None:
        """Start beside other servers: not while one of them holds the lock, which a kind with one writer always takes.

        Raises DatabaseTaken and errors of the driver.
        """

    def let_go(self) -> None:
        """Give back what the lock has of the connections, before they are closed."""

    def close(self) -> None:
        """Let others in, after the connections are closed."""


class Dialect(Protocol):
    """One kind of database. All methods block; those that get a connection use it and leave it open."""

    @property
    def has_one_writer(self) -> bool:
        """Write transactions take turns, and one server uses the database."""

    @property
    def locking_reads_see_inserts(self) -> bool:
        """SELECT ... FOR UPDATE waits for a row that another transaction has inserted and not committed yet."""

    @property
    def clock(self) -> str | None:
        """An expression for the database's clock, milliseconds since the epoch; None: it is this machine's."""

    @property
    def port(self) -> int:
        """Return the port of a URL without one."""

    def hosts(self, url: sa.URL) -> Hosts:
        """Return the hosts of a database; where it is a file, one without a name."""

    def engines(self, url: sa.URL, hosts: Hosts, pool_size: int, patient: bool) -> tuple[sa.Engine, sa.Engine]:
        """Make engines for transactions, and for single statements that read. patient: no time limit on a statement."""

    def once(self, url: sa.URL) -> sa.Engine:
        """Make an engine without a pool."""

    def failure_of(self, exc: sa.exc.DBAPIError) -> Failure: ...

    def refusal_of(self, exc: sa.exc.DBAPIError) -> Refusal | None:
        """Return why it was not possible to connect; None: that may pass."""

    def snapshot(self, connection: sa.Connection) -> AbstractContextManager[None]:
        """Inside, all statements of this connection for reading see one moment."""

    def exclusive_lock(self, url: sa.URL, hosts: Hosts, engine: sa.Engine) -> ExclusiveLock: ...

    def migrating(self, url: sa.URL, connection: sa.Connection) -> AbstractContextManager[sa.Connection]:
        """The connection to change the schema with, while no other `tmc init` does. Raises StoreUnavailable."""

    def create_database(self, url: sa.URL) -> None:
        """Create the database where it is missing. Raises StoreUnavailable."""

    def settings(self, connection: sa.Connection, batch_bytes: int) -> list[Finding]:
        """Return findings: whether messages are safe in it. batch_bytes: the largest transaction that a server sends."""

    def replication(self, connection: sa.Connection) -> list[Finding]:
        """Return findings: whether another host has what was answered."""

    def hold_for_move(self, connection: sa.Connection) -> bool:
        """Keep other moves of shards away from this database as long as the connection is open. Returns: whether it worked."""

    def wait_briefly(self) -> str:
        """Return the statement by which changes of tables give up soon: while they wait for others, everybody waits for them."""

    def recording(self, connection: sa.Connection, recording: Recording) -> list[str]:
        """Return statements that have every change of a row in a table written into another one, in its transaction.

        Nothing changes where that is so already.
        """

    def recording_no_more(self, recording: Recording) -> list[str]:
        """Return statements that end it, also where it was begun by half."""

    def renaming(self, names: Mapping[str, str]) -> list[str]:
        """Return statements that rename tables, all of them or none, once no transaction uses them."""

    def through_index(self, index: str) -> str:
        """Return what follows a table's name to have it read through this index, whatever the statistics say."""

    def literal(self, value: int | bytes) -> str:
        """A value as SQL text, with nothing in it that could be mistaken."""

    def insert(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> None:
        """One statement for many rows. Raises IntegrityError: no row of this call is in."""

    def insert_free(self, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        """Insert rows that clash with none, in one statement; or nothing, if one clashes and the database cannot tell which.

        Returns: the first column of what is in. The transaction stays usable either way.
        """


def insert_all_or_none(
    dialect: Dialect, connection: sa.Connection, into: Insertion, rows: Sequence[Mapping[str, Any]]
) -> set[Any]:
    """Do what `insert_free` does, where a statement that fails leaves its transaction intact."""
    try:
        dialect.insert(connection, into, rows)
    except sa.exc.IntegrityError:
        return set()
    return {row[into.columns[0]] for row in rows}
