"""The ledger's answers and the fence, on SQLite, MariaDB and PostgreSQL at the isolation levels that services use."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tmc_client import aio
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.local.sessions import SessionTransaction
from tmc_client.producing.ledger import create_tables, ledger_id_of
from tmc_client.producing.producer import Producer
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger, ledger_info, metadata
from tmc_common.protocol import message_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

COMMIT, ROLLBACK, UNKNOWN = tmc.Verdict.COMMIT, tmc.Verdict.ROLLBACK, tmc.Verdict.UNKNOWN
NOW = time.time_ns() // 1_000_000
_numbers = itertools.count(1)
LEVELS = [
    pytest.param("READ COMMITTED", marks=pytest.mark.mariadb),
    pytest.param("REPEATABLE READ", marks=pytest.mark.mariadb),
    *(
        pytest.param(f"postgresql {level}", marks=pytest.mark.postgresql)
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    ),
]
"""Of the databases that are servers, as services use them."""


@pytest.fixture(
    params=[
        "sqlite",
        *LEVELS,
    ]
)
def business(request: pytest.FixtureRequest, tmp_path) -> Iterator[sa.Engine]:
    """A service's database with its own table and the ledger."""
    if request.param == "sqlite":
        engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    else:
        engine = _on_a_server(request, request.param)
        metadata.drop_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS purchase")
        connection.exec_driver_sql("CREATE TABLE purchase (id BIGINT PRIMARY KEY)")
    create_tables(engine)
    yield engine
    engine.dispose()


def _on_a_server(request: pytest.FixtureRequest, level: str) -> sa.Engine:
    kind = "postgresql" if level.startswith("postgresql ") else "mariadb"
    server: MariaDB | PostgreSQL = request.getfixturevalue(kind)
    isolation: Any = level.removeprefix("postgresql ")
    return sa.create_engine(server.create("tmc_shop"), isolation_level=isolation, pool_size=16)


