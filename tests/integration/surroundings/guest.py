"""What a program does with the SDK, over each path to its database: for any kind of process. See test_matrix.py."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import tmc_client as tmc
from tests.support.messages import a_message
from tests.support.producing import FakeTarget
from tmc_client import aio, tables
from tmc_client.producing.ledger import ledger_id_of
from tmc_common.protocol import message_pb2, types_pb2
from tmc_storm.eventually import eventually

TOPIC = "guest.paid"
KEYS = "paid-ü-订-"  # as programs name them
WEEK = timedelta(days=7)
NOWHERE = "127.0.0.1:1"


_EXACT = mysql.VARCHAR(100, charset="utf8mb4", collation="utf8mb4_bin")
_KEY = sa.Unicode(100).with_variant(_EXACT, "mysql", "mariadb")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "guest_orders"
    key: Mapped[str] = mapped_column(_KEY, primary_key=True)


class Invoice(Base):
    __tablename__ = "guest_invoices"
    number: Mapped[str] = mapped_column(sa.String(40), primary_key=True)


class NotTodayError(Exception):
    """The program raises it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where databases and center are, as JSON: url: of the business database.  second: of another one like it.

    asynchronous: `url` for an asyncio driver.  center: its address.  path: see PATHS.
    """

    path: str
    url: str
    second: str
    asynchronous: str
    center: str

    @property
    def name(self) -> str:
        return f"{self.path} on {sa.make_url(self.url).get_backend_name()}"


class CountingPool(sa.QueuePool):
    """Counts the connections that the main thread takes from it. One that is made beside it counts its own."""

    taken = 0

    def connect(self) -> sa.PoolProxiedConnection:
        if threading.current_thread() is threading.main_thread():
            self.taken += 1
        return super().connect()


@dataclass
class Shop:
    """A program over one path. options: of its engines.  others: engines beside `engine`, disposed with it."""

    place: Place
    engine: sa.Engine
    sessions: Callable[[], Session]
    center: tmc.Center
    options: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Session, str], None] = lambda session, key: session.add(Order(key=key))
    others: list[sa.Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        plain = sa.create_engine(self.place.url, poolclass=sa.NullPool)
        self._looking = plain.execution_options(**self.engine.get_execution_options())

    def orders(self, key: str) -> int:
        with self._looking.connect() as connection:
            return connection.execute(sa.select(sa.func.count()).where(Order.key == key)).scalar_one()

    @property
    def taken(self) -> int:
        """Connections that the main thread has taken from the pool so far."""
        pool = self.engine.pool
        return pool.taken if isinstance(pool, CountingPool) else 0

    def close(self) -> None:
        self.center.close()
        for engine in (self.engine, *self.others):
            engine.dispose()

    def is_committed(self, key: str) -> bool:
        try:
            state = self.center.get_message(topic=TOPIC, key=key).state
        except tmc.NotFound:
            return False
        return state == types_pb2.MESSAGE_STATE_COMMITTED


def _plain(place: Place, center: tmc.Center, **options: Any) -> Shop:
    arguments = (
        {"prepare_threshold": None} if place.url.startswith("postgresql") else {}
    )  # for poolers, as psycopg says
    engine = sa.create_engine(place.url, connect_args=arguments, poolclass=CountingPool, **options)
    return Shop(place=place, engine=engine, sessions=sessionmaker(engine), center=center, options=options)


def _pool_of_one(place: Place, center: tmc.Center) -> Shop:
    return _plain(place, center, pool_size=1, max_overflow=0, pool_timeout=3)


def _two_engines(place: Place, center: tmc.Center) -> Shop:
    shop = _plain(place, center)
    second = sa.create_engine(place.second)
    shop.others.append(second)
    shop.sessions = sessionmaker(shop.engine, binds={Invoice: second})
    shop.write = lambda session, key: session.add_all([Order(key=key), Invoice(number=uuid.uuid4().hex)])
    return shop


def _replica(place: Place, center: tmc.Center) -> Shop:
    shop = _plain(place, center)
    follower = sa.create_engine(place.second)
    shop.others.append(follower)

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
            changes = self._flushing or isinstance(clause, sa.Insert | sa.Update | sa.Delete)
            return shop.engine if changes else follower

    shop.sessions = sessionmaker(class_=Routing)
    return shop


def _schemas(place: Place, center: tmc.Center) -> Shop:
    shop = _plain(place, center)
    engine = shop.engine.execution_options(schema_translate_map={None: "tenant"})
    return Shop(place=place, engine=engine, sessions=sessionmaker(engine), center=center)


PATHS: Mapping[str, Callable[[Place, tmc.Center], Shop]] = {
    "direct": _plain,
    "PgBouncer by session": _plain,
    "PgBouncer by transaction": _plain,
    "pool of one": _pool_of_one,
    "replica": _replica,
    "two engines": _two_engines,
    "schema": _schemas,
    "latin1": _plain,
}


def _send(shop: Shop, key: str, session: Session | None = None, **options: Any) -> None:
    with session or shop.sessions() as used, shop.center.transaction(used, **options) as tx:
        shop.write(used, key)
        tx.send(TOPIC, {}, key=key)


def block(shop: Shop, key: str) -> None:
    _send(shop, key)
    assert (shop.orders(key), shop.is_committed(key)) == (1, True)


def block_that_prepares_first(shop: Shop, key: str) -> None:
    with shop.sessions() as session, shop.center.transaction(session, prepare_first=True) as tx:
        tx.send(TOPIC, {}, key=key)
        shop.write(session, key)
    assert (shop.orders(key), shop.is_committed(key)) == (1, True)


def block_that_fails(shop: Shop, key: str) -> None:
    try:
        with shop.sessions() as session, shop.center.transaction(session) as tx:
            shop.write(session, key)
            tx.send(TOPIC, {}, key=key)
            raise NotTodayError
    except NotTodayError:
        pass
    assert (shop.orders(key), shop.is_committed(key)) == (0, False)


def block_whose_commit_is_refused(shop: Shop, key: str) -> None:
    def refuse(_session: Session) -> None:
        raise NotTodayError

    session = shop.sessions()
    sa.event.listen(session, "before_commit", refuse)
    try:
        _send(shop, key, session)
    except NotTodayError:
        _send(shop, key)  # its key is free
    assert (shop.orders(key), shop.is_committed(key)) == (1, True)


def block_with_a_fallback(shop: Shop, key: str) -> None:
    with (
        closing(tmc.connect(NOWHERE, app="orders")) as away,
        closing(tmc.Outbox(shop.engine, shop.center, direct=False)) as box,
        shop.sessions() as session,
    ):
        with away.transaction(session, fallback=box, prepare_timeout=timedelta(milliseconds=100)) as tx:
            shop.write(session, key)
            tx.send(TOPIC, {}, key=key)
        assert (shop.orders(key), len(box.store.by_key(key))) == (1, 1)


def checks(shop: Shop, key: str) -> None:
    """Ask about what was committed and what is not there, twice: a marker is written, then found."""
    with shop.sessions() as session, shop.center.transaction(session) as tx:
        session.add(Order(key=key))
        tx.send(TOPIC, {}, key=key)
    describe = shop.center.connection.unary("/tmc.v1.MessageService/DescribeChecks", message_pb2.DescribeChecksResponse)
    token = describe(message_pb2.DescribeChecksRequest(), timeout=5.0).check_token
    with shop.engine.begin() as connection:
        ledger_id = ledger_id_of(connection.execute)
    there = shop.center.get_message(topic=TOPIC, key=key).message_id
    ours: dict[str, Any] = {
        "topic": TOPIC,
        "key": key,
        "ledger_id": ledger_id,
        "created_ms": time.time_ns() // 1_000_000,
    }
    asked = [tmc.Question(message_id=message_id, **ours) for message_id in (there, key)]
    with closing(shop.center.checks(shop.engine)) as answering:
        for _ in range(2):
            found = [answer.verdict for answer in answering.answer(token, asked)]
            assert found == [tmc.Verdict.COMMIT, tmc.Verdict.ROLLBACK]


def inbox(shop: Shop, key: str) -> None:
    box, message = tmc.SqlInbox(shop.sessions), a_message(1, id=key)
    box.check()
    for first in (True, False):
        with box.once(message) as session:
            assert (session is not None) is first
            if session is not None:
                shop.write(session, key)
    assert shop.orders(key) == 1


def block_in_a_handler(shop: Shop, key: str) -> None:
    with tmc.SqlInbox(shop.sessions).once(a_message(1, id=key)) as session, shop.center.transaction(session) as tx:
        shop.write(session, key)
        tx.send(TOPIC, {}, key=key)
    assert (shop.orders(key), shop.is_committed(key)) == (1, True)


def outbox_block(shop: Shop, key: str) -> None:
    with closing(tmc.Outbox(shop.engine, FakeTarget())) as box:
        with shop.sessions() as session, box.transaction(session) as tx:
            shop.write(session, key)
            tx.send(TOPIC, {}, key=key)
        assert box.flush()
        assert [kept.direct for kept in box.store.by_key(key)] == [True]
    assert shop.orders(key) == 1


def outbox_and_its_relay(shop: Shop, key: str) -> None:
    with tmc.Outbox(shop.engine, shop.center, direct=False, untouched=timedelta(0)) as box:
        with shop.sessions() as session:
            shop.write(session, key)
            box.add(session, TOPIC, {}, key=key)
            session.commit()
        eventually(lambda: shop.is_committed(key))
    assert shop.orders(key) == 1


def block_on_a_connection_of_the_driver(shop: Shop, key: str) -> None:
    arguments, options = shop.engine.dialect.create_connect_args(shop.engine.url)
    if shop.place.url.startswith("postgresql"):
        options["prepare_threshold"] = None

    def connect() -> Any:
        return shop.engine.dialect.loaded_dbapi.connect(*arguments, **options)

    tmc.create_tables(connect)
    with closing(connect()) as connection, shop.center.transaction(connection) as tx:
        connection.cursor().execute("SELECT 1")
        tx.send(TOPIC, {}, key=key)
    with tmc.SqlInbox(connect).once(a_message(1, id=key)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SELECT 1")
    with closing(tmc.Outbox(connect, FakeTarget())) as box, closing(connect()) as connection:
        with box.transaction(connection) as tx:
            tx.send(TOPIC, {}, key=key)
        assert box.flush()
    assert shop.is_committed(key)


def upkeep(shop: Shop, _key: str) -> None:
    tmc.create_tables(shop.engine)
    shop.center.resume(shop.engine)
    tmc.clean_ledger(shop.engine, WEEK)
    tmc.clean_inbox(shop.engine, WEEK)
    with closing(tmc.Outbox(shop.engine, shop.center, direct=False)) as box:
        box.store.clean(WEEK)


def asyncio_block_and_handler(shop: Shop, key: str) -> None:
    async def use() -> None:
        arguments = {"prepare_threshold": None} if shop.place.url.startswith("postgresql") else {}
        made = create_async_engine(shop.place.asynchronous, connect_args=arguments, **shop.options)
        engine = made.execution_options(**shop.engine.get_execution_options())
        async with aio.connect(shop.place.center, app="orders") as center:
            async with AsyncSession(engine) as session, center.transaction(session) as tx:
                session.add(Order(key=key))
                tx.send(TOPIC, {}, key=key)
            assert await center.resume(engine) == 0
            assert (await center.get_message(topic=TOPIC, key=key)).state == types_pb2.MESSAGE_STATE_COMMITTED
        box = tmc.SqlInbox(async_sessionmaker(engine))
        await box.check_async()
        async with box.once_async([a_message(1, id=key)]) as effects:
            effects.handle.add(Order(key=key + "!"))
        await engine.dispose()

    with ThreadPoolExecutor(1) as beside:  # asyncio would take SIGINT from uWSGI
        beside.submit(asyncio.run, use()).result()
    assert (shop.orders(key), shop.orders(key + "!")) == (1, 1)


USES: Mapping[str, Callable[[Shop, str], None]] = {
    use.__name__: use
    for use in (
        block,
        block_that_prepares_first,
        block_that_fails,
        block_whose_commit_is_refused,
        block_with_a_fallback,
        checks,
        inbox,
        block_in_a_handler,
        outbox_block,
        outbox_and_its_relay,
        block_on_a_connection_of_the_driver,
        upkeep,
        asyncio_block_and_handler,
    )
}


def make_tables(place: Place) -> None:
    """On both databases, and in the schema of a tenant."""
    for url in (place.url, place.second):
        engine = sa.create_engine(url)
        schemas = [None, "tenant"] if place.path == "schema" else [None]
        for schema in schemas:
            translated = engine.execution_options(schema_translate_map={None: schema}) if schema else engine
            if schema:
                with engine.begin() as connection:
                    connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                tables.metadata.create_all(translated)
            else:
                tmc.create_tables(engine)
            Base.metadata.create_all(translated)
        engine.dispose()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """said: "works", or the sentence of a refusal, or what went wrong.  taken: connections from the program's pool."""

    said: str
    taken: int


def use_all(place: Place) -> dict[str, Outcome]:
    """Run each use and return what became of it."""
    shop = PATHS[place.path](place, tmc.connect(place.center, app="orders"))
    found = {}
    for name, use in USES.items():
        before, said = shop.taken, "works"
        try:
            use(shop, f"{KEYS}{uuid.uuid4().hex[:12]}")
        except tmc.InvalidRequest as exc:
            said = f"refused: {exc}"
        except Exception as exc:  # noqa: BLE001 - whatever it is, the test compares it
            said = f"{type(exc).__name__}: {exc}"[:400]
        found[name] = Outcome(said=said, taken=shop.taken - before)
    shop.close()
    return found


def read_places(path: str) -> list[Place]:
    return [Place(**each) for each in json.loads(Path(path).read_text())]


def use_places(path: str) -> dict[str, dict[str, str]]:
    """path: of the JSON with the places. Returns: what was said of each use, by name of the place."""
    return {place.name: {use: each.said for use, each in use_all(place).items()} for place in read_places(path)}


def serve_checks(path: str) -> None:
    """A server for checks starts and stops."""
    place = read_places(path)[0]
    with tmc.connect(place.center, app="orders") as center:
        center.checks(sa.create_engine(place.url)).serve().stop()
