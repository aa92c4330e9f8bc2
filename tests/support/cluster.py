"""The production form on one machine: servers as processes over real MariaDB, RabbitMQ and Consul."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import grpc
import sqlalchemy as sa

from tmc_common.protocol import admin_pb2, admin_pb2_grpc
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.store.engines import Database
from tmc_server.store.tables import shard_tables, tombstone
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitCluster, RabbitMQ
from tmc_storm.services.replicated import Replicated
from tmc_storm.tcp_proxy import TcpProxy

TMC = str(Path(sys.executable).parent / "tmc")
ROOT = Path(__file__).parents[2]


_IN_TURN = [("grpc.lb_policy_name", "round_robin"), ("grpc.use_local_subchannel_pool", 1)]


@cache
def _shared_broker() -> RabbitMQ:
    """It ends with the process."""
    return RabbitMQ()


Kind = Literal["mariadb", "postgresql"]
KINDS: tuple[Kind, ...] = ("mariadb", "postgresql")


class Server:
    """One `tmc serve`. script: a program to run instead."""

    def __init__(self, environment: dict[str, str], log: Path, arguments: Sequence[str]) -> None:
        self.environment = environment
        self.log = log
        self.arguments = list(arguments)
        self.port = int(environment["TMC_SERVER__LISTEN"].rpartition(":")[2])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL of its HTTP door."""
        return f"http://{self.environment['TMC_HTTP__LISTEN']}"

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.arguments, env=self.environment, stdout=log, stderr=log, cwd=ROOT)
        self.await_serving()

    def await_serving(self) -> None:
        def serving() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return b"serving on port" in self.log.read_bytes()[self._seen :]

        eventually(serving, seconds=60)
        self._seen = len(self.log.read_bytes())

    _seen = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def suspend(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM, and wait. Returns: the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def rss_mb(self) -> float:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024


class Cluster:
    """databases: servers of this kind that share the 32 shards.  settings: further TMC_ variables of every server.

    http: servers have the HTTP door, too.
    replicated: the one database, on several hosts.
    broker_behind_proxy: servers and consumers reach RabbitMQ through `proxy`, which misbehaves on request.  broker: stopped
    with the cluster; None: one node, shared with other clusters of this process, unless it is to be `own_broker`.
    """

    def __init__(
        self,
        databases: int = 1,
        servers: int = 1,
        kind: Kind = "mariadb",
        consul: bool = False,
        lease_seconds: float = 3.0,
        pool_mb: int = 128,
        broker_behind_proxy: bool = False,
        broker: RabbitMQ | RabbitCluster | None = None,
        own_broker: bool = False,
        consul_settings: Mapping[str, str | bool] | None = None,
        http: bool = False,
        replicated: Replicated | None = None,
        **settings: str,
    ) -> None:
        self._has_http = http
        self.home = Path(tempfile.mkdtemp(prefix="tmc-cluster-"))
        make = {"mariadb": lambda: MariaDB(pool_mb=pool_mb), "postgresql": lambda: PostgreSQL(pool_mb=pool_mb)}[kind]
        self.databases: list[Any] = [replicated] if replicated else [make() for _ in range(databases)]
        self._is_shared = broker is None and not (own_broker or broker_behind_proxy)
        self.broker: Any = broker or (_shared_broker() if self._is_shared else RabbitMQ())
        self.proxy = TcpProxy("127.0.0.1", self.broker.port) if broker_behind_proxy else None
        broker_url = f"amqp://guest:guest@127.0.0.1:{self.proxy.port}/%2F" if self.proxy else self.broker.url
        self.consul = Consul(**(consul_settings or {})) if consul else None
        self.settings = {
            "TMC_STORE__CATALOG": self.databases[0].url("tmc_cluster"),
            "TMC_STORE__CHANGE_DELAY_MS": "1500",
            "TMC_DELIVERY__KIND": "rabbitmq",
            "TMC_RABBITMQ__URL": broker_url,
            "TMC_RABBITMQ__SINGLE_NODE": str(not isinstance(broker, RabbitCluster)).lower(),
            "TMC_SERVER__LEASE_SECONDS": str(lease_seconds),
            "TMC_LIMITS__ITEMS_PER_SECOND": "0",
        } | settings
        if databases > 1:
            config = self.home / "tmc.toml"
            size = 32 // databases
            config.write_text(
                "".join(
                    f'[[store.shards]]\nurl = "{database.url("tmc_cluster")}"\nfirst = {i * size}\n'
                    f"last = {i * size + size - 1}\n"
                    for i, database in enumerate(self.databases)
                )
            )
            self._config = ["--config", str(config)]
        else:
            self._config = []
        if self.consul is not None:
            self.settings |= {"TMC_CONSUL__AGENT": self.consul.address, "TMC_CONSUL__TAG": "test"}
        made = subprocess.run(
            [TMC, "init", *self._config], env=os.environ | self.settings, capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr
        self.token = made.stdout.strip()
        self.servers = [self.new_server(number) for number in range(servers)]
        for server in self.servers:
            server.start()
        self.keys: dict[str, str] = {}
        self._readers = [Database(database.url("tmc_cluster")) for database in self.databases]

    def new_server(self, number: int, *arguments: str) -> Server:
        """A server that is not started. arguments: instead of `tmc serve`."""
        environment = os.environ | self.settings | {"TMC_SERVER__LISTEN": f"127.0.0.1:{free_port()}"}
        if self._has_http:
            environment["TMC_HTTP__LISTEN"] = f"127.0.0.1:{free_port()}"
        command = arguments or (TMC, "serve")
        return Server(environment, self.home / f"server{number}.log", [*command, *self._config])

    @property
    def addresses(self) -> str:
        return ",".join(server.address for server in self.servers)

    @property
    def by_name(self) -> str:
        """How the SDK finds the servers through Consul."""
        assert self.consul is not None
        return f"consul://{self.consul.address}/tmc?tag=test"

    def channel(self, target: str) -> grpc.Channel:
        """To all servers in turn."""
        return grpc.insecure_channel(target, _IN_TURN)

    def admin(self, method: str, request: Any) -> Any:
        """One admin call to any server that answers."""
        with self.channel("ipv4:" + self.addresses) as channel:
            call = getattr(admin_pb2_grpc.AdminServiceStub(channel), method)
            metadata = [("authorization", f"Bearer {self.token}")]
            return call(request, metadata=metadata, timeout=20, wait_for_ready=True)

    def register(self, *apps: str) -> None:
        for app in apps:
            self.keys[app] = self.admin("RegisterApp", admin_pb2.RegisterAppRequest(id=app)).key

    def subscribe(self, topic: str, app: str, **settings: Any) -> Any:
        topic_settings = settings.pop("topic_settings", {})
        owner = settings.pop("owner", "orders")
        self.admin("RegisterTopic", admin_pb2.RegisterTopicRequest(name=topic, owner=owner, **topic_settings))
        return self.admin(
            "RegisterSubscription", admin_pb2.RegisterSubscriptionRequest(topic=topic, app=app, **settings)
        )

    def in_effect(self, *made: Any) -> None:
        """Wait until these subscriptions count."""
        eventually(lambda: time.time() * 1000 >= max(one.effective_ms for one in made) + 200)

    def consumptions(self, *subscriptions: int) -> Counter[str]:
        """Rows of these subscriptions (or all) by state, over all databases."""
        found: Counter[str] = Counter()
        for shard in range(32):
            table = shard_tables(shard).consumption
            query = sa.select(table.c.state, sa.func.count()).group_by(table.c.state)
            if subscriptions:
                query = query.where(table.c.subscription_no.in_(subscriptions))
            with self._readers[shard * len(self._readers) // 32].reading() as connection:
                for state, count in connection.execute(query):
                    found[ConsumptionState(state).name] += count
        return found

    def messages(self) -> Counter[str]:
        """Messages by state, over all databases."""
        found: Counter[str] = Counter()
        for shard in range(32):
            table = shard_tables(shard).message
            query = sa.select(table.c.state, sa.func.count()).group_by(table.c.state)
            with self._readers[shard * len(self._readers) // 32].reading() as connection:
                for state, count in connection.execute(query):
                    found[MessageState(state).name] += count
        return found

    def rolled_back(self) -> set[str]:
        """Return the keys of what was rolled back, also where the rollback came before its prepare."""
        found: set[str] = set()
        for reader in self._readers:
            with reader.reading() as connection:
                found.update(connection.scalars(sa.select(tombstone.c.message_key)))
        return found

    def rows(self, subscription: int) -> list[Any]:
        """All consumption rows of one subscription."""
        found: list[Any] = []
        for shard in range(32):
            table = shard_tables(shard).consumption
            with self._readers[shard * len(self._readers) // 32].reading() as connection:
                found += connection.execute(sa.select(table).where(table.c.subscription_no == subscription)).fetchall()
        return found

    def open_rows(self, subscription: int) -> str:
        """Rows by (state, attempt, tried) and what the broker says of its queues: for the message of a failed test."""
        rows = Counter((ConsumptionState(row.state).name, row.attempt, row.tried) for row in self.rows(subscription))
        queues = self.broker.control("list_queues", "name", "state", "messages", "consumers", "--quiet")
        return f"{dict(rows)}, queues: {queues}"

    def live_servers(self) -> list[Any]:
        """Alive by their heartbeats, with the shards each holds."""
        answer = self.admin("ListServers", admin_pb2.ListServersRequest())
        return [server for server in answer.servers if server.alive]

    def shared(self, servers: int) -> None:
        """Wait until so many servers hold all shards between them, each its fair part."""

        def fair() -> bool:
            alive = self.live_servers()
            shards = sorted(shard for server in alive for shard in server.shards)
            least = min((len(server.shards) for server in alive), default=0)
            return len(alive) == servers and shards == list(range(32)) and least >= 32 // servers - 2

        eventually(fair)

    def stop(self) -> None:
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                os.kill(server.pid, signal.SIGCONT)
                server.terminate()
        for reader in self._readers:
            reader.close()
        if self.consul is not None:
            self.consul.stop()
        if self.proxy is not None:
            self.proxy.close()
        if self._is_shared:
            self._delete_queues()
        else:
            self.broker.stop()
        for database in self.databases:
            database.stop()

    def _delete_queues(self) -> None:
        names = self.broker.control("list_queues", "name", "--quiet", "--no-table-headers").split()
        connection = self.broker.connect()
        channel = connection.channel()
        for name in names:
            channel.queue_delete(name)
        connection.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell_errors()
        self.stop()

    def tell_errors(self) -> None:
        """What servers logged as errors goes to stderr, where a failing test shows it."""
        for server in self.servers:
            for line in server.log.read_text().splitlines():
                if '"level": "error"' in line or '"level": "critical"' in line:
                    print(server.log.name, line.replace("\\n", "\n"), file=sys.stderr)
