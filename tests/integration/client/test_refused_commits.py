"""A commit that raises: refused by the database, by a listener, by the network, or not at all. The block finds out which."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.producing import FakeProducer, FakeTarget, verdicts
from tests.support.shops import DATABASES, open_shop, url_of
from tmc_client import aio
from tmc_client.local.choosing import local_of
from tmc_client.producing.aio_transaction import AsyncTransaction
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger

SHORT = timedelta(seconds=2)


class NotTodayError(Exception):
    """A listener raises it."""


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    made = open_shop(sa.create_engine(url_of(request, tmp_path, "refused")))
    yield made
    made.dispose()


def _block(producer: FakeProducer, source: Any) -> Transaction:
    local = local_of(source, "center.transaction()")
    return Transaction(producer, lambda *_: None, local, SHORT)  # type: ignore[arg-type]


def _order(session: Any, number: int) -> None:
    session.execute(sa.text("INSERT INTO orders VALUES (:id)"), {"id": number})


def _orders(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT id FROM orders ORDER BY id")).scalars())


def _verdicts(engine: sa.Engine, producer: FakeProducer) -> dict[str, tmc.Verdict]:
    arguments, options = engine.dialect.create_connect_args(engine.url)
    return verdicts(lambda: engine.dialect.connect(*arguments, **options), producer)


def _cut(connection: sa.Connection) -> None:
    """As if the network went away before COMMIT."""
    connection.connection.dbapi_connection.close()  # type: ignore[union-attr]


def _commit_first(connection: sa.Connection) -> None:
    """As if the network went away after COMMIT, before its answer."""
    raw: Any = connection.connection.dbapi_connection
    raw.commit()
    raise NotTodayError


def _refuse(_connection: sa.Connection) -> None:
    raise NotTodayError


@pytest.mark.parametrize("happens", [_refuse, _cut])
def test_what_did_not_commit_is_known_at_once(engine: sa.Engine, happens: Callable[[sa.Connection], None]) -> None:
    producer, failing = FakeProducer(), sa.create_engine(engine.url)
    session = Session(failing)
    with pytest.raises((NotTodayError, sa.exc.DBAPIError)), _block(producer, session) as tx:
        event.listen(failing, "commit", happens)
        _order(session, 1)
        tx.send("t", {}, key="a")
    event.remove(failing, "commit", happens)
    assert producer.abandoned == ["a"]  # its key is free
    with _block(producer, session) as tx:  # the session is of use, and commits nothing of before
        _order(session, 2)
        tx.send("t", {}, key="a")
    session.close()
    failing.dispose()
    assert (_orders(engine), producer.submitted) == ([2], ["a"])


def test_a_listener_that_raises_before_the_commit_leaves_nothing_open(engine: sa.Engine) -> None:
    producer = FakeProducer()
    session = Session(engine)
    event.listen(session, "before_commit", _refuse)
    with pytest.raises(NotTodayError), _block(producer, session) as tx:
        _order(session, 1)
        tx.send("t", {}, key="a")
    event.remove(session, "before_commit", _refuse)
    assert not session.in_transaction()
    session.commit()
    session.close()
    assert (_orders(engine), producer.abandoned, producer.submitted) == ([], ["a"], [])


@pytest.mark.parametrize("lost", [True, False], ids=["answer lost", "after_commit raises"])
def test_what_did_commit_is_sent_and_nothing_is_raised(engine: sa.Engine, lost: bool) -> None:
    producer, failing = FakeProducer(), sa.create_engine(engine.url)
    session = Session(failing)
    with _block(producer, session) as tx:
        if lost:
            event.listen(failing, "commit", _commit_first)
        else:
            event.listen(session, "after_commit", _refuse)
        _order(session, 1)
        tx.send("t", {}, key="a")
    if lost:
        event.remove(failing, "commit", _commit_first)
    else:
        event.remove(session, "after_commit", _refuse)
    assert (_orders(engine), producer.submitted, producer.abandoned) == ([1], ["a"], [])
    with _block(producer, session) as tx:
        _order(session, 2)
        tx.send("t", {}, key="b")
    session.close()
    failing.dispose()
    assert (_orders(engine), producer.submitted) == ([1, 2], ["a", "b"])


def test_an_interrupt_in_the_commit_is_raised_and_what_committed_is_sent(engine: sa.Engine) -> None:
    def interrupt(_session: Session) -> None:
        raise KeyboardInterrupt

    producer = FakeProducer()
    session = Session(engine)
    event.listen(session, "after_commit", interrupt)
    with pytest.raises(KeyboardInterrupt), _block(producer, session) as tx:
        _order(session, 1)
        tx.send("t", {}, key="a")
    session.close()
    assert (_orders(engine), producer.submitted) == ([1], ["a"])


def test_what_cannot_be_told_is_left_to_checks(engine: sa.Engine) -> None:
    """The database is away: no connection tells."""
    producer, failing = FakeProducer(), sa.create_engine(engine.url)
    session = Session(failing)

    def go_away(connection: sa.Connection) -> None:
        event.listen(failing.pool, "connect", _refuse_all)
        _cut(connection)

    def _refuse_all(*_: object) -> None:
        raise NotTodayError

    with pytest.raises((NotTodayError, sa.exc.DBAPIError)), _block(producer, session) as tx:
        event.listen(failing, "commit", go_away)
        _order(session, 1)
        tx.send("t", {}, key="a")
    session.close()
    failing.dispose()
    assert (producer.submitted, producer.abandoned) == ([], [])
    assert _verdicts(engine, producer) == {"a": tmc.Verdict.ROLLBACK}


def test_a_marker_that_a_check_wrote_says_it_too(engine: sa.Engine) -> None:
    """The key of the block's row is taken by the time it asks."""
    producer, failing = FakeProducer(), sa.create_engine(engine.url)
    session = Session(failing)

    def check_first(connection: sa.Connection) -> None:
        connection.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
        assert _verdicts(engine, producer) == {"a": tmc.Verdict.ROLLBACK}
        raise NotTodayError

    with pytest.raises(NotTodayError), _block(producer, session) as tx:
        event.listen(failing, "commit", check_first)
        _order(session, 1)
        tx.send("t", {}, key="a")
    session.close()
    failing.dispose()
    assert (_orders(engine), producer.abandoned) == ([], ["a"])


