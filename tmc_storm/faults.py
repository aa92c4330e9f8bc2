"""Everything that can break around a center: what machines, networks, administrators and operators do in a bad night."""

from __future__ import annotations

import contextlib
import random
import resource
import sqlite3
from collections.abc import Callable, Iterator
from typing import Protocol

import pika
import sqlalchemy as sa

from tmc_storm.cast import Cast
from tmc_storm.moving import shard_moves
from tmc_storm.operating import operator_acts
from tmc_storm.plan import Ending, Fault, once
from tmc_storm.scene import DatabaseServer, Link, Scene, administrator, is_mariadb
from tmc_storm.services.program import Program
from tmc_storm.services.rabbitmq import RabbitMQ
from tmc_storm.services.replicated import Replicated
from tmc_storm.services.skewed import set_clock

_REASON = "the storm"


def faults_of(scene: Scene, cast: Cast) -> list[Fault]:
    """Return what can break in this scene."""
    found = [fault for link in scene.links for fault in _of_link(link)]
    for server in scene.servers:
        found += _of_program(server, "server", longest_s=3.0, heals_s=4.0, weight=0.7)
        if scene.databases:  # an SQLite file has no clock but the server's
            found.append(_clock_wrong(scene, server))
    for program in cast.producers:
        faults = _of_program(program, "producer", longest_s=4.0, heals_s=2.0, weight=0.5)
        # what one that ends leaves undecided would stay so
        found += faults if scene.has_checks else [fault for fault in faults if fault.kind.endswith("suspended")]
    for program in cast.consumers:
        found += _of_program(program, "consumer", longest_s=4.0, heals_s=2.0, weight=0.5)
    for program in cast.receivers:
        found += _of_program(program, "webhook receiver", longest_s=4.0, heals_s=2.0, weight=0.5)
    for number, database in enumerate(scene.databases):
        part = f"database {number}"
        found += of_machine(database, "database", part, longest_s=3.0, weight=0.5)
        found += _of_database_server(database, part)
        if isinstance(database, Replicated):
            found += _of_replicas(database, part)
    if scene.business is not None:
        found += of_machine(scene.business, "business database", "business database", longest_s=9.0, weight=0.5)
    if scene.servers and not scene.databases:
        found += [_sqlite_locked(scene), _disk_full(scene.servers[0])]
    for number, broker in enumerate(scene.brokers):
        found += of_machine(broker, "broker", f"broker {number}", longest_s=4.0, weight=0.3)
    if scene.brokers:
        found += _of_broker(scene.brokers[0])
    if scene.consul is not None:
        found += of_machine(scene.consul, "Consul", "Consul", longest_s=4.0, weight=0.5)
    if scene.run_tmc is not None and len(scene.databases) > 1:
        found += shard_moves(scene.operator, scene.run_tmc)
    return [*found, *operator_acts(scene)]


def nodes_of(scene: Scene, cast: Cast) -> list[Fault]:
    """Return what the founding documents killed, producers, brokers and consumers, and what else runs, each by itself."""
    programs = [
        Fault(kind=f"{kind}: killed", part=program.name, begin=_killed(program))
        for kind, several in (
            ("producer", cast.producers),
            ("consumer", cast.consumers),
            ("webhook receiver", cast.receivers),
            ("server", scene.servers),
        )
        for program in several
    ]
    machines: list[tuple[str, str, Machine]] = [
        ("broker", f"broker {number}", broker) for number, broker in enumerate(scene.brokers)
    ]
    machines += [("database", f"database {number}", database) for number, database in enumerate(scene.databases)]
    return programs + [Fault(kind=f"{kind}: killed", part=part, begin=_killed(one)) for kind, part, one in machines]


class Machine(Protocol):
    """A program of ours, or one of the services."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...


def _killed(machine: Machine) -> Callable[[random.Random], Ending]:
    def begin(_: random.Random) -> Ending:
        machine.kill()
        return machine.start

    return begin


def _suspended(machine: Machine) -> Callable[[random.Random], Ending]:
    def begin(_: random.Random) -> Ending:
        machine.suspend()
        return machine.resume

    return begin


def of_machine(machine: Machine, kind: str, part: str, *, longest_s: float, weight: float) -> list[Fault]:
    """Return what can happen to one machine: it is killed, or suspended, and runs again."""
    return [
        Fault(
            kind=f"{kind}: killed",
            part=part,
            begin=_killed(machine),
            longest_s=longest_s,
            heals_s=6.0,
            weight=weight,
        ),
        Fault(kind=f"{kind}: suspended", part=part, begin=_suspended(machine), longest_s=longest_s, weight=weight),
    ]


def _of_program(program: Program, kind: str, *, longest_s: float, heals_s: float, weight: float) -> list[Fault]:
    def ended(_: random.Random) -> Ending:
        program.stop()
        return program.start

    killed, suspended = of_machine(program, kind, program.name, longest_s=longest_s, weight=weight)
    stopped = Fault(
        kind=f"{kind}: stopped", part=program.name, begin=ended, longest_s=1.0, heals_s=heals_s, weight=weight
    )
    return [killed, suspended, stopped]


def _clock_wrong(scene: Scene, server: Program) -> Fault:
    """Return a fault that puts one server's clock an hour ahead, or ten minutes back."""

    def begin(dice: random.Random) -> Ending:
        set_clock(scene.clock_of(server.name), dice.choice((3600.0, -600.0)))
        return lambda: set_clock(scene.clock_of(server.name), 0.0)

    return Fault(kind="server: clock wrong", part=f"clock of {server.name}", begin=begin, longest_s=6.0)


