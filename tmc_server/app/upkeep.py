"""Background jobs of a server about itself: its leases, its copy of the catalog, its exclusive lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tmc_common.eventlog import EventLog
from tmc_server.app.outlets import Outlets
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.reading import AuditTrail
from tmc_server.duties.periodic import Periodic
from tmc_server.duties.rescuing import Rescuing
from tmc_server.errors import Retryable
from tmc_server.metrics import METRICS
from tmc_server.rpc.authentication import FailedLogin, FailedLogins
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.leases import ShardLeases
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.shard_map import as_ranges

log = EventLog("tmc.app")


class Wakeup:
    """Wakes duties; those who notify it are made before the duties are. From any thread."""

    def __init__(self) -> None:
        self._duties: list[Periodic] = []

    def register(self, duties: Sequence[Periodic]) -> None:
        self._duties.extend(duties)

    def notify(self) -> None:
        for duty in self._duties:
            duty.wake()


def beat(nodes: NodeSlots) -> bool:
    """Give this server's sign of life. Returns: whether to try again at once."""
    kept = nodes.run_once()
    METRICS.servers_alive.set(len(nodes.alive))
    return not kept


class ShardKeeping:
    """The leases of one database's shards, and what servers that are gone left behind there. everyone: all leases here."""

    def __init__(
        self, leases: ShardLeases, rescuing: Rescuing, everyone: Sequence[ShardLeases], redeliver: Callable[[], None]
    ) -> None:
        self._leases = leases
        self._rescuing = rescuing
        self._everyone = everyone
        self._redeliver = redeliver

    def run_once(self) -> bool:
        """Returns: whether there may be more to rescue at once."""
        changed = self._leases.run_once()
        rescued = self._rescue()  # before what is due there is counted as tried once more
        held = sum(len(each.held()) for each in self._everyone)
        if changed:
            log.info("shards_leased", "this server looks after %d shards", held)
            self._redeliver()
        METRICS.leases_held.set(held)
        return rescued

    def take_up(self) -> None:
        """Take leases before the first call. A database that is away is looked after later."""
        try:
            while self.run_once():
                pass
        except Retryable as exc:
            log.warning("shards_delayed", "shards are looked after later: %s", exc)

    def release(self) -> None:
        try:
            self._leases.release()
        except Retryable as exc:
            log.warning("leases_kept", "shards stay leased until their leases expire: %s", exc)

    def _rescue(self) -> bool:
        rescued = self._rescuing.run_once()
        if rescued:
            METRICS.rescued.inc(rescued)
            log.info("deliveries_rescued", "%d deliveries of a server that is gone are due again", rescued)
            self._redeliver()
        return rescued > 0


class CatalogFollowing:
    """Keeps the copy of the catalog current, and applies a new one to what is running, whichever thread read it.

    die: called from this duty's thread: the server cannot continue.
    """

    def __init__(
        self,
        watch: CatalogWatch,
        outlets: Outlets,
        shards: ShardMap,
        die: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._outlets = outlets
        self._shards = shards
        self._die = die
        self._followed = 0  # version of the catalog

    def run_once(self) -> bool:
        changed = self._watch.run_once()
        if self._watch.current.version != self._followed:
            self._follow(self._watch.current)
        return changed

    def _follow(self, catalog: Catalog) -> None:
        self._followed = catalog.version
        self._outlets.catalog_changed()
        if unknown := self._shards.follow(catalog.version, catalog.shard_map, catalog.frozen):
            log.critical(
                "shard_map_changed",
                "shard %s is in a database that this server's configuration does not know: add it to [store]",
                as_ranges(unknown),
            )
            self._die()
        if catalog.superseded:
            self._outlets.finish(frozenset(catalog.superseded))


def note_logins(failed: FailedLogins, trail: AuditTrail) -> None:
    """Write failed logins into the audit trail: a flood of them becomes a few rows."""

    def note(login: FailedLogin) -> None:
        what = f"{login.count} in a minute; the last one as app {login.app} from {login.peer}"
        trail.add("center", "failed logins", f"credentials {login.kind}", what)

    failed.write(note)


def stay_alone(database: Database, die: Callable[[], None]) -> None:
    """Hold the exclusive lock of a database, or die."""
    try:
        database.hold_exclusively()
    except DatabaseTaken as exc:
        log.critical("database_shared", "%s", exc)
        die()
