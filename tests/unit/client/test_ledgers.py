"""Several ledgers in one process: each question is answered from the one its message was prepared with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import tmc_client as tmc
from tmc_client.checks.ledgers import Ledgers
from tmc_client.checks.questions import Because
from tmc_client.producing.ledger import ledger_id_of
from tmc_client.tables import ledger, metadata

COMMIT, ROLLBACK, UNKNOWN = tmc.Verdict.COMMIT, tmc.Verdict.ROLLBACK, tmc.Verdict.UNKNOWN


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[list[sa.Engine]]:
    """Each with a ledger that has one row, whose id is the tenant's number."""
    engines = [sa.create_engine(f"sqlite:///{tmp_path}/{number}.db") for number in range(3)]
    for number, engine in enumerate(engines):
        tmc.create_tables(engine)
        _commit(engine, str(number))
    yield engines
    for engine in engines:
        engine.dispose()


def _commit(engine: sa.Engine, message_id: str) -> None:
    row = {"state": 1, "topic": "t", "message_key": "k", "attempt_id": b"0" * 16, "created_ms": 1}
    with engine.begin() as connection:
        connection.execute(ledger.insert(), {"message_id": message_id, **row})


def _question(engine: sa.Engine, message_id: str) -> tmc.Question:
    with engine.begin() as connection:
        ledger_id = ledger_id_of(connection.execute)
    now = time.time_ns() // 1_000_000
    return tmc.Question(message_id=message_id, topic="t", key="k", ledger_id=ledger_id, created_ms=now)


def _verdicts(ledgers: Ledgers, *questions: tmc.Question) -> list[tmc.Verdict]:
    return [answer.verdict for answer in ledgers.answer(questions, fences=True)]


def test_each_question_is_answered_from_its_own_ledger(tenants: list[sa.Engine]) -> None:
    asked = [_question(engine, str(number)) for number, engine in enumerate(tenants)]
    fenced = _question(tenants[1], "0")  # committed in another one
    with closing(Ledgers()) as ledgers:
        for engine in tenants:
            ledgers.add(engine)
        assert _verdicts(ledgers, asked[2], fenced, asked[0], asked[1]) == [COMMIT, ROLLBACK, COMMIT, COMMIT]


def test_a_ledger_that_is_added_later_is_known_at_once(tenants: list[sa.Engine]) -> None:
    with closing(Ledgers(Clock())) as ledgers:
        ledgers.add(tenants[0])
        ledgers.add(tenants[1])
        (answer,) = ledgers.answer([_question(tenants[2], "2")], fences=True)
        assert answer.detail.startswith("WRONG_LEDGER")
        ledgers.add(tenants[2])
        assert _verdicts(ledgers, _question(tenants[2], "2")) == [COMMIT]


def test_a_database_that_is_away_stops_no_other_and_may_be_the_one(tenants: list[sa.Engine], tmp_path: Path) -> None:
    clock, away = Clock(), sa.create_engine(f"sqlite:///{tmp_path}/not/there/yet.db")
    with closing(Ledgers(clock)) as ledgers:
        for engine in (tenants[0], away):
            ledgers.add(engine)
        assert _verdicts(ledgers, _question(tenants[0], "0")) == [COMMIT]
        (answer,) = ledgers.answer([_question(tenants[1], "1")], fences=True)
        assert (answer.verdict, answer.detail[:11]) == (UNKNOWN, "LEDGER_AWAY")
        (tmp_path / "not/there").mkdir(parents=True)
        tmc.create_tables(away)
        _commit(away, "9")
        clock.now += 5
        assert _verdicts(ledgers, _question(away, "9")) == [COMMIT]
        (answer,) = ledgers.answer([_question(tenants[1], "1")], fences=True)
        assert answer.detail.startswith("WRONG_LEDGER")
    away.dispose()


def test_engines_of_one_pool_share_the_connections_beside_it(tmp_path: Path) -> None:
    opened: list[object] = []
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shared.db")
    sa.event.listen(engine, "connect", lambda raw, _record: opened.append(raw))
    for name in ("one", "two", "three"):
        sa.event.listen(
            engine, "connect", lambda raw, _record, name=name: raw.execute(f"ATTACH '{tmp_path}/{name}.db' AS {name}")
        )
    tenants = [engine.execution_options(schema_translate_map={None: name}) for name in ("one", "two", "three")]
    for number, tenant in enumerate(tenants):
        metadata.create_all(tenant)
        _commit(tenant, str(number))
    asked = [_question(tenant, str(number)) for number, tenant in enumerate(tenants)]
    before = len(opened)
    with closing(Ledgers()) as ledgers:
        for tenant in tenants:
            ledgers.add(tenant)
        assert _verdicts(ledgers, *asked) == [COMMIT] * 3
    assert len(opened) - before == 1
    engine.dispose()


def test_ledgers_over_asyncio_share_a_loop(tmp_path: Path, tenants: list[sa.Engine]) -> None:
    asked = [_question(engine, str(number)) for number, engine in enumerate(tenants)]
    with closing(Ledgers()) as ledgers:
        for number in range(3):
            ledgers.add(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/{number}.db"))
        assert _verdicts(ledgers, *asked) == [COMMIT] * 3


def test_a_database_that_hangs_delays_only_the_call_that_looks(tenants: list[sa.Engine]) -> None:
    """Another call for a ledger that is not known yet is answered NOT_NOW meanwhile."""
    hangs, goes_on = threading.Event(), threading.Event()
    with closing(Ledgers()) as ledgers:
        for engine in tenants[:2]:
            ledgers.add(engine)
        assert _verdicts(ledgers, _question(tenants[0], "0")) == [COMMIT]
        slow = tenants[2].execution_options()

        @sa.event.listens_for(slow.pool, "connect")
        def _connect(*_: object) -> None:
            hangs.set()
            goes_on.wait(60)

        question = _question(tenants[2], "2")
        ledgers.add(slow)
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(_verdicts, ledgers, question)
            assert hangs.wait(60)
            (answer,) = ledgers.answer([question], fences=True)
            known = _verdicts(ledgers, _question(tenants[1], "1"))
            goes_on.set()
            assert looking.result(60) == [COMMIT]
        assert answer.detail.startswith("LEDGER_AWAY")
        assert known == [COMMIT]


def test_any_error_of_a_driver_is_an_answer_not_now(tenants: list[sa.Engine]) -> None:
    """Drivers of asyncio raise OSError and errors of their own when they cannot connect."""
    question = _question(tenants[0], "0")
    with closing(Ledgers()) as ledgers:
        ledgers.add(tenants[0])
        assert _verdicts(ledgers, question) == [COMMIT]
        with closing(Ledgers()) as away:
            away.add(sa.create_engine(tenants[0].url, creator=_refused))
            (answer,) = away.answer([question], fences=True)
    assert (answer.because, answer.detail[:11]) == (Because.NOT_NOW, "LEDGER_AWAY")


def _refused() -> None:
    raise OSError("connection refused")
