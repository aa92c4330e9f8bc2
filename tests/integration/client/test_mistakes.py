"""Typical mistakes of producers, and the sentence that each gets: the first table of docs/mistakes.md.

A mistake is one row of MISTAKES: a function that makes it in a Place, and what must come of it. Adding one means adding a
function and its row, then writing the page: `python -m tests.integration.client.test_mistakes`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.messages import a_message
from tests.support.mistakes import Table
from tests.support.web import web_server
from tmc_client import aio
from tmc_client.tables import metadata


@dataclass(kw_only=True)
class Place:
    """Where mistakes are made: a center that takes everything, a database with the SDK's tables and one without."""

    center: tmc.Center
    engine: sa.Engine
    empty: sa.Engine
    async_engine: AsyncEngine

    def in_a_block(self, work: Callable[[Session, Any], object], engine: sa.Engine | None = None) -> None:
        with Session(engine or self.engine) as session, self.center.transaction(session) as tx:
            work(session, tx)

    def in_asyncio(self, work: Callable[[aio.AsyncCenter], Any]) -> None:
        async def story() -> None:
            try:
                await work(aio.AsyncCenter(self.center))
            finally:
                await self.async_engine.dispose()

        asyncio.run(story())


# The mistakes ------------------------------------------------------------------------------------------------------


def _key_number(place: Place) -> None:
    place.center.publish("shop.paid", {}, key=5)  # type: ignore[arg-type]


def _delay_number(place: Place) -> None:
    place.in_a_block(lambda _, tx: tx.send("shop.paid", {}, key="k", delay=5))


def _timeout_number(place: Place) -> None:
    place.center.publish("shop.paid", {}, key="k", timeout=5)  # type: ignore[arg-type]


def _header_number(place: Place) -> None:
    place.center.publish("shop.paid", {}, key="k", headers={"tries": 3})  # type: ignore[dict-item]


def _body_that_is_no_json(place: Place) -> None:
    place.center.publish("shop.paid", {"order": object()}, key="k")


def _not_a_number(place: Place) -> None:
    place.center.publish("shop.paid", {"price": float("nan")}, key="k")


def _async_session(place: Place) -> None:
    place.center.transaction(AsyncSession(place.async_engine))


def _session_in_asyncio(place: Place) -> None:
    aio.AsyncCenter(place.center).transaction(Session(place.engine))  # type: ignore[arg-type]


def _sessionmaker(place: Place) -> None:
    place.center.transaction(sessionmaker(place.engine))  # type: ignore[arg-type]


def _with_in_asyncio(place: Place) -> None:
    async def work(center: aio.AsyncCenter) -> None:
        with center.transaction(AsyncSession(place.async_engine)):
            pass

    place.in_asyncio(work)


def _async_with_in_blocking(place: Place) -> None:
    async def work(_: aio.AsyncCenter) -> None:
        async with place.center.transaction(Session(place.engine)):
            pass

    place.in_asyncio(work)


def _commit_inside(place: Place) -> None:
    place.in_a_block(lambda session, _: (session.execute(sa.text("SELECT 1")), session.commit()))


def _rollback_inside(place: Place) -> None:
    place.in_a_block(lambda session, _: (session.execute(sa.text("SELECT 1")), session.rollback()))


def _send_after(place: Place) -> None:
    with Session(place.engine) as session, place.center.transaction(session) as tx:
        pass
    tx.send("shop.paid", {}, key="k")


def _send_before(place: Place) -> None:
    with Session(place.engine) as session:
        place.center.transaction(session).send("shop.paid", {}, key="k")


def _block_in_block(place: Place) -> None:
    def work(session: Session, _: Any) -> None:
        with place.center.transaction(session):
            pass

    place.in_a_block(work)


def _same_key_twice(place: Place) -> None:
    def work(_: Session, tx: Any) -> None:
        tx.send("shop.paid", {}, key="paid-7")
        tx.send("shop.paid", {}, key="paid-7")

    place.in_a_block(work)


