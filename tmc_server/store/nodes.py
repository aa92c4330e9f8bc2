"""Node slots and heartbeats: which servers may make message numbers, until when, and which servers exist.

A slot is leased with an epoch. `high_ms` in the table is a promise made in advance: the holder makes no number with a
later time, so the next holder, which starts there, cannot repeat one, even if clocks went back in between.

The same heartbeat renews the row of this server run in `tmc_server`. A run whose row has expired is dead, and the
other servers redeliver what it handed over last. The row also says which version of the catalog this run uses. A
server that stores a change may bar an expired run from reading the catalog (`silenced`); that run then takes another
identity, as after any lost slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tmc_server.domain.ids import SLOTS, IdGenerator
from tmc_server.domain.ports.servers import ServerRun
from tmc_server.errors import NoIdentity
from tmc_server.store.activation import LONGEST_STALE_MS
from tmc_server.store.engines import Database, StoreConflict, is_over, repeating, wall_clock_ms
from tmc_server.store.records import record_of
from tmc_server.store.tables import node_slot, server

LEASE_MS = 10_000
_FORGET_MS = 86_400_000


def server_runs(connection: sa.Connection) -> list[ServerRun]:
    """Return all that are written down, in the order of their incarnations."""
    rows = connection.execute(sa.select(server).order_by(server.c.incarnation))
    return [record_of(ServerRun, row) for row in rows]


@dataclass(frozen=True)
class Lease:
    """incarnation: one number per server run, growing with every run of the slot."""

    slot: int
    epoch: int

    def __str__(self) -> str:
        return str(self.slot)

    @property
    def incarnation(self) -> int:
        return self.epoch * SLOTS + self.slot


class NodeSlots:
    """Leases one slot for this process. `run_once` keeps it; without it numbers and deliveries stop at the lease's end.

    owner: how operators know this server.  lease_ms: how long others wait before they take this server for gone.
    stale_ms: greatest age of a copy of the catalog that this server submits with.
    databases: identities of those in its configuration; no shard moves to another one while this server is alive.
    """

    def __init__(
        self,
        database: Database,
        owner: str,
        clock: Callable[[], int] = wall_clock_ms,
        lease_ms: int = LEASE_MS,
        monotonic: Callable[[], float] = time.monotonic,
        stale_ms: int = LONGEST_STALE_MS,
        databases: Collection[str] = (),
    ) -> None:
        self._database = database
        self._owner = owner
        self._stale_ms = stale_ms
        self._databases = databases
        self._catalog_version = 0
        self._clock = clock
        self._lease_ms = lease_ms
        self._monotonic = monotonic
        self._beat = float("-inf")
        self.lease: Lease | None = None
        self.ids = IdGenerator(clock)
        self.alive: Sequence[ServerRun] = ()
        self.gone: Sequence[ServerRun] = ()

    @property
    def name(self) -> str:
        """Return this server's name as ListServers has it."""
        return self._owner

    def incarnation(self) -> int | None:
        """This server run. None: its last heartbeat is so old that other servers may consider it dead."""
        lease = self.lease
        fresh = self._monotonic() - self._beat < self._lease_ms / 1000
        return lease.incarnation if lease is not None and fresh else None

    def run(self) -> int | None:
        """The incarnation of this server run, whether its heartbeat is over or not. None: it has none now."""
        lease = self.lease
        return lease.incarnation if lease is not None else None

    def acknowledge(self, version: int) -> None:
        """This copy of the catalog is in use: write it down now, and with every beat. Raises StoreUnavailable."""
        self._catalog_version = version
        lease = self.lease
        if lease is not None:
            self._write_version(lease, version)

    @repeating
    def _write_version(self, lease: Lease, version: int) -> None:
        with self._database.transaction() as connection:
            mine = server.update().where(server.c.incarnation == lease.incarnation)
            connection.execute(mine.where(server.c.catalog_version < version).values(catalog_version=version))

    def acquire(self) -> Lease:
        """Take a free slot. Raises NoIdentity when all are taken or the clock is wrong, StoreUnavailable."""
        self.ids.check_clock()
        for _ in range(5):
            try:
                beat = self._monotonic()
                with self._database.transaction() as connection:
                    lease, start, until = self._take(connection)
                    self._read_members(connection)
                self.lease, self._beat = lease, beat
                self.ids.lease(lease.slot, start, until)  # only now: an uncommitted slot is nobody's
                return lease
            except (StoreConflict, sa.exc.IntegrityError):
                continue  # another server took the same slot at the same moment
        raise NoIdentity("Every attempt to lease a node slot lost against another server: start this one again.")

    def _take(self, connection: sa.Connection) -> tuple[Lease, int, int]:
        """Returns: the lease, the first and the last millisecond of its numbers."""
        self._database.now(connection)
        for seen_ms in connection.execute(sa.select(server.c.seen_ms)).scalars():
            self._database.not_before(seen_ms)
        now = self._database.now(connection)
        rows = {row.slot: row for row in connection.execute(sa.select(node_slot).with_for_update())}
        free = [slot for slot in sorted(rows) if rows[slot].expires_ms <= now]
        fresh = next((slot for slot in range(SLOTS) if slot not in rows), None)
        expires = now + self._lease_ms
        until = max(now, self._clock()) + self._lease_ms
        if free:
            row = rows[free[0]]
            lease, start = Lease(row.slot, row.epoch + 1), row.high_ms
            until = max(until, start + self._lease_ms)
            values = {"epoch": lease.epoch, "owner": self._owner, "expires_ms": expires, "high_ms": until}
            connection.execute(node_slot.update().where(node_slot.c.slot == lease.slot).values(values))
        elif fresh is not None:
            lease, start = Lease(fresh, 1), 0
            connection.execute(
                node_slot.insert().values(slot=fresh, epoch=1, owner=self._owner, expires_ms=expires, high_ms=until)
            )
        else:
            raise NoIdentity(f"All {SLOTS} node slots are leased: stop servers that are not needed.")
        connection.execute(server.delete().where(server.c.expires_ms < now - _FORGET_MS))
        connection.execute(
            server.insert().values(
                incarnation=lease.incarnation,
                name=self._owner,
                started_ms=now,
                expires_ms=expires,
                catalog_version=self._catalog_version,
                stale_ms=self._stale_ms,
                silenced=0,
                seen_ms=now,
                known_databases=" ".join(self._databases),
            )
        )
        return lease, start, until

    def run_once(self) -> bool:
        """Keep the slot and look who else is there. Returns False: it was lost and another one was taken.

        Raises NoIdentity, StoreUnavailable.
        """
        lease = self.lease
        if lease is None:
            self.acquire()
            return False
        beat = self._monotonic()
        if beat - self._beat < self._lease_ms / 3000:
            if len(self.alive) > 1:  # alone there is nobody whose end has to be noticed soon
                with self._database.reading() as connection:
                    self._read_members(connection)
            return True
        kept, until = self._extend(lease)
        if kept:
            self._beat = beat
            self.ids.lease(lease.slot, 0, until)
            return True
        self.ids.lease(lease.slot, 0, 0)  # nothing more from the lost slot
        self.lease = None
        self.acquire()
        return False

    @repeating
    def _extend(self, lease: Lease) -> tuple[bool, int]:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            until = max(now, self._clock(), self.ids.high_ms) + self._lease_ms
            kept = connection.execute(
                node_slot.update()
                .where(
                    node_slot.c.slot == lease.slot,
                    node_slot.c.epoch == lease.epoch,
                    node_slot.c.owner == self._owner,
                    node_slot.c.expires_ms > now,
                )
                .values(expires_ms=now + self._lease_ms, high_ms=until)
            ).rowcount
            if kept:
                mine = server.update().where(server.c.incarnation == lease.incarnation, server.c.silenced == 0)
                beat = {"expires_ms": now + self._lease_ms, "catalog_version": self._catalog_version, "seen_ms": now}
                kept = connection.execute(mine.values(**beat)).rowcount
            self._read_members(connection)
        return bool(kept), until

    def _read_members(self, connection: sa.Connection) -> None:
        now = self._database.now(connection)
        runs = server_runs(connection)
        self.alive = [run for run in runs if not is_over(run.expires_ms, now)]
        self.gone = [run for run in runs if is_over(run.expires_ms, now)]

    def release(self, all_answered: bool = True) -> None:
        """Free the slot; the next holder starts after the last number made here.

        all_answered: nothing that was handed over is uncertain, so nobody has to hand it over again.
        """
        lease, self.lease = self.lease, None
        if lease is None:
            return
        high = self.ids.high_ms + 1
        self.ids.lease(lease.slot, 0, 0)
        self._free(lease, high, all_answered)

    @repeating
    def _free(self, lease: Lease, high_ms: int, all_answered: bool) -> None:
        with self._database.transaction() as connection:
            connection.execute(
                node_slot.update()
                .where(node_slot.c.slot == lease.slot, node_slot.c.epoch == lease.epoch)
                .values(expires_ms=0, high_ms=high_ms)
            )
            mine = server.c.incarnation == lease.incarnation
            if all_answered:
                connection.execute(server.delete().where(mine))
            else:
                connection.execute(server.update().where(mine).values(expires_ms=self._database.now(connection)))
