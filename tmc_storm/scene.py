"""Where a storm takes place: what there is to strike, and how services and observers reach what they need."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tmc_storm.moving import Run
from tmc_storm.operator import Operator
from tmc_storm.services.consul import Consul
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.program import Program
from tmc_storm.services.rabbitmq import RabbitMQ
from tmc_storm.services.replicated import Replicated, ReplicatedMariaDB
from tmc_storm.shop import books
from tmc_storm.tcp_proxy import TcpProxy

DatabaseServer = MariaDB | PostgreSQL | Replicated
_LOCK_S = 10  # how long an administrator waits for a lock


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of one thing to another, such as "server 1" to "database 0"."""

    source: str
    target: str
    proxy: TcpProxy

    @property
    def kind(self) -> str:
        """Return the names without their numbers."""
        return f"{_plain(self.source)} to {_plain(self.target)}"

    @property
    def name(self) -> str:
        return f"{self.source} to {self.target}"


def _plain(name: str) -> str:
    return name.rstrip(" 0123456789")


class Scene(ABC):
    """The things that a storm finds. A scene that we only visit has few of them.

    operator: of the center, whose calls pass no proxy.  links: connections with a proxy.  business: the server of the services'
    databases; None, they are SQLite files.  has_checks: the center can ask producers about undecided messages.
    authority, server_name: for TLS to the center; empty, none.  run_tmc: None, its configuration is not ours.
    subscriptions: the topics of each app that gets messages.  webhook_port: where the service listens that gets them as
    webhooks; 0: there is none.  webhook_urls: by topic.  http_addresses: host:port of the servers' HTTP doors.
    queue_hosts: of the broker with submit queues, as a URL has them; empty, none.
    """

    operator: Operator

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links: list[Link] = []
        self.servers: list[Program] = []
        self.databases: list[DatabaseServer] = []
        self.business: DatabaseServer | None = None
        self.brokers: list[RabbitMQ] = []
        self.consul: Consul | None = None
        self.has_checks = True
        self.run_tmc: Run | None = None
        self.authority = self.server_name = ""
        self.subscriptions: Mapping[str, Sequence[str]] = books.SUBSCRIPTIONS
        self.webhook_port = 0
        self.webhook_urls: Mapping[str, str] = {}
        self.queue_hosts = ""
        self.http_addresses: Sequence[str] = ()
        self._open = contextlib.ExitStack()

    @property
    @abstractmethod
    def addresses(self) -> str:
        """Return the address by which producers reach the servers."""

    @property
    def consumer_address(self) -> str:
        """Return the address by which consumers reach them."""
        return self.addresses

    def business_url(self, name: str, *, direct: bool = False) -> str:
        """Return the URL of a service's database. direct: without a proxy, for those who only look."""
        return f"sqlite:///{self.folder}/{name}.db"

    def clock_of(self, server: str) -> Path:
        """Return the file by which this server's clock goes; see `skewed`."""
        return self.folder / f"{server.replace(' ', '-')}.clock"

    def link(self, source: str, target: str, host: str, port: int, *, port_of: TcpProxy | None = None) -> TcpProxy:
        """Put a proxy into a connection. port_of: listen on the port of that one, at the target's own address."""
        proxy = TcpProxy(host, port) if port_of is None else TcpProxy(host, port, host=host, port=port_of.port)
        self._open.callback(proxy.close)
        self.links.append(Link(source=source, target=target, proxy=proxy))
        return proxy

    def close(self) -> None:
        """Stop everything."""
        self._open.close()


@contextlib.contextmanager
def administrator(server: DatabaseServer, database: str = "") -> Iterator[sa.Connection]:
    """Connect as the one who may do everything, past the proxies; each statement is its own transaction."""
    machine = server.primary if isinstance(server, Replicated) else server
    name = database or ("mysql" if is_mariadb(server) else "postgres")
    engine = sa.create_engine(machine.url(name), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(
            f"SET lock_wait_timeout = {_LOCK_S}" if is_mariadb(server) else f"SET lock_timeout = '{_LOCK_S}s'"
        )
        yield connection


def is_mariadb(server: DatabaseServer) -> bool:
    """Return whether it is MariaDB; otherwise it is PostgreSQL."""
    return isinstance(server, MariaDB | ReplicatedMariaDB)
