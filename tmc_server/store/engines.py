"""Connections: one Database per URL. What differs between kinds of databases is in `dialects`.

Driver errors are translated here and nowhere else: StoreUnavailable (retry later), StoreConflict (the transaction was
rolled back: run it again); anything else is a bug.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import SHARDS
from tmc_server.errors import RowLocked, StoreUnavailable
from tmc_server.store.dialects import dialect_of, url_of
from tmc_server.store.dialects.contract import Failure
from tmc_server.store.dialects.hosts import NoPrimary

log = EventLog("tmc.store")

P = ParamSpec("P")
Result = TypeVar("Result")
_CLOCK_FOR_S = 1.5  # the look at the catalog brings it every second
_CLOCK_ERROR_MS = 125.0  # as long as it may be off by more, a reading is repeated
_CLOCK_TRIES = 3
_CLOCK_DRIFT = 0.001  # two clocks run apart by less
_CLOCK_SET_BACK_MS = 1_000  # a smaller step back is taken at once
CLOCK_TOO_FAR_MS = 86_400_000  # a longer one is followed: catching up would take ten days and more
_CLOCK_SLOWED = 0.1


def is_over(end_ms: int, now: int) -> bool:
    """Return whether what was leased until end_ms is over. An end that far ahead is of a clock that was set back since."""
    return not now < end_ms <= now + CLOCK_TOO_FAR_MS


def over(end_ms: sa.Column[int], now: int) -> sa.ColumnElement[bool]:
    """Return `is_over` as a condition."""
    return sa.or_(end_ms <= now, end_ms > now + CLOCK_TOO_FAR_MS)


class StoreConflict(Exception):
    """The transaction lost against another one and was rolled back: run it again."""


class RowWaited(StoreConflict):
    """A row stayed locked for longer than we wait; the transaction was rolled back."""


def wall_clock_ms() -> int:
    """This machine's clock, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class CarriedClock:
    """Estimates a database's clock from occasional readings and, in between, this process's monotonic clock.

    A reading says only that the clock had this value at some moment between request and response. This bounds the
    offset of the two clocks from both sides, and the bounds of successive readings are intersected. So the error is
    at most half the duration of the fastest reading plus the drift since, and a slow response cannot shift the
    estimate: it goes back by no more than it may have been ahead. If new bounds exclude the old ones, the clock was
    set. Forward, we follow it. If it was set back, due times that are stored would be that much too far away: the estimate
    goes on from where it was, a tenth slower, until the clock has caught up. (By more than a day: we follow it.)
    Thread-safe: one attribute is replaced. Of two changes at once one may be lost; the next reading makes up for it.
    """

    def __init__(self) -> None:
        # Offset of the clocks in milliseconds: used, lower bound, upper bound; and the time of the reading.
        self._known: tuple[float, float, float, float] | None = None

    def knows(self, now: float) -> bool:
        """Return whether a reading is so fresh that none is needed."""
        return self._known is not None and now - self._known[3] <= _CLOCK_FOR_S

    def take(self, read: int, before: float, after: float) -> float:
        """Use a reading: the clock stood at `read` between `before` and `after`. Returns: the error now, at most, ms."""
        least, most = read - after * 1000, read + 1 - before * 1000  # `read` is cut to whole milliseconds
        used = (least + most) / 2
        if self._known is not None:
            known, low, high, known_at = self._known
            drift = (after - known_at) * 1000 * _CLOCK_DRIFT
            was_set = max(least, low - drift) > min(most, high + drift)
            if not was_set:
                least, most = max(least, low - drift), min(most, high + drift)
                used = min(max(known, least), most)
            was_ahead = known - high > _CLOCK_SET_BACK_MS
            if (was_set or was_ahead) and _CLOCK_SET_BACK_MS < known - used < CLOCK_TOO_FAR_MS:
                used = max(used, known - (after - known_at) * 1000 * _CLOCK_SLOWED)
        self._known = (used, least, most, after)
        return max(most - used, min(used, most) - least)

    def not_before(self, ms: int, now: float) -> None:
        """Another server has seen this time already. Something must have been read."""
        assert self._known is not None
        used, least, most, at = self._known
        if ms - now * 1000 - used < CLOCK_TOO_FAR_MS:
            self._known = (max(used, ms - now * 1000), least, most, at)

    @property
    def ahead_ms(self) -> int:
        """Return how far the estimate is ahead of a clock that was set back."""
        return round(max(self._known[0] - self._known[2], 0)) if self._known is not None else 0

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
        self.url = url_of(url)
        self.dialect = dialect_of(self.url.get_backend_name())
        self._carried = CarriedClock()
        self._clock = clock
        self._writer = threading.RLock() if self.dialect.has_one_writer else nullcontext()
        self.hosts = self.dialect.hosts(self.url)
        self.engine, self.readers = self.dialect.engines(self.url, self.hosts, pool_size, patient)
        self._exclusive = self.dialect.exclusive_lock(self.url, self.hosts, self.engine)

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
                read = self._read_clock(connection)
                now = time.monotonic()
                if self._take(read, before, now) <= _CLOCK_ERROR_MS:
                    break
        return self._carried.at(now)

    def now_and(self, connection: sa.Connection, query: str) -> tuple[int, Any]:
        """The clock and the one value of a query, in one statement: for who looks every second anyway."""
        if self._clock is not None:
            return self._clock(), connection.exec_driver_sql(query).scalar_one()
        before = time.monotonic()
        if self.dialect.clock is None:
            read, value = wall_clock_ms(), connection.exec_driver_sql(query).scalar_one()
        else:
            read, value = connection.exec_driver_sql(f"SELECT {self.dialect.clock}, ({query})").one()
        now = time.monotonic()
        self._take(int(read), before, now)
        return self._carried.at(now), value

    def not_before(self, ms: int) -> None:
        """Another server has read this time here, before the clock was set back. To be called after `now`."""
        if self._clock is None:
            self._carried.not_before(ms, time.monotonic())

    @property
    def clock_ahead_ms(self) -> int:
        """Return how far `now` is ahead of the database's clock, since that was set back."""
        return self._carried.ahead_ms

    def _read_clock(self, connection: sa.Connection) -> int:
        if self.dialect.clock is None:
            return wall_clock_ms()
        return int(connection.exec_driver_sql(f"SELECT {self.dialect.clock}").scalar_one())

    def _take(self, read: int, before: float, after: float) -> float:
        was_ahead = self._carried.ahead_ms > _CLOCK_SET_BACK_MS
        error = self._carried.take(read, before, after)
        if self._carried.ahead_ms > _CLOCK_SET_BACK_MS and not was_ahead:
            log.warning(
                "clock_set_back",
                "the clock of %s was set back by %.1f s: the center's time goes on, a tenth slower, until it has caught up",
                self.url.render_as_string(hide_password=True),
                self._carried.ahead_ms / 1000,
            )
        return error

    def connect(self) -> sa.Connection:
        """A connection to keep. Raises StoreUnavailable."""
        with self._translated():
            return self.engine.connect()

    @contextmanager
    def writing(self, connection: sa.Connection) -> Iterator[None]:
        """One write transaction on this connection: committed at the end, rolled back by any exception."""
        with self._translated(), self._writer, connection.begin():
            yield

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A write transaction on a connection of the pool."""
        with self.connection() as connection, self.writing(connection):
            yield connection

    @contextmanager
    def connection(self) -> Iterator[sa.Connection]:
        """A connection of the pool, errors translated."""
        with self._translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection for reading, without locks or waits; each statement sees what is committed by then."""
        with self._translated(), self.readers.connect() as connection:
            yield connection.execution_options(tmc_reading=True)

    @contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        """Read as `reading` does, but all statements see one moment."""
        with self.reading() as connection, self.dialect.snapshot(connection):
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of the driver into ours."""
        try:
            yield
        except (sa.exc.TimeoutError, NoPrimary) as exc:
            raise StoreUnavailable from exc
        except sa.exc.DBAPIError as exc:
            match self.dialect.failure_of(exc):
                case Failure.ROW_WAITED:
                    raise RowWaited(str(exc.orig)) from exc
                case Failure.CONFLICT:
                    raise StoreConflict(str(exc.orig)) from exc
                case Failure.TABLE_MISSING:
                    raise StoreUnavailable.table_missing() from exc
                case Failure.UNAVAILABLE:
                    raise StoreUnavailable from exc
                case Failure.FAULT:
                    raise

    def hold_exclusively(self) -> None:
        """Lock out other servers from this database until this process ends. Repeat to verify that the lock holds.

        Raises DatabaseTaken, StoreUnavailable.
        """
        with self._translated():
            self._exclusive.hold()

    def refuse_beside_another(self) -> None:
        """Start beside other servers: refused while one that must be alone is here, and on SQLite.

        Raises DatabaseTaken, StoreUnavailable.
        """
        with self._translated():
            self._exclusive.refuse_beside_another()

    def close(self) -> None:
        self._exclusive.let_go()
        self.engine.dispose()
        self.readers.dispose()
        self._exclusive.close()


def repeated(run: Callable[[], Result], tries: int = 5) -> Result:
    """Run a transaction again while it loses against others. Raises RowLocked when it always does."""
    for _ in range(tries):
        try:
            return run()
        except StoreConflict as exc:
            lost = exc
    raise RowLocked from lost


def repeating(transaction: Callable[P, Result]) -> Callable[P, Result]:
    """Run it again while it loses against others, see `repeated`."""

    @functools.wraps(transaction)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        return repeated(lambda: transaction(*args, **kwargs))

    return run


class ShardMap:
    """The databases of the catalog and of each of the 32 shards: first as configured, then as the catalog says.

    spare: further databases, to which shards can be moved.  Thread-safe: `shards` is replaced as a whole.
    """

    def __init__(self, catalog: Database, shards: Sequence[Database], spare: Sequence[Database] = ()) -> None:
        if len(shards) != SHARDS:
            raise ValueError(f"{len(shards)} shards are mapped, {SHARDS} are needed")
        self.catalog = catalog
        self.shards: Sequence[Database] = tuple(shards)
        self.configured = self.shards
        self.homes = list(dict.fromkeys([*shards, *spare]))
        self.by_identity: dict[str, Database] = {}
        self._followed = -1
        self._frozen: Collection[Shard] = ()
        self._following = threading.Lock()

    @property
    def databases(self) -> list[Database]:
        """Return each database once, also those that hold no shard now."""
        return list(dict.fromkeys([self.catalog, *self.homes]))

    def shards_in(self, database: Database) -> list[Shard]:
        return [Shard(shard) for shard, holder in enumerate(self.shards) if holder is database]

    def usable_in(self, database: Database) -> list[Shard]:
        """Return its shards but for those that are frozen: a duty fails for all its shards if it meets one."""
        return [shard for shard in self.shards_in(database) if shard not in self._frozen]

    def holder(self, shard: Shard) -> Database:
        return self.shards[shard]

    def follow(self, version: int, places: Mapping[Shard, str], frozen: Collection[Shard]) -> Sequence[Shard]:
        """Use the shards where the catalog of this version says that they are, by the identities of databases.

        frozen: those that nobody can use now.

        Returns: those in a database that is not configured; then nothing changes.
        """
        unknown = [shard for shard, identity in places.items() if self.by_identity.get(identity) not in self.homes]
        with self._following:
            if places and not unknown and version >= self._followed:
                self._followed, self._frozen = version, frozen
                self.shards = tuple(self.by_identity[places[Shard(shard)]] for shard in range(SHARDS))
        return unknown

    @property
    def known(self) -> Sequence[str]:
        """Return the identities of the databases in which shards can be."""
        return [identity for identity, database in self.by_identity.items() if database in self.homes]

    def number_of(self, database: Database) -> Shard:
        """Return a number for a home in ids that people see: its first shard as configured, or one behind all shards."""
        if database in self.configured:
            return Shard(self.configured.index(database))
        return Shard(SHARDS + self.homes.index(database))

    def close(self) -> None:
        for database in self.databases:
            database.close()
