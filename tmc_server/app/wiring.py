"""The parts of one server and how they hang together. Nothing runs yet when `wire` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tmc_common.eventlog import EventLog
from tmc_server.app.alerting import alerting, sinks_of
from tmc_server.app.checks import Checks
from tmc_server.app.discovery import Discovery
from tmc_server.app.maintenance import CannotStart
from tmc_server.app.opening import OpenStore
from tmc_server.app.outlets import Outlets
from tmc_server.app.run_mode import RunMode
from tmc_server.app.sso import SingleSignOn
from tmc_server.app.submission import submission
from tmc_server.app.upkeep import CatalogFollowing, ShardKeeping, Wakeup, beat, note_logins, stay_alone
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.config import Config
from tmc_server.delivery.window import UNCERTAIN_MS
from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.alerts import EpisodeStore
from tmc_server.domain.ports.checks import Asking
from tmc_server.domain.ports.reading import AuditTrail, TrafficReader
from tmc_server.domain.proposals import ApprovalRules
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.bulk import BulkWorking
from tmc_server.duties.checking import Checking
from tmc_server.duties.counting import Counting, Gauging
from tmc_server.duties.ordering import Ordering
from tmc_server.duties.periodic import Periodic
from tmc_server.duties.redelivering import Redelivering
from tmc_server.duties.rescuing import Rescuing
from tmc_server.duties.retention import Retention
from tmc_server.http.door import Door
from tmc_server.metrics import METRICS
from tmc_server.requests.acking import Acking
from tmc_server.requests.administering import Administering
from tmc_server.requests.alerts import Alerts
from tmc_server.requests.auditing import Auditing
from tmc_server.requests.browsing import Browsing
from tmc_server.requests.bulk import BulkJobs
from tmc_server.requests.caller import Allowance, Budget, RateLimiter
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.deciding_by_hand import DecidingByHand
from tmc_server.requests.delivery_control import DeliveryControl
from tmc_server.requests.explaining import Explaining
from tmc_server.requests.first_use import FirstUse, topics_exist, topics_to_produce_exist
from tmc_server.requests.lookup import Lookup
from tmc_server.requests.operators import Operators
from tmc_server.requests.overviewing import Overviewing
from tmc_server.requests.preparing import OpenGauge, Preparing
from tmc_server.requests.proposals import Proposals
from tmc_server.requests.searching import Searching
from tmc_server.requests.signing import Signing
from tmc_server.requests.timeline import Timelines
from tmc_server.rpc.admin_service import AdminServicer
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.calls import Edge
from tmc_server.rpc.consumption_service import ConsumptionServicer
from tmc_server.rpc.doorkeeper import Doorkeeper
from tmc_server.rpc.message_service import MessageServicer
from tmc_server.rpc.server import SERVICES, GrpcServer, build
from tmc_server.settings import ConfigError, settings_of
from tmc_server.store.alert_outbox import SqlAlertOutbox
from tmc_server.store.audit_seals import AuditSeals
from tmc_server.store.audit_trail import SqlAuditTrail
from tmc_server.store.batch import ShardWriter
from tmc_server.store.bulk_jobs import SqlBulkStore
from tmc_server.store.bulk_work import SqlBulkWork
from tmc_server.store.due import OpenCounts, SqlDueWork
from tmc_server.store.due_checks import SqlCheckStore, SqlDueChecks
from tmc_server.store.engines import Database
from tmc_server.store.episodes import SqlEpisodeStore
from tmc_server.store.failure_groups import SqlFailures
from tmc_server.store.group_commit import GroupCommit, Limits, ShardedGroupCommit
from tmc_server.store.leases import ShardLeases
from tmc_server.store.line_repair import SqlLineWork
from tmc_server.store.listing import Lister
from tmc_server.store.operators import OperatorStore
from tmc_server.store.progress import SqlQueueProgress
from tmc_server.store.proposals import SqlProposals
from tmc_server.store.reading import Reader
from tmc_server.store.replays import SqlReplays
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.scanning import DueIndex, earliest_check, earliest_delivery
from tmc_server.store.searching import SqlKeySearch
from tmc_server.store.shard_map import Following, identity_of, place_of
from tmc_server.store.standing import StandingCounts
from tmc_server.store.traffic import SqlTraffic, Traffic
from tmc_server.submission.intake import Desk
from tmc_server.submission.sharing import Sharing

if TYPE_CHECKING:
    from tmc_server.http.server import HttpServer

log = EventLog("tmc.app")

_RETENTION_S = 60.0
_GAUGES_S = 15.0
_ORDERING_S = 2.0
_BULK_S = 1.0
_REST_S = 60.0
_DOORS_S = 1.0
_SUBMISSION_S = 1.0
_WOKEN_S = 30.0  # the scan wakes these duties; without it they run this often
_EXCLUSIVE_S = 5.0
_COUNTING_S = 2.0
_TRAFFIC_S = 10.0
_SEALING_S = 5.0
_LOGINS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """duties: in the order in which they start and stop.  findable: those that let others find this server.

    submission: None: no submit queues are read.  http: None: calls come over gRPC only.
    """

    outlets: Outlets
    discovery: Discovery
    checks: Checks
    commit: ShardedGroupCommit
    shard_keeping: Sequence[ShardKeeping]
    checking: Sequence[Checking]
    administering: Administering
    edge: Edge
    grpc: GrpcServer
    http: HttpServer | None
    submission: Sharing | None
    duties: Sequence[Periodic]
    findable: Sequence[Periodic]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One database with shards: what works on it."""

    database: Database
    writer: ShardWriter
    leases: ShardLeases
    due: SqlDueWork
    lines: SqlLineWork
    standing: StandingCounts
    outbox: SqlAlertOutbox


