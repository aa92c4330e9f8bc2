"""Fixtures: the databases that every adapter test runs against. A missing MariaDB is a failure, never a skip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.consul import Consul
from tests.support.mariadb import MariaDB
from tests.support.rabbitmq import RabbitMQ
from tests.support.store import StoreUnderTest, mariadb_store, sqlite_store


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The private server of this run."""
    server = MariaDB()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The private broker of this run."""
    broker = RabbitMQ()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def consul() -> Iterator[Consul]:
    """The private Consul agent of this run."""
    agent = Consul()
    yield agent
    agent.stop()


@pytest.fixture(params=["sqlite", pytest.param("mariadb", marks=pytest.mark.mariadb)])
def store(request: pytest.FixtureRequest, tmp_path) -> Iterator[StoreUnderTest]:
    """An empty store with app `orders` owning topic `order.paid`, and `coupons` subscribed to it; manual clock."""
    sqlite = request.param == "sqlite"
    made = sqlite_store(tmp_path) if sqlite else mariadb_store(request.getfixturevalue("mariadb"))
    yield made
    made.close()
