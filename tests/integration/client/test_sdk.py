"""The SDK against a running center: transactions, ledgers, consumers, both faces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import CenterInThisProcess, RunningCenter
from tests.support.messages import a_message
from tmc_client import aio
from tmc_client.connecting import sender
from tmc_client.local import one_transaction
from tmc_client.producing.answered import SETTLE_BATCH
from tmc_client.producing.ledger import Settler, rows_for
from tmc_client.tables import inbox, ledger
from tmc_common.protocol import types_pb2
from tmc_server.store.tables import alert
from tmc_storm.eventually import eventually

Running = RunningCenter | CenterInThisProcess


@pytest.fixture(scope="module", params=["of its own", "in this process"])
def running(request, tmp_path_factory) -> Iterator[Running]:
    url = f"sqlite:///{tmp_path_factory.mktemp('sdk')}/c.db"
    if request.param == "of its own":
        with RunningCenter(url, open_to_all=True, dev={"retry_interval_ms": 200}) as made:
            yield made
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMC_DEV__RETRY_INTERVAL_MS", "200")
        with CenterInThisProcess(url) as embedded:
            yield embedded


@pytest.fixture
def center(running: Running) -> Iterator[tmc.Center]:
    with tmc.connect(running.address, app="orders") as made:
        yield made


@pytest.fixture
def business(tmp_path) -> Iterator[sa.Engine]:
    """The business database: one table of orders, and the SDK's tables."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/business.db")
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    yield engine
    engine.dispose()


def _orders(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.exec_driver_sql("SELECT id FROM orders ORDER BY id").scalars())


def _ledger(engine: sa.Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(ledger).order_by(ledger.c.message_id)))


def _state(center: tmc.Center, topic: str, key: str) -> int:
    return center.get_message(topic=topic, key=key).state


def _insert(session: Session, number: int) -> None:
    session.execute(sa.text("INSERT INTO orders VALUES (:id)"), {"id": number})