def wire(
    config: Config, store: OpenStore, loop: asyncio.AbstractEventLoop, mode: RunMode, die: Callable[[], None]
) -> Wiring:
    """Wire the parts, on the loop. die: from any thread; this server cannot go on.

    Raises CannotStart, OSError: the port is taken.
    """
    redelivery, asking = Wakeup(), Wakeup()
    outboxes = {
        database: SqlAlertOutbox(database, store.shards.number_of(database), store.watch)
        for database in store.shards.homes
    }
    progress = SqlQueueProgress(store.shards.catalog, store.nodes.incarnation)
    outlets = Outlets(
        config=config,
        loop=loop,
        catalog=store.watch,
        alerts=next(iter(outboxes.values())),
        progress=progress,
        wake=redelivery.notify,
        on_copies=mode.on_copies,
    )
    discovery = Discovery(config, store.shards.catalog)
    checks = Checks(config, discovery.instances)
    traffic = Traffic()
    shared_traffic = SqlTraffic(store.shards.catalog, traffic, store.nodes.incarnation)
    parts = [_part(store, outlets, traffic, database, outbox) for database, outbox in outboxes.items()]
    commit = _group_commit(config, store, parts, loop, die)
    outlets.answers.performer = commit
    checking = _checking(store, checks, parts, asking, mode)
    counting = Counting(store.watch, OpenCounts(store.shards), outlets.unacked_near_limit)
    sso = SingleSignOn(config.oidc)
    seals = _seals(config, store)
    trail = SqlAuditTrail(store.shards.databases, seals)
    METRICS.names.limit = config.telemetry.series
    _measure(store, commit)
    served = _serve(
        config,
        store,
        outlets,
        discovery,
        asking=checks.asking,
        parts=parts,
        traffic=shared_traffic,
        commit=commit,
        gauge=counting,
        trail=trail,
        sso=sso,
        mode=mode,
        die=die,
    )
    doors = Periodic("doors", served.edge.doorkeeper.sweep, _DOORS_S)
    served.edge.doorkeeper.wake = doors.wake
    sharing = submission(
        config,
        served.desk,
        loop,
        lambda: {shard for part in parts for shard in part.leases.held()},
        outlets.raise_topic_alert,
    )
    shard_keeping = _shard_keeping(config, store, parts, redelivery)
    following = CatalogFollowing(store.watch, outlets, store.shards, die)
    sinks = sinks_of(config.alerts)
    beat_s = min(1.0, config.server.lease_seconds / 6)
    duties = [
        Periodic("node", partial(beat, store.nodes), beat_s),
        *(Periodic("leases", keeping.run_once, beat_s) for keeping in shard_keeping),
        *_redelivering(parts, outlets, redelivery),
        *_ordering(store, parts),
        *_bulk(store, parts),
        *_asking(checking, asking),
        *_scanning(config, store, parts, [redelivery, asking]),
        *(duty for part in parts for duty in alerting(part.outbox, sinks, store)),
        *_retaining(config, store, parts),
        *_staying_alone(store, die),
        Periodic("catalog", following.run_once, store.watch.period_s),
        Periodic("counting", counting.run_once, _COUNTING_S),
        Periodic("traffic", shared_traffic.run_once, _TRAFFIC_S),
        *(Periodic("sealing", each.seal, _SEALING_S) for each in seals),
        Periodic("logins", partial(note_logins, served.edge.authentication.failed, trail), _LOGINS_S),
        *_gauging(config, store, parts),
        *sso.duties(),
        *outlets.duties(),
        doors,
        *([Periodic("submission", sharing.run_once, _SUBMISSION_S)] if sharing is not None else []),
    ]
    return Wiring(
        outlets=outlets,
        discovery=discovery,
        checks=checks,
        commit=commit,
        shard_keeping=shard_keeping,
        checking=checking,
        administering=served.administering,
        edge=served.edge,
        grpc=served.grpc,
        http=served.http,
        submission=sharing,
        duties=duties,
        findable=discovery.duties(served.grpc.port),
    )


