"""Every way a session can end, for the transaction block and for the handler with an inbox.

A way is one row of WAYS: what is done inside, and how it must come out. Each runs as a producer's block and as a consumer's
handler, blocking and asyncio, on SQLite, MariaDB and PostgreSQL. Adding a way means adding one row.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client.center import timedelta
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.consuming.inbox import Effects
from tmc_client.local.sessions import SessionTransaction
from tmc_client.producing.aio_transaction import AsyncTransaction
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import inbox, ledger, ledger_info
from tmc_common.protocol import message_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

_numbers = itertools.count(1)


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """What happened, as often as it happened."""

    __tablename__ = "effect"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


class Taken(Base):
    """Row 1 is there before each way begins: inserting it again fails."""

    __tablename__ = "taken"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


class Refusal(Exception):
    """The program's own error."""


@dataclass(kw_only=True)
class Scene:
    """Where a way runs. send: of the block; handlers send nothing."""

    session: Session
    database: Database
    send: Callable[[str], None]

    def effect(self, number: int) -> None:
        self.session.execute(sa.insert(Effect).values(number=number))

    def work(self, number: int, key: str) -> None:
        self.effect(number)
        self.send(key)

    def fail(self) -> None:
        """A statement that the database refuses; its transaction lives on."""
        self.session.execute(sa.insert(Taken).values(id=1, number=0))

    def connection_id(self) -> int:
        function = "pg_backend_pid" if self.database.kind == "postgresql" else "connection_id"
        return int(self.session.execute(sa.text(f"SELECT {function}()")).scalar_one())


# What is done inside -----------------------------------------------------------------------------------------------


def plain(scene: Scene) -> None:
    scene.work(1, "a")


def nothing(scene: Scene) -> None:
    pass


def exception(scene: Scene) -> None:
    scene.work(1, "a")
    raise Refusal


