"""Fixtures: the databases that every adapter test runs against. A missing server is a failure, never a skip."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from tests.support.dose import LONG, in_turn
from tests.support.kafka import Kafka
from tests.support.store import StoreUnderTest, server_store, sqlite_store
from tmc_storm.services.consul import Consul
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitMQ

# Who stops the tests lets their fixtures stop what they started; children that a test forks end as usual.
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, signal.default_int_handler)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
SERVERS = ("mariadb", "postgresql")
"""Fixtures of database servers that the center runs on."""
_FIGURES = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run one of the tests of each kind that takes turns; all by `--long`, or where tests are named one by one."""
    if LONG or any("::" in argument for argument in config.args):
        return
    kinds: dict[str, list[pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers("takes_turns"):
            kinds.setdefault(mark.args[0], []).append(item)
    chosen = [item for kind, some in kinds.items() for item in in_turn(kind, some)]
    others = {item for some in kinds.values() for item in some}.difference(chosen)
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keep a figure that a test saw: printed at the end, and part of the report of `./scripts/test --long`."""
    return request.config.stash.setdefault(_FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, [])
    for figure in figures:
        terminalreporter.write_line(figure)
    if not LONG:
        return
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error")}
    now = datetime.now(UTC)
    report = config.rootpath / "reports" / f"long-{now:%Y-%m-%dT%H%M}-{os.getpid()}.md"  # of this lane
    report.parent.mkdir(exist_ok=True)
    lines = [f"# Long run of {now:%Y-%m-%d %H:%M} UTC", "", ", ".join(f"{n} {kind}" for kind, n in counts.items()), ""]
    report.write_text("\n".join([*lines, *(f"- {figure}" for figure in figures)]) + "\n")
    terminalreporter.write_line(f"report: {report.relative_to(config.rootpath)}")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The private server of this run."""
    server = MariaDB()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The private server of this run."""
    server = PostgreSQL()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The private broker of this run."""
    broker = RabbitMQ()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """The private Kafka of this run."""
    broker = Kafka()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def consul() -> Iterator[Consul]:
    """The private Consul agent of this run."""
    agent = Consul()
    yield agent
    agent.stop()


_SERVERS = [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in SERVERS]


@pytest.fixture(params=_SERVERS)
def database_server(request: pytest.FixtureRequest) -> MariaDB | PostgreSQL:
    """A server whose transactions write beside each other and lock rows."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sqlite", *_SERVERS])
def store(request: pytest.FixtureRequest, tmp_path) -> Iterator[StoreUnderTest]:
    """An empty store with app `orders` owning topic `order.paid`, and `coupons` subscribed to it; manual clock."""
    kind = request.param
    made = server_store(request.getfixturevalue(kind)) if kind in SERVERS else sqlite_store(tmp_path)
    yield made
    made.close()
