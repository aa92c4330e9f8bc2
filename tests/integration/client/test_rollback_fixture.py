"""Suites that wrap each test in a transaction which they roll back, as SQLAlchemy documents it: blocks only record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.messages import a_message
from tests.support.producing import FakeTarget
from tests.support.shops import DATABASES, open_shop, url_of
from tmc_client import aio
from tmc_client.recording import only_record, sent
from tmc_client.tables import inbox, ledger

NOWHERE = "127.0.0.1:1"


class PaymentFailedError(Exception):
    """The program raises it."""


def _begin_explicitly(engine: sa.Engine) -> None:
    """As SQLAlchemy says for SQLite: its driver would begin too late for savepoints."""
    event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))


@pytest.fixture(params=DATABASES)
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url_of(request, tmp_path, "fixture"))
    if request.param == "sqlite":
        _begin_explicitly(engine)
    open_shop(engine)
    sent.clear()
    with engine.connect() as connection:
        outer = connection.begin()
        yield connection
        outer.rollback()
        assert [connection.execute(sa.select(sa.func.count()).select_from(t)).scalar() for t in (ledger, inbox)] == [
            0,
            0,
        ]
        assert _orders(connection) == []
    engine.dispose()


@pytest.fixture
def session(connection: sa.Connection) -> Iterator[Session]:
    with only_record(), Session(connection, join_transaction_mode="create_savepoint") as session:
        yield session


def _orders(source: Any) -> list[int]:
    return list(source.execute(sa.text("SELECT id FROM orders ORDER BY id")).scalars())


def _order(session: Any, number: int) -> None:
    session.execute(sa.text("INSERT INTO orders VALUES (:id)"), {"id": number})


def _keys() -> list[str]:
    return [message.key for message in sent]


def test_blocks_record_what_they_would_send(session: Session) -> None:
    with closing(tmc.connect(NOWHERE, app="orders")) as center:
        with center.transaction(session) as tx:
            _order(session, 1)
            tx.send("order.paid", {"order": 1}, key="a")
        with suppress(PaymentFailedError), center.transaction(session) as tx:
            _order(session, 2)
            tx.send("order.paid", {}, key="never")
            raise PaymentFailedError
        with closing(tmc.Outbox(session.get_bind().engine, FakeTarget())) as box, box.transaction(session) as tx:
            _order(session, 3)
            tx.send("order.paid", {}, key="by the outbox")
    assert (_orders(session), _keys()) == ([1, 3], ["a", "by the outbox"])


def test_handlers_work_with_their_inbox(session: Session) -> None:
    box = tmc.SqlInbox(lambda: session)
    with closing(tmc.connect(NOWHERE, app="orders")) as center:
        with box.once(a_message(1)) as given, center.transaction(given) as tx:
            _order(given, 1)
            tx.send("order.paid", {}, key="of a handler")
        with box.once(a_message(1)) as given:
            assert given is None
    assert (_orders(session), _keys()) == ([1], ["of a handler"])


def test_a_savepoint_of_the_program_is_no_such_test(session: Session) -> None:
    with closing(tmc.connect(NOWHERE, app="orders")) as center, session.begin_nested():
        with pytest.raises(tmc.InvalidRequest, match="savepoint"), center.transaction(session):
            pass


def test_it_is_refused_unless_asked_for(connection: sa.Connection) -> None:
    """The outer transaction of a program may be committed, and its message would be lost."""
    with closing(tmc.connect(NOWHERE, app="orders")) as center:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with pytest.raises(tmc.InvalidRequest, match="transaction of the connection"), center.transaction(session):
                pass


def test_asyncio_records_too(tmp_path: Path) -> None:
    async def story() -> list[int]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/fixture.db")
        _begin_explicitly(engine.sync_engine)
        await aio.create_tables(engine)
        async with engine.begin() as connection:
            await connection.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        sent.clear()
        async with engine.connect() as connection, aio.connect(NOWHERE, app="orders") as center:
            outer = await connection.begin()
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                async with center.transaction(session) as tx:
                    await session.execute(sa.text("INSERT INTO orders VALUES (1)"))
                    tx.send("order.paid", {}, key="a")
                found = list((await session.execute(sa.text("SELECT id FROM orders"))).scalars())
            await outer.rollback()
        await engine.dispose()
        return found

    with only_record():
        assert asyncio.run(story()) == [1]
    assert _keys() == ["a"]