class Consumed:
    """What a consumer got."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.attempts: list[int] = []


class TestTransaction:
    def test_commit_delivers_and_settles(self, center: tmc.Center, business: sa.Engine) -> None:
        with Session(business) as session, center.transaction(session) as tx:
            _insert(session, 1)
            tx.send("tx.one", {"order": 1}, key="a")
            tx.send("tx.one", {"order": 1}, key="b")
        assert _orders(business) == [1]
        assert [_state(center, "tx.one", key) for key in "ab"] == [types_pb2.MESSAGE_STATE_COMMITTED] * 2
        center.flush()
        assert [row.settled_ms is not None for row in _ledger(business)] == [True, True]

    def test_an_exception_in_the_block_leaves_nothing_anywhere(self, center: tmc.Center, business: sa.Engine) -> None:
        with pytest.raises(ZeroDivisionError), Session(business) as session, center.transaction(session) as tx:
            _insert(session, 1)
            tx.send("tx.one", {}, key="never")
            1 / 0  # noqa: B018
        assert (_orders(business), _ledger(business)) == ([], [])
        with pytest.raises(tmc.NotFound):
            _state(center, "tx.one", "never")

    def test_a_refused_message_rolls_the_others_back(self, center: tmc.Center, business: sa.Engine) -> None:
        center.publish("tx.one", {}, key="taken")
        with pytest.raises(tmc.KeyCommitted), Session(business) as session, center.transaction(session) as tx:
            _insert(session, 1)
            tx.send("tx.one", {}, key="beside")
            tx.send("tx.one", {}, key="taken")
        assert (_orders(business), _ledger(business)) == ([], [])
        eventually(lambda: _is_free(center, "beside"))

    def test_a_failed_local_commit_frees_its_key(self, center: tmc.Center, business: sa.Engine) -> None:
        with pytest.raises(sa.exc.OperationalError), Session(business) as session, center.transaction(session) as tx:
            _insert(session, 1)
            tx.send("tx.one", {}, key="refused")
            sa.event.listen(session, "before_commit", _explode)
        assert _orders(business) == []
        with pytest.raises(tmc.NotFound):
            center.get_message(topic="tx.one", key="refused")

    def test_a_block_inside_a_savepoint_is_refused(self, center: tmc.Center, business: sa.Engine) -> None:
        with Session(business) as session, session.begin(), session.begin_nested():
            with pytest.raises(tmc.InvalidRequest, match="savepoint"), center.transaction(session):
                pass

    def test_blocks_whose_commit_would_not_be_their_own_are_refused(
        self, center: tmc.Center, business: sa.Engine
    ) -> None:
        with business.connect() as connection, connection.begin():
            with pytest.raises(tmc.InvalidRequest), center.transaction(Session(bind=connection)):
                pass
        with Session(business) as session, center.transaction(session) as outer:
            outer.send("tx.one", {}, key="outer")
            with pytest.raises(tmc.InvalidRequest), center.transaction(session):
                pass
        assert _state(center, "tx.one", "outer") == types_pb2.MESSAGE_STATE_COMMITTED

    def test_sending_before_or_after_the_block_is_refused_at_the_call(
        self, center: tmc.Center, business: sa.Engine
    ) -> None:
        with Session(business) as session:
            tx = center.transaction(session)
            with pytest.raises(tmc.InvalidRequest, match="before its block"):
                tx.send("tx.one", {}, key="early")
            with tx:
                _insert(session, 1)
            with pytest.raises(tmc.InvalidRequest, match="after the end of its block"):
                tx.send("tx.one", {}, key="late")
            with pytest.raises(tmc.InvalidRequest, match="used before"), tx:
                pass
        assert _orders(business) == [1]

    def test_a_transaction_that_autocommits_already_is_refused_at_the_block(
        self, center: tmc.Center, business: sa.Engine
    ) -> None:
        engine = business.execution_options(isolation_level="AUTOCOMMIT")
        with Session(engine) as session:
            session.execute(sa.text("SELECT 1"))
            with pytest.raises(tmc.InvalidRequest, match="AUTOCOMMIT"), center.transaction(session):
                raise AssertionError("the block began")

    def test_a_swallowed_refusal_does_not_open_the_connection(self, center: tmc.Center, business: sa.Engine) -> None:
        engine = business.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(tmc.InvalidRequest, match="AUTOCOMMIT"):
            with Session(engine) as session, center.transaction(session):
                for _ in range(2):
                    with contextlib.suppress(tmc.InvalidRequest):
                        _insert(session, 1)
        assert _orders(business) == []

    def test_sessions_and_connections_are_free_after_a_block(self, center: tmc.Center, business: sa.Engine) -> None:
        with Session(business) as session:
            with center.transaction(session):
                _insert(session, 1)
            _insert(session, 2)
            session.commit()
            with pytest.raises(ZeroDivisionError), center.transaction(session):
                1 / 0  # noqa: B018
            _insert(session, 3)
            session.commit()
        assert _orders(business) == [1, 2, 3]
        assert not one_transaction._BY_CONNECTION

    def test_a_center_that_is_away_stops_the_block_before_the_commit(self, business: sa.Engine) -> None:
        from tmc_storm.services.ports import free_port

        away = tmc.connect(f"127.0.0.1:{free_port()}", app="orders")
        with pytest.raises(tmc.Unavailable), Session(business) as session:
            with away.transaction(session, prepare_timeout=timedelta(milliseconds=300)) as tx:
                _insert(session, 1)
                tx.send("tx.one", {}, key="x")
        assert (_orders(business), _ledger(business)) == ([], [])
        away.sender.close(grace=0)

    def test_a_restarted_producer_submits_what_its_ledger_holds(self, center: tmc.Center, business: sa.Engine) -> None:
        """The producer died between its commit and the answer to its submit."""
        prepared = center.prepare("tx.one", {"order": 9}, key="orphan")
        with business.begin() as connection:
            connection.exec_driver_sql("INSERT INTO orders VALUES (9)")
            connection.execute(ledger.insert(), rows_for([prepared]))
        assert center.resume(business) == 1
        assert _state(center, "tx.one", "orphan") == types_pb2.MESSAGE_STATE_COMMITTED
        assert center.resume(business) == 0


def _is_free(center: tmc.Center, key: str) -> bool:
    try:
        center.rollback(center.prepare("tx.one", {}, key=key))
    except tmc.KeyInProgress:
        return False
    return True


def _explode(session: Session) -> None:
    raise sa.exc.OperationalError("COMMIT", {}, Exception("connection lost"))


class Paid(pydantic.BaseModel):
    order: int


class TestConsumer:
    def test_bodies_come_as_annotated(self, running: Running, center: tmc.Center) -> None:
        got: list[Any] = []
        consumer = tmc.Consumer(tmc.connect(running.address, app="typed"))

        @consumer.listener(tmc.topic("typed.model", Paid))
        def model(paid: Paid, message: tmc.Message) -> None:
            got.append((paid, message.key, message.headers, message.producer))

        @consumer.listener("typed.bytes")
        async def raw(body: bytes) -> None:
            await asyncio.sleep(0)
            got.append(body)

        with consumer:
            eventually(lambda: _subscribed(running, "typed", 2))
            center.publish("typed.model", Paid(order=7), key="k7", headers={"trace": "x"})
            center.publish("typed.bytes", b"\x00\xff", key="k8")
            eventually(lambda: len(got) == 2)
        assert (Paid(order=7), "k7", {"trace": "x"}, "orders") in got
        assert b"\x00\xff" in got

    def test_a_failing_handler_is_tried_again_and_rejects_end_it(self, running: Running, center: tmc.Center) -> None:
        tries: list[tuple[str, int]] = []
        consumer = tmc.Consumer(tmc.connect(running.address, app="failing"))

        @consumer.listener("failing")
        def handle(body: str, message: tmc.Message) -> None:
            tries.append((body, message.attempt))
            if body == "reject":
                raise tmc.Reject("never")
            if body == "later" and message.attempt < 3:
                raise tmc.Later(timedelta(milliseconds=10))
            if body == "broken" and message.attempt < 2:
                raise RuntimeError("broken")

        with consumer:
            eventually(lambda: _subscribed(running, "failing", 1))
            for body in ("reject", "later", "broken"):
                center.publish("failing", body, key=body)
            eventually(lambda: len(tries) == 6)
            eventually(lambda: _consumption_states(running, "failing") == {"reject": 3, "later": 2, "broken": 2})
        assert sorted(tries) == [("broken", 1), ("broken", 2), ("later", 1), ("later", 2), ("later", 3), ("reject", 1)]

    def test_with_an_inbox_a_copy_that_comes_again_has_no_second_effect(
        self, running: Running, center: tmc.Center, business: sa.Engine
    ) -> None:
        handled, lost_acks = [], [1, 1]
        mine = tmc.connect(running.address, app="inboxed")
        consumer = tmc.Consumer(mine)
        real = mine.sender.send

        def lose_two_acks(kind: sender.Kind, request: Any, timeout: float) -> Any:
            if kind is not sender.ACK or not lost_acks:
                return real(kind, request, timeout)
            lost_acks.pop()
            return None  # as if nobody had to be told

        mine.sender.send = lose_two_acks  # type: ignore[method-assign]

        @consumer.listener("inboxed", inbox=tmc.SqlInbox(sessionmaker(business)))
        def handle(body: str, session: Session) -> None:
            handled.append(body)
            _insert(session, 5)

        with consumer:
            eventually(lambda: _subscribed(running, "inboxed", 1))
            center.publish("inboxed", "x", key="x")
            eventually(lambda: _consumption_states(running, "inboxed") == {"x": 2})
        assert handled == ["x"]
        assert _orders(business) == [5]
        with business.connect() as connection:
            assert len(connection.execute(sa.select(inbox)).fetchall()) == 1

    def test_a_handler_that_fails_with_an_inbox_leaves_no_note(
        self, running: Running, center: tmc.Center, business: sa.Engine
    ) -> None:
        tries: list[int] = []
        consumer = tmc.Consumer(tmc.connect(running.address, app="inboxed2"))

        @consumer.listener("inboxed2", inbox=tmc.SqlInbox(sessionmaker(business)))
        def handle(body: str, session: Session, message: tmc.Message) -> None:
            tries.append(message.attempt)
            _insert(session, message.attempt)
            if message.attempt == 1:
                raise RuntimeError("after the effect")

        with consumer:
            eventually(lambda: _subscribed(running, "inboxed2", 1))
            center.publish("inboxed2", "x", key="x")
            eventually(lambda: _consumption_states(running, "inboxed2") == {"x": 2})
        assert (tries, _orders(business)) == ([1, 2], [2])

    @pytest.mark.parametrize("kind", ["blocking", "asyncio"])
    def test_an_inbox_without_its_tables_is_found_before_the_first_message(
        self, running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
    ) -> None:
        with tmc.connect(running.address, app=f"late-{kind}") as mine:
            consumer = tmc.Consumer(mine)
            if kind == "blocking":
                engine = sa.create_engine(f"sqlite:///{tmp_path}/late.db", poolclass=sa.NullPool)

                @consumer.listener("late", inbox=tmc.SqlInbox(sessionmaker(engine)))
                def handle(body: str) -> None: ...
            else:
                asynchronous = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/late.db", poolclass=sa.NullPool)

                @consumer.listener("late", inbox=tmc.SqlInbox(async_sessionmaker(asynchronous)))
                async def handle_async(body: str) -> None: ...

            with consumer:
                eventually(lambda: "There is no table tmc_inbox in this database" in caplog.text)

    def test_a_note_that_is_refused_for_another_reason_is_no_duplicate(
        self, running: Running, center: tmc.Center, business: sa.Engine
    ) -> None:
        with business.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE INSERT ON tmc_inbox BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        with pytest.raises(sa.exc.IntegrityError), tmc.SqlInbox(sessionmaker(business)).once(a_message()):
            pass

    def test_a_hanging_async_handler_does_not_keep_the_process(self, running: Running, center: tmc.Center) -> None:
        entered = threading.Event()
        of_others = set(threading.enumerate())  # consumers of other tests may still be ending
        consumer = tmc.Consumer(tmc.connect(running.address, app="hanging"))

        @consumer.listener("hanging")
        async def handle(body: str) -> None:
            entered.set()
            await asyncio.sleep(3600)

        consumer.start()
        eventually(lambda: _subscribed(running, "hanging", 1))
        center.publish("hanging", "x", key="x")
        assert entered.wait(10)
        own = [t for t in set(threading.enumerate()) - of_others if t.name.startswith("tmc-handler")]
        assert own
        consumer.stop(grace=timedelta(milliseconds=10))
        eventually(lambda: not any(thread.is_alive() for thread in own))
        assert _consumption_states(running, "hanging") == {"x": 1}

    def test_a_handler_that_hangs_is_given_up_and_its_message_runs_elsewhere(
        self, running: Running, center: tmc.Center
    ) -> None:
        """The retry interval is 200 ms: Extends keep the second consumer from the message until max_handling."""
        gate, ran = threading.Event(), []
        consumers = [tmc.Consumer(tmc.connect(running.address, app="hung"), concurrency=2) for _ in range(2)]
        for consumer in consumers:

            @consumer.listener("hung", max_handling=timedelta(seconds=1))
            def handle(body: str, message: tmc.Message) -> None:
                ran.append((message.attempt, message.interval_ms))
                if message.attempt == 1:
                    gate.wait(60)

        for consumer in consumers:
            consumer.start()
        eventually(lambda: _subscribed(running, "hung", 1))
        center.publish("hung", "x", key="x")
        eventually(lambda: _consumption_states(running, "hung") == {"x": 2}, seconds=60)
        (first, second) = ran  # of more attempts where Extends come late, but never of more runs
        assert first == (1, 200)
        assert second[0] > 1
        with running.server.store.shards.catalog.reading() as connection:
            alerts = connection.execute(sa.select(alert.c.kind, alert.c.attempt, alert.c.detail)).all()
        found = [(row.attempt, "max_handling of 1 s" in row.detail) for row in alerts if row.kind == "handler hangs"]
        assert found == [(1, True)]
        gate.set()
        for consumer in consumers:
            consumer.stop()

    def test_stop_lets_running_handlers_end(self, running: Running, center: tmc.Center) -> None:
        entered, go_on = threading.Event(), threading.Event()
        consumer = tmc.Consumer(tmc.connect(running.address, app="stopping"), concurrency=1)

        @consumer.listener("stopping")
        def handle(body: str) -> None:
            entered.set()
            go_on.wait(10)

        consumer.start()
        eventually(lambda: _subscribed(running, "stopping", 1))
        center.publish("stopping", "x", key="x")
        assert entered.wait(10)
        stopper = threading.Thread(target=consumer.stop)
        stopper.start()
        go_on.set()
        stopper.join(20)
        assert _consumption_states(running, "stopping") == {"x": 2}

    @pytest.mark.parametrize(
        ("signature", "expected"),
        [
            ("def h(): ...", "first parameter"),
            ("def h(body, what): ...", "unknown parameters"),
            ("def h(body, session): ...", "inbox"),
        ],
    )
    def test_handlers_that_cannot_work_are_refused_at_once(
        self, center: tmc.Center, signature: str, expected: str
    ) -> None:
        space: dict[str, Any] = {}
        exec(signature, space)
        with pytest.raises(TypeError, match=expected):
            tmc.Consumer(center).listener("t")(space["h"])


def _subscribed(running: Running, app: str, count: int) -> bool:
    catalog = running.server.store.watch.current
    return sum(1 for s in catalog.subscriptions.values() if catalog.apps[s.app].id == app) == count


def _consumption_states(running: Running, topic: str) -> dict[str, int]:
    """State numbers by message key: 1 scheduled, 2 acked, 3 failed."""
    from tmc_server.domain.placement import table_index_for
    from tmc_server.store.tables import shard_tables

    tables = shard_tables(table_index_for(topic))
    number = running.server.store.watch.current.topic_by_name[topic].number
    query = (
        sa.select(tables.message.c.message_key, tables.consumption.c.state)
        .join(tables.consumption, tables.consumption.c.message_id == tables.message.c.id)
        .where(tables.message.c.topic_no == number)
    )
    with running.server.store.shards.catalog.reading() as connection:
        return dict(connection.execute(query).fetchall())


class TestAsyncio:
    def test_the_same_calls_awaited(self, running: Running, tmp_path) -> None:
        async def story() -> None:
            engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/async.db")
            sync = sa.create_engine(f"sqlite:///{tmp_path}/async.db")
            await aio.create_tables(engine)
            await aio.create_tables(engine)
            async with aio.connect(running.address, app="orders") as center:
                prepared = await center.prepare("aio", b"1", key="one")
                assert await center.submit(prepared) == prepared.message_id
                await center.rollback(await center.prepare("aio", b"2", key="two"))
                assert await center.publish("aio", b"3", key="three")
                published = await asyncio.gather(*(center.publish("aio", b"", key=f"m{i}") for i in range(100)))
                assert len(set(published)) == 100
                async with AsyncSession(engine) as session, center.transaction(session) as tx:
                    tx.send("aio", {"x": 1}, key="tx")
                with pytest.raises(ZeroDivisionError):
                    async with AsyncSession(engine) as session, center.transaction(session) as tx:
                        tx.send("aio", {"x": 1}, key="tx-never")
                        1 / 0  # noqa: B018
                assert (await asyncio.to_thread(_state, center.blocking, "aio", "tx")) == 2
                await _cancelled_block(center, engine)
                orphan = await center.prepare("aio", {}, key="orphan")
                async with engine.begin() as connection:
                    await connection.execute(ledger.insert(), rows_for([orphan]))
                assert (await center.resume(engine), await center.resume(engine)) == (1, 0)
                assert (await asyncio.to_thread(_state, center.blocking, "aio", "orphan")) == 2
                with pytest.raises(tmc.KeyCommitted):
                    await center.publish("aio", b"other", key="three")
                with pytest.raises(TypeError):
                    with center.transaction(AsyncSession(engine)):  # type: ignore[attr-defined]
                        pass
            await engine.dispose()
            assert [row.settled_ms is not None for row in _ledger(sync)] == [True, True]
            sync.dispose()

        asyncio.run(story())

    def test_asyncio_has_everything_that_the_blocking_face_has(self) -> None:
        center = tmc.connect("127.0.0.1:1", app="orders")
        inner = {"after_fork", "answered", "connection", "identity", "producer", "sender", "settle", "timeout"}
        offered = {name for name in dir(center) if not name.startswith("_")} - inner
        assert offered <= set(dir(aio.AsyncCenter(center)))

    def test_messages_are_looked_up_and_checks_are_answered_over_asyncio(self, running: Running, tmp_path) -> None:
        async def story() -> None:
            async with aio.connect(running.address, app="orders") as center:
                published = await center.publish("aio", b"", key="looked-up")
                assert (await center.get_message(topic="aio", key="looked-up")).message_id == published
                center.check("aio.own")(lambda _: tmc.Verdict.COMMIT)
                checks = center.checks(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/none.db"))
                assert (
                    checks._outcome(tmc.Question(message_id="1", topic="aio.own", key="k")).verdict
                    is tmc.Verdict.COMMIT
                )

        asyncio.run(story())

    def test_a_submit_that_is_answered_after_the_block_is_settled_all_the_same(
        self, running: Running, tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tmc_client.producing.transaction.SUBMIT_WAIT", timedelta(0))
        answer: Future[Any] = Future()

        async def story() -> None:
            engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/late.db", poolclass=sa.NullPool)
            await aio.create_tables(engine)
            async with aio.connect(running.address, app="orders") as center:
                monkeypatch.setattr(center.blocking.producer, "submit", lambda *_: answer)
                async with AsyncSession(engine) as session, center.transaction(session) as tx:
                    tx.send("aio", {"x": 1}, key="late")
                sync = sa.create_engine(f"sqlite:///{tmp_path}/late.db")
                assert [row.settled_ms is not None for row in _ledger(sync)] == [False]
                await asyncio.to_thread(answer.set_result, None)
                await center.flush()
                assert [row.settled_ms is not None for row in _ledger(sync)] == [True]
                sync.dispose()
            await engine.dispose()

        asyncio.run(story())

    def test_blocks_on_a_connection_are_settled_by_later_ones(self, running: Running, tmp_path) -> None:
        """A second connection might wait for the one that the program holds."""

        async def story() -> None:
            engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/bound.db", pool_size=1, max_overflow=0)
            await aio.create_tables(engine)
            async with aio.connect(running.address, app="orders") as center, engine.connect() as connection:
                for number in range(SETTLE_BATCH + 1):
                    async with AsyncSession(connection) as session, center.transaction(session) as tx:
                        tx.send("aio", {"x": 1}, key=f"bound-{number}")
            await engine.dispose()

        asyncio.run(story())
        sync = sa.create_engine(f"sqlite:///{tmp_path}/bound.db")
        assert [row.settled_ms is not None for row in _ledger(sync)].count(True) == SETTLE_BATCH
        sync.dispose()

    def test_processes_that_start_at_once_may_all_make_the_tables(self, tmp_path) -> None:
        async def story() -> None:
            engines = [create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/many.db") for _ in range(8)]
            await asyncio.gather(*(aio.create_tables(engine) for engine in engines))
            for engine in engines:
                await engine.dispose()

        asyncio.run(story())


def test_a_settler_survives_what_a_driver_or_an_event_raises(tmp_path) -> None:
    broken, well = (sa.create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in ("broken", "well"))
    tmc.create_tables(well)
    with well.begin() as connection:
        connection.execute(
            ledger.insert(), rows_for([tmc.Prepared(message_id="1-1-05-1", topic="t", key="k", attempt_id=b"0" * 16)])
        )

    @sa.event.listens_for(broken, "do_connect")
    def refuse(*_: Any) -> None:
        raise RuntimeError("no secret to connect with")

    settler = Settler()
    settler.add(broken, ["1-1-05-9"])
    settler.add(well, ["1-1-05-1"])
    eventually(lambda: [row.settled_ms is not None for row in _ledger(well)] == [True])
    with well.begin() as connection:
        connection.execute(ledger.update().values(settled_ms=None))
    settler.add(well, ["1-1-05-1"])  # its thread lives
    eventually(lambda: [row.settled_ms is not None for row in _ledger(well)] == [True])
    settler.close()
    well.dispose()


def test_a_settler_closes_after_what_it_is_writing(tmp_path) -> None:
    """Else the program disposes of its engine, and the connection that comes back afterward is never closed."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/slow.db")
    tmc.create_tables(engine)
    begun, may_end = threading.Event(), threading.Event()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def hold(*_: Any) -> None:
        begun.set()
        may_end.wait(30)

    settler = Settler()
    settler.add(engine, ["1-1-05-1"])
    begun.wait(30)
    closing = threading.Thread(target=settler.close)
    closing.start()
    closing.join(0.2)
    was_closed = not closing.is_alive()
    may_end.set()
    closing.join(30)
    assert (was_closed, engine.pool.checkedout()) == (False, 0)
    engine.dispose()