class Center:
    """A center that prepares everything. meanwhile: what happens between Prepare and the ledger rows."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[str], None] = lambda _id: None
        self.rolled_back: list[bytes] = []

    def prepare(self, request: message_pb2.PrepareRequest, _timeout: timedelta) -> Future[Any]:
        message_id = f"1-1-05-{next(_numbers):012d}"
        self.meanwhile(message_id)
        return _done(message_pb2.PrepareResult(message_id=message_id))

    def submit(self, message: Any, _timeout: timedelta) -> Future[Any]:
        return _done(message_pb2.SubmitResult(message_id=message.message_id))

    def rollback(self, message: Any, _timeout: timedelta) -> Future[Any]:
        self.rolled_back.append(message.attempt_id)
        return _done(message_pb2.RollbackResult())


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def block(center: Center, session: Session, keys: list[str]) -> None:
    with Transaction(center, lambda *_: None, SessionTransaction(session), timedelta(seconds=2)) as tx:  # type: ignore[arg-type]
        for key in keys:
            tx.send("shop.paid", {}, key=key)


def ledger_id(engine: sa.Engine) -> bytes:
    with engine.begin() as connection:
        return ledger_id_of(connection.execute)


def question(engine: sa.Engine, message_id: str, **changes: Any) -> tmc.Question:
    values = {"topic": "shop.paid", "key": "k", "ledger_id": ledger_id(engine), "created_ms": NOW} | changes
    return tmc.Question(message_id=message_id, **values)


def ask(answers: LedgerAnswers, *questions: tmc.Question, fences: bool = True) -> list[tmc.Verdict]:
    return [answer.verdict for answer in answers.answer(questions, fences=fences)]


@pytest.fixture
def answers(business: sa.Engine) -> Iterator[LedgerAnswers]:
    made = LedgerAnswers(business)
    yield made
    made.close()


def write_row(connection: sa.Connection, message_id: str) -> None:
    row = {"message_id": message_id, "state": 1, "topic": "t", "message_key": "k", "attempt_id": b"\0" * 16}
    connection.execute(ledger.insert(), {**row, "created_ms": NOW, "settled_ms": None})


class TestTheFence:
    def test_after_the_answer_rollback_the_transaction_cannot_commit(
        self, business: sa.Engine, answers: LedgerAnswers
    ) -> None:
        center = Center()
        told: list[tmc.Verdict] = []
        center.meanwhile = lambda id_: told.extend(ask(answers, question(business, id_)))
        sqlite = business.dialect.name == "sqlite"
        with Session(business) as session:
            if sqlite:  # whoever has written holds the only lock there is, and is not taken for absent
                session.execute(sa.text("SELECT * FROM purchase")).all()
            else:
                session.execute(sa.text("INSERT INTO purchase VALUES (1)"))
            with pytest.raises(tmc.Fenced, match="Run it again"):
                block(center, session, ["k"])
        assert told == [ROLLBACK]
        assert len(center.rolled_back) == 1
        with business.connect() as connection:
            assert connection.execute(sa.text("SELECT COUNT(*) FROM purchase")).scalar_one() == 0
            assert connection.execute(sa.select(ledger.c.state)).scalars().all() == [2]

    def test_what_is_being_committed_is_unknown_and_then_known(
        self, business: sa.Engine, answers: LedgerAnswers
    ) -> None:
        with business.connect() as connection:
            write_row(connection, "1-1-05-7")
            asked = question(business, "1-1-05-7") if business.dialect.name != "sqlite" else None
            asked = asked or tmc.Question(
                message_id="1-1-05-7", topic="t", key="k", ledger_id=_known_id(connection), created_ms=NOW
            )
            assert ask(answers, asked) == [UNKNOWN]
            connection.commit()
        assert ask(answers, asked) == [COMMIT]

    def test_what_was_taken_back_is_fenced(self, business: sa.Engine, answers: LedgerAnswers) -> None:
        asked = question(business, "1-1-05-8")
        with business.connect() as connection:
            write_row(connection, "1-1-05-8")
            connection.rollback()
        assert ask(answers, asked) == [ROLLBACK]
        assert ask(answers, asked, asked) == [ROLLBACK, ROLLBACK]
        with business.connect() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(ledger)).scalar_one() == 1

    def test_a_reader_without_the_right_to_fence_learns_nothing_about_absent_rows(
        self, business: sa.Engine, answers: LedgerAnswers
    ) -> None:
        assert ask(answers, question(business, "1-1-05-9"), fences=False) == [UNKNOWN]
        with business.connect() as connection:
            assert connection.execute(sa.select(ledger)).all() == []

    def test_many_at_once_each_by_what_is_written(
        self, business: sa.Engine, answers: LedgerAnswers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "tmc_client.checks.fence._BUDGET_S", 120
        )  # what is tested are verdicts, however slow the machine
        with business.begin() as connection:
            for number in range(0, 300, 2):
                write_row(connection, f"1-1-05-{number}")
        verdicts = ask(answers, *(question(business, f"1-1-05-{number}") for number in range(300)))
        assert verdicts == [COMMIT, ROLLBACK] * 150


@pytest.mark.parametrize(
    "driver",
    [
        "sqlite+aiosqlite",
        pytest.param("mariadb+asyncmy", marks=pytest.mark.mariadb),
        pytest.param("postgresql+asyncpg", marks=pytest.mark.postgresql),
        pytest.param("postgresql+psycopg", marks=pytest.mark.postgresql),
    ],
)
def test_checks_over_an_async_engine_are_answered_from_any_thread(
    driver: str, request: pytest.FixtureRequest, tmp_path
) -> None:
    if driver.startswith("sqlite"):
        url = sa.make_url(f"sqlite:///{tmp_path}/shop.db")
    else:
        url = sa.make_url(request.getfixturevalue(driver.partition("+")[0]).create("tmc_async_checks"))
    business = sa.create_engine(url)
    metadata.drop_all(business)
    create_tables(business)
    with business.begin() as connection:
        write_row(connection, "1-1-05-1")
    checks = tmc.connect("127.0.0.1:1", app="orders").checks(create_async_engine(url.set(drivername=driver)))
    checks.token._token = "known"
    asked = [question(business, "1-1-05-1"), question(business, "1-1-05-2")]

    async def on_a_loop() -> list[Any]:
        return await asyncio.to_thread(checks.answer, "known", asked)

    for answers in (checks.answer("known", asked), asyncio.run(on_a_loop())):
        assert [answer.verdict for answer in answers] == [COMMIT, ROLLBACK]
    with business.begin() as connection, pytest.raises(sa.exc.IntegrityError):
        write_row(connection, "1-1-05-2")  # it is fenced
    checks.close()
    eventually(lambda: "tmc-checks-loop" not in [thread.name for thread in threading.enumerate()])
    business.dispose()


def test_a_ledger_that_is_not_there_is_named_in_the_answer(tmp_path) -> None:
    answers = LedgerAnswers(sa.create_engine(f"sqlite:///{tmp_path}/shop.db"))
    [answer] = answers.answer(
        [tmc.Question(message_id="1-1-05-1", topic="t", key="k", ledger_id=b"x" * 16)], fences=True
    )
    answers.close()
    assert answer.verdict is UNKNOWN
    assert "There is no table tmc_ledger_info in this database: call tmc.create_tables(engine)" in answer.detail


def _known_id(connection: sa.Connection) -> bytes:
    return connection.execute(sa.select(ledger_info.c.ledger_id)).scalar_one()


class TestWhoMayAnswer:
    def test_another_environments_ledger_answers_nothing_and_fences_nothing(
        self, business: sa.Engine, answers: LedgerAnswers
    ) -> None:
        """Two environments share a service name: the test system must never answer for production."""
        foreign = question(business, "1-1-05-1", ledger_id=os.urandom(16))
        without = question(business, "1-1-05-2", ledger_id=b"")
        found = answers.answer([foreign, without], fences=True)
        assert [answer.verdict for answer in found] == [UNKNOWN, UNKNOWN]
        assert all(answer.detail.startswith("WRONG_LEDGER") for answer in found)
        with business.connect() as connection:
            assert connection.execute(sa.select(ledger)).all() == []

    def test_from_before_the_horizon_it_is_too_old(self, business: sa.Engine, answers: LedgerAnswers) -> None:
        day = 86_400_000
        with business.begin() as connection:
            write_row(connection, "1-1-05-1")
            connection.execute(ledger.update().values(created_ms=NOW - 30 * day, settled_ms=NOW - 30 * day))
            write_row(connection, "1-1-05-2")  # old too, but never answered by the center: it stays
            connection.execute(ledger.update().where(ledger.c.settled_ms.is_(None)).values(created_ms=NOW - 30 * day))
        assert tmc.clean_ledger(business, timedelta(days=8)) == 1
        old = question(business, "1-1-05-1", created_ms=NOW - 30 * day)
        [answer] = answers.answer([old], fences=True)
        assert answer.verdict is UNKNOWN
        assert answer.detail.startswith("TOO_OLD")
        assert ask(answers, question(business, "1-1-05-2", created_ms=NOW - 30 * day)) == [COMMIT]
        assert ask(answers, question(business, "1-1-05-3")) == [ROLLBACK]  # a young one is fenced as ever

    def test_a_ledger_cannot_be_cleaned_too_early(self, business: sa.Engine) -> None:
        with pytest.raises(ValueError, match="7 days"):
            tmc.clean_ledger(business, timedelta(days=6, hours=23))

    def test_a_ledger_that_is_away_decides_nothing(self, tmp_path) -> None:
        away = LedgerAnswers(sa.create_engine(f"sqlite:///{tmp_path}/none/shop.db"))
        found = away.answer([tmc.Question(message_id="1-1-05-1", topic="t", key="k", ledger_id=b"x" * 16)], fences=True)
        assert [(answer.verdict, answer.detail.partition(":")[0]) for answer in found] == [(UNKNOWN, "LEDGER_AWAY")]


@pytest.mark.parametrize("isolation", LEVELS)
def test_constant_checking_never_deadlocks_blocks_of_several_messages(
    request: pytest.FixtureRequest, isolation: str, note: Callable[[str], None]
) -> None:
    """Several markers in one transaction, or in another order, would."""
    engine = _on_a_server(request, isolation)
    metadata.drop_all(engine)
    create_tables(engine)
    center, outcomes, seen = Center(), Counter[str](), []
    answers, done, verdicts = LedgerAnswers(engine), threading.Event(), Counter[tmc.Verdict]()
    blocks = 10_000 if LONG else 800

    def prepared(message_id: str) -> None:
        seen.append(message_id)
        if len(seen) % 100 == 0:  # this block is late: it is asked about before its rows are there
            verdicts.update(answer.verdict for answer in answers.answer([question(engine, message_id)], fences=True))

    center.meanwhile = prepared

    def check() -> None:
        while not done.is_set():
            some = [question(engine, id_) for id_ in seen[-12:]]
            verdicts.update(answer.verdict for answer in answers.answer(some, fences=True))

    def work(share: int) -> None:
        for number in range(share):
            with Session(engine) as session:
                try:
                    block(center, session, [f"{number}-{part}" for part in range(3)])
                    outcomes["committed"] += 1
                except tmc.Fenced:
                    outcomes["fenced"] += 1
                except Exception as exc:  # noqa: BLE001 - counted
                    outcomes[repr(exc)[:200]] += 1

    checkers = [threading.Thread(target=check) for _ in range(2)]
    workers = [threading.Thread(target=work, args=(blocks // 8,)) for _ in range(8)]
    for thread in [*checkers, *workers]:
        thread.start()
    for worker in workers:
        worker.join()
    done.set()
    for checker in checkers:
        checker.join()
    with engine.connect() as connection:
        rows = Counter(connection.execute(sa.select(ledger.c.state)).scalars())
    answers.close()
    engine.dispose()
    note(f"{isolation}: {dict(outcomes)} of {blocks} blocks beside {sum(verdicts.values())} checks")
    assert set(outcomes) <= {"committed", "fenced"}
    assert sum(outcomes.values()) == blocks
    assert rows[1] == outcomes["committed"] * 3
    assert outcomes["fenced"] > 0
    assert verdicts[COMMIT] > 0


@pytest.fixture
def checked_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer of each Prepare is lost, and a check is answered "rolled back" before the repeat."""
    prepare = Producer.prepare

    def checked(self: Producer, request: message_pb2.PrepareRequest, timeout: timedelta) -> Future[Any]:
        attempt = tmc.Prepared(message_id="", topic=request.topic, key=request.key, attempt_id=request.attempt_id)
        self.rollback(attempt, timeout).result(60)
        return prepare(self, request, timeout)

    monkeypatch.setattr(Producer, "prepare", checked)


