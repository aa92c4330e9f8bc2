"""Node slots: who may make message numbers, until when, and where a slot's next holder has to start.

A slot is leased with an epoch. `high_ms` in the table is a promise made in advance: the holder makes no number with a
later time, so the next holder, who starts there, cannot repeat one, even if clocks went back in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from tmc_server.domain.ids import SLOTS, IdGenerator
from tmc_server.errors import NoIdentity
from tmc_server.store.engines import Database, StoreConflict, repeated, wall_clock_ms
from tmc_server.store.tables import node_slot

LEASE_MS = 30_000


@dataclass(frozen=True)
class Lease:
    """incarnation: one number per server run, growing with every run of the slot."""

    slot: int
    epoch: int

    @property
    def incarnation(self) -> int:
        return self.epoch * SLOTS + self.slot


class NodeSlots:
    """Leases one slot for this process. `run_once` keeps it; without it numbers stop at the lease's end."""

    def __init__(self, database: Database, owner: str, clock: Callable[[], int] = wall_clock_ms) -> None:
        self._database = database
        self._owner = owner
        self._clock = clock
        self.lease: Lease | None = None
        self.ids = IdGenerator(clock)

    def acquire(self) -> Lease:
        """Take a free slot. Raises NoIdentity when all are taken, StoreUnavailable."""
        for _ in range(5):
            try:
                with self._database.transaction() as connection:
                    lease, start, until = self._take(connection)
                self.lease = lease
                self.ids.lease(lease.slot, start, until)  # only now: an uncommitted slot is nobody's
                return lease
            except (StoreConflict, sa.exc.IntegrityError):
                continue  # another server took the same slot at the same moment
        raise NoIdentity("Every attempt to lease a node slot lost against another server: start this one again.")

    def _take(self, connection: sa.Connection) -> tuple[Lease, int, int]:
        """Returns: the lease, the first and the last millisecond of its numbers."""
        now = self._database.now(connection)
        rows = {row.slot: row for row in connection.execute(sa.select(node_slot).with_for_update())}
        free = [slot for slot in sorted(rows) if rows[slot].expires_ms <= now]
        fresh = next((slot for slot in range(SLOTS) if slot not in rows), None)
        until = max(now, self._clock()) + LEASE_MS
        if free:
            row = rows[free[0]]
            lease, start = Lease(row.slot, row.epoch + 1), row.high_ms
            until = max(until, start + LEASE_MS)
            values = {"epoch": lease.epoch, "owner": self._owner, "expires_ms": now + LEASE_MS, "high_ms": until}
            connection.execute(node_slot.update().where(node_slot.c.slot == lease.slot).values(values))
        elif fresh is not None:
            lease, start = Lease(fresh, 1), 0
            connection.execute(
                node_slot.insert().values(
                    slot=fresh, epoch=1, owner=self._owner, expires_ms=now + LEASE_MS, high_ms=until
                )
            )
        else:
            raise NoIdentity(f"All {SLOTS} node slots are leased: stop servers that are not needed.")
        return lease, start, until

    def run_once(self) -> bool:
        """Extend the lease, or take another slot when it is lost. Returns: the slot was kept."""
        lease = self.lease
        if lease is None:
            self.acquire()
            return False
        kept, until = repeated(lambda: self._extend(lease))
        if kept:
            self.ids.lease(lease.slot, 0, until)
            return True
        self.ids.lease(lease.slot, 0, 0)  # nothing more from the lost slot
        self.acquire()
        return False

    def _extend(self, lease: Lease) -> tuple[bool, int]:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            until = max(now, self._clock(), self.ids.high_ms) + LEASE_MS
            kept = connection.execute(
                node_slot.update()
                .where(
                    node_slot.c.slot == lease.slot,
                    node_slot.c.epoch == lease.epoch,
                    node_slot.c.owner == self._owner,
                    node_slot.c.expires_ms > now,
                )
                .values(expires_ms=now + LEASE_MS, high_ms=until)
            ).rowcount
        return bool(kept), until

    def release(self) -> None:
        """Free the slot; the next holder starts after the last number made here."""
        lease, self.lease = self.lease, None
        if lease is None:
            return
        high = self.ids.high_ms + 1
        self.ids.lease(lease.slot, 0, 0)
        repeated(lambda: self._free(lease, high))

    def _free(self, lease: Lease, high_ms: int) -> None:
        with self._database.transaction() as connection:
            connection.execute(
                node_slot.update()
                .where(node_slot.c.slot == lease.slot, node_slot.c.epoch == lease.epoch)
                .values(expires_ms=0, high_ms=high_ms)
            )
