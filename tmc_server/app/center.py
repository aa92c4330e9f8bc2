"""One server. Start and stop read as lists."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import uvloop

from tmc_common.addresses import is_loopback
from tmc_server.alerts.log import LogSink
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.app.checks import Checks
from tmc_server.app.maintenance import CannotStart, open_shards
from tmc_server.app.memory import keep_memory_small
from tmc_server.app.outlets import Outlets
from tmc_server.app.surroundings import Surroundings
from tmc_server.archives.local import LocalArchive
from tmc_server.config import Config
from tmc_server.delivery.window import UNCERTAIN_MS
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import AlertSink
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.alerting import Alerting, Grouping
from tmc_server.duties.checking import Checking
from tmc_server.duties.counting import Counting, Gauging
from tmc_server.duties.periodic import Periodic
from tmc_server.duties.redelivering import Redelivering
from tmc_server.duties.rescuing import Rescuing
from tmc_server.duties.retention import Retention
from tmc_server.errors import Retryable, StoreUnavailable, TmcError
from tmc_server.metrics import METRICS
from tmc_server.requests.acking import Acking
from tmc_server.requests.administering import Administering
from tmc_server.requests.caller import Allowance, Budget, RateLimiter
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.first_use import FirstUse
from tmc_server.requests.preparing import Preparing
from tmc_server.requests.signing import Signing
from tmc_server.requests.undecided import Undecided
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.calls import Edge
from tmc_server.rpc.doorkeeper import Doorkeeper
from tmc_server.rpc.server import GrpcServer, build
from tmc_server.rpc.servicers import AdminServicer, ConsumptionServicer, MessageServicer
from tmc_server.store.activation import CatalogActivation
from tmc_server.store.batch import ShardWriter
from tmc_server.store.catalog import CatalogStore, CatalogWatch
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.due import DueConsumptions, OpenCounts, SqlAlertOutbox
from tmc_server.store.due_checks import DueMessages, UndecidedMessages
from tmc_server.store.engines import Database
from tmc_server.store.fitness import examine
from tmc_server.store.group_commit import GroupCommit, Limits, ShardedGroupCommit
from tmc_server.store.leases import ShardLeases
from tmc_server.store.migrate import migrate
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.progress import SqlQueueProgress
from tmc_server.store.reading import Reader
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.scanning import DueIndex, earliest_check, earliest_delivery
from tmc_server.store.shard_map import ShardsElsewhere, check
from tmc_server.store.standing import StandingCounts
from tmc_server.telemetry import MetricsEndpoint

log = logging.getLogger("tmc.app")

_RETENTION_S = 60.0
_GAUGES_S = 15.0
_DOORS_S = 1.0
_WOKEN_S = 30.0  # the scan wakes these duties; by themselves they look so often
SAME_SIGNAL_S = 1.0  # a terminal and a supervisor may both pass on one wish to stop


class Center:
    """dev: schema made by itself, no credentials, names made at first use, changes at once."""

    def __init__(self, config: Config, dev: bool = False) -> None:
        self._config = config
        self._dev = dev
        self._alone = dev or config.delivery.kind == "builtin"
        self._shards = open_shards(config)
        self._dead = asyncio.Event()
        self._followed = 0  # version of the catalog
        self._duties: list[Periodic] = []
        self._redelivering: list[Periodic] = []
        self._asking: list[Periodic] = []
        self._metrics = MetricsEndpoint(config.telemetry.listen)

    @property
    def port(self) -> int:
        return self._grpc.port

    async def start(self) -> None:
        """Serving when it returns. Raises CannotStart."""
        try:
            with ExitStack() as undo:
                undo.callback(self._shards.close)
                self._metrics.start()  # a port that is taken ends the start before anything is leased or handed over
                undo.callback(self._metrics.stop)
                await asyncio.to_thread(self._open_store, undo)
                self._build(asyncio.get_running_loop())
                self._commit.start()
                await asyncio.to_thread(self._take_up)
                await self._grpc.server.start()
                for duty in self._duties:
                    duty.start()
                await self._grpc.set_serving(True)
                for duty in self._findable:
                    duty.start()
                undo.pop_all()
        except (TmcError, DatabaseTaken, ShardsElsewhere, OSError) as exc:
            raise CannotStart(str(exc)) from exc
        log.info("serving on port %d as node %s", self.port, self._nodes.lease)
        if not (self._dev or self._config.tls.certificate or is_loopback(self._config.server.listen)):
            log.warning("keys travel in the clear: set [tls], or listen on loopback only")

    def _open_store(self, undo: ExitStack) -> None:
        for database in self._shards.databases:
            database.hold_exclusively() if self._alone else database.refuse_beside_another()
        if self._dev:
            migrate(self._shards)
        bad = [
            f"{database!r}: {finding}"
            for database in self._shards.databases
            for finding in examine(database, self._config.limits.batch_bytes + self._config.limits.body_bytes)
            if not finding.ok
        ]
        if bad:
            raise StoreUnavailable("This database is not ready to keep messages:\n" + "\n".join(bad))
        self._shard_map = check(self._shards)
        delay_ms = 0 if self._dev else self._config.store.change_delay_ms
        self._store = CatalogStore(self._shards.catalog, delay_ms)
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._nodes = NodeSlots(self._shards.catalog, name, lease_ms=self._lease_ms, stale_ms=delay_ms)
        self._watch = CatalogWatch(self._store, self._nodes.run, self._nodes.acknowledge)
        # First the row, then the first look: whoever stores a change sees the row, or this server sees the change.
        self._nodes.acquire()
        undo.callback(self._release_slot, clean=True)  # the next start need not wait for the lease to run out
        self._watch.run_once()
        check(self._shards)  # again: from here on a change of the map is seen in the catalog
        self._activation = CatalogActivation(
            self._shards.catalog, self._watch.run_once, self._nodes.run, alone=self._alone
        )

    @property
    def _lease_ms(self) -> int:
        return round(self._config.server.lease_seconds * 1000)

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        config, limits = self._config, self._config.limits
        shard_databases = [database for database in self._shards.databases if self._shards.shards_in(database)]
        outboxes = [SqlAlertOutbox(database) for database in shard_databases]
        progress = SqlQueueProgress(self._shards.catalog, self._nodes.incarnation)
        self._outlets = Outlets(config, loop, self._watch, outboxes[0], progress, self._wake_redelivery)
        self._surroundings = Surroundings(config, self._shards.catalog)
        self._checks = Checks(config, self._surroundings.instances)
        self._writers = {
            database: ShardWriter(
                database,
                self._watch,
                self._outlets.outlet,
                self._nodes.incarnation,
                take_back=self._outlets.answers.give_back,
            )
            for database in self._shards.databases
        }
        self._commit = self._group_commit(loop)
        self._outlets.answers.performer = self._commit
        self._counting = Counting(self._watch, OpenCounts(self._shards.shards))
        self._leases = [
            ShardLeases(
                database,
                self._shards.shards_in(database),
                self._nodes.incarnation,
                lambda: [run.incarnation for run in self._nodes.alive],
                self._lease_ms,
            )
            for database in shard_databases
        ]
        held = list(zip(shard_databases, self._leases, strict=True))
        self._work = [DueConsumptions(self._writers[database], leases, self._watch) for database, leases in held]
        self._checking = [
            Checking(
                DueMessages(self._writers[database], leases, self._watch),
                self._checks.asking,
                self._watch,
                self._wake_checking,
            )
            for database, leases in held
        ]
        self._looks = [
            DueIndex(database, leases, self._watch, earliest_delivery, earliest_check) for database, leases in held
        ]
        METRICS.names.limit = config.telemetry.series
        self._gauging = Gauging(
            [StandingCounts(database, leases, self._watch) for database, leases in held], self._watch
        )
        servicers, edge = self._servicers(), self._edge()
        self._grpc: GrpcServer = build(servicers, edge, config.server.listen, config.tls, limits)
        doors = Periodic("doors", edge.doorkeeper.sweep, _DOORS_S)
        edge.doorkeeper.wake = doors.wake
        self._duties = [*self._make_duties(outboxes), *self._outlets.duties(), doors]
        self._findable = self._surroundings.duties(self._grpc.port)

    def _servicers(self) -> dict[str, object]:
        limits = self._config.limits
        first_use = self._first_use() if self._dev else None
        self._authentication = Authentication(
            self._watch, first_use.app if first_use else None, bind_apps=self._config.tls.bind_apps
        )
        rate = RateLimiter(limits.items_per_second)
        self._administering = administering = Administering(
            self._store, self._watch, Reader(self._shards), self._commit, self._watch.run_once, self._activation,
            self._surroundings.instances, self._outlets,
        )  # fmt: skip
        produce, consume = (first_use.topic_to_produce, first_use.topic_to_consume) if first_use else (None, None)
        preparing = Preparing(
            self._watch, self._nodes.ids, self._commit, rate, self._counting, limits.body_bytes,
            self._surroundings.senders, *([produce] if produce else []),
        )  # fmt: skip
        deciding = Deciding(self._watch, self._commit, rate, self._counting)
        acking = Acking(self._watch, self._commit, rate)
        signing = Signing(
            self._store, self._watch, administering.change, self._outlets.alarm, self._config.delivery.signatures
        )
        return {
            "tmc.v1.MessageService": MessageServicer(preparing, deciding, administering),
            "tmc.v1.ConsumptionService": ConsumptionServicer(
                acking,
                administering,
                signing,
                self._outlets.streams,
                self._outlets.broker,
                *([consume] if consume else []),
            ),
            "tmc.v1.AdminService": AdminServicer(administering, self._undecided(administering), signing),
        }

    def _edge(self) -> Edge:
        limits = self._config.limits
        allowance = Allowance(
            calls_per_second=limits.calls_per_second,
            bytes_per_second=limits.bytes_per_second,
            open_calls=limits.open_calls,
            open_bytes=limits.open_bytes,
            streams=limits.streams,
        )
        return Edge(self._authentication, Budget(allowance), Doorkeeper(limits.connections))

    def _undecided(self, administering: Administering) -> Undecided:
        desk = UndecidedMessages([self._writers[database] for database in self._shards.shards])
        return Undecided(
            self._store, self._watch, desk, Reader(self._shards), self._checks.asking, administering.change
        )

    def _group_commit(self, loop: asyncio.AbstractEventLoop) -> ShardedGroupCommit:
        limits = self._config.limits
        databases = self._shards.databases
        commits = [
            GroupCommit(
                self._writers[database],
                Limits(
                    lanes=1 if database.dialect.has_one_writer else limits.lanes,
                    queue=limits.queue,
                    queue_bytes=limits.queue_bytes,
                    batch_operations=limits.batch_operations,
                    batch_bytes=limits.batch_bytes,
                ),
                loop,
                self._dead.set,
            )
            for database in databases
        ]
        return ShardedGroupCommit(commits, [databases.index(holder) for holder in self._shards.shards])

    def _make_duties(self, outboxes: list[SqlAlertOutbox]) -> list[Periodic]:
        """One of each kind per database: one that is away holds up no other."""
        scan_s = self._config.delivery.scan_seconds
        beat_s = min(1.0, self._config.server.lease_seconds / 6)
        outlet, told = self._outlets.outlet, self._outlets.abandoned
        self._redelivering = [
            Periodic("redelivering", Redelivering([work], outlet, on_abandoned=told).run_once, _WOKEN_S)
            for work in self._work
        ]
        self._asking = [Periodic("checking", duty.run_once, _WOKEN_S) for duty in self._checking]
        self._rescuing = [Rescuing([work], self._nodes, self._uncertain_ms) for work in self._work]
        webhook = self._config.alerts.webhook.get_secret_value()
        sinks: dict[str, AlertSink] = {"log": LogSink()} | ({"webhook": WebhookSink(webhook)} if webhook else {})
        alerting = [each for outbox in outboxes for each in self._make_alerting(outbox, sinks)]
        alone = self._shards.databases if self._alone else []
        return [
            Periodic("node", self._beat, beat_s),
            *(
                Periodic("leases", partial(self._keep, leases, rescuing), beat_s)
                for leases, rescuing in zip(self._leases, self._rescuing, strict=True)
            ),
            *self._redelivering,
            *self._asking,
            *(Periodic("scanning", partial(self._scan, look), scan_s) for look in self._looks),
            *alerting,
            *self._retaining(),
            *(Periodic("alone", partial(self._stay_alone, database), 5.0) for database in alone),
            Periodic("catalog", self._look_at_catalog, self._watch.period_s),
            Periodic("counting", self._counting.run_once, 2.0),
            *([Periodic("gauging", self._gauging.run_once, _GAUGES_S)] if self._config.telemetry.listen else []),
        ]

    def _make_alerting(self, outbox: SqlAlertOutbox, sinks: Mapping[str, AlertSink]) -> list[Periodic]:
        """One that groups, and one per sink: a sink that hangs holds up no other."""
        sending = [
            Periodic(f"alerting {name}", Alerting(outbox, name, sink, self._watch).run_once, 5.0)
            for name, sink in sinks.items()
        ]

        def send() -> None:
            for duty in sending:
                duty.wake()

        return [Periodic("alerting", Grouping(outbox, list(sinks), send).run_once, 5.0), *sending]

    def _retaining(self) -> list[Periodic]:
        """One per database; none where nothing is to be removed."""
        retention = self._config.retention
        if retention.kind == "none":
            return []
        lists = LocalArchive(Path(retention.archive)) if retention.kind == "archive" else None
        keep_ms = round(retention.keep_hours * 3_600_000)
        held = zip((work.database for work in self._work), self._leases, strict=True)
        duties = [
            Retention([ClosedMessages(database, leases)], lists, keep_ms, retention.rows_per_second)
            for database, leases in held
        ]
        return [Periodic("retention", duty.run_once, _RETENTION_S) for duty in duties]

    @property
    def _uncertain_ms(self) -> int | None:
        """How long before its last sign of life a server's copies are uncertain; None: they lived in its memory."""
        return None if self._config.delivery.kind == "builtin" else self._lease_ms + UNCERTAIN_MS

    def _beat(self) -> bool:
        kept = self._nodes.run_once()
        METRICS.servers_alive.set(len(self._nodes.alive))
        return not kept

    def _keep(self, leases: ShardLeases, rescuing: Rescuing) -> None:
        changed = leases.run_once()
        self._rescue(rescuing)  # before what is due there is counted as tried once more
        if changed:
            log.info("this server looks after %d shards", sum(len(each.held()) for each in self._leases))
            self._wake_redelivery()
        METRICS.leases_held.set(sum(len(each.held()) for each in self._leases))

    def _rescue(self, duty: Rescuing) -> None:
        rescued = duty.run_once()
        if rescued:
            METRICS.rescued.inc(rescued)
            log.info("%d deliveries of a server that is gone are due again", rescued)
            self._wake_redelivery()

    def _take_up(self) -> None:
        """Before the first call: leases, what an earlier run left behind, the ways out."""
        for leases, rescuing in zip(self._leases, self._rescuing, strict=True):
            try:
                self._keep(leases, rescuing)
            except Retryable as exc:
                log.warning("shards are looked after later: %s", exc)
        self._outlets.start()

    def _scan(self, look: DueIndex) -> None:
        if look.due():
            self._wake_redelivery()
            self._wake_checking()

    def _wake_checking(self) -> None:
        for duty in self._asking:
            duty.wake()

    def _wake_redelivery(self) -> None:
        for duty in self._redelivering:
            duty.wake()

    def _look_at_catalog(self) -> bool:
        """Keep the copy current, and do what a new one means for what is running, whoever read it."""
        changed = self._watch.run_once()
        if self._watch.current.version != self._followed:
            self._follow(self._watch.current)
        return changed

    def _follow(self, catalog: Catalog) -> None:
        self._followed = catalog.version
        self._outlets.catalog_changed()
        if catalog.shard_map != self._shard_map:
            log.critical("the shard map was changed: this server's configuration puts shards elsewhere")
            self._loop.call_soon_threadsafe(self._dead.set)
        if self._outlets.streams is not None and catalog.superseded:
            self._loop.call_soon_threadsafe(self._outlets.streams.finish, catalog.superseded)

    def _stay_alone(self, database: Database) -> None:
        try:
            database.hold_exclusively()
        except DatabaseTaken as exc:
            log.critical("%s", exc)
            self._loop.call_soon_threadsafe(self._dead.set)

    def _first_use(self) -> FirstUse:
        dev = self._config.dev
        policy = RetryPolicy(interval_ms=dev.retry_interval_ms)
        return FirstUse(self._store, self._watch, self._watch.run_once, policy, dev.transaction_time_ms, log.info)

    async def run_until(self, stopping: asyncio.Event) -> bool:
        """Serve until told to stop (True), or until this server cannot go on by itself (False)."""
        waits = [asyncio.create_task(event.wait()) for event in (stopping, self._dead)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._dead.is_set():
            log.critical("this server cannot go on serving")
        return not self._dead.is_set()

    async def stop(self) -> None:
        """In this order: nobody new comes, who is here is answered, what waits is stored, then the doors close."""
        await self._grpc.set_serving(False)
        for duty in self._findable:
            await asyncio.to_thread(duty.stop)
        await asyncio.to_thread(self._surroundings.deregister)
        if self._outlets.streams is not None:
            self._outlets.streams.finish()  # consumers go elsewhere; a stream would outlast any grace
        await self._grpc.server.stop(self._config.server.shutdown_seconds)
        self._administering.stop()
        for duty in self._duties:
            await asyncio.to_thread(duty.stop)
        for checking in self._checking:
            await asyncio.to_thread(checking.stop)
        await asyncio.to_thread(self._release_leases)
        clean = await asyncio.to_thread(self._outlets.stop)
        await self._outlets.answers.flush()
        await asyncio.to_thread(self._checks.close)
        await asyncio.to_thread(self._commit.stop)
        await asyncio.to_thread(self._release_slot, clean)
        await asyncio.to_thread(self._shards.close)
        self._metrics.stop()
        log.info("stopped")

    def _release_leases(self) -> None:
        for leases in self._leases:
            try:
                leases.release()
            except Retryable as exc:
                log.warning("shards stay leased until their leases expire: %s", exc)

    def _release_slot(self, clean: bool) -> None:
        try:
            self._nodes.release(clean)  # the next start need not wait for the lease to run out
        except Retryable as exc:
            log.warning("the node slot stays leased until it expires: %s", exc)


async def _serve(config: Config, dev: bool) -> bool:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    center = Center(config, dev)
    await center.start()

    first = loop.time()

    def on_signal() -> None:
        nonlocal first
        if not stopping.is_set():
            first = loop.time()
            stopping.set()
        elif loop.time() - first > SAME_SIGNAL_S:
            os._exit(130)  # a second signal: at once

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    well = await center.run_until(stopping)
    await center.stop()
    return well


def serve(config: Config, dev: bool = False) -> None:
    """Run one server until SIGTERM or SIGINT. Raises CannotStart; SystemExit(1) when a fault ended it."""
    keep_memory_small()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_serve(config, dev)):
            raise SystemExit(1)