@pytest.mark.usefixtures("checked_early")
@pytest.mark.parametrize("prepare_first", [True, False])
def test_a_block_that_was_checked_before_its_prepare_was_answered_may_run_again(
    tmp_path: Path, prepare_first: bool
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    with RunningCenter(f"sqlite:///{tmp_path}/center.db") as center:
        address, key = center.address, center.keys["orders"]

        def block() -> None:
            with (
                tmc.connect(address, app="orders", key=key) as orders,
                Session(engine) as session,
                orders.transaction(session, prepare_first=prepare_first) as tx,
            ):
                tx.send("order.paid", b"x", key="blocking")

        async def async_block() -> None:
            other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
            try:
                async with (
                    aio.connect(address, app="orders", key=key) as orders,
                    AsyncSession(other) as session,
                    orders.transaction(session, prepare_first=prepare_first) as tx,
                ):
                    tx.send("order.paid", b"x", key="asyncio")
            finally:
                await other.dispose()

        for run in (block, lambda: asyncio.run(async_block())):
            with pytest.raises(tmc.Fenced, match="Run it again") as caught:
                run()
            assert caught.value.reason == "ALREADY_ROLLED_BACK"
    with engine.connect() as connection:
        assert connection.execute(sa.select(ledger)).all() == []
    engine.dispose()