def rollback_swallowed(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.rollback()
    scene.effect(2)


def rollback_then_send(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.rollback()
    scene.work(2, "b")


def rollback_and_out(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.rollback()
    scene.session.execute(sa.select(Effect)).all()
    raise Refusal


def close(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.close()
    scene.effect(2)


def connection_rollback(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(sa.exc.SQLAlchemyError):
        scene.session.connection().rollback()


def nested_rollback(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(Refusal), scene.session.begin_nested():
        scene.work(2, "b")
        raise Refusal


def nested_rollback_before_any_statement(scene: Scene) -> None:
    with suppress(Refusal), scene.session.begin_nested():
        scene.send("b")
        raise Refusal
    scene.work(1, "a")


def nested_flush_error(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(sa.exc.IntegrityError), scene.session.begin_nested():
        scene.work(2, "b")
        scene.session.add(Taken(id=1, number=0))


def nested_of_the_connection(scene: Scene) -> None:
    scene.work(1, "a")
    savepoint = scene.session.connection().begin_nested()
    scene.work(2, "b")
    savepoint.rollback()


def nested_in_nested(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(Refusal), scene.session.begin_nested():
        scene.work(2, "b")
        with scene.session.begin_nested():
            scene.work(3, "c")
        raise Refusal


def inner_nested(scene: Scene) -> None:
    with scene.session.begin_nested():
        scene.work(1, "a")
        with suppress(Refusal), scene.session.begin_nested():
            scene.work(2, "b")
            raise Refusal
        scene.work(3, "c")


def released(scene: Scene) -> None:
    with scene.session.begin_nested():
        scene.work(1, "a")
    scene.work(2, "b")


def released_then_exception(scene: Scene) -> None:
    """With SQLite's driver a savepoint that is the first statement would be the transaction: releasing it commits."""
    with scene.session.begin_nested():
        scene.work(1, "a")
    raise Refusal


def savepoint_left_open(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.begin_nested()
    scene.work(2, "b")


def swallowed_statement(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(sa.exc.IntegrityError):
        scene.fail()


def swallowed_flush(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.add(Taken(id=1, number=0))
    with suppress(sa.exc.IntegrityError):
        scene.session.flush()


def swallowed_flush_then_send(scene: Scene) -> None:
    swallowed_flush(scene)
    scene.send("b")


def commit(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.commit()
    raise Refusal


def commit_swallowed(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(tmc.InvalidRequest):
        scene.session.commit()


def commit_of_the_transaction(scene: Scene) -> None:
    scene.work(1, "a")
    root = scene.session.get_transaction()
    assert root is not None
    scene.session.begin_nested()
    root.commit()


def commit_of_the_connection(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.connection().commit()


def begin_inside(scene: Scene) -> None:
    with scene.session.begin():
        scene.work(1, "a")


def commit_as_text(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.execute(sa.text("COMMIT"))


def rollback_as_text(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.execute(sa.text("ROLLBACK"))
    scene.effect(2)


def ddl(scene: Scene) -> None:
    scene.work(1, "a")
    scene.session.execute(sa.text("CREATE TABLE made_inside (id INTEGER)"))


def commit_fails(scene: Scene) -> None:
    scene.work(1, "a")

    @sa.event.listens_for(scene.session, "before_commit")
    def lose_the_connection(_: Session) -> None:
        raise sa.exc.OperationalError("COMMIT", {}, Exception("connection lost"))


def killed(scene: Scene) -> None:
    scene.work(1, "a")
    scene.database.kill(scene.connection_id())


def killed_and_swallowed(scene: Scene) -> None:
    scene.work(1, "a")
    scene.database.kill(scene.connection_id())
    with suppress(sa.exc.SQLAlchemyError):
        scene.effect(2)


def rolled_back_by_the_database(scene: Scene) -> None:
    """Servers: a deadlock. SQLite: a conflict with OR ROLLBACK. The error is swallowed, the session knows nothing."""
    scene.work(1, "a")
    with suppress(sa.exc.DBAPIError):
        scene.database.make_it_roll_back(scene)
    if scene.database.kind != "postgresql":  # which refuses every further statement
        scene.work(2, "b")


# How it must come out ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row. error: how the error of the block, or of the handler's first run, begins; "" when all is well.

    effects: what is in the database after it.  sent: keys.  handler_error: where it differs.  engine: of Database.
    """

    inside: Callable[[Scene], None]
    error: str | tuple[str, ...] = ""
    effects: tuple[int, ...] = ()
    sent: tuple[str, ...] = ()
    handler_error: str | None = None
    engine: str = "plain"
    only: tuple[str, ...] = ("sqlite", "mariadb", "postgresql")
    name: str = ""

    @property
    def id(self) -> str:
        return self.name or self.inside.__name__


SERVERS = ("mariadb", "postgresql")
ROLLED_BACK = "InvalidRequest: The transaction of this"
COMMIT_REFUSED = "InvalidRequest: A commit inside a"
ENDED_EARLY = "InvalidRequest: The database ended the transaction"
AUTOCOMMIT = "InvalidRequest: This connection is in AUTOCOMMIT"

WAYS = [
    Way(inside=plain, effects=(1,), sent=("a",)),
    Way(inside=nothing),
    Way(inside=exception, error="Refusal"),
    Way(inside=rollback_swallowed, error=ROLLED_BACK),
    Way(inside=rollback_then_send, error=ROLLED_BACK),
    Way(inside=rollback_and_out, error="Refusal"),
    Way(inside=close, error=ROLLED_BACK),
    Way(inside=connection_rollback, error=ROLLED_BACK),
    Way(inside=nested_rollback, effects=(1,), sent=("a",)),
    Way(inside=nested_rollback_before_any_statement, effects=(1,), sent=("a",)),
    Way(inside=nested_flush_error, effects=(1,), sent=("a",)),
    Way(inside=nested_of_the_connection, effects=(1,), sent=("a",)),
    Way(inside=nested_in_nested, effects=(1,), sent=("a",)),
    Way(inside=inner_nested, effects=(1, 3), sent=("a", "c")),
    Way(inside=released, effects=(1, 2), sent=("a", "b")),
    Way(inside=released_then_exception, error="Refusal"),
    Way(inside=savepoint_left_open, effects=(1, 2), sent=("a", "b")),
    Way(inside=swallowed_statement, effects=(1,), sent=("a",), only=("sqlite", "mariadb")),
    Way(inside=swallowed_statement, error=ENDED_EARLY, only=("postgresql",)),  # its commit would roll back, silently
    Way(inside=swallowed_flush, error=ROLLED_BACK),
    Way(inside=swallowed_flush_then_send, error=ROLLED_BACK),
    Way(inside=commit, error=COMMIT_REFUSED),
    Way(inside=commit_swallowed, effects=(1,), sent=("a",)),
    Way(inside=commit_of_the_transaction, error=COMMIT_REFUSED),
    Way(inside=commit_of_the_connection, error=COMMIT_REFUSED),
    Way(inside=begin_inside, error=COMMIT_REFUSED, handler_error="InvalidRequestError: A transaction is already begun"),
    Way(inside=commit_as_text, error=ENDED_EARLY, effects=(1,)),  # reported, and cannot be undone
    Way(inside=rollback_as_text, error=ENDED_EARLY),
    Way(inside=ddl, error=ENDED_EARLY, effects=(1,), only=("mariadb",)),  # it commits by itself there
    Way(inside=ddl, effects=(1,), sent=("a",), only=("sqlite", "postgresql")),
    Way(inside=commit_fails, error="OperationalError"),
    Way(
        inside=killed, error=("OperationalError", "DBAPIError", "InterfaceError"), only=SERVERS
    ),  # the last two: of asyncpg
    Way(inside=killed_and_swallowed, error=ROLLED_BACK, only=SERVERS),
    Way(inside=rolled_back_by_the_database, error=ENDED_EARLY),
    Way(inside=plain, error=AUTOCOMMIT, engine="autocommit", name="autocommit"),
    Way(inside=plain, error=AUTOCOMMIT, engine="autocommit option", name="autocommit_by_option"),
    Way(inside=plain, error=AUTOCOMMIT, engine="autocommit driver", name="autocommit_of_the_driver"),
    Way(inside=plain, effects=(1,), sent=("a",), engine="begin event", only=("sqlite",), name="begin_from_an_event"),
]


# Only for handlers: a block in a handler commits for both, and must be the last.


def _block(session: Session, center: Any) -> Transaction:
    return Transaction(center, lambda *_: None, SessionTransaction(session), timedelta(seconds=2))


def block_inside(scene: Scene) -> None:
    scene.effect(1)
    with _block(scene.session, FakeCenter()) as tx:
        tx.send("t", {}, key="inside")


def block_inside_then_exception(scene: Scene) -> None:
    block_inside(scene)
    raise Refusal


def block_inside_then_more(scene: Scene) -> None:
    block_inside(scene)
    scene.effect(2)


def block_inside_that_fails(scene: Scene) -> None:
    scene.effect(1)
    with suppress(Refusal), _block(scene.session, FakeCenter()):
        raise Refusal


HANDLER_WAYS = [
    *WAYS,
    Way(inside=block_inside, effects=(1,)),
    Way(inside=block_inside_then_exception, effects=(1,), error="Refusal"),
    Way(inside=block_inside_then_more, effects=(1,), error="InvalidRequest: The transaction block in this"),
    Way(inside=block_inside_that_fails, error=ROLLED_BACK),
]


# Where it runs -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Database:
    """A business database. driver: of its blocking engine.  async_driver: of the other one."""

    kind: str
    url: sa.URL
    async_url: sa.URL
    engines: list[sa.Engine] = field(default_factory=list)

    def engine(self, how: str = "plain") -> sa.Engine:
        made = sa.create_engine(self.url, **self._options(how, self.url))
        return self._ready(made, how)

    def async_engine(self, how: str = "plain") -> AsyncEngine:
        made = create_async_engine(self.async_url, **self._options(how, self.async_url))
        return AsyncEngine(self._ready(made.sync_engine, how))

    def _options(self, how: str, url: sa.URL) -> dict[str, Any]:
        if how == "autocommit" or (
            how == "autocommit driver" and url.get_driver_name() == "asyncpg"
        ):  # has no such option
            return {"isolation_level": "AUTOCOMMIT"}
        if how == "autocommit driver":
            return {"connect_args": {"isolation_level": None} if self.kind == "sqlite" else {"autocommit": True}}
        return {"connect_args": {"isolation_level": None}} if how == "begin event" else {}

    def _ready(self, engine: sa.Engine, how: str) -> sa.Engine:
        if how == "autocommit option":
            return engine.execution_options(isolation_level="AUTOCOMMIT")
        if how == "begin event":
            sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        return engine

    def kill(self, connection_id: int) -> None:
        with sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
            kill = (
                f"SELECT pg_terminate_backend({connection_id})"
                if self.kind == "postgresql"
                else f"KILL {connection_id}"
            )
            connection.exec_driver_sql(kill)

    def make_it_roll_back(self, scene: Scene) -> None:
        """Raises the database's error."""
        if self.kind == "sqlite":
            scene.session.execute(sa.text("INSERT OR ROLLBACK INTO taken VALUES (1, 0)"))
            return
        other = sa.create_engine(self.url, poolclass=sa.NullPool).connect()
        if self.kind == "postgresql":  # the victim is who looks for deadlocks first
            other.exec_driver_sql("SET deadlock_timeout = '1h'")
            scene.session.execute(sa.text("SET LOCAL deadlock_timeout = '10ms'"))
        other.execute(
            sa.insert(Effect), [{"number": 100 + number} for number in range(50)]
        )  # the cheaper one is the victim
        other.execute(sa.update(Taken).where(Taken.id == 2).values(number=1))
        scene.session.execute(sa.update(Taken).where(Taken.id == 3).values(number=1))

        def cross() -> None:
            with other:
                other.execute(sa.update(Taken).where(Taken.id == 3).values(number=2))
                other.rollback()

        thread = threading.Thread(target=cross)
        thread.start()
        try:
            eventually(self._somebody_waits)
            scene.session.execute(sa.update(Taken).where(Taken.id == 2).values(number=2))
        finally:
            thread.join()

    def _somebody_waits(self) -> bool:
        with sa.create_engine(self.url, poolclass=sa.NullPool).connect() as connection:
            waiting = {
                "mariadb": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
                "postgresql": "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
            }[self.kind]
            return bool(connection.exec_driver_sql(waiting).scalar_one())


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("mariadb", marks=pytest.mark.mariadb),
        pytest.param("postgresql", marks=pytest.mark.postgresql),
    ],
)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("endings") / "shop.db"
        url = sa.make_url(f"sqlite:///{path}")
        found = Database(kind="sqlite", url=url, async_url=url.set(drivername="sqlite+aiosqlite"))
    else:
        server: MariaDB | PostgreSQL = request.getfixturevalue(request.param)
        url = sa.make_url(server.create("tmc_endings"))
        driver = {"mariadb": "mariadb+asyncmy", "postgresql": "postgresql+asyncpg"}[request.param]
        found = Database(kind=request.param, url=url, async_url=url.set(drivername=driver))
    return found


@pytest.fixture
def emptied(database: Database) -> Iterator[sa.Engine]:
    engine = database.engine()
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS made_inside")
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.delete(ledger))
        connection.execute(sa.insert(Taken), [{"id": number, "number": 0} for number in (1, 2, 3)])
    yield engine
    engine.dispose()


def effects(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(Effect.number).order_by(Effect.id)).scalars())


class FakeCenter:
    """Prepares everything, remembers what was submitted."""

    def __init__(self) -> None:
        self.prepared: dict[str, str] = {}
        self.submitted: set[str] = set()
        self.abandoned: list[str] = []

    def prepare(self, request: message_pb2.PrepareRequest, _timeout: timedelta) -> Future[Any]:
        message_id = f"1-1-05-{next(_numbers):012d}"
        self.prepared[message_id] = request.key
        return _done(message_pb2.PrepareResult(message_id=message_id))

    def submit(self, message: Any, _timeout: timedelta) -> Future[Any]:
        self.submitted.add(message.key)
        return _done(message_pb2.SubmitResult(message_id=message.message_id))

    def rollback(self, message: Any, _timeout: timedelta) -> Future[Any]:
        self.abandoned.append(message.key)
        return _done(message_pb2.RollbackResult())


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def run_blocking(way: Way, database: Database, center: Any) -> None:
    engine = database.engine(way.engine)
    try:
        with Session(engine) as session, _block(session, center) as tx:
            way.inside(Scene(session=session, database=database, send=lambda key: tx.send("t", {}, key=key)))
    finally:
        engine.dispose()


def run_asyncio(way: Way, database: Database, center: Any) -> None:
    async def story() -> None:
        engine = database.async_engine(way.engine)
        try:
            async with AsyncSession(engine) as session:
                async with AsyncTransaction(center, lambda *_: None, session, timedelta(seconds=2)) as tx:
                    scene = Scene(
                        session=session.sync_session, database=database, send=lambda key: tx.send("t", {}, key=key)
                    )
                    await session.run_sync(lambda _: way.inside(scene))
        finally:
            await engine.dispose()

    asyncio.run(story())


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "is left by an error"])
def test_asyncio_prepares_first_too(fails: bool, database: Database, emptied: sa.Engine) -> None:
    center = FakeCenter()

    async def story() -> None:
        engine = database.async_engine()
        try:
            async with AsyncSession(engine) as session:
                block = AsyncTransaction(center, lambda *_: None, session, timedelta(seconds=2), prepare_first=True)
                async with block as tx:
                    tx.send("t", {}, key="a")
                    assert list(center.prepared.values()) == ["a"]
                    await session.execute(sa.insert(Effect).values(number=1))
                    if fails:
                        raise Refusal
        finally:
            await engine.dispose()

    with suppress(Refusal):
        asyncio.run(story())
    assert (effects(emptied), center.submitted) == (([], set()) if fails else ([1], {"a"}))
    assert center.abandoned == (["a"] if fails else [])


@pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("run", [run_blocking, run_asyncio])
@pytest.mark.parametrize("way", [pytest.param(way, id=way.id) for way in WAYS])
def test_a_block_sends_what_it_commits_and_nothing_else(
    way: Way, run: Callable[[Way, Database, Any], None], database: Database, emptied: sa.Engine
) -> None:
    if database.kind not in way.only:
        return  # the same function ends otherwise there: a row of its own says how
    center = FakeCenter()
    seen = ""
    try:
        run(way, database, center)
    except Exception as exc:  # noqa: BLE001 - compared below
        seen = f"{type(exc).__name__}: {exc}"
    assert seen.startswith(way.error) if way.error else seen == "", seen
    assert (tuple(effects(emptied)), center.submitted) == (way.effects, set(way.sent))
    assert _verdicts(emptied, center) == {key: key in way.sent for key in center.prepared.values()}


def _verdicts(engine: sa.Engine, center: FakeCenter) -> dict[str, bool]:
    """What a check says about each message that was prepared: True for COMMIT, False for ROLLBACK."""
    with engine.connect() as connection:
        ledger_id = connection.execute(sa.select(ledger_info.c.ledger_id)).scalar_one()
    answers = LedgerAnswers(engine)
    asked = [
        tmc.Question(message_id=id_, topic="t", key=key, ledger_id=ledger_id, created_ms=1)
        for id_, key in center.prepared.items()
    ]
    found = answers.answer(asked, fences=True)
    answers.close()
    assert all(answer.verdict in (tmc.Verdict.COMMIT, tmc.Verdict.ROLLBACK) for answer in found), found
    return {q.key: answer.verdict is tmc.Verdict.COMMIT for q, answer in zip(asked, found, strict=True)}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("endings-center")
    with RunningCenter(
        f"sqlite:///{folder}/c.db", open_to_all=True, dev={"retry_interval_ms": 500}, delivery={"scan_seconds": 0.05}
    ) as made:
        yield made


class Handlers:
    """One consumer for all ways: the first run of a message does what the way does, later ones do the plain thing."""

    def __init__(self, running: RunningCenter, database: Database, kind: str) -> None:
        self.topic = f"endings.{database.kind}.{kind.replace(' ', '-')}"
        self.is_async, self.stays_in_thread = kind == "asyncio session", False
        self.way: Way = WAYS[0]
        self.runs: Counter[str] = Counter()  # by message: a late copy of an earlier one must not count
        self._database = database
        self._plain = database.engine()
        self._special: list[sa.Engine] = []
        self._running = running
        self._center = tmc.connect(running.address, app="endings")
        self._consumer = tmc.Consumer(self._center)
        inbox: Any = self
        if kind == "asyncio session":

            @self._consumer.listener(self.topic, inbox=inbox)
            async def handle(body: Any, session: AsyncSession, message: tmc.Message) -> None:
                await session.run_sync(lambda blocking: self._handle(blocking, message))
        elif kind == "coroutine":

            @self._consumer.listener(self.topic, inbox=inbox)
            async def handle(body: Any, session: Session, message: tmc.Message) -> None:
                self._handle(session, message)
        else:

            @self._consumer.listener(self.topic, inbox=inbox)
            def handle(body: Any, session: Session, message: tmc.Message) -> None:
                self._handle(session, message)

    def check(self) -> None:
        """See SqlInbox."""

    async def check_async(self) -> None:
        """See SqlInbox."""

    def once_each(self, messages: Sequence[tmc.Message]) -> AbstractContextManager[Effects]:
        """See SqlInbox: its database depends on the message."""
        engine, kind = self._plain, self._kind_of_engine(messages)
        if kind != "plain":
            engine = self._database.engine(kind)
            self._special.append(engine)
        return tmc.SqlInbox(lambda: Session(engine)).once_each(messages)

    @asynccontextmanager
    async def once_async(self, messages: Sequence[tmc.Message]) -> AsyncIterator[Effects]:
        """As `once_each`."""
        engine = self._database.async_engine(self._kind_of_engine(messages))
        try:
            async with tmc.SqlInbox(async_sessionmaker(engine)).once_async(messages) as effects:
                yield effects
        finally:
            await engine.dispose()

    def _kind_of_engine(self, messages: Sequence[tmc.Message]) -> str:
        (message,) = messages
        self.runs[message.id] += 1
        return self.way.engine if self.runs[message.id] == 1 else "plain"

    def _handle(self, session: Session, message: tmc.Message) -> None:
        scene = Scene(session=session, database=self._database, send=lambda _key: None)
        if self.runs[message.id] == 1:
            self.way.inside(scene)
        else:
            scene.effect(77)

    def deliver(self, way: Way) -> Any:
        """Returns: the message as operators see it when it is settled."""
        self.way = way
        key = f"{way.id}-{next(_numbers)}"
        self._center.publish(self.topic, {}, key=key)
        return eventually(lambda: self._acked(key))

    def _acked(self, key: str) -> Any:
        found = self._running.detail(self.topic, key)
        states = [consumption.state for consumption in found.consumptions]
        return found if states == [types_pb2.CONSUMPTION_STATE_ACKED] else None

    def __enter__(self) -> Handlers:
        self._consumer.start()
        eventually(lambda: self._running.server.store.watch.current.topic_by_name.get(self.topic) is not None)
        catalog = self._running.server.store.watch
        eventually(
            lambda: any(
                s.topic == catalog.current.topic_by_name[self.topic].number
                for s in catalog.current.subscriptions.values()
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.stop()
        self._center.close()
        for engine in (self._plain, *self._special):
            engine.dispose()


@pytest.fixture(scope="module", params=["function", "coroutine", "asyncio session"])
def handlers(request: pytest.FixtureRequest, running: RunningCenter, database: Database) -> Iterator[Handlers]:
    with Handlers(running, database, request.param) as made:
        yield made


def _first_error(caplog: pytest.LogCaptureFixture, message_id: str) -> str:
    """The consumer's own record: on a busy machine the center may get it when the next attempt is already out, and drops it."""
    errors = [
        f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        for record in caplog.records
        if record.exc_info and record.name == "tmc_client.consumer" and message_id in record.getMessage()
    ]
    return errors[0] if errors else ""


@pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("way", [pytest.param(way, id=way.id) for way in HANDLER_WAYS])
def test_a_handlers_effect_happens_once_or_its_message_comes_again(
    way: Way, database: Database, emptied: sa.Engine, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    if database.kind not in way.only:
        return  # the same function ends otherwise there: a row of its own says how
    expected = way.error if way.handler_error is None else way.handler_error
    settled = handlers.deliver(way)
    error = _first_error(caplog, settled.message.message_id)
    assert error.startswith(expected) if expected else error == "", error
    again = () if way.effects or not expected else (77,)  # the second run finds the note, or does the effect
    assert tuple(effects(emptied)) == way.effects + again
    with emptied.connect() as connection:
        note = sa.select(sa.func.count()).select_from(inbox).where(inbox.c.message_id == settled.message.message_id)
        assert connection.execute(note).scalar_one() == 1  # a further copy has no effect