def _blocking_block_in_a_loop(place: Place) -> None:
    async def work(_: aio.AsyncCenter) -> None:
        place.in_a_block(lambda *_: None)

    place.in_asyncio(work)


def _engine_for_aio_create_tables(place: Place) -> None:
    place.in_asyncio(lambda _: aio.create_tables(place.engine))  # type: ignore[arg-type]


def _engine_for_aio_resume(place: Place) -> None:
    place.in_asyncio(lambda center: center.resume(place.engine))  # type: ignore[arg-type]


def _name_of_app(place: Place) -> None:
    tmc.connect("127.0.0.1:50051", app="my orders!")


def _autocommit(place: Place) -> None:
    engine = place.engine.execution_options(isolation_level="AUTOCOMMIT")
    place.in_a_block(lambda session, _: session.execute(sa.text("SELECT 1")), engine)


def _no_ledger(place: Place) -> None:
    place.in_a_block(lambda _, tx: tx.send("shop.paid", {}, key="no-ledger"), place.empty)


def _no_ledger_in_asyncio(place: Place) -> None:
    async def work(center: aio.AsyncCenter) -> None:
        metadata.drop_all(place.engine)
        async with AsyncSession(place.async_engine) as session, center.transaction(session) as tx:
            tx.send("shop.paid", {}, key="no-ledger")

    place.in_asyncio(work)


def _no_ledger_at_resume(place: Place) -> None:
    place.center.resume(place.empty)


def _old_ledger(place: Place) -> None:
    with place.engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX tmc_ledger_unsettled")
        connection.exec_driver_sql("ALTER TABLE tmc_ledger DROP COLUMN settled_ms")
    place.in_a_block(lambda _, tx: tx.send("shop.paid", {}, key="old-ledger"))


def _no_inbox(place: Place) -> None:
    with tmc.SqlInbox(sessionmaker(place.empty)).once(a_message()):
        pass


def _async_sessionmaker(place: Place) -> None:
    @tmc.Consumer(place.center).listener("shop.paid", inbox=tmc.SqlInbox(async_sessionmaker(place.async_engine)))
    def give_coupon(paid: dict[str, Any], session: AsyncSession) -> None: ...


def _engine_as_inbox(place: Place) -> None:
    tmc.SqlInbox(place.engine)  # type: ignore[arg-type]


def _session_for_checks(place: Place) -> None:
    place.center.checks(Session(place.engine))  # type: ignore[arg-type]


def _coroutine_for_checks(place: Place) -> None:
    async def outcome(_: tmc.Question) -> tmc.Verdict:
        return tmc.Verdict.COMMIT

    place.center.check("shop.paid")(outcome)  # type: ignore[arg-type]


def _connect(place: Place) -> sqlite3.Connection:
    return sqlite3.connect(str(place.engine.url.database))


def _engine_for_a_block(place: Place) -> None:
    place.center.transaction(place.engine)


def _cursor_for_a_block(place: Place) -> None:
    with closing(_connect(place)) as connection:
        place.center.transaction(connection.cursor())


def _function_for_a_block(place: Place) -> None:
    place.center.transaction(lambda: _connect(place))


def _connection_in_autocommit(place: Place) -> None:
    with closing(_connect(place)) as connection:
        connection.isolation_level = None
        with place.center.transaction(connection):
            pass


def _commit_of_the_connection(place: Place) -> None:
    with closing(_connect(place)) as connection, place.center.transaction(connection):
        connection.commit()


def _block_in_block_of_the_connection(place: Place) -> None:
    with closing(_connect(place)) as connection, place.center.transaction(connection):
        with place.center.transaction(connection):
            pass


def _engine_begin(place: Place) -> None:
    with place.engine.begin() as connection, place.center.transaction(connection):
        pass


def _connection_for_the_tables(place: Place) -> None:
    with closing(_connect(place)) as connection:
        tmc.create_tables(connection)  # type: ignore[arg-type]


def _connection_as_inbox(place: Place) -> None:
    with closing(_connect(place)) as connection:
        tmc.SqlInbox(connection)  # type: ignore[arg-type]


