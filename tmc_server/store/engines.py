"""Connections: one Database per URL, with the session settings that our guarantees rest on.

MariaDB and MySQL: READ COMMITTED, strict mode, utf8mb4, UTC, short lock waits.  SQLite: WAL, synchronous FULL,
BEGIN IMMEDIATE, one writer at a time, one server per file. Foreign errors are sorted here and nowhere else:
StoreUnavailable (ask again), StoreConflict (the transaction was rolled back, run it again), anything else is a fault.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from tmc_server.domain.placement import SHARDS
from tmc_server.errors import RowLocked, StoreUnavailable

LOCK_WAIT_S = 2
Result = TypeVar("Result")
_SQLITE_AWAY = ("is locked", "disk I/O error", "disk is full", "readonly database", "unable to open")
_CLOCK = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)"
_CLOCK_FOR_S = 1.5  # the look at the catalog brings it every second
_CLOCK_ERROR_MS = 125.0  # as long as it may be off by more, a reading is repeated
_CLOCK_TRIES = 3
_CLOCK_DRIFT = 0.001  # two clocks run apart by less
_REST_S = 1.0
_CONFLICTS = {1213, 1020}  # deadlock, changed since the snapshot: the whole transaction is repeated
_LOCK_WAIT = 1205
_UNAVAILABLE = {1021, 1040, 1053, 1114, 1152, 1158, 1159, 1160, 1161, 1203, 1226, 1290, 1836, 1927, 2002, 2003}
_UNAVAILABLE |= {2005, 2006, 2012, 2013, 2055, 1042, 1043, 1047, 1049, 1102, 1146, 3024, 4031}


class StoreConflict(Exception):
    """The transaction lost against another one and was rolled back: run it again."""


class RowWaited(StoreConflict):
    """Somebody held a row for longer than we wait; the transaction was rolled back."""


class DatabaseTaken(Exception):
    """Another server works on this database."""


def wall_clock_ms() -> int:
    """This machine's clock, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


@contextmanager
def translated() -> Iterator[None]:
    """Turn driver errors into ours."""
    try:
        yield
    except sa.exc.TimeoutError as exc:
        raise StoreUnavailable from exc
    except sa.exc.DBAPIError as exc:
        code = exc.orig.args[0] if exc.orig is not None and exc.orig.args else None
        text = str(exc.orig)
        if code == _LOCK_WAIT:
            raise RowWaited(text) from exc
        if code in _CONFLICTS:
            raise StoreConflict(text) from exc
        # Our own writers take turns: who locks an SQLite file is somebody else.
        away = any(part in text for part in _SQLITE_AWAY)
        if exc.connection_invalidated or code in _UNAVAILABLE or away or isinstance(exc, sa.exc.InterfaceError):
            raise StoreUnavailable from exc
        raise


class CarriedClock:
    """A database's clock, read now and then and carried on with this process's monotonic clock in between.

    A reading says only that the clock stood there at some moment between asking and answer: it bounds the distance of the
    two clocks from both sides, and the bounds of successive readings are intersected. So the carried time is off by at
    most half of the quickest reading plus the drift since, and a slow answer cannot move it: it goes back by no more than
    it may have been ahead. Bounds that exclude what was known mean that the clock was set: it is followed.
    Thread-safe: one attribute is replaced.
    """

    def __init__(self) -> None:
        # Distance of the clocks in milliseconds: as used, at least, at most; and when that was known.
        self._known: tuple[float, float, float, float] | None = None

    def knows(self, now: float) -> bool:
        """Whether a reading is so fresh that none is needed."""
        return self._known is not None and now - self._known[3] <= _CLOCK_FOR_S

    def take(self, read: int, before: float, after: float) -> float:
        """Use a reading: the clock stood at `read` between `before` and `after`. Returns: the error now, at most, ms."""
        least, most = read - after * 1000, read + 1 - before * 1000  # `read` is cut to whole milliseconds
        used = (least + most) / 2
        if self._known is not None:
            known, low, high, known_at = self._known
            drift = (after - known_at) * 1000 * _CLOCK_DRIFT
            if max(least, low - drift) <= min(most, high + drift):
                least, most = max(least, low - drift), min(most, high + drift)
                used = min(max(known, least), most)
        self._known = (used, least, most, after)
        return max(most - used, used - least)

    def at(self, now: float) -> int:
        """Milliseconds since the epoch. Something must have been read."""
        assert self._known is not None
        return round(self._known[0] + now * 1000)


