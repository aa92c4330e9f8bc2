"""Batch listeners: one call and one transaction for many messages, and halves until a bad one is alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.handlers import HandlerBench
from tests.support.messages import a_message, in_line
from tmc_client import aio
from tmc_client.consuming.turns import BatchSize
from tmc_client.tables import inbox
from tmc_storm.eventually import eventually

_LONG_S = 600.0


@pytest.fixture
def bench() -> Iterator[HandlerBench]:
    made = HandlerBench(concurrency=2)
    yield made
    made.stop()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/consumer.db")
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


def _size(max_messages: int, max_wait_s: float = _LONG_S) -> BatchSize:
    return BatchSize(max_messages=max_messages, max_wait_s=max_wait_s)


def _body(number: int) -> tmc.Message:
    return a_message(number, body=str(number).encode(), content_type="application/json")


def _numbers(bench: HandlerBench, kind: str) -> list[int]:
    return sorted(int(request.message_id.rpartition("-")[2]) for name, request in bench.center.sent if name == kind)


def test_a_batch_is_handled_when_it_is_full(bench: HandlerBench) -> None:
    seen: list[list[int]] = []

    def handle(numbers: list[int], messages: list[tmc.Message]) -> None:
        assert [message.body for message in messages] == [str(number).encode() for number in numbers]
        seen.append(numbers)

    bench.start(handle, batch=_size(3))
    receipts = [bench.arrive(_body(number)) for number in range(1, 7)]
    eventually(lambda: sorted(seen) == [[1, 2, 3], [4, 5, 6]])
    eventually(lambda: all(receipt.seen == ["handled", "answered"] for receipt in receipts))
    assert _numbers(bench, "AckMany") == [1, 2, 3, 4, 5, 6]


def test_a_batch_that_does_not_fill_is_handled_after_a_while(bench: HandlerBench) -> None:
    seen: list[list[int]] = []
    bench.start(lambda numbers: seen.append(numbers), batch=_size(100, max_wait_s=0.01))
    bench.arrive(_body(1))
    eventually(lambda: seen == [[1]])
    bench.arrive(_body(2))
    eventually(lambda: seen == [[1], [2]])


def test_what_a_stopping_consumer_has_collected_is_given_back(bench: HandlerBench) -> None:
    seen: list[list[int]] = []
    bench.start(lambda numbers: seen.append(numbers), batch=_size(100))
    receipt = bench.arrive(_body(1))
    bench.handling.begin_no_more()
    bench.handling.give_back_waiting()
    assert bench.handling.wait_idle(30)
    assert (seen, bench.center.answers()) == ([], [("NackMany", 1)])
    assert bench.center.sent[-1][1].not_begun
    assert receipt.seen == ["handled", "answered"]


def test_a_bad_message_is_found_by_halves(bench: HandlerBench, engine: sa.Engine) -> None:
    calls: list[list[int]] = []

    def handle(numbers: list[int], session: Session) -> None:
        calls.append(numbers)
        if 6 in numbers:
            raise ValueError("six")

    bench.start(handle, inbox=tmc.SqlInbox(sessionmaker(engine)), batch=_size(8))
    for number in range(1, 9):
        bench.arrive(_body(number))
    eventually(lambda: len(bench.center.sent) == 8)
    assert calls == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8], [5, 6], [5], [6], [7, 8]]
    assert (_numbers(bench, "AckMany"), _numbers(bench, "NackMany")) == ([1, 2, 3, 4, 5, 7, 8], [6])
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(inbox)).scalar_one() == 7


def test_later_postpones_the_whole_batch(bench: HandlerBench) -> None:
    calls: list[list[int]] = []

    def handle(numbers: list[int]) -> None:
        calls.append(numbers)
        raise tmc.Later(timedelta(seconds=7))

    bench.start(handle, batch=_size(4))
    for number in range(1, 5):
        bench.arrive(_body(number))
    eventually(lambda: _numbers(bench, "NackMany") == [1, 2, 3, 4])
    assert calls == [[1, 2, 3, 4]]
    assert {request.retry_after_ms for _, request in bench.center.sent} == {7_000}


def test_a_body_that_cannot_be_read_is_left_out(bench: HandlerBench) -> None:
    seen: list[list[int]] = []
    bench.start(lambda numbers: seen.append(numbers), batch=_size(3))
    bench.arrive(_body(1))
    bench.arrive(a_message(2, body=b"{", content_type="application/json"))
    bench.arrive(_body(3))
    eventually(lambda: len(bench.center.sent) == 3)
    assert (seen, _numbers(bench, "NackMany")) == ([[1, 3]], [2])


def test_what_had_its_effect_is_acked_and_left_out(bench: HandlerBench, engine: sa.Engine) -> None:
    seen: list[list[int]] = []
    box = tmc.SqlInbox(sessionmaker(engine))
    with box.once(_body(2)):
        pass
    bench.start(lambda numbers: seen.append(numbers), inbox=box, batch=_size(3))
    for number in (1, 2, 3):
        bench.arrive(_body(number))
    eventually(lambda: _numbers(bench, "AckMany") == [1, 2, 3])
    assert seen == [[1, 3]]


def test_what_was_overtaken_is_found_by_halves(bench: HandlerBench, engine: sa.Engine) -> None:
    seen: list[int] = []
    box = tmc.SqlInbox(sessionmaker(engine))
    with box.once(in_line(9, sequence=9)):
        pass
    bench.start(lambda bodies: seen.append(len(bodies)), inbox=box, batch=_size(2))
    bench.arrive(in_line(1, sequence=10))
    bench.arrive(in_line(2, sequence=2))
    eventually(lambda: len(bench.center.sent) == 2)
    assert (_numbers(bench, "AckMany"), _numbers(bench, "NackMany")) == ([1], [2])
    assert seen == [1]


def test_a_batch_that_hangs_is_given_up_as_one(bench: HandlerBench) -> None:
    entered, gate = threading.Event(), threading.Event()

    def handle(numbers: list[int]) -> None:
        entered.set()
        gate.wait(60)

    bench.start(handle, batch=_size(4), max_handling=timedelta(seconds=1))
    for number in range(1, 5):
        bench.arrive(_body(number))
    assert entered.wait(30)
    bench.clock.now += 1
    bench.handling.give_up_overdue()
    assert _numbers(bench, "NackMany") == [1, 2, 3, 4]
    assert (bench.handling.hanging, bench.handling.threads, bench.handling.broken) == (1, 2, "")
    gate.set()
    eventually(lambda: bench.handling.hanging == 0)
    eventually(lambda: _numbers(bench, "AckMany") == [1, 2, 3, 4])


def test_what_a_half_has_handled_is_answered_at_once_and_each_call_has_its_own_time(bench: HandlerBench) -> None:
    """A dependency that never answers: each call fails after 0.9 s of the second that it may take."""
    entered, gate = threading.Event(), threading.Event()

    def handle(numbers: list[int]) -> None:
        bench.clock.now += 0.9
        bench.handling.give_up_overdue()
        if numbers == [3]:
            entered.set()
            gate.wait(60)
        elif 4 in numbers:
            raise OSError("nobody there")

    bench.start(handle, batch=_size(4), max_handling=timedelta(seconds=1))
    for number in range(1, 5):
        bench.arrive(_body(number))
    assert entered.wait(30)
    assert _numbers(bench, "AckMany") == [1, 2]
    gate.set()
    eventually(lambda: len(bench.center.answers()) == 4)
    assert (_numbers(bench, "AckMany"), _numbers(bench, "NackMany")) == ([1, 2, 3], [4])
    assert not any(request.handler_hangs for name, request in bench.center.sent if name == "NackMany")


def test_a_half_that_was_given_up_with_the_other_one_is_not_handled(bench: HandlerBench) -> None:
    calls: list[list[int]] = []

    def handle(numbers: list[int]) -> None:
        calls.append(numbers)
        if numbers == [1, 2]:
            bench.clock.now += 1
            bench.handling.give_up_overdue()
        raise OSError("nobody there")

    bench.start(handle, batch=_size(4), max_handling=timedelta(seconds=1))
    receipts = [bench.arrive(_body(number)) for number in range(1, 5)]
    eventually(lambda: all(receipt.seen == ["handled", "answered"] for receipt in receipts))
    eventually(lambda: bench.handling.hanging == 0)
    assert calls == [[1, 2, 3, 4], [1, 2]]
    assert _numbers(bench, "NackMany") == [1, 2, 3, 4]


def test_an_asyncio_batch_has_one_session(bench: HandlerBench, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/consumer.db", poolclass=sa.NullPool)
    asyncio.run(aio.create_tables(engine))
    seen: list[Any] = []

    async def handle(numbers: list[int], session: AsyncSession) -> None:
        found = await session.execute(sa.select(sa.func.count()).select_from(inbox))
        seen.append((numbers, found.scalar_one()))
        if 2 in numbers and len(numbers) > 1:
            raise ValueError("not together")

    bench.start(handle, inbox=tmc.SqlInbox(async_sessionmaker(engine)), batch=_size(2))
    bench.arrive(_body(1))
    bench.arrive(_body(2))
    eventually(lambda: _numbers(bench, "AckMany") == [1, 2])
    assert seen == [([1, 2], 2), ([1], 1), ([2], 2)]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_messages": 0}, ValueError, "a batch has one message or more"),
        ({"max_messages": 1000}, ValueError, "needs a prefetch of at least that, this consumer has 32"),
        ({"max_wait": 1.0}, TypeError, "max_wait must be a timedelta"),
    ],
)
def test_a_batch_that_cannot_be(options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with tmc.connect("127.0.0.1:1", app="coupons") as center, pytest.raises(error, match=sentence):
        tmc.Consumer(center).batch_listener("t", **{"max_messages": 10, **options})


def test_a_batch_is_a_list() -> None:
    with tmc.connect("127.0.0.1:1", app="coupons") as center:
        consumer = tmc.Consumer(center)
        with pytest.raises(TypeError, match="a batch listener takes a list of bodies: annotate paid"):

            @consumer.batch_listener("t", max_messages=10)
            def handle(paid: dict[str, Any]) -> None: ...