def _connection_for_add(place: Place) -> None:
    with closing(_connect(place)) as connection, tmc.Outbox(place.engine, place.center) as outbox:
        outbox.add(connection, "shop.paid", {}, key="k")  # type: ignore[arg-type]


def _unknown_target(place: Place) -> None:
    tmc.Outbox(place.engine, "carrier://pigeon")


def _days_as_number(place: Place) -> None:
    tmc.clean_ledger(place.engine, 30)  # type: ignore[arg-type]


def _port_of_http(place: Place) -> None:
    with web_server() as port, tmc.connect(f"127.0.0.1:{port}", app="orders") as center:
        center.publish("shop.paid", {}, key="k", timeout=timedelta(seconds=2))


def _cleaned_too_early(place: Place) -> None:
    tmc.clean_inbox(place.engine, timedelta(days=1))


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One row. words: what was done, for the page.  error, sentence: what it gets; the sentence stands in the error's text."""

    make: Callable[[Place], None]
    words: str
    error: type[Exception]
    sentence: str

    @property
    def id(self) -> str:
        return self.make.__name__.strip("_")

    @property
    def row(self) -> list[str]:
        return [self.words, f"`{self.error.__name__}`", self.sentence]


BAD, CODEC = tmc.InvalidRequest, tmc.CodecError

