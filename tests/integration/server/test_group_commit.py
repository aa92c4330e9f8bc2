"""The lanes: batches, neighbors, cancelled callers, locked rows, lost connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.support.store import DONE, StoreUnderTest, server_store
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import Operation, Stored
from tmc_server.errors import InternalFault, QueueFull, RowLocked, ShuttingDown, StoreUnavailable
from tmc_server.store import group_commit
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import Database
from tmc_server.store.group_commit import GroupCommit, Limits, Whereabouts
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL


class _Gate:
    """A writer hook that holds the first transaction until it is opened."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.open = threading.Event()

    def __call__(self, point: str) -> None:
        if point == "begin" and not self.inside.is_set():
            self.inside.set()
            assert self.open.wait(20)


def _run(
    store: StoreUnderTest,
    story: Callable[[GroupCommit], Awaitable[Any]],
    writer: ShardWriter | None = None,
    limits: Limits | None = None,
    died: list[int] | None = None,
    whereabouts: Whereabouts | None = None,
) -> Any:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        deaths = [] if died is None else died
        made = GroupCommit(
            writer or store.writer, limits or Limits(lanes=2), loop, lambda: deaths.append(1), whereabouts
        )
        made.start()
        try:
            return await story(made)
        finally:
            await asyncio.to_thread(made.stop)

    return asyncio.run(main())


async def _perform(commit: GroupCommit, *operations: Operation) -> list[Any]:
    return await asyncio.wait_for(commit.perform(operations), 120)


def test_waiting_operations_share_a_transaction(store: StoreUnderTest) -> None:
    gate = _Gate()
    operations = [store.a_prepare() for _ in range(100)]

    async def story(commit: GroupCommit) -> Any:
        first = asyncio.ensure_future(_perform(commit, operations[0]))
        await asyncio.to_thread(gate.inside.wait, 10)
        rest = [asyncio.ensure_future(_perform(commit, operation)) for operation in operations[1:]]
        await asyncio.sleep(0)
        gate.open.set()
        return await asyncio.gather(first, *rest)

    with store.counting() as counter:
        answers = _run(store, story, store.new_writer(gate))
    assert answers == [[store.stored(each.number, MessageState.PREPARED)] for each in operations]
    assert counter.commits == 2


