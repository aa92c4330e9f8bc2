"""The world of a storm: a center on databases, a broker and Consul of its own, with a proxy in every connection.

Everything is on this machine, on free ports of loopback.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tmc_storm.operator import Operator
from tmc_storm.scene import DatabaseServer, Scene, administrator, is_mariadb
from tmc_storm.services import consul, mariadb, postgresql
from tmc_storm.services.consul import Consul
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.program import Program
from tmc_storm.services.rabbitmq import RabbitCluster, RabbitMQ
from tmc_storm.services.replicated import HOSTS, Replicated, ReplicatedMariaDB, ReplicatedPostgreSQL
from tmc_storm.services.skewed import set_clock
from tmc_storm.shop import books
from tmc_storm.tcp_proxy import TcpProxy


class Store(StrEnum):
    """Where the center keeps its messages."""

    SQLITE = "sqlite"
    MARIADB = "mariadb"
    POSTGRESQL = "postgresql"


Delivery = Literal["builtin", "rabbitmq"]

_USER, _PASSWORD = "storm", "storm"  # of the center and the shop: like theirs elsewhere, it may not do everything
_SHARDS = 32
_THIS_MACHINE = '["127.0.0.0/8:*"]'
_TMC = [sys.executable, "-m", "tmc_cli"]
_SKEWED = [sys.executable, "-m", "tmc_storm.services.skewed"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of a world. replicas: each of the center's databases has one.  brokers: nodes of one RabbitMQ cluster.

    consul: servers register there and consumers find them.
    """

    store: Store = Store.SQLITE
    delivery: Delivery = "builtin"
    servers: int = 1
    databases: int = 1
    replicas: bool = False
    brokers: int = 1
    consul: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError."""
        several = self.servers > 1 or self.databases > 1
        if self.store is Store.SQLITE and several:
            raise ValueError("a SQLite file has one server: choose another store for several")
        if self.store is Store.SQLITE and self.replicas:
            raise ValueError("a SQLite file has no replica: choose another store")
        if self.delivery == "builtin" and self.servers > 1:
            raise ValueError("the built-in delivery is for one server: several need rabbitmq")


def missing(form: Form) -> list[str]:
    """Return what must be installed first: Debian packages, other programs, our extras."""
    wanted = {
        "mariadb-server": form.store is Store.MARIADB and shutil.which(mariadb.DAEMON) is None,
        "tmc-center[mysql]": form.store is Store.MARIADB and find_spec("MySQLdb") is None,
        "asyncmy": form.store is Store.MARIADB and find_spec("asyncmy") is None,
        "postgresql": form.store is Store.POSTGRESQL and not (postgresql.BINARIES / "postgres").exists(),
        "tmc-center[postgresql]": form.store is Store.POSTGRESQL and find_spec("psycopg") is None,
        "rabbitmq-server": form.delivery == "rabbitmq" and shutil.which("rabbitmq-server") is None,
        "Consul (or give --no-consul)": form.consul and consul.found() is None,
    }
    return [name for name, is_missing in wanted.items() if is_missing]


class World(Scene):
    """Everything below the shop, of our own, running."""

    def __init__(self, form: Form, folder: Path, instances: Mapping[str, list[str]]) -> None:
        """instances: where services answer checks."""
        super().__init__(folder)
        self.form = form
        try:
            self._start(instances)
        except BaseException:
            self.close()
            raise

    def _start(self, instances: Mapping[str, list[str]]) -> None:
        form = self.form
        if form.store is not Store.SQLITE:
            self.databases = [self._of_center() for _ in range(form.databases)]
            self.business = self._database("orders", "stock", "mail", "web")
            self._business_link = self.link("shop", "business database", "127.0.0.1", self.business.port)
        self._start_brokers()
        if form.consul:
            self.consul = Consul()
            self._open.callback(self.consul.stop)
        self._ports = [free_port() for _ in range(form.servers)]
        self._doors = [self.link("client", f"server {i}", "127.0.0.1", port) for i, port in enumerate(self._ports)]
        self._http_ports = [free_port() for _ in range(form.servers)]
        self.http_addresses = [
            self.link("HTTP client", f"server {i}", "127.0.0.1", port).address
            for i, port in enumerate(self._http_ports)
        ]
        self.subscriptions = {**books.SUBSCRIPTIONS, **books.WEBHOOKS}
        self.webhook_port = free_port()
        webhook = self.link("center", "webhook receiver", "127.0.0.1", self.webhook_port)
        # Behind the proxy, one that is away looks like one that hangs up; the other way says that nobody is there.
        self.webhook_urls = {
            books.ACCOUNT: f"http://{webhook.address}/one",
            books.PAID: f"http://127.0.0.1:{self.webhook_port}/batch",
        }
        self.servers = [self._server(number, instances) for number in range(form.servers)]
        self.run_tmc = self._run_tmc
        token = self._init()
        self.operator = Operator("ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self._ports), token)
        self._open.callback(self.operator.close)
        for server in self.servers:
            server.start()
            self._open.callback(server.stop)
        self.operator.call("GetOverview", seconds=120)

    def _of_center(self) -> DatabaseServer:
        if not self.form.replicas:
            return self._database("tmc")
        if self.form.store is Store.MARIADB:
            pair: Replicated = ReplicatedMariaDB(_USER, _PASSWORD)
        else:
            pair = ReplicatedPostgreSQL()
        self._open.callback(pair.stop)
        pair.create("tmc")
        if self.form.store is Store.POSTGRESQL:
            self._give(pair, "tmc")
        return pair

    def _database(self, *names: str) -> DatabaseServer:
        made: DatabaseServer = MariaDB(pool_mb=64) if self.form.store is Store.MARIADB else PostgreSQL(pool_mb=64)
        self._open.callback(made.stop)
        for name in names:
            made.create(name)
        self._give(made, *names)
        return made

    def _give(self, server: DatabaseServer, *names: str) -> None:
        """Make the user to whom these databases belong."""
        with administrator(server) as connection:
            if is_mariadb(server):
                connection.exec_driver_sql(f"CREATE USER {_USER} IDENTIFIED BY '{_PASSWORD}'")
            else:
                connection.exec_driver_sql(f"CREATE ROLE {_USER} LOGIN PASSWORD '{_PASSWORD}'")
            for name in names:
                if is_mariadb(server):
                    connection.exec_driver_sql(f"GRANT ALL ON {name}.* TO {_USER}")
                else:
                    connection.exec_driver_sql(f"ALTER DATABASE {name} OWNER TO {_USER}")

    def _start_brokers(self) -> None:
        if self.form.delivery == "builtin":
            return
        if self.form.brokers > 1:
            cluster = RabbitCluster(self.form.brokers)
            self._open.callback(cluster.stop)
            self.brokers = cluster.nodes
        else:
            self.brokers = [RabbitMQ()]
            self._open.callback(self.brokers[0].stop)
        self._consumer_links = self._to_brokers("consumer")
        self.queue_hosts = _hosts(self._to_brokers("producer"))

    def _to_brokers(self, source: str) -> list[TcpProxy]:
        return [self.link(source, f"broker {i}", "127.0.0.1", broker.port) for i, broker in enumerate(self.brokers)]

    def _server(self, number: int, instances: Mapping[str, list[str]]) -> Program:
        """Make a server that is not started. All its connections have proxies of their own."""
        form, name = self.form, f"server {number}"
        urls = [self._center_url(name, i) for i in range(len(self.databases))]
        urls = urls or [f"sqlite:///{self.folder}/center.db"]
        settings = {
            "TMC_SERVER__LISTEN": f"127.0.0.1:{self._ports[number]}",
            "TMC_SERVER__LEASE_SECONDS": "3",
            "TMC_STORE__CATALOG": urls[0],
            "TMC_STORE__CHANGE_DELAY_MS": "1500",
            "TMC_DELIVERY__KIND": form.delivery,
            "TMC_DISCOVERY__INSTANCES": json.dumps(dict(instances)),
            "TMC_CHECKS__ALLOW": _THIS_MACHINE,
            "TMC_WEBHOOKS__ALLOW": _THIS_MACHINE,
            "TMC_HTTP__LISTEN": f"127.0.0.1:{self._http_ports[number]}",
            "TMC_LOG__FORMAT": "json",
        }
        if self.brokers:
            settings |= {
                "TMC_RABBITMQ__URL": f"amqp://guest:guest@{_hosts(self._to_brokers(name))}/%2F",
                "TMC_RABBITMQ__SINGLE_NODE": str(form.brokers == 1).lower(),
                "TMC_RABBITMQ__CONSUMER_ADDRESS": _hosts(self._consumer_links),
                "TMC_SUBMISSION__RABBITMQ": "true",
            }
        if self.consul is not None:
            settings |= {
                "TMC_CONSUL__AGENT": self.link(name, "Consul", "127.0.0.1", self.consul.port).address,
                "TMC_CONSUL__TAG": "storm",
                "TMC_CONSUL__ADVERTISE": self._doors[number].address,
            }
        config = self.folder / f"server-{number}.toml"
        config.write_text("".join(_range_of(url, i, len(urls)) for i, url in enumerate(urls)) if len(urls) > 1 else "")
        set_clock(self.clock_of(name), 0.0)
        command = [*_SKEWED, str(self.clock_of(name)), "serve", "--config", str(config)]
        return Program(name, command, settings, self.folder / f"server-{number}.log")

    def _run_tmc(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command with the configuration of the first server, over the connections that this one has."""
        return subprocess.Popen(
            [*_TMC, *words, "--config", str(self.folder / "server-0.toml")],
            env=self.servers[0].environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _init(self) -> str:
        """Create the tables, and return the token of the administrator."""
        command = self._run_tmc(["init"])
        token, errors = command.communicate()
        if command.returncode:
            raise RuntimeError(f"tmc init: {errors}")
        return token.strip()

    def _center_url(self, server: str, number: int) -> str:
        """Return the URL of a database of the center, with proxies of this server's own."""
        database, target = self.databases[number], f"database {number}"
        if not isinstance(database, Replicated):
            return self._url(self.link(server, target, "127.0.0.1", database.port).port, "tmc")
        first = self.link(server, f"{target} 0", HOSTS[0], database.port)
        self.link(server, f"{target} 1", HOSTS[1], database.port, port_of=first)
        return self._url(first.port, "tmc", ",".join(HOSTS))

    def _url(self, port: int, database: str, hosts: str = "127.0.0.1") -> str:
        """Return the URL by which somebody who is not an administrator reaches this database at this port."""
        scheme = "mariadb+mysqldb" if self.form.store is Store.MARIADB else "postgresql+psycopg"
        return f"{scheme}://{_USER}:{_PASSWORD}@{hosts}:{port}/{database}"

    def business_url(self, name: str, *, direct: bool = False) -> str:
        if self.business is None:
            return super().business_url(name, direct=direct)
        return self._url(self.business.port if direct else self._business_link.port, name)

    @property
    def addresses(self) -> str:
        return _hosts(self._doors)

    @property
    def consumer_address(self) -> str:
        return f"consul://{self.consul.address}/tmc?tag=storm" if self.consul is not None else self.addresses


def _hosts(proxies: Sequence[TcpProxy]) -> str:
    return ",".join(proxy.address for proxy in proxies)


def _range_of(url: str, number: int, count: int) -> str:
    first, end = _SHARDS * number // count, _SHARDS * (number + 1) // count
    return f'[[store.shards]]\nurl = "{url}"\nfirst = {first}\nlast = {end - 1}\n'