def _disk_full(server: Program) -> Fault:
    """Return a fault by which no file of the server can grow: with SQLite, it is the database."""

    def begin(_: random.Random) -> Ending:
        limited, usual = server.pid, resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(limited, resource.RLIMIT_FSIZE, (4096, usual[1]))

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended over it
                resource.prlimit(limited, resource.RLIMIT_FSIZE, usual)

        return end

    return Fault(kind="database: disk full", part=server.name, begin=begin, longest_s=3.0)


def _of_link(link: Link) -> list[Fault]:
    """Return what happens to connections: they are closed or reset, hang, lose the answers, or are slow."""
    proxy = link.proxy

    def until_mended(break_it: Callable[[], None]) -> Callable[[random.Random], Ending]:
        def begin(_: random.Random) -> Ending:
            break_it()
            return proxy.pass_through

        return begin

    def answers_lost(_: random.Random) -> Ending:
        proxy.mute()

        def end() -> None:
            proxy.cut()
            proxy.pass_through()

        return end

    def fault(what: str, begin: Callable[[random.Random], Ending], longest_s: float = 0.0) -> Fault:
        return Fault(kind=f"{link.kind}: {what}", part=link.name, begin=begin, longest_s=longest_s)

    return [
        fault("closed", once(lambda _: proxy.cut())),
        fault("reset", once(lambda _: proxy.reset())),
        fault("black hole", until_mended(proxy.black_hole), 4.0),
        fault("answers lost", answers_lost, 2.0),
        fault("slow", until_mended(lambda: proxy.delay(0.1)), 4.0),
    ]


def _of_database_server(server: DatabaseServer, part: str) -> list[Fault]:
    """Return what administrators of a database do who never heard of the center."""
    kinds: dict[str, tuple[Callable[[random.Random], Ending], float]] = {
        "connections killed": (once(lambda _: _kill_connections(server)), 0.0),
        "read-only": (_scoped(lambda _: _read_only(server)), 3.0),
        "a table locked": (_scoped(lambda dice: _table_locked(server, dice)), 3.0),
        "rows locked": (_scoped(lambda dice: _rows_locked(server, dice)), 3.0),
        "no connections left": (_scoped(lambda _: _few_connections(server)), 3.0),
    }
    if is_mariadb(server):
        kinds["global read lock"] = (_scoped(lambda _: _all_locked(server)), 2.0)
    return [
        Fault(kind=f"database: {what}", part=part, begin=begin, longest_s=longest_s)
        for what, (begin, longest_s) in kinds.items()
    ]


def _of_replicas(database: Replicated, part: str) -> list[Fault]:
    """Return what happens to a database with a replica: it fails over, is switched over, or waits for the replica."""

    def over_to_replica() -> None:
        database.promote()
        database.rebuild()

    def failed(_: random.Random) -> Ending:
        database.kill()
        return over_to_replica

    def switched(_: random.Random) -> Ending:
        database.demote()
        return over_to_replica

    def replica_suspended(_: random.Random) -> Ending:
        replica: Machine = database.replica
        replica.suspend()
        return replica.resume

    def fault(what: str, begin: Callable[[random.Random], Ending], longest_s: float) -> Fault:
        return Fault(kind=f"database: {what}", part=part, begin=begin, longest_s=longest_s, heals_s=4.0, weight=0.4)

    return [
        fault("failed over", failed, 3.0),
        fault("switched over", switched, 1.0),
        fault("replica suspended", replica_suspended, 3.0),
    ]


def _scoped(
    scope: Callable[[random.Random], contextlib.AbstractContextManager[object]],
) -> Callable[[random.Random], Ending]:
    """Make a fault of a context manager."""

    def begin(dice: random.Random) -> Ending:
        opened = contextlib.ExitStack()
        opened.enter_context(scope(dice))
        return opened.close

    return begin


