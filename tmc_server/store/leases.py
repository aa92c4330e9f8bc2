"""Leases on shards: which server handles what is due in a shard. One row per shard, in the shard's own database.

A lease only avoids duplicate work and guards nothing by itself: every claim checks the lease row (owner and epoch) in
its own statement, and rows are guarded by their state and attempt. By its own monotonic clock, the owner stops before
other servers may take over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.store.engines import Database, StoreConflict, is_over, over, repeating
from tmc_server.store.tables import lease

WITHOUT_OWNER_MS = 2_000  # any server may take a shard that had no owner for this long, even above its fair share
LAST_RESORT_MS = 20_000  # also one that rests or is drained
# A lease nobody took is kept this long, or until servers come or go; then it is offered again.
ADOPTED_S = 60.0


@dataclass(frozen=True, slots=True)
class ShardLease:
    """owner: incarnation of the server run.  epoch: grows with every owner."""

    owner: int
    epoch: int

    @property
    def guard(self) -> dict[str, int]:
        """Parameters of statements that hold only while this lease does."""
        return {"owner": self.owner, "epoch": self.epoch}


class ShardLeases:
    """The leases of one server on the shards of one database.

    shards: those of the database now.  identity: this server run, None while its heartbeat is over.
    sharing: the runs with a heartbeat that are not drained. A run that is not among them frees what it holds.
    """

    def __init__(
        self,
        database: Database,
        shards: Callable[[], Sequence[Shard]],
        identity: Callable[[], int | None],
        sharing: Callable[[], Collection[int]],
        lease_ms: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._shards_now = shards
        self._shards = shards()
        self._identity = identity
        self._sharing = sharing
        self._lease_ms = lease_ms
        self._monotonic = monotonic
        self._held: Mapping[Shard, ShardLease] = {}
        self._renewed = float("-inf")
        self._releasing = False
        self._rest_until = float("-inf")
        self._offered: set[Shard] = set()  # freed for others
        self._adopted: dict[Shard, float] = {}  # leases nobody took, and until when they are kept
        self._known: set[int] = set()

    def rest(self, seconds: float) -> None:
        """Leave the shards to others for a while, if there are others. From any thread."""
        self._rest_until = self._monotonic() + seconds

    def held(self) -> Mapping[Shard, ShardLease]:
        """Leases by shard; empty once they may have expired by this server's own clock."""
        return self._held if self._monotonic() - self._renewed < self._lease_ms / 1000 else {}

    def run_once(self) -> bool:
        """Renew leases, release those above the fair share, take free ones. Returns: whether anything changed."""
        me = self._identity()
        self._shards = self._shards_now()
        if me is None or self._releasing or not self._shards:
            self._held = {}
            return False
        began = self._monotonic()
        renew = began - self._renewed >= self._lease_ms / 3000
        if not renew and self._held.keys() == set(self._shards) and set(self._sharing()) <= {me}:
            return False  # all is ours and nobody else is there: nothing to take, nothing to give
        before = self._held
        held, written = self._turn(me, renew)
        if written:
            self._renewed = began
        self._held = held
        return held != before

    @repeating
    def _turn(self, me: int, renew: bool) -> tuple[dict[Shard, ShardLease], bool]:
        """Returns: what is held, and whether all of it was taken or renewed just now."""
        now, rows = self._read()
        if len(rows) < len(self._shards):
            self._create([shard for shard in self._shards if shard not in rows])
            now, rows = self._read()
        mine = {
            row.shard: ShardLease(me, row.epoch) for row in rows.values() if row.owner == me and row.expires_ms > now
        }
        renew = renew or not mine.keys() <= self._held.keys()  # one that comes back after a freeze is older
        sharing = set(self._sharing())
        aside = bool(sharing - {me}) and (me not in sharing or self._monotonic() < self._rest_until)
        share = 0 if aside else -(-len(self._shards) // len(sharing | {me}))
        if sharing != self._known:
            self._known = sharing
            self._offered.clear()
            self._adopted.clear()
        self._offered -= {row.shard for row in rows.values() if row.owner not in (0, me)}  # not in vain
        surplus = [shard for shard in sorted(mine) if self._adopted.get(shard, 0.0) <= self._monotonic()][share:]
        free = [row for row in rows.values() if is_over(row.expires_ms, now)]
        within, adopted = _wanted(free, me, share - len(mine), now - (LAST_RESORT_MS if aside else WITHOUT_OWNER_MS))
        wanted = sorted([*within, *adopted], key=lambda row: row.shard)
        if not (renew or surplus or wanted):
            return mine, False
        with self._database.transaction() as connection:
            if surplus:
                self._free(connection, me, surplus, now)
                self._offered.update(surplus)
            kept = {shard: held for shard, held in mine.items() if shard not in surplus}
            if kept:
                renewed = lease.update().where(
                    lease.c.shard.in_(sorted(kept)), lease.c.owner == me, lease.c.expires_ms > now
                )
                if connection.execute(renewed.values(expires_ms=now + self._lease_ms, seen_ms=now)).rowcount != len(
                    kept
                ):
                    raise StoreConflict("a lease went while it was renewed")
            for row in wanted:
                taken = lease.update().where(
                    lease.c.shard == row.shard, lease.c.epoch == row.epoch, over(lease.c.expires_ms, now)
                )
                values = {"owner": me, "epoch": row.epoch + 1, "expires_ms": now + self._lease_ms, "seen_ms": now}
                if connection.execute(taken.values(values)).rowcount:
                    kept[row.shard] = ShardLease(me, row.epoch + 1)
                    if row in adopted and (aside or row.shard in self._offered):
                        self._adopted[row.shard] = self._monotonic() + ADOPTED_S
            return kept, True

    def _read(self) -> tuple[int, dict[Shard, Any]]:
        """The time and the rows by shard."""
        with self._database.reading() as connection:
            query = sa.select(lease).where(lease.c.shard.in_(self._shards)).order_by(lease.c.shard)
            found = {row.shard: row for row in connection.execute(query)}
            self._database.now(connection)
            for row in found.values():
                self._database.not_before(row.seen_ms)
            return self._database.now(connection), found

    def _create(self, missing: Sequence[Shard]) -> None:
        rows = [{"shard": shard, "owner": 0, "epoch": 0, "expires_ms": 0} for shard in missing]
        try:
            with self._database.transaction() as connection:
                connection.execute(lease.insert(), rows)
        except sa.exc.IntegrityError as exc:
            raise StoreConflict("another server made the same rows at the same moment") from exc

    @staticmethod
    def _free(connection: sa.Connection, me: int, shards: Sequence[Shard], now: int) -> None:
        mine = lease.update().where(lease.c.shard.in_(shards), lease.c.owner == me)
        connection.execute(mine.values(owner=0, expires_ms=now))

    def release(self) -> None:
        """Free all leases, so that others can take them at once, and take no more."""
        self._releasing = True
        held, self._held = self._held, {}
        me = next(iter(held.values())).owner if held else None
        if me is not None:
            self._release(me, sorted(held))

    @repeating
    def _release(self, me: int, shards: Sequence[Shard]) -> None:
        with self._database.transaction() as connection:
            self._free(connection, me, shards, self._database.now(connection))


def _wanted(free: Sequence[Any], me: int, share_left: int, before_ms: int) -> tuple[list[Any], list[Any]]:
    """Choose free leases to take: `share_left` of them, and those that have had no owner since `before_ms`.

    Servers begin at different shards, so that two rarely want the same ones.
    """
    count = len(free)
    turned = [free[(i + me) % count] for i in range(count)]
    within = turned[: max(0, share_left)]
    return within, [row for row in turned[len(within) :] if is_over(row.expires_ms, before_ms)]