def _seals(config: Config, store: OpenStore) -> list[AuditSeals]:
    keys = [key.get_secret_value() for key in config.audit.seal_keys]
    return [AuditSeals(database, keys) for database in store.shards.databases]


def _approval_rules(config: Config) -> ApprovalRules:
    return ApprovalRules(decide=config.approval.decide, bulk_over=config.approval.bulk_over or None)


def _measure(store: OpenStore, commit: ShardedGroupCommit) -> None:
    """Gauges that are read when they are asked for."""
    METRICS.commit_waiting.set_function(lambda: commit.waiting)
    METRICS.build_info.labels(version("tmc-center")).set(1)
    for database in store.shards.databases:
        ahead = METRICS.clock_ahead_seconds.labels(place_of(database))
        ahead.set_function(partial(_clock_ahead_s, database))
        pool: Any = database.engine.pool
        if hasattr(pool, "checkedout"):
            METRICS.pool_in_use.labels(place_of(database)).set_function(pool.checkedout)


def _clock_ahead_s(database: Database) -> float:
    return database.clock_ahead_ms / 1000


def _at_once(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What callers reach."""

    administering: Administering
    edge: Edge
    grpc: GrpcServer
    http: HttpServer | None
    desk: Desk


def _serve(
    config: Config,
    store: OpenStore,
    outlets: Outlets,
    discovery: Discovery,
    *,
    asking: Asking,
    parts: Sequence[_Part],
    traffic: TrafficReader,
    commit: ShardedGroupCommit,
    gauge: OpenGauge,
    trail: AuditTrail,
    sso: SingleSignOn,
    mode: RunMode,
    die: Callable[[], None],
) -> _Served:
    """The use cases and the RPCs in front of them. Raises OSError: the port is taken."""
    catalog, reader = store.watch, Reader(store.shards)
    by_database = {part.database: part for part in parts}

    def part_of(shard: Shard) -> _Part:
        return by_database[store.shards.holder(shard)]

    def writer_of(shard: Shard) -> ShardWriter:
        return part_of(shard).writer

    first_use = _first_use(config, store) if mode.is_open else None
    rate = RateLimiter(config.limits.items_per_second)
    administering = Administering(
        editor=store.catalog,
        catalog=catalog,
        reader=reader,
        refresh=catalog.run_once,
        activation=store.activation,
        instances=discovery.instances,
        forwarding=outlets,
    )
    signing = Signing(store.catalog, catalog, administering.change, outlets.raise_alert, config.delivery.signatures)
    preparing = Preparing(
        catalog=catalog,
        ids=store.nodes.ids,
        performer=commit,
        rate=rate,
        gauge=gauge,
        body_bytes=config.limits.body_bytes,
        senders=discovery.senders,
        ensure_topic=first_use.topic_to_produce if first_use else topics_to_produce_exist,
    )
    deciding = Deciding(catalog, commit, rate, gauge)
    by_hand = DecidingByHand(
        editor=store.catalog,
        catalog=catalog,
        desk=SqlCheckStore(writer_of),
        reader=reader,
        asking=asking,
        change=administering.change,
    )
    deliveries = DeliveryControl(
        editor=store.catalog,
        catalog=catalog,
        reader=reader,
        performer=commit,
        lines=lambda shard: part_of(shard).lines,
        change=administering.change,
        replaying=SqlReplays(writer_of, store.nodes.ids),
    )
    numbers = {store.shards.number_of(home): home for home in store.shards.homes}
    desks: dict[int, EpisodeStore] = {number: SqlEpisodeStore(home, number) for number, home in numbers.items()}
    lookup = Lookup(catalog, reader)
    operators = OperatorStore(store.shards.catalog, store.catalog.change_delay_ms)
    servicers = {
        "tmc.v1.MessageService": MessageServicer(preparing, deciding, administering, lookup),
        "tmc.v1.ConsumptionService": ConsumptionServicer(
            acking=Acking(catalog, commit, rate),
            administering=administering,
            signing=signing,
            streams=outlets.streams,
            broker=outlets.broker,
            ensure_topic=first_use.topic_to_consume if first_use else topics_exist,
        ),
        "tmc.v1.AdminService": AdminServicer(
            administering=administering,
            by_hand=by_hand,
            signing=signing,
            deliveries=deliveries,
            lookup=lookup,
            browsing=Browsing(catalog, Lister(store.shards, lambda: catalog.current.topics), reader),
            explaining=Explaining(
                catalog, lookup, reader, outlets.outlet.look_only, next(iter(desks.values())).open_detail
            ),
            timelines=Timelines(catalog, lookup, reader),
            overviewing=Overviewing(
                catalog,
                [(part.standing, partial(store.shards.shards_in, part.database)) for part in parts],
                traffic,
            ),
            auditing=Auditing(trail),
            searching=Searching(catalog, lookup, SqlKeySearch(store.shards), SqlFailures(store.shards)),
            bulk=BulkJobs(SqlBulkStore(store.shards), catalog),
            operators=Operators(operators, administering),
            proposals=Proposals(SqlProposals(store.shards.catalog), _approval_rules(config), operators),
            server=store.nodes.name,
            settings=list(settings_of(config)),
            alerts=Alerts(catalog, store.catalog, reader, desks, administering.change),
        ),
    }
    edge = _edge(config, store, first_use, mode.secret, sso)
    grpc = build(servicers, edge, config.server.listen, config.tls, config.limits)
    http = _http(config, servicers, edge, die, only_here=mode.is_open and not mode.secret)
    desk = Desk(catalog=catalog, preparing=preparing, deciding=deciding, budget=edge.budget)
    return _Served(administering=administering, edge=edge, grpc=grpc, http=http, desk=desk)


def _http(
    config: Config, servicers: Mapping[str, object], edge: Edge, die: Callable[[], None], *, only_here: bool
) -> HttpServer | None:
    """The second server, if there is to be one. Raises CannotStart, OSError: the port is taken."""
    if not config.http.listen:
        return None
    try:
        from tmc_server.http.server import HttpServer
    except ModuleNotFoundError as exc:
        raise CannotStart(f"[http] needs {exc.name}: install tmc-center[http].") from exc
    limits = config.limits
    door = Door(SERVICES, servicers, edge, request_bytes=limits.request_bytes, only_here=only_here)
    server = HttpServer(door, config.http.listen, config.tls, limits.connections, die)
    edge.doorkeeper.ports.add(server.port)
    return server


def _part(store: OpenStore, outlets: Outlets, traffic: Traffic, database: Database, outbox: SqlAlertOutbox) -> _Part:
    nodes = store.nodes
    writer = ShardWriter(
        database,
        store.watch,
        outlets.outlet,
        nodes.incarnation,
        take_back=lambda copies, now: outlets.answers.give_back(copies, tried_ms=now),
        traffic=traffic,
    )
    leases = ShardLeases(
        database,
        partial(store.shards.usable_in, database),
        nodes.incarnation,
        lambda: [run.incarnation for run in nodes.alive if not run.drained],
        store.lease_ms,
    )
    return _Part(
        database=database,
        writer=writer,
        leases=leases,
        due=SqlDueWork(writer, leases, store.watch),
        lines=SqlLineWork(writer, leases, store.watch),
        standing=StandingCounts(database, leases, store.watch),
        outbox=outbox,
    )


def _group_commit(
    config: Config,
    store: OpenStore,
    parts: Sequence[_Part],
    loop: asyncio.AbstractEventLoop,
    die: Callable[[], None],
) -> ShardedGroupCommit:
    limits = config.limits
    whereabouts = Following(store.shards, store.watch)
    commits = {
        part.database: GroupCommit(
            part.writer,
            Limits(
                lanes=1 if part.database.dialect.has_one_writer else limits.lanes,
                queue=limits.queue,
                queue_bytes=limits.queue_bytes,
            ),
            loop,
            die,
            whereabouts,
        )
        for part in parts
    }
    return ShardedGroupCommit(commits, store.shards)


def _first_use(config: Config, store: OpenStore) -> FirstUse:
    policy = RetryPolicy(interval_ms=config.dev.retry_interval_ms)
    watch = store.watch
    return FirstUse(
        editor=store.catalog,
        catalog=watch,
        refresh=watch.run_once,
        policy=policy,
        transaction_time_ms=config.dev.transaction_time_ms,
        say=partial(log.info, "name_created"),
    )


def _edge(config: Config, store: OpenStore, first_use: FirstUse | None, secret: str, sso: SingleSignOn) -> Edge:
    limits = config.limits
    authentication = Authentication(
        store.watch,
        first_use.app if first_use else None,
        secret=secret,
        bind_apps=config.tls.bind_apps,
        oidc=sso.name_of,
    )
    allowance = Allowance(
        calls_per_second=limits.calls_per_second,
        bytes_per_second=limits.bytes_per_second,
        open_calls=limits.open_calls,
        open_bytes=limits.open_bytes,
        streams=limits.streams,
    )
    return Edge(authentication, Budget(allowance), Doorkeeper(limits.connections))


# -- duties: one of each kind per database, so that one that is away holds up no other -----------------------------


def _shard_keeping(config: Config, store: OpenStore, parts: Sequence[_Part], redelivery: Wakeup) -> list[ShardKeeping]:
    # How long before its last sign of life a server's copies are uncertain; None: they lived in its memory.
    uncertain_ms = None if config.delivery.kind == "builtin" else store.lease_ms + UNCERTAIN_MS
    everyone = [part.leases for part in parts]
    return [
        ShardKeeping(
            part.leases,
            Rescuing([part.due], store.nodes, uncertain_ms, most_s=store.lease_ms / 6_000),
            everyone,
            redelivery.notify,
        )
        for part in parts
    ]


def _yielding(leases: ShardLeases) -> Callable[[], None]:
    """Return what a duty does that fails again and again through its own fault: others may do better."""

    def rest() -> None:
        log.warning(
            "shards_released",
            "a duty keeps failing here: other servers look after its shards for %d s, if there are any",
            _REST_S,
        )
        leases.rest(_REST_S)

    return rest


def _redelivering(parts: Sequence[_Part], outlets: Outlets, wakeup: Wakeup) -> list[Periodic]:
    duties = [
        Periodic(
            "redelivering",
            Redelivering([part.due], outlets.outlet, on_abandoned=outlets.abandoned).run_once,
            _WOKEN_S,
            on_stuck=_yielding(part.leases),
        )
        for part in parts
    ]
    wakeup.register(duties)
    return duties


def _ordering(store: OpenStore, parts: Sequence[_Part]) -> list[Periodic]:
    return [
        Periodic("ordering", Ordering(part.lines, store.watch).run_once, _ORDERING_S, on_stuck=_yielding(part.leases))
        for part in parts
    ]


def _bulk(store: OpenStore, parts: Sequence[_Part]) -> list[Periodic]:
    desk = SqlBulkStore(store.shards)
    work = [SqlBulkWork(part.writer, part.leases, store.nodes.ids) for part in parts]
    return [Periodic("bulk", BulkWorking(desk, each).run_once, _BULK_S) for each in work]


def _checking(
    store: OpenStore, checks: Checks, parts: Sequence[_Part], wakeup: Wakeup, mode: RunMode
) -> list[Checking]:
    return [
        Checking(
            SqlDueChecks(part.writer, part.leases, store.watch),
            checks.asking,
            store.watch,
            wakeup.notify,
            monotonic=mode.monotonic,
            run=_at_once if mode.is_manual else None,
        )
        for part in parts
    ]


def _asking(checking: Sequence[Checking], wakeup: Wakeup) -> list[Periodic]:
    duties = [Periodic("checking", each.run_once, _WOKEN_S) for each in checking]
    wakeup.register(duties)
    return duties


def _scanning(config: Config, store: OpenStore, parts: Sequence[_Part], wakeups: Sequence[Wakeup]) -> list[Periodic]:
    def duty(part: _Part) -> Periodic:
        index = DueIndex(part.database, part.leases, store.watch, earliest_delivery, earliest_check)

        def scan() -> None:
            if index.due():
                for wakeup in wakeups:
                    wakeup.notify()

        return Periodic("scanning", scan, config.delivery.scan_seconds)

    return [duty(part) for part in parts]


def _retaining(config: Config, store: OpenStore, parts: Sequence[_Part]) -> list[Periodic]:
    """One duty per database; none if nothing is to be removed."""
    retention = config.retention
    if retention.kind == "none":
        return []
    lists = _archive_of(retention.archive, store) if retention.kind == "archive" else None
    keep_ms = round(retention.keep_hours * 3_600_000)
    duties = [
        Retention([ClosedMessages(part.database, part.leases)], lists, keep_ms, retention.rows_per_second)
        for part in parts
    ]
    return [Periodic("retention", duty.run_once, _RETENTION_S) for duty in duties]


def _archive_of(url: str, store: OpenStore) -> ArchiveFolder:
    try:
        return ArchiveFolder(url, center=identity_of(store.shards.catalog) or "")
    except ValueError as exc:
        raise ConfigError(f"{exc}. For S3: pip install s3fs.") from exc


def _staying_alone(store: OpenStore, die: Callable[[], None]) -> list[Periodic]:
    databases = store.shards.databases if store.is_alone else []
    return [Periodic("alone", partial(stay_alone, database, die), _EXCLUSIVE_S) for database in databases]


def _gauging(config: Config, store: OpenStore, parts: Sequence[_Part]) -> list[Periodic]:
    if not config.telemetry.listen:
        return []
    return [Periodic("gauging", Gauging([part.standing for part in parts], store.watch).run_once, _GAUGES_S)]