def _kill_connections(server: DatabaseServer) -> None:
    with administrator(server) as connection:
        _kill_on(connection)


def _kill_on(connection: sa.Connection) -> None:
    """Kill all connections to the center's database."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'tmc'")
        return
    found = connection.exec_driver_sql("SELECT id FROM information_schema.processlist WHERE db = 'tmc'")
    for number in found.scalars().all():
        with contextlib.suppress(sa.exc.DBAPIError):  # it has ended
            connection.exec_driver_sql(f"KILL {number}")


@contextlib.contextmanager
def _read_only(server: DatabaseServer) -> Iterator[None]:
    if is_mariadb(server):
        on, off = ["SET GLOBAL read_only = 1"], ["SET GLOBAL read_only = 0"]
    else:
        on = ["ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"]
        off = [
            "SET default_transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        ]
    _run(server, on)
    try:
        yield
    finally:
        _run(server, off)


@contextlib.contextmanager
def _few_connections(server: DatabaseServer) -> Iterator[None]:
    with administrator(server) as connection:  # one for all of it: there would be no other
        if is_mariadb(server):
            usual = connection.exec_driver_sql("SELECT @@max_connections").scalar_one()
            on, off = "SET GLOBAL max_connections = 10", f"SET GLOBAL max_connections = {usual}"
        else:
            on, off = "ALTER DATABASE tmc CONNECTION LIMIT 3", "ALTER DATABASE tmc CONNECTION LIMIT -1"
        connection.exec_driver_sql(on)
        try:
            _kill_on(connection)
            yield
        finally:
            connection.exec_driver_sql(off)


def _run(server: DatabaseServer, statements: list[str]) -> None:
    with administrator(server) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@contextlib.contextmanager
def _table_locked(server: DatabaseServer, dice: random.Random) -> Iterator[None]:
    with administrator(server, "tmc") as connection:
        table = _table(connection, dice)
        if is_mariadb(server):
            connection.exec_driver_sql(f"LOCK TABLES {table} WRITE")
        else:
            connection.exec_driver_sql("BEGIN")
            connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


@contextlib.contextmanager
def _rows_locked(server: DatabaseServer, dice: random.Random) -> Iterator[None]:
    with administrator(server, "tmc") as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(f"SELECT * FROM {_table(connection, dice)} LIMIT 500 FOR UPDATE")
        yield


@contextlib.contextmanager
def _all_locked(server: DatabaseServer) -> Iterator[None]:
    with administrator(server) as connection:
        connection.exec_driver_sql("FLUSH TABLES WITH READ LOCK")
        yield


def _table(connection: sa.Connection, dice: random.Random) -> str:
    """Return any table with rows that change all the time."""
    names = sa.inspect(connection).get_table_names()
    return dice.choice(sorted(name for name in names if "message_" in name or "consumption_" in name))


def _sqlite_locked(scene: Scene) -> Fault:
    def begin(_: random.Random) -> Ending:
        connection = sqlite3.connect(scene.folder / "center.db", timeout=30, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        return connection.close

    return Fault(kind="database: file locked", part="database", begin=begin, longest_s=3.0)


def _of_broker(broker: RabbitMQ) -> list[Fault]:
    """Return what administrators of a broker do who never heard of the center."""

    def on_channel(work: Callable[[pika.channel.Channel, random.Random], object]) -> Callable[[random.Random], Ending]:
        def strike(dice: random.Random) -> None:
            connection = broker.connect()
            work(connection.channel(), dice)
            connection.close()

        return once(strike)

    def queue(dice: random.Random) -> str:
        names = broker.control("list_queues", "name", "--quiet", "--no-table-headers").split()
        return dice.choice(sorted(names))

    def alarm(_: random.Random) -> Ending:
        broker.control("set_vm_memory_high_watermark", "0")
        return lambda: broker.control("set_vm_memory_high_watermark", "absolute", "1GB")

    def policy(_: random.Random) -> Ending:
        broker.control("set_policy", "storm", ".*", '{"max-length": 5, "overflow": "reject-publish"}')
        return lambda: broker.control("clear_policy", "storm")

    def fault(what: str, begin: Callable[[random.Random], Ending], longest_s: float = 0.0) -> Fault:
        return Fault(kind=f"broker: {what}", part="broker 0", begin=begin, longest_s=longest_s, weight=0.3)

    return [
        fault("a queue deleted", on_channel(lambda channel, dice: channel.queue_delete(queue(dice)))),
        fault("a queue purged", on_channel(lambda channel, dice: channel.queue_purge(queue(dice)))),
        fault("connections closed", once(lambda _: broker.control("close_all_connections", _REASON))),
        fault("memory alarm", alarm, 4.0),
        fault("queues take five messages", policy, 4.0),
    ]
