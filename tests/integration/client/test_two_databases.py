"""Sessions over two databases, replicas and schemas of tenants: our rows are where the program's are, or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tmc_client as tmc
from tests.support.messages import a_message
from tests.support.producing import FakeProducer, FakeTarget
from tmc_client import aio
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.local.choosing import local_of
from tmc_client.producing.aio_transaction import AsyncTransaction
from tmc_client.producing.answered import SETTLE_BATCH, Answered
from tmc_client.producing.ledger import ledger_id_of
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import inbox, ledger, outbox

SHORT = timedelta(seconds=2)


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """Two databases with all tables; of the second one, also as a replica that somebody can write to."""
    made = []
    for name in ("tmc_first", "tmc_second"):
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path}/{name}.db"
        else:
            url = request.getfixturevalue(request.param).create(name)
        engine = sa.create_engine(url)
        for metadata in (ledger.metadata, Base.metadata):
            metadata.drop_all(engine)
            metadata.create_all(engine)
        tmc.create_tables(engine)
        made.append(engine)
    yield made[0], made[1]
    for engine in made:
        engine.dispose()


def _count(engine: sa.Engine, table: sa.Table | type[Base]) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def _block(producer: FakeProducer, session: Any, settle: Any = lambda *_: None, **options: Any) -> Transaction:
    local = local_of(session, "center.transaction()")
    return Transaction(producer, settle, local, SHORT, **options)  # type: ignore[arg-type]


def _connects(engine: sa.Engine) -> Callable[[], Any]:
    arguments, options = engine.dialect.create_connect_args(engine.url)
    return lambda: engine.dialect.connect(*arguments, **options)


def _routing(leader: sa.Engine, follower: sa.Engine) -> type[Session]:
    """As SQLAlchemy's documentation has it."""

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **_: Any) -> sa.Engine:  # type: ignore[override]
            return leader if self._flushing or isinstance(clause, sa.Update | sa.Delete) else follower

    return RoutingSession


REFUSED = r"writes to two databases, .* which commit one after the other"


