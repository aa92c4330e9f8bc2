"""The store of one server, opened: databases, catalog, node slot. The first part of a start."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from tmc_common.eventlog import EventLog
from tmc_server.app.maintenance import CannotStart
from tmc_server.config import Config
from tmc_server.errors import Retryable
from tmc_server.store.activation import CatalogActivation
from tmc_server.store.catalog import CatalogStore
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.engines import ShardMap
from tmc_server.store.fitness import examine
from tmc_server.store.group_commit import BATCH_BYTES
from tmc_server.store.migrate import migrate
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.shard_map import check, settle

log = EventLog("tmc.app")


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """is_alone: no other server may use these databases."""

    shards: ShardMap
    catalog: CatalogStore
    nodes: NodeSlots
    watch: CatalogWatch
    activation: CatalogActivation
    lease_ms: int
    is_alone: bool

    def release_slot(self, clean: bool) -> None:
        """The next start need not wait for the lease to run out."""
        try:
            self.nodes.release(clean)
        except Retryable as exc:
            log.warning("node_slot_kept", "the node slot stays leased until it expires: %s", exc)


def open_store(config: Config, shards: ShardMap, is_open: bool, undo: ExitStack) -> OpenStore:
    """Blocks. Raises TmcError, DatabaseTaken, ShardsElsewhere; CannotStart: its settings are unsafe.

    is_open: see RunMode.  undo: gives back what was taken, should the start fail later.
    """
    is_alone = is_open or config.delivery.kind == "builtin"
    for database in shards.databases:
        database.hold_exclusively() if is_alone else database.refuse_beside_another()
    if is_open:
        settle(shards, some_are_made=True)
        migrate(shards)
    _demand_safe_settings(config, shards)
    check(shards)
    delay_ms = 0 if is_open else config.store.change_delay_ms
    catalog = CatalogStore(shards.catalog, delay_ms)
    lease_ms = round(config.server.lease_seconds * 1000)
    name = f"{socket.gethostname()}:{os.getpid()}"
    nodes = NodeSlots(shards.catalog, name, lease_ms=lease_ms, stale_ms=delay_ms, databases=shards.known)
    watch = CatalogWatch(catalog, nodes.run, nodes.acknowledge)
    store = OpenStore(
        shards=shards,
        catalog=catalog,
        nodes=nodes,
        watch=watch,
        activation=CatalogActivation(shards.catalog, watch.run_once, nodes.run, alone=is_alone),
        lease_ms=lease_ms,
        is_alone=is_alone,
    )
    # First the row, then the first look: a server that stores a change sees the row, or this one sees the change.
    nodes.acquire()
    undo.callback(store.release_slot, clean=True)
    watch.run_once()
    check(shards)  # again: from here on a change of the map is seen in the catalog
    return store


def _demand_safe_settings(config: Config, shards: ShardMap) -> None:
    bad = [
        f"{database!r}: {finding}"
        for database in shards.databases
        for finding in examine(database, BATCH_BYTES + config.limits.body_bytes)
        if not finding.ok
    ]
    if bad:
        raise CannotStart("This database is not ready to keep messages:\n" + "\n".join(bad))