def test_a_lane_leaves_a_connection_that_leads_to_a_former_primary(
    store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there would refuse it: a message that is not found is answered without a write."""
    database, given_up = store.writer.database, list[object]()
    event.listen(database.engine, "invalidate", lambda *seen: given_up.append(seen))

    async def story(commit: GroupCommit) -> None:
        await _perform(commit, store.a_prepare())
        await _perform(commit, store.a_prepare())
        assert given_up == []
        monkeypatch.setattr(database.hosts, "leads", lambda _connection: False)
        await _perform(commit, store.a_prepare())
        assert len(given_up) == 1

    _run(store, story, limits=Limits(lanes=1))


def test_a_full_queue_refuses_and_changes_nothing(store: StoreUnderTest) -> None:
    gate = _Gate()

    async def story(commit: GroupCommit) -> None:
        first = asyncio.ensure_future(_perform(commit, store.a_prepare()))
        await asyncio.to_thread(gate.inside.wait, 10)
        rest = [asyncio.ensure_future(_perform(commit, store.a_prepare())) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await commit.perform([store.a_prepare(key="refused")])
        gate.open.set()
        await asyncio.gather(first, *rest)

    _run(store, story, store.new_writer(gate), Limits(lanes=1, queue=5))
    assert store.messages_with_key("refused") == []


def test_a_neighbor_is_not_refused_by_a_queue_that_a_greedy_app_has_filled(store: StoreUnderTest) -> None:
    """Both queue for the same shard; the newest operations of the greedy one make room and are told so."""
    gate = _Gate()
    greedy, polite = [store.a_prepare(app=1) for _ in range(10)], [store.a_prepare(app=2) for _ in range(3)]

    async def story(commit: GroupCommit) -> Any:
        first = asyncio.ensure_future(_perform(commit, store.a_prepare()))
        await asyncio.to_thread(gate.inside.wait, 10)
        filled = asyncio.ensure_future(_perform(commit, *greedy))
        await asyncio.sleep(0)
        beside = asyncio.ensure_future(_perform(commit, *polite))
        await asyncio.sleep(0)
        gate.open.set()
        return await asyncio.gather(first, filled, beside)

    _, of_greedy, of_polite = _run(store, story, store.new_writer(gate), Limits(lanes=1, queue=10))
    assert [type(answer) for answer in of_polite] == [Stored] * 3
    assert [type(answer) for answer in of_greedy] == [Stored] * 7 + [QueueFull] * 3
    assert [len(store.messages_with_key(operation.key)) for operation in greedy] == [1] * 7 + [0] * 3


class _OnItsWay:
    """Nobody has the shard."""

    looks = 0

    def look(self, _shard: Shard, _here: Database) -> Database | None:
        self.looks += 1


def test_a_shard_on_its_way_is_waited_for_once_for_each_time_it_is_frozen(
    store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that moves it may have been killed: what comes later is refused at once, and the lane works for others."""
    monkeypatch.setattr(group_commit, "_FROZEN_S", 0.2)
    way = _OnItsWay()

    async def looks(commit: GroupCommit) -> tuple[bool, int]:
        before = way.looks
        (answer,) = await _perform(commit, store.a_prepare())
        return isinstance(answer, StoreUnavailable), way.looks - before

    async def story(commit: GroupCommit) -> None:
        for _ in range(2):
            with store.frozen():
                is_refused, first = await looks(commit)
                assert is_refused
                assert first > 1
                assert await looks(commit) == (True, 1)
            assert await looks(commit) == (False, 0)

    _run(store, story, whereabouts=way)


def test_a_cancelled_caller_does_not_hurt_its_neighbors(store: StoreUnderTest) -> None:
    gate = _Gate()
    cancelled, neighbor, later = (store.a_prepare() for _ in range(3))
    died: list[int] = []

    async def story(commit: GroupCommit) -> None:
        first = asyncio.ensure_future(_perform(commit, store.a_prepare()))
        await asyncio.to_thread(gate.inside.wait, 10)
        gone = asyncio.ensure_future(_perform(commit, cancelled))
        stays = asyncio.ensure_future(_perform(commit, neighbor))
        await asyncio.sleep(0)
        gone.cancel()
        gate.open.set()
        await asyncio.gather(first, stays)
        await _perform(commit, later)

    _run(store, story, store.new_writer(gate), died=died)
    assert died == []
    for operation in (cancelled, neighbor, later):
        assert store.state_of(operation.number) is MessageState.PREPARED


def test_one_poisoned_operation_fails_alone(store: StoreUnderTest) -> None:
    poison = store.a_prepare(key="poison", content_type=None)
    healthy = [store.a_prepare() for _ in range(199)]

    async def story(commit: GroupCommit) -> list[Any]:
        return await _perform(commit, *healthy[:99], poison, *healthy[99:])

    answers = _run(store, story)
    assert isinstance(answers.pop(99), InternalFault)
    assert answers == [store.stored(o.number, MessageState.PREPARED) for o in healthy]


def test_after_stop_nothing_is_taken(store: StoreUnderTest) -> None:
    async def story(commit: GroupCommit) -> None:
        await asyncio.to_thread(commit.stop)
        with pytest.raises(ShuttingDown):
            await commit.perform([store.a_prepare()])

    _run(store, story)


def test_a_dead_lane_is_reported_and_its_callers_are_answered(store: StoreUnderTest) -> None:
    died: list[int] = []
    gate = _Gate()

    def die(point: str) -> None:
        gate(point)
        raise SystemExit

    async def story(commit: GroupCommit) -> None:
        tasks = [asyncio.ensure_future(_perform(commit, store.a_prepare()))]
        await asyncio.to_thread(gate.inside.wait, 10)
        tasks += [asyncio.ensure_future(_perform(commit, store.a_prepare())) for _ in range(5)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.to_thread(eventually, lambda: died)
        await asyncio.to_thread(commit.stop)
        for answers in await asyncio.gather(*tasks):
            assert [type(answer) for answer in answers] == [ShuttingDown]

    _run(store, story, store.new_writer(die), Limits(lanes=1), died)
    assert died == [1]


def test_what_comes_back_after_the_end_is_answered(store: StoreUnderTest) -> None:
    """A rollback of an unknown attempt writes its tombstone, and the lanes end before it can look again."""
    rollback = store.decide_attempt(store.a_prepare(), commit=False)
    stopped: list[GroupCommit] = []

    def stop_behind(point: str) -> None:
        if point == "committed":
            stopped[0]._ready.clear()

    async def story(commit: GroupCommit) -> list[Any]:
        stopped.append(commit)
        future = asyncio.ensure_future(_perform(commit, rollback))
        await asyncio.sleep(0)
        await asyncio.to_thread(commit.stop)
        return await future

    (answer,) = _run(store, story, store.new_writer(stop_behind), Limits(lanes=1))
    assert isinstance(answer, ShuttingDown | Stored)


class TestOnServers:
    @pytest.fixture
    def store(self, database_server: MariaDB | PostgreSQL) -> Any:
        made = server_store(database_server)
        yield made
        made.close()

    @pytest.mark.parametrize("what", ["submit", "ack"])
    def test_one_locked_row_among_200_holds_up_nobody_else(self, store: StoreUnderTest, what: str) -> None:
        operations = [store.prepared() for _ in range(200)]
        numbers = [operation.number for operation in operations]
        if what == "ack":
            store.perform(*(store.submit_of(number) for number in numbers))
        make = store.submit_of if what == "submit" else store.ack_of
        table = "message" if what == "submit" else "consumption"
        column = "id" if what == "submit" else "message_id"
        foreign = store.database.engine.connect()
        foreign.exec_driver_sql(
            f"SELECT * FROM tmc_{table}_{store.shard:02d} WHERE {column} = {numbers[77]} FOR UPDATE"
        ).fetchall()

        async def story(commit: GroupCommit) -> None:
            decisions = [make(number) for number in numbers]
            tasks = [asyncio.ensure_future(_perform(commit, decision)) for decision in decisions]
            others = [task for i, task in enumerate(tasks) if i != 77]
            await asyncio.wait_for(asyncio.gather(*others), 20)
            assert not tasks[77].done()
            foreign.rollback()
            await tasks[77]
            answers = [answer for task in tasks for answer in task.result()]
            expected = (
                [store.stored(number, MessageState.COMMITTED) for number in numbers]
                if what == "submit"
                else [DONE] * 200
            )
            assert answers == expected

        try:
            _run(store, story)
        finally:
            foreign.close()

    def test_a_key_that_a_stranger_holds_does_not_stop_the_others_for_long(self, store: StoreUnderTest) -> None:
        """An insert has to wait for a foreign uncommitted row; its neighbors are run one by one."""
        foreign = store.database.engine.connect()
        blocked, others = store.a_prepare(key="held"), [store.a_prepare() for _ in range(50)]
        table = f"tmc_message_{store.shard:02d}"
        foreign.exec_driver_sql(
            f"INSERT INTO {table} (id, topic_no, producer_no, producer_tag, message_key, live, attempt_id, digest, state,"
            f" content_type, body, delay_ms, created_ms) VALUES (1, {store.topic.number}, 1, 'default', 'held', 1, '', '', 1, '',"
            " '', 0, 0)"
        )

        async def story(commit: GroupCommit) -> list[Any]:
            return await _perform(commit, *others[:25], blocked, *others[25:])

        try:
            answers = _run(store, story)
        finally:
            foreign.rollback()
            foreign.close()
        assert isinstance(answers.pop(25), RowLocked)
        assert answers == [store.stored(o.number, MessageState.PREPARED) for o in others]

    def test_a_row_that_stays_locked_is_refused(self, store: StoreUnderTest) -> None:
        operation = store.prepared()
        foreign = store.database.engine.connect()
        foreign.exec_driver_sql(f"SELECT * FROM tmc_message_{store.shard:02d} FOR UPDATE").fetchall()

        async def story(commit: GroupCommit) -> list[Any]:
            return await _perform(commit, store.submit_of(operation.number))

        try:
            (answer,) = _run(store, story)
        finally:
            foreign.close()
        assert isinstance(answer, RowLocked)
        assert store.state_of(operation.number) is MessageState.PREPARED

    @pytest.mark.parametrize("when", ["written", "commit sent"])
    def test_a_connection_lost_in_the_middle_is_settled_before_anybody_is_answered(
        self, store: StoreUnderTest, when: str
    ) -> None:
        """KILL the lane's connection before its commit, or let the commit through and lose only its answer."""
        operation = store.prepared()
        store.outlet.room = 1
        lost: list[int] = []
        taken_back: list[Any] = []
        writer = ShardWriter(
            store.database, store.watch, store.outlet, lambda: 7, take_back=lambda *found: taken_back.append(found)
        )

        def lose_once(connection: sa.Connection) -> None:
            if lost:
                return
            lost.append(1)
            store.clock.advance(1)  # a new connection takes longer than the millisecond that tells two copies apart
            dbapi = connection.connection.dbapi_connection
            if when == "commit sent":
                dbapi.commit()
                dbapi.cursor().execute("SELECT 1")  # psycopg sends no COMMIT unless a transaction is open
            with sa.create_engine(store.database.url, poolclass=sa.NullPool).connect() as killer:
                is_postgresql = killer.dialect.name == "postgresql"
                killer.exec_driver_sql(
                    f"SELECT pg_terminate_backend({dbapi.info.backend_pid})"
                    if is_postgresql
                    else f"KILL {dbapi.thread_id()}"
                )

        async def story(commit: GroupCommit) -> list[Any]:
            sa.event.listen(store.database.engine, "commit", lose_once)
            return await _perform(commit, store.submit_of(operation.number), store.a_prepare(key="beside"))

        try:
            answers = _run(store, story, writer)
        finally:
            sa.event.remove(store.database.engine, "commit", lose_once)
        assert lost == [1]
        # The try may be in the table although nobody got the copy: it is taken back, by its attempt number.
        (((copy,), at),) = taken_back
        assert (copy.number, copy.attempt) == (operation.number, 1)
        delivered = store.delivered_attempts(operation.number)
        assert delivered == ([] if when == "commit sent" else [1])
        assert store.outlet.reserved == 0
        assert answers[0] == store.stored(operation.number, MessageState.COMMITTED)
        assert isinstance(answers[1], Stored)
        assert store.row(operation.number) is not None
        assert len(store.messages_with_key("beside")) == 1
        store.perform(store.give_back_of(copy.number, copy.attempt, tried_ms=at))
        tried = store.row(operation.number).tried
        assert tried == (0 if when == "commit sent" else 1), "the repetition's own copy is on its way"

    def test_a_rollback_beside_its_own_prepare_finds_what_that_commits(self, store: StoreUnderTest) -> None:
        """The prepare has looked for tombstones and is about to commit; the rollback cannot see it yet."""
        prepare, inside, go, buried = store.a_prepare(), threading.Event(), threading.Event(), threading.Event()
        preparing = threading.Thread(target=lambda: store.perform(prepare))

        def hold(_connection: sa.Connection) -> None:
            if threading.current_thread() is preparing:
                inside.set()
                assert go.wait(20)

        def look(point: str) -> None:
            if point == "committed":
                buried.set()

        answers: list[Any] = []
        rollback = store.decide_attempt(prepare, commit=False)
        deciding = threading.Thread(
            target=lambda: answers.extend(store.perform(rollback, writer=store.new_writer(look)))
        )
        sa.event.listen(store.database.engine, "commit", hold)
        try:
            preparing.start()
            assert inside.wait(20)
            deciding.start()
            assert buried.wait(20)
            go.set()
            for thread in (preparing, deciding):
                thread.join(30)
        finally:
            sa.event.remove(store.database.engine, "commit", hold)
        assert store.state_of(prepare.number) is MessageState.ROLLED_BACK
        assert answers == [store.stored(prepare.number, MessageState.ROLLED_BACK)]

    def test_a_database_that_is_away_is_unavailable_to_all(self, store: StoreUnderTest) -> None:
        from tmc_server.store.engines import Database
        from tmc_storm.services.ports import free_port

        away = Database(f"mariadb+mysqldb://root@127.0.0.1:{free_port()}/nowhere")
        writer = ShardWriter(away, store.watch, store.outlet, lambda: 7)

        async def story(commit: GroupCommit) -> list[Any]:
            return await _perform(commit, *(store.a_prepare() for _ in range(10)))

        answers = _run(store, story, writer)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        away.close()

    def test_deadlocks_are_repeated(self, store: StoreUnderTest) -> None:
        """Two lanes, two databases' worth of writers, the same rows in opposite arrival order: all are answered."""
        numbers = [store.submitted(room=1) for _ in range(50)]

        async def story(commit: GroupCommit) -> list[Any]:
            forward = [store.nack_of(number, 1) for number in numbers]
            backward = [store.ack_of(number) for number in reversed(numbers)]
            other = GroupCommit(store.new_writer(), Limits(lanes=2), asyncio.get_running_loop(), lambda: None)
            other.start()
            answers = await asyncio.gather(
                *(_perform(other, operation) for operation in backward),
                *(_perform(commit, operation) for operation in forward),
            )
            await asyncio.to_thread(other.stop)
            return [answer for each in answers[: len(backward)] for answer in each]

        assert _run(store, story) == [DONE] * 50