def test_a_block_over_two_databases_is_refused(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = pair
    producer = FakeProducer()
    with Session(bind=first, binds={Invoice: second}) as session:
        with pytest.raises(tmc.InvalidRequest, match=REFUSED) as caught, _block(producer, session) as tx:
            session.add_all([Order(id=1), Invoice(id=1)])
            tx.send("t", {}, key="a")
        assert str(first.url) in str(caught.value)
        assert str(second.url) in str(caught.value)
    assert (_count(first, Order), _count(second, Invoice), producer.submitted) == (0, 0, [])


def test_what_was_written_elsewhere_before_the_block_is_refused_at_once(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = pair
    with Session(bind=first, binds={Invoice: second}) as session:
        session.add(Invoice(id=1))
        session.flush()
        with _expect_refusal(), _block(FakeProducer(), session) as tx:
            tx.send("t", {}, key="a")
    assert _count(second, Invoice) == 0


def _expect_refusal() -> Any:
    return pytest.raises(tmc.InvalidRequest, match=REFUSED)


def test_text_that_writes_elsewhere_is_seen_too(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = pair
    with (
        Session(bind=first, binds={Invoice: second}) as session,
        _expect_refusal(),
        _block(FakeProducer(), session) as tx,
    ):
        session.connection(bind_arguments={"mapper": Invoice}).exec_driver_sql("INSERT INTO invoices VALUES (1)")
        tx.send("t", {}, key="a")
    assert _count(second, Invoice) == 0


def test_a_handler_over_two_databases_is_refused(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = pair
    box = tmc.SqlInbox(lambda: Session(bind=first, binds={Invoice: second}))
    with _expect_refusal(), box.once(a_message(1)) as session:
        session.add_all([Order(id=1), Invoice(id=1)])
    assert (_count(first, inbox), _count(first, Order), _count(second, Invoice)) == (0, 0, 0)


def test_an_outbox_over_two_databases_is_refused(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = pair
    with closing(tmc.Outbox(first, FakeTarget())) as box, Session(bind=first, binds={Invoice: second}) as session:
        session.add(Invoice(id=1))
        box.add(session, "t", {}, key="a")
        with _expect_refusal():
            session.commit()
        with _expect_refusal():  # also if the program goes on
            session.commit()
        session.rollback()
        with _expect_refusal(), box.transaction(session) as tx:
            session.add(Invoice(id=2))
            tx.send("t", {}, key="b")
    assert (_count(first, outbox), _count(second, Invoice)) == (0, 0)


def test_a_session_that_does_not_know_where_is_refused(pair: tuple[sa.Engine, sa.Engine]) -> None:
    first, _ = pair
    with Session(binds={Order: first}) as session:
        with pytest.raises(tmc.InvalidRequest, match="no engine for our tables"), _block(FakeProducer(), session):
            session.add(Order(id=1))


def test_our_rows_go_where_a_routing_session_writes(pair: tuple[sa.Engine, sa.Engine]) -> None:
    leader, follower = pair
    producer, target = FakeProducer(), FakeTarget()
    routing = _routing(leader, follower)
    with routing() as session:
        assert session.scalars(sa.select(Order)).all() == []  # from the follower, in the same transaction
        with _block(producer, session) as tx:
            session.add(Order(id=1))
            assert session.scalars(sa.select(Invoice)).all() == []
            tx.send("t", {}, key="a")
    with closing(tmc.Outbox(leader, target)) as box, routing() as session:
        session.scalars(sa.select(Invoice)).all()
        session.add(Order(id=2))
        box.add(session, "t", {}, key="b")
        session.commit()
        with box.transaction(session) as tx:
            session.add(Order(id=3))
            tx.send("t", {}, key="c")
        box.flush()
    with tmc.SqlInbox(routing).once(a_message(1)) as session:
        session.scalars(sa.select(Invoice)).all()
        session.add(Order(id=4))
    assert [_count(leader, table) for table in (Order, ledger, outbox, inbox)] == [4, 1, 2, 1]
    assert [_count(follower, table) for table in (Order, ledger, outbox, inbox)] == [0, 0, 0, 0]
    assert producer.submitted == ["a"]
    assert sorted(entry.key for entry in target.taken) == ["b", "c"]


def test_asyncio_refuses_and_routes_too(tmp_path: Path) -> None:
    async def use() -> tuple[list[int], list[str]]:
        leader, follower = (create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/{name}.db") for name in ("one", "two"))
        for engine in (leader, follower):
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
            await aio.create_tables(engine)
        producer: Any = FakeProducer()
        routing = _routing(leader.sync_engine, follower.sync_engine)
        async with AsyncSession(leader, sync_session_class=routing) as session:
            await session.scalars(sa.select(Order))
            async with AsyncTransaction(producer, lambda *_: None, session, SHORT) as tx:
                session.add(Order(id=1))
                tx.send("t", {}, key="a")
        async with AsyncSession(leader, binds={Invoice: follower}) as session:
            with _expect_refusal():
                async with AsyncTransaction(producer, lambda *_: None, session, SHORT) as tx:
                    session.add_all([Order(id=2), Invoice(id=2)])
                    tx.send("t", {}, key="b")
        counts = []
        for engine in (leader, follower):
            async with engine.connect() as connection:
                counts.append((await connection.execute(sa.select(sa.func.count()).select_from(Order))).scalar_one())
            await engine.dispose()
        return counts, producer.submitted

    assert asyncio.run(use()) == ([1, 0], ["a"])


@pytest.fixture
def tenants(pair: tuple[sa.Engine, sa.Engine], tmp_path: Path) -> sa.Engine:
    """One engine over two schemas, each with all tables; sessions say which."""
    engine = pair[0]
    names = {"sqlite": "shop", "mysql": "tmc_second", "mariadb": "tmc_second", "postgresql": "shop"}
    schema = names[engine.dialect.name]
    if schema == "shop":
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.exec_driver_sql("DROP SCHEMA IF EXISTS shop CASCADE")
                connection.exec_driver_sql("CREATE SCHEMA shop")
        if engine.dialect.name == "sqlite":
            engine.dispose()
            sa.event.listen(engine, "connect", lambda raw, _: raw.execute(f"ATTACH '{tmp_path}/shop.db' AS shop"))
    translated = engine.execution_options(schema_translate_map={None: schema})
    ledger.metadata.create_all(translated)
    with translated.begin() as connection:
        ledger_id_of(connection.execute)
    return translated


def test_checks_look_into_the_schema_of_their_engine(tenants: sa.Engine) -> None:
    """Committed there, nothing in the default one: without the schema this would be answered ROLLBACK, or LEDGER_AWAY."""
    producer = FakeProducer()
    with Session(tenants) as session, _block(producer, session) as tx:
        tx.send("t", {}, key="a")
    (message_id,) = producer.prepared
    with tenants.connect() as connection:
        ledger_id = ledger_id_of(connection.execute)
    with closing(LedgerAnswers(tenants)) as answers:
        question = tmc.Question(message_id=message_id, topic="t", key="a", ledger_id=ledger_id, created_ms=1)
        (answer,) = answers.answer([question], fences=True)
    assert answer.verdict is tmc.Verdict.COMMIT


def test_marks_go_to_the_schema_of_the_sessions_connection(tenants: sa.Engine, pair: Any) -> None:
    producer, settled = FakeProducer(), list[sa.Engine]()
    options: dict[str, Any] = dict(tenants.get_execution_options())
    for key in ("a", "b"):
        with Session(pair[0]) as session:
            session.connection(execution_options=options)
            with _block(producer, session, lambda engine, _ids: settled.append(engine)) as tx:
                tx.send("t", {}, key=key)
    assert settled[0].get_execution_options() == options
    assert _count(settled[0], ledger) == 2
    assert settled[0] is settled[1]  # one batch


def test_an_outbox_of_another_schema_is_refused(tenants: sa.Engine, pair: Any) -> None:
    with closing(tmc.Outbox(pair[0], FakeTarget(), direct=False)) as box:
        with Session(pair[0]) as session:
            box.add(session, "t", {}, key="a")
            session.commit()
        with Session(tenants) as session:
            box.add(session, "t", {}, key="b")
            with pytest.raises(tmc.InvalidRequest, match="another database, or schema"):
                session.commit()
        with Session(tenants) as session, pytest.raises(tmc.InvalidRequest, match="another database, or schema"):
            with box.transaction(session) as tx:
                tx.send("t", {}, key="c")
    assert (_count(pair[0], outbox), _count(tenants, outbox)) == (1, 0)


def test_addresses_of_engines_do_not_decide_which_database_an_outbox_is_of(pair: tuple[sa.Engine, sa.Engine]) -> None:
    """Behind `creator=` the same address is another database, and another address the same one."""
    first, second = pair
    target = FakeTarget()
    same = sa.create_engine(first.url.set(query={}), creator=_connects(first))
    disguised = sa.create_engine(first.url, creator=_connects(second))
    foreign = sa.create_engine(f"{first.dialect.name}+{first.dialect.driver}://", creator=_connects(first))
    with closing(tmc.Outbox(first, target)) as box:
        for engine in (same, foreign):
            with Session(engine) as session:
                box.add(session, "t", {}, key=str(engine.url)[-20:] or "x")
                session.commit()
        with Session(disguised) as session, pytest.raises(tmc.InvalidRequest, match="another database"):
            box.add(session, "t", {}, key="lost")
            session.commit()
        box.flush()
    for engine in (same, disguised, foreign):
        engine.dispose()
    assert (len(target.taken), _count(second, outbox)) == (2, 0)


def test_what_shares_one_connection_is_settled_by_later_blocks() -> None:
    """With a second transaction, the settler would commit what the program has open."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    tmc.create_tables(engine)
    producer, answered = FakeProducer(), Answered()

    def never(*_: object) -> None:
        raise AssertionError

    for number in range(2 * SETTLE_BATCH):
        with Session(engine) as session, _block(producer, session, never, answered=answered) as tx:
            tx.send("t", {}, key=f"k-{number}")
    with engine.connect() as connection:
        open_ = sa.select(sa.func.count()).select_from(ledger).where(ledger.c.settled_ms.is_(None))
        assert connection.execute(open_).scalar_one() < 2 * SETTLE_BATCH
    engine.dispose()
