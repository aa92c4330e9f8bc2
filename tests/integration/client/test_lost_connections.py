"""Connections that a server has closed while they were idle cost no message a retry."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

import tmc_client as tmc
from tests.support.messages import a_message
from tmc_client import errors
from tmc_client.tables import metadata
from tmc_storm.services.mariadb import MariaDB


@pytest.fixture
def engine(mariadb: MariaDB) -> Iterator[sa.Engine]:
    root = sa.create_engine(mariadb.url("mysql"))
    with root.begin() as connection:
        connection.exec_driver_sql("CREATE DATABASE IF NOT EXISTS lost_connections")
    root.dispose()
    made = sa.create_engine(mariadb.url("lost_connections"), pool_size=1, max_overflow=0)
    tmc.create_tables(made)
    yield made
    made.dispose()  # its connections may be lost
    metadata.drop_all(made)
    made.dispose()


def _kill_all(mariadb: MariaDB) -> None:
    """As a server does after wait_timeout."""
    root = sa.create_engine(mariadb.url("mysql"))
    with root.connect() as connection:
        query = "SELECT id FROM information_schema.processlist WHERE db = 'lost_connections'"
        for number in connection.exec_driver_sql(query).scalars().all():
            connection.exec_driver_sql(f"KILL {number}")
    root.dispose()


@pytest.mark.mariadb
def test_the_first_message_after_an_idle_night_is_handled(mariadb: MariaDB, engine: sa.Engine) -> None:
    inbox = tmc.SqlInbox(sessionmaker(engine))
    for number in range(3):
        with inbox.once(a_message(number)) as session:
            assert session is not None
        _kill_all(mariadb)


@pytest.mark.mariadb
def test_a_connection_that_is_lost_in_a_handler_is_no_failure_of_it(mariadb: MariaDB, engine: sa.Engine) -> None:
    inbox = tmc.SqlInbox(sessionmaker(engine))
    with pytest.raises(errors.InboxDown), inbox.once(a_message()) as session:
        _kill_all(mariadb)
        session.execute(sa.text("SELECT 1"))
    with inbox.once(a_message()) as session:
        assert session is not None


@pytest.mark.mariadb
def test_a_connection_that_is_lost_before_the_commit_is_no_failure_of_a_handler(
    mariadb: MariaDB, engine: sa.Engine
) -> None:
    inbox = tmc.SqlInbox(sessionmaker(engine))
    with pytest.raises(errors.InboxDown), inbox.once(a_message()):
        _kill_all(mariadb)


@pytest.mark.mariadb
def test_an_error_of_a_statement_is_the_handlers_own(engine: sa.Engine) -> None:
    inbox = tmc.SqlInbox(sessionmaker(engine))
    with pytest.raises(sa.exc.ProgrammingError), inbox.once(a_message()) as session:
        session.execute(sa.text("SELECT nothing FROM nowhere"))


def test_django_closes_what_the_server_closed_before_a_handler_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmc_client.django import fitness

    closed: list[str] = []

    def connection(name: str, *, usable: bool, in_atomic_block: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            connection=object(),
            in_atomic_block=in_atomic_block,
            is_usable=lambda: usable,
            close=lambda: closed.append(name),
        )

    there = [
        connection("lost", usable=False),
        connection("well", usable=True),
        connection("of a test case", usable=False, in_atomic_block=True),
    ]
    monkeypatch.setattr(fitness, "close_old_connections", lambda: closed.append("old ones"))
    monkeypatch.setattr(fitness, "connections", SimpleNamespace(all=lambda initialized_only: there))
    fitness.before_handler()
    assert closed == ["old ones", "lost"]
    fitness.after_handler()
    fitness.before_handler()  # used a moment ago: not tested again
    assert closed == ["old ones", "lost", "old ones", "old ones"]


def test_frameworks_are_called_around_every_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.handlers import HandlerBench
    from tmc_client.consuming import calling
    from tmc_storm.eventually import eventually

    seen: list[str] = []
    monkeypatch.setattr(calling, "_AROUND", [])
    calling.around_handlers(lambda: seen.append("before"), lambda: seen.append("after"))
    bench = HandlerBench()

    def handle(body: bytes) -> None:
        seen.append("handler")
        raise RuntimeError("broken")

    bench.start(handle)
    bench.arrive(a_message())
    eventually(lambda: seen == ["before", "handler", "after"])
    bench.stop()