def test_an_outbox_block_leaves_nothing_open_either(engine: sa.Engine) -> None:
    session = Session(engine)
    event.listen(session, "before_commit", _refuse)
    with closing(tmc.Outbox(engine, FakeTarget())) as box:
        with pytest.raises(NotTodayError), box.transaction(session) as tx:
            _order(session, 1)
            tx.send("t", {}, key="a")
        event.remove(session, "before_commit", _refuse)
        session.commit()
        session.close()
        assert box.store.standing().unsent == 0
    assert _orders(engine) == []


DEFERRED = (
    "CREATE TABLE bought (id INTEGER PRIMARY KEY, by_whom INTEGER REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
)


@pytest.mark.parametrize("kind", ["session", "connection of SQLAlchemy", "psycopg", "sqlite3"])
def test_a_deferred_constraint_frees_the_key_at_once(kind: str, request: Any, tmp_path: Path) -> None:
    if kind == "sqlite3":
        connect: Callable[[], Any] = lambda: _with_keys(f"{tmp_path}/shop.db")  # noqa: E731 - one of two
        engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    else:
        engine = sa.create_engine(request.getfixturevalue("postgresql").create("tmc_refused"))
        connect = lambda: psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False))  # noqa: E731
    ledger.metadata.drop_all(engine)
    tmc.create_tables(engine)
    with engine.begin() as connection:
        for text in ("DROP TABLE IF EXISTS bought", "DROP TABLE IF EXISTS orders"):
            connection.exec_driver_sql(text)
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql(DEFERRED)
    sources = {"session": lambda: Session(engine), "connection of SQLAlchemy": engine.connect}
    producer = FakeProducer()
    with closing(sources.get(kind, connect)()) as source:
        run = source.connection().exec_driver_sql if kind == "session" else getattr(source, "exec_driver_sql", None)
        run = run or source.execute
        if kind == "session":
            source.rollback()

        def buy() -> None:
            with _block(producer, source) as tx:
                (source.connection().exec_driver_sql if kind == "session" else run)("INSERT INTO bought VALUES (1, 7)")
                tx.send("t", {}, key="a")

        with pytest.raises((sa.exc.IntegrityError, psycopg.IntegrityError, sqlite3.IntegrityError)):
            buy()
        assert producer.abandoned == ["a"]
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO orders VALUES (7)")
        buy()
    engine.dispose()
    assert producer.submitted == ["a"]


def _with_keys(path: str) -> sqlite3.Connection:
    made = sqlite3.connect(path)
    made.execute("PRAGMA foreign_keys = ON")
    return made


@pytest.mark.parametrize("raises", ["before_commit", "after_commit"])
def test_asyncio_finds_out_too(raises: str, tmp_path: Path) -> None:
    async def use() -> tuple[bool, Any, Any]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        await aio.create_tables(engine)
        producer: Any = FakeProducer()
        failed = False
        async with AsyncSession(engine) as session:
            event.listen(session.sync_session, raises, _refuse)
            try:
                async with AsyncTransaction(producer, lambda *_: None, session, SHORT) as tx:
                    tx.send("t", {}, key="a")
            except NotTodayError:
                failed = True
            event.remove(session.sync_session, raises, _refuse)
        await engine.dispose()
        return failed, producer.submitted, producer.abandoned

    expected = {"before_commit": (True, [], ["a"]), "after_commit": (False, ["a"], [])}
    assert asyncio.run(use()) == expected[raises]