class Database:
    """One database. clock: milliseconds since the epoch, for tests; by default the database's own clock.

    patient: no time limit on a statement, for the work of `tmc init`.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], int] | None = None, pool_size: int = 8, patient: bool = False
    ) -> None:
        self.url = sa.make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._carried = CarriedClock()
        self._clock = clock or (wall_clock_ms if self.is_sqlite else None)
        self._writer = threading.RLock() if self.is_sqlite else nullcontext()
        self._file_lock: IO[str] | None = None
        self._alone: sa.Connection | None = None
        if self.is_sqlite:
            self.engine = self.readers = self._sqlite_engine(pool_size)
        else:
            self.engine = self._mysql_engine(pool_size, patient, isolation_level="READ COMMITTED")
            # Single statements need no transaction: nothing has to be rolled back when such a connection is put away.
            self.readers = self._mysql_engine(
                pool_size, patient, isolation_level="AUTOCOMMIT", pool_reset_on_return=None
            )

    def _sqlite_engine(self, pool_size: int) -> sa.Engine:
        arguments = {"timeout": 5.0, "check_same_thread": False}
        engine = sa.create_engine(
            self.url, pool_size=pool_size, max_overflow=8, poolclass=sa.pool.QueuePool, connect_args=arguments
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _mysql_engine(self, pool_size: int, patient: bool, **options: Any) -> sa.Engine:
        limits = {} if patient else {"read_timeout": 15, "write_timeout": 15}
        engine = sa.create_engine(
            self.url,
            pool_size=pool_size,
            max_overflow=8,
            pool_use_lifo=True,  # the duties' connection stays warm, the others may rest
            pool_recycle=1800,
            query_cache_size=2000,
            connect_args={"connect_timeout": 5, "charset": "utf8mb4", **limits},
            **options,
        )
        event.listen(engine, "connect", _prepare_mysql)
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", _ping_after_rest)
        return engine

    def __repr__(self) -> str:
        return f"Database({self.url.render_as_string(hide_password=True)})"

    def now(self, connection: sa.Connection) -> int:
        """The database's clock, milliseconds since the epoch.

        Read from the database once a second and carried on with this process's monotonic clock in between: asking
        in every transaction cost a tenth of the throughput. Source: docs/decisions/0004-database-clock.md.
        """
        if self._clock is not None:
            return self._clock()
        now = time.monotonic()
        if not self._carried.knows(now):
            for _ in range(_CLOCK_TRIES):
                before = time.monotonic()
                read = int(connection.exec_driver_sql(f"SELECT {_CLOCK}").scalar_one())
                now = time.monotonic()
                if self._carried.take(read, before, now) <= _CLOCK_ERROR_MS:
                    break
        return self._carried.at(now)

    def now_and(self, connection: sa.Connection, query: str) -> tuple[int, Any]:
        """The clock and the one value of a query, in one statement: for who looks every second anyway."""
        if self._clock is not None:
            return self._clock(), connection.exec_driver_sql(query).scalar_one()
        before = time.monotonic()
        read, value = connection.exec_driver_sql(f"SELECT {_CLOCK}, ({query})").one()
        now = time.monotonic()
        self._carried.take(int(read), before, now)
        return self._carried.at(now), value

    def connect(self) -> sa.Connection:
        """A connection to keep. Raises StoreUnavailable."""
        with translated():
            return self.engine.connect()

    @contextmanager
    def writing(self, connection: sa.Connection) -> Iterator[None]:
        """One write transaction on this connection: committed at the end, rolled back by any exception."""
        with translated(), self._writer, connection.begin():
            yield

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A write transaction on a connection of the pool."""
        with self.connection() as connection, self.writing(connection):
            yield connection

    @contextmanager
    def connection(self) -> Iterator[sa.Connection]:
        """A connection of the pool, errors translated."""
        with translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection for reading: waits for nobody, locks nothing; each statement sees what is committed then."""
        with translated(), self.readers.connect() as connection:
            yield connection.execution_options(tmc_reading=True)

    @contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        """As `reading`, but all statements see one moment."""
        with self.reading() as connection:
            if self.is_sqlite:  # one deferred transaction: everything is as at its first read
                yield connection
                return
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
            try:
                yield connection
            except BaseException:
                connection.invalidate()  # these connections are put away without a rollback
                raise
            connection.exec_driver_sql("COMMIT")

    def lock_alone(self) -> None:
        """Refuse a second server on this database; the lock goes with the process. Repeat it to see that it holds.

        Raises DatabaseTaken, StoreUnavailable.
        """
        if self.is_sqlite:
            self._lock_file()
        elif self._alone is None or not self._holds_alone():
            with translated():
                self._alone = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                got = self._alone.exec_driver_sql(f"SELECT GET_LOCK('{self._alone_name}', 10)").scalar_one()
            if got != 1:
                raise DatabaseTaken(
                    f"Another server uses {self!r}: built-in delivery serves one server, stop the other."
                )

    def refuse_alone(self) -> None:
        """Start beside other servers: refused while one that must be alone is here, and on SQLite.

        Raises DatabaseTaken, StoreUnavailable.
        """
        if self.is_sqlite:
            self._lock_file()
            return
        with self.connection() as connection:
            if not connection.exec_driver_sql(f"SELECT IS_FREE_LOCK('{self._alone_name}')").scalar_one():
                raise DatabaseTaken(f"A server with built-in delivery uses {self!r}: stop it first.")

    @property
    def _alone_name(self) -> str:
        return f"tmc_server_{self.url.database}"

    def _holds_alone(self) -> bool:
        assert self._alone is not None
        try:
            return bool(self._alone.exec_driver_sql("SELECT 1").scalar_one())
        except sa.exc.DBAPIError:
            self._alone.invalidate()
            self._alone.close()
            self._alone = None
            return False

    def _lock_file(self) -> None:
        if self._file_lock is not None or self.url.database in (None, "", ":memory:"):
            return
        handle = Path(f"{self.url.database}.lock").open("w")  # noqa: SIM115 - held as long as the server lives
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            handle.close()
            raise DatabaseTaken(
                f"Another server uses {self.url.database}: SQLite serves one server, stop the other or use MariaDB."
            ) from exc
        self._file_lock = handle

    def close(self) -> None:
        if self._alone is not None:
            self._alone.invalidate()
            self._alone.close()
            self._alone = None
        self.engine.dispose()
        self.readers.dispose()
        if self._file_lock is not None:
            self._file_lock.close()
            self._file_lock = None


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A deferred transaction that turns from reading to writing may fail at once, whatever the busy timeout says.
    reading = connection.get_execution_options().get("tmc_reading", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _prepare_mysql(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO'")
    cursor.execute(f"SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = {LOCK_WAIT_S}")
    cursor.execute("SELECT VERSION()")
    if "MariaDB" in cursor.fetchone()[0]:
        cursor.execute("SET SESSION idle_transaction_timeout = 5")
    cursor.close()


def _note_use(_connection: Any, record: sa.pool.ConnectionPoolEntry) -> None:
    record.info["used"] = time.monotonic()


def _ping_after_rest(connection: Any, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
    """Find out that the server went away while this connection rested; the pool then makes a new one."""
    if time.monotonic() - record.info.get("used", time.monotonic()) > _REST_S:
        try:
            connection.ping()
        except Exception as exc:
            raise sa.exc.DisconnectionError from exc


def repeated(run: Callable[[], Result], tries: int = 5) -> Result:
    """Run a transaction again while it loses against others. Raises RowLocked when it always does."""
    for _ in range(tries):
        try:
            return run()
        except StoreConflict as exc:
            lost = exc
    raise RowLocked from lost


@dataclass(frozen=True)
class ShardMap:
    """Which database holds the catalog and which holds each of the 32 shards."""

    catalog: Database
    shards: Sequence[Database]

    def __post_init__(self) -> None:
        if len(self.shards) != SHARDS:
            raise ValueError(f"{len(self.shards)} shards are mapped, {SHARDS} are needed")

    @property
    def databases(self) -> list[Database]:
        """Each database once."""
        return list(dict.fromkeys([self.catalog, *self.shards]))

    def shards_in(self, database: Database) -> list[int]:
        return [shard for shard, holder in enumerate(self.shards) if holder is database]

    def close(self) -> None:
        for database in self.databases:
            database.close()