def test_locks_that_a_thread_of_the_parent_holds_are_not_inherited() -> None:
    center = tmc.connect("127.0.0.1:1", app="orders")
    checks = center.checks()
    with center._settler_lock, checks.token._lock:
        child = os.fork()
        if child == 0:
            free = center._settler_lock.acquire(blocking=False) and checks.token._lock.acquire(blocking=False)
            os._exit(0 if free else 1)
    assert os.waitpid(child, 0)[1] == 0


async def _cancelled_block(center: aio.AsyncCenter, engine: Any) -> None:
    """The client of a web request went away in the middle of the prepare: its key is free again."""

    async def request() -> None:
        async with AsyncSession(engine) as session, center.transaction(session) as tx:
            tx.send("aio", {}, key="left")

    real, started = center.blocking.producer.prepare, asyncio.Event()

    def prepare(*arguments: Any) -> Any:
        started.set()
        return real(*arguments)

    center.blocking.producer.prepare = prepare  # type: ignore[method-assign]
    task = asyncio.create_task(request())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    center.blocking.producer.prepare = real  # type: ignore[method-assign]
    assert await asyncio.to_thread(eventually, lambda: _free_in_aio(center.blocking))


def _free_in_aio(center: tmc.Center) -> bool:
    try:
        return bool(center.publish("aio", b"", key="left"))
    except tmc.KeyInProgress:
        return False


def test_credentials_and_deadlines_are_different_errors(tmp_path) -> None:
    with RunningCenter(f"sqlite:///{tmp_path}/c.db") as strict:
        with tmc.connect(strict.address, app="orders", key="wrong") as wrong, pytest.raises(tmc.NotAuthenticated):
            wrong.publish("order.paid", b"", key="x")
        with tmc.connect(strict.address, app="orders", key=strict.keys["orders"]) as right:
            assert right.publish("order.paid", b"", key="x")
            with pytest.raises(tmc.DeadlineExceeded):
                right.publish("order.paid", b"", key="y", timeout=timedelta(microseconds=1))
            with pytest.raises(tmc.InvalidRequest) as caught:
                right.publish("order.paid", b"", key="")
            assert caught.value.field == "key"


@pytest.mark.parametrize("address", ["", "nohost", "http://x", "a:b", "1.2.3.4:5,oops"])
def test_addresses_that_cannot_work_are_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="no address of a center"):
        tmc.connect(address, app="x")