MISTAKES = [
    Mistake(make=_key_number, words="`key=5`", error=BAD, sentence="key=5 is no str: write key='5'."),
    Mistake(
        make=_delay_number,
        words="`delay=5`",
        error=BAD,
        sentence="delay=5 is no timedelta: write delay=timedelta(seconds=...).",
    ),
    Mistake(
        make=_timeout_number,
        words="`timeout=5`",
        error=BAD,
        sentence="timeout=5 is no timedelta: write timeout=timedelta(seconds=...).",
    ),
    Mistake(
        make=_header_number,
        words='`headers={"tries": 3}`',
        error=BAD,
        sentence="Header 'tries': 3 is no str: write '3'.",
    ),
    Mistake(
        make=_body_that_is_no_json,
        words="a body that holds an object",
        error=CODEC,
        sentence="A body of type dict cannot be sent: it holds an object of type object.",
    ),
    Mistake(
        make=_not_a_number,
        words="a body with NaN",
        error=CODEC,
        sentence="A body of type dict cannot be sent: Out of range float values are not JSON compliant",
    ),
    Mistake(
        make=_async_session,
        words="an AsyncSession for the blocking center",
        error=BAD,
        sentence="center.transaction() takes a Session, not AsyncSession: for an AsyncSession connect with tmc_client.aio",
    ),
    Mistake(
        make=_session_in_asyncio,
        words="a Session for the asyncio center",
        error=BAD,
        sentence="center.transaction() takes an AsyncSession, not Session: for a Session connect with tmc_client.connect()",
    ),
    Mistake(
        make=_sessionmaker,
        words="a sessionmaker instead of a session",
        error=BAD,
        sentence="of a sessionmaker make a session first.",
    ),
    Mistake(
        make=_with_in_asyncio,
        words="`with` instead of `async with`",
        error=TypeError,
        sentence="Write `async with center.transaction(session) as tx`",
    ),
    Mistake(
        make=_async_with_in_blocking,
        words="`async with` instead of `with`",
        error=TypeError,
        sentence="Write `with center.transaction(session) as tx`, without async",
    ),
    Mistake(
        make=_commit_inside,
        words="`session.commit()` in a block",
        error=BAD,
        sentence="A commit inside a transaction block: it commits by itself at its end, everything or nothing.",
    ),
    Mistake(
        make=_rollback_inside,
        words="`session.rollback()` in a block",
        error=BAD,
        sentence="Put session.begin_nested() around what may fail, or let the error out.",
    ),
    Mistake(
        make=_send_before,
        words="`tx.send` before its block",
        error=BAD,
        sentence="tx.send() before its block: enter `with center.transaction(session) as tx` first.",
    ),
    Mistake(
        make=_send_after,
        words="`tx.send` after its block",
        error=BAD,
        sentence="tx.send() after the end of its block: send inside it, or use center.publish().",
    ),
    Mistake(
        make=_block_in_block,
        words="a block in a block",
        error=BAD,
        sentence="the outer one owns the commit. Send inside the outer one.",
    ),
    Mistake(
        make=_same_key_twice,
        words="the same key twice in a block",
        error=BAD,
        sentence="key 'paid-7' was sent to shop.paid in this block already: give each message a key of its own.",
    ),
    Mistake(
        make=_blocking_block_in_a_loop,
        words="a blocking block in `async def`",
        error=RuntimeWarning,
        sentence="stops the event loop while it waits: in async code connect with tmc_client.aio",
    ),
    Mistake(
        make=_engine_for_aio_create_tables,
        words="an Engine for `aio.create_tables`",
        error=BAD,
        sentence="takes an AsyncEngine, not Engine: of create_async_engine(url), or use tmc_client.create_tables(engine).",
    ),
    Mistake(
        make=_engine_for_aio_resume,
        words="an Engine for `resume` of the asyncio center",
        error=BAD,
        sentence="center.resume() takes an AsyncEngine, not Engine",
    ),
    Mistake(
        make=_name_of_app,
        words='`app="my orders!"`',
        error=BAD,
        sentence="app='my orders!' is no name of an app: give 1 to 64 characters of A-Z a-z 0-9 _ -.",
    ),
    Mistake(
        make=_autocommit,
        words="an engine in AUTOCOMMIT",
        error=BAD,
        sentence="This connection is in AUTOCOMMIT and would commit every statement of the transaction block by itself",
    ),
    Mistake(
        make=_no_ledger,
        words="no ledger tables",
        error=BAD,
        sentence="There is no table tmc_ledger_info in this database: call tmc.create_tables(engine) once",
    ),
    Mistake(
        make=_no_ledger_in_asyncio,
        words="the same over asyncio",
        error=BAD,
        sentence="There is no table tmc_ledger_info in this database: call tmc.create_tables(engine) once",
    ),
    Mistake(
        make=_no_ledger_at_resume,
        words="`center.resume()` without ledger tables",
        error=BAD,
        sentence="There is no table tmc_ledger in this database: call tmc.create_tables(engine) once",
    ),
    Mistake(
        make=_old_ledger,
        words="a ledger of an older version",
        error=BAD,
        sentence="Table tmc_ledger is of an older version: ALTER TABLE tmc_ledger ADD COLUMN settled_ms BIGINT",
    ),
    Mistake(
        make=_no_inbox,
        words="no inbox table",
        error=BAD,
        sentence="There is no table tmc_inbox in this database: call tmc.create_tables(engine) once",
    ),
    Mistake(
        make=_async_sessionmaker,
        words="an async_sessionmaker for the inbox of a `def`",
        error=TypeError,
        sentence="give_coupon(): its inbox makes AsyncSessions: write `async def`, or give it SqlInbox(sessionmaker(engine))",
    ),
    Mistake(
        make=_engine_as_inbox,
        words="an engine for an inbox",
        error=BAD,
        sentence="tmc.SqlInbox() takes what makes sessions, not Engine: give it sessionmaker(engine)",
    ),
    Mistake(
        make=_session_for_checks,
        words="a session for checks",
        error=BAD,
        sentence="center.checks() takes the engine of the ledger's database, not Session: for a session give its engine.",
    ),
    Mistake(
        make=_coroutine_for_checks,
        words="an `async def` that answers checks",
        error=BAD,
        sentence="outcome() answers checks in a thread: write `def`, not `async def`.",
    ),
    Mistake(
        make=_engine_for_a_block,
        words="an engine instead of a session",
        error=BAD,
        sentence="center.transaction() takes a Session, not Engine: write Session(engine), or engine.connect().",
    ),
    Mistake(
        make=_cursor_for_a_block,
        words="a cursor instead of a connection",
        error=BAD,
        sentence="center.transaction() takes a Session, not Cursor: give the cursor's connection.",
    ),
    Mistake(
        make=_function_for_a_block,
        words="a function instead of a connection",
        error=BAD,
        sentence="center.transaction() takes a Session, not function: call it, and give what it returns.",
    ),
    Mistake(
        make=_connection_in_autocommit,
        words="a connection in AUTOCOMMIT",
        error=BAD,
        sentence=(
            "This connection is in AUTOCOMMIT and would commit every statement of the transaction "
            "block by itself: turn that off"
        ),
    ),
    Mistake(
        make=_commit_of_the_connection,
        words="`connection.commit()` in a block over a connection",
        error=BAD,
        sentence=(
            "What was committed stays, the rest was rolled back, and nothing was sent. Remove it: the "
            "transaction block commits at its end."
        ),
    ),
    Mistake(
        make=_block_in_block_of_the_connection,
        words="a block in a block over one connection",
        error=BAD,
        sentence="A transaction block inside a transaction block: the outer one owns the commit. Send inside the outer one.",
    ),
    Mistake(
        make=_engine_begin,
        words="a block in `engine.begin()`",
        error=BAD,
        sentence="Take the connection from engine.connect(), and open the block around savepoints.",
    ),
    Mistake(
        make=_connection_for_the_tables,
        words="a connection for `create_tables`",
        error=BAD,
        sentence=(
            "tmc.create_tables() takes a blocking engine of the business database, not Connection; or "
            "a function that returns a new connection"
        ),
    ),
    Mistake(
        make=_connection_as_inbox,
        words="a connection for an inbox",
        error=BAD,
        sentence=(
            "tmc.SqlInbox() takes what makes sessions, not Connection: give it sessionmaker(engine), "
            "or a function that returns a connection."
        ),
    ),
    Mistake(
        make=_connection_for_add,
        words="`outbox.add(connection, ...)`",
        error=BAD,
        sentence="over a connection, write `with outbox.transaction(connection) as tx` and tx.send().",
    ),
    Mistake(
        make=_unknown_target,
        words="an outbox with an unknown address",
        error=BAD,
        sentence="tmc.Outbox() knows no target for carrier://: installed are amqp, amqps, kafka.",
    ),
    Mistake(
        make=_days_as_number,
        words="`clean_ledger(engine, 30)`",
        error=BAD,
        sentence="older_than=30 is no timedelta: write older_than=timedelta(seconds=...).",
    ),
    Mistake(
        make=_port_of_http,
        words="the port of an HTTP server",
        error=tmc.DeadlineExceeded,
        sentence="What answers at the center's address speaks HTTP/1, not gRPC: check the address, its port and tls=.",
    ),
    Mistake(
        make=_cleaned_too_early,
        words="an inbox cleaned after a day",
        error=ValueError,
        sentence="keep the inbox for 7 days at least: a copy that comes later has a second effect",
    ),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('mistakes')}/c.db", open_to_all=True) as made:
        yield made


@pytest.fixture
def place(running: RunningCenter, tmp_path: Path) -> Iterator[Place]:
    engine, empty = (sa.create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in ("shop", "empty"))
    tmc.create_tables(engine)
    with tmc.connect(running.address, app="orders") as center:
        asynchronous = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        yield Place(center=center, engine=engine, empty=empty, async_engine=asynchronous)
    engine.dispose()
    empty.dispose()


@pytest.mark.parametrize("mistake", [pytest.param(mistake, id=mistake.id) for mistake in MISTAKES])
def test_a_mistake_gets_a_sentence_that_names_it_and_the_way_out(mistake: Mistake, place: Place) -> None:
    with pytest.raises(mistake.error) as caught:
        mistake.make(place)
    assert type(caught.value) is mistake.error
    assert mistake.sentence in str(caught.value)


TABLE = Table(
    source="tests/integration/client/test_mistakes.py",
    columns=["mistake", "error", "sentence"],
    rows=[mistake.row for mistake in MISTAKES],
)


def test_the_page_lists_every_mistake() -> None:
    assert TABLE.is_on_the_page()


if __name__ == "__main__":
    TABLE.write()
