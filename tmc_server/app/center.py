"""The composition root: the only module that names concrete adapters. Start and stop read as lists."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from functools import partial

import uvloop
from sqlalchemy.exc import ArgumentError

from tmc_server.alerts.log import LogSink
from tmc_server.config import Config
from tmc_server.delivery.stream import StreamOutlet
from tmc_server.domain.operations import GiveBack
from tmc_server.domain.ports import Copy
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.alerting import Alerting
from tmc_server.duties.counting import Counting
from tmc_server.duties.periodic import Periodic
from tmc_server.duties.redelivering import Redelivering
from tmc_server.errors import Retryable, StoreUnavailable, TmcError
from tmc_server.requests.acking import Acking
from tmc_server.requests.administering import Administering
from tmc_server.requests.caller import RateLimiter
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.first_use import FirstUse
from tmc_server.requests.preparing import Preparing
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.server import GrpcServer, build
from tmc_server.rpc.servicers import AdminServicer, ConsumptionServicer, MessageServicer
from tmc_server.store.batch import ShardWriter
from tmc_server.store.catalog import FIRST_OPERATOR, CatalogStore, CatalogWatch
from tmc_server.store.checks import examine
from tmc_server.store.due import DueConsumptions, OpenCounts, SqlAlertOutbox
from tmc_server.store.engines import Database, DatabaseTaken, ShardMap
from tmc_server.store.group_commit import GroupCommit, Limits, ShardedGroupCommit
from tmc_server.store.migrate import migrate
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.reading import Reader

log = logging.getLogger("tmc.app")


class CannotStart(Exception):
    """The server refuses to start; the text says why and what to do."""


def open_shards(config: Config, patient: bool = False) -> ShardMap:
    """One Database per URL of the configuration. patient: statements may take long, as those of `tmc init`."""
    opened: dict[str, Database] = {}

    def database(url: str) -> Database:
        if url not in opened:
            try:
                opened[url] = Database(url, pool_size=config.limits.lanes + 5, patient=patient)
            except ModuleNotFoundError as exc:
                raise CannotStart(f"[store] needs the database driver {exc.name}: install tmc-center[mysql].") from exc
            except ArgumentError as exc:
                raise CannotStart(f"[store] has no database URL that SQLAlchemy understands: {exc}.") from exc
        return opened[url]

    catalog = database(config.store.catalog.get_secret_value())
    ranges = config.store.shards
    by_shard = {
        shard: database(part.url.get_secret_value()) for part in ranges for shard in range(part.first, part.last + 1)
    }
    return ShardMap(catalog, [by_shard.get(shard, catalog) for shard in range(32)])


class Center:
    """One server. dev: schema made by itself, no credentials, names made at first use, changes at once."""

    def __init__(self, config: Config, dev: bool = False) -> None:
        self._config = config
        self._dev = dev
        self._shards = open_shards(config)
        self._dead = asyncio.Event()
        self._duties: list[Periodic] = []

    @property
    def port(self) -> int:
        return self._grpc.port

    async def start(self) -> None:
        """Serving when it returns. Raises CannotStart."""
        try:
            await asyncio.to_thread(self._open_store)
            self._build(asyncio.get_running_loop())
            self._commit.start()
            await asyncio.to_thread(self._rescue)
            await self._grpc.server.start()
            for duty in self._duties:
                duty.start()
            await self._grpc.set_serving(True)
        except (TmcError, DatabaseTaken, OSError) as exc:
            self._shards.close()
            raise CannotStart(str(exc)) from exc
        log.info("serving on port %d as node %s", self.port, self._nodes.lease)
        if not (self._dev or self._config.tls.certificate or _is_loopback(self._config.server.listen)):
            log.warning("keys travel in the clear: set [tls], or listen on loopback only")

    def _open_store(self) -> None:
        for database in self._shards.databases:
            database.lock_alone()
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
        self._store = CatalogStore(self._shards.catalog, 0 if self._dev else self._config.store.change_delay_ms)
        self._watch = CatalogWatch(self._store)
        self._watch.run_once()
        self._nodes = NodeSlots(self._shards.catalog, f"{socket.gethostname()}:{os.getpid()}")
        self._lease = self._nodes.acquire()

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        limits = self._config.limits
        self._loop = loop
        self._outlet = StreamOutlet(loop, self._give_back, self._wake_redelivery)
        self._writers = {
            database: ShardWriter(
                database, self._watch, self._outlet, self._lease.incarnation, take_back=self._take_back
            )
            for database in self._shards.databases
        }
        self._commit = self._group_commit(loop)
        self._counting = Counting(self._watch, OpenCounts(self._shards.shards))
        self._work = [
            DueConsumptions(writer, self._shards.shards_in(database), self._watch, self._lease.incarnation)
            for database, writer in self._writers.items()
        ]
        first_use = self._first_use() if self._dev else None
        rate = RateLimiter(limits.items_per_second)
        reader = Reader(self._shards)
        administering = Administering(self._store, self._watch, reader, self._commit, self._watch.run_once)
        produce, consume = (first_use.topic_to_produce, first_use.topic_to_consume) if first_use else (None, None)
        preparing = Preparing(
            self._watch, self._nodes.ids, self._commit, rate, self._counting, limits.body_bytes,
            *([produce] if produce else []),
        )  # fmt: skip
        deciding = Deciding(self._watch, self._commit, rate, self._counting)
        acking = Acking(self._watch, self._commit, rate)
        servicers = {
            "tmc.v1.MessageService": MessageServicer(preparing, deciding, administering),
            "tmc.v1.ConsumptionService": ConsumptionServicer(
                acking, administering, self._outlet, *([consume] if consume else [])
            ),
            "tmc.v1.AdminService": AdminServicer(administering),
        }
        authentication = Authentication(self._watch, first_use.app if first_use else None)
        config = self._config
        self._grpc: GrpcServer = build(
            servicers, authentication, config.server.listen, config.tls, limits.request_bytes
        )
        self._duties = self._make_duties()

    def _group_commit(self, loop: asyncio.AbstractEventLoop) -> ShardedGroupCommit:
        limits = self._config.limits
        databases = self._shards.databases
        commits = [
            GroupCommit(
                self._writers[database],
                Limits(
                    1 if database.is_sqlite else limits.lanes,
                    limits.queue,
                    limits.queue_bytes,
                    limits.batch_operations,
                    limits.batch_bytes,
                ),
                loop,
                self._dead.set,
            )
            for database in databases
        ]
        return ShardedGroupCommit(commits, [databases.index(holder) for holder in self._shards.shards])

    def _make_duties(self) -> list[Periodic]:
        """One redelivering and one alerting per database: one that is away holds up no other."""
        scan_s = self._config.delivery.scan_seconds
        self._redelivering = [Periodic("redelivering", Redelivering([work]).run_once, scan_s) for work in self._work]
        outboxes = [SqlAlertOutbox(database) for database in self._shards.databases if self._shards.shards_in(database)]
        alerting = [Alerting([outbox], [LogSink()], self._watch) for outbox in outboxes]
        return [
            *self._redelivering,
            *(Periodic("alerting", duty.run_once, 2.0) for duty in alerting),
            *(Periodic("alone", partial(self._stay_alone, database), 5.0) for database in self._shards.databases),
            Periodic("catalog", self._watch.run_once, self._watch.period_s),
            Periodic("node", lambda: not self._nodes.run_once(), 5.0),
            Periodic("counting", self._counting.run_once, 2.0),
        ]

    def _wake_redelivery(self) -> None:
        for duty in self._redelivering:
            duty.wake()

    def _stay_alone(self, database: Database) -> None:
        try:
            database.lock_alone()
        except DatabaseTaken as exc:
            log.critical("%s", exc)
            self._loop.call_soon_threadsafe(self._dead.set)

    def _first_use(self) -> FirstUse:
        dev = self._config.dev
        policy = RetryPolicy(interval_ms=dev.retry_interval_ms)
        return FirstUse(self._store, self._watch, self._watch.run_once, policy, dev.transaction_time_ms, log.info)

    def _rescue(self) -> None:
        rescued = sum(work.rescue() for work in self._work)
        if rescued:
            log.info("%d deliveries of an earlier run are due again", rescued)

    def _take_back(self, copies: Sequence[Copy]) -> None:
        """From a lane or duty thread: tries that may have been counted although nothing was handed over."""
        self._loop.call_soon_threadsafe(self._give_back, copies)

    def _give_back(self, copies: Sequence[Copy]) -> None:
        """On the loop: copies that reached nobody are due again at once, uncounted."""
        operations = [(c.shard, GiveBack(c.number, c.subscription, c.attempt, after_ms=0)) for c in copies]
        try:
            self._commit.perform(operations)
        except TmcError as exc:
            log.warning("%d copies wait for their next due time: %s", len(copies), exc)

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
        self._outlet.finish()  # consumers go elsewhere; a stream would outlast any grace
        await self._grpc.server.stop(self._config.server.shutdown_seconds)
        for duty in self._duties:
            await asyncio.to_thread(duty.stop)
        await asyncio.to_thread(self._commit.stop)
        await asyncio.to_thread(self._release)
        log.info("stopped")

    def _release(self) -> None:
        try:
            self._nodes.release()  # the next start need not wait for the lease to run out
        except Retryable as exc:
            log.warning("the node slot stays leased until it expires: %s", exc)
        self._shards.close()


def _is_loopback(listen: str) -> bool:
    return listen.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


async def _serve(config: Config, dev: bool) -> bool:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    center = Center(config, dev)
    await center.start()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(130)  # a second signal: at once
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    well = await center.run_until(stopping)
    await center.stop()
    return well


def serve(config: Config, dev: bool = False) -> None:
    """Run one server until SIGTERM or SIGINT. Raises CannotStart; SystemExit(1) when a fault ended it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_serve(config, dev)):
            raise SystemExit(1)


def initialise(config: Config, new_token: bool = False) -> str | None:
    """Create or upgrade the schema. Returns: the admin token, the first time or when asked for. Raises CannotStart."""
    shards = open_shards(config, patient=True)
    try:
        if shards.catalog.is_sqlite:
            shards.catalog.lock_alone()
        migrate(shards)
        return CatalogStore(shards.catalog, 0).make_operator(FIRST_OPERATOR, replace=new_token)
    except (TmcError, DatabaseTaken) as exc:
        raise CannotStart(str(exc)) from exc
    finally:
        shards.close()


def _as_ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def diagnose(config: Config) -> tuple[list[str], bool]:
    """What `tmc doctor` says: lines, and whether all is well."""
    shards = open_shards(config)
    lines: list[str] = []
    well = True
    need = config.limits.batch_bytes + config.limits.body_bytes
    for database in shards.databases:
        lines.append(f"{database!r}, shards {_as_ranges(shards.shards_in(database)) or 'none'}")
        try:
            findings = examine(database, need)
        except StoreUnavailable as exc:
            lines.append(f"BAD  {exc}")
            well = False
            continue
        lines += [str(finding) for finding in findings]
        well = well and all(finding.ok for finding in findings)
    shards.close()
    return lines, well
