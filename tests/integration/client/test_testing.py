"""tmc_client.testing, as a user's tests use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_client.testing import Crashed, ManualCenter
from tmc_storm.eventually import eventually

SECOND = timedelta(seconds=1)


@pytest.fixture
def business(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/business.db")
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE paid (number INTEGER)")
    yield engine
    engine.dispose()


def _pay(center: tmc.Center, engine: sa.Engine, number: int) -> None:
    with Session(engine) as session, center.transaction(session) as tx:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")


def _paid(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT number FROM paid ORDER BY number")).scalars())


class Coupons:
    """A consumer that fails the first `failures` times, and records when it was called."""

    def __init__(self, center: ManualCenter, failures: int = 0, **options: Any) -> None:
        self.at: list[datetime] = []
        self.orders: list[int] = []
        self.consumer = tmc.Consumer(center.connect(app="coupons"), **options)

        @self.consumer.listener("order.paid")
        def give(paid: dict[str, int]) -> None:
            self.at.append(center.now)
            if len(self.at) <= failures:
                raise tmc.Later(timedelta(seconds=7 * len(self.at)), "no coupons left")
            self.orders.append(paid["order"])

    def pauses(self) -> list[int]:
        return [round((later - earlier).total_seconds()) for earlier, later in zip(self.at, self.at[1:], strict=False)]


def test_a_producer_and_a_consumer(tmc_center: ManualCenter, business: sa.Engine) -> None:
    coupons = Coupons(tmc_center)
    tmc_center.consume(coupons.consumer)
    _pay(tmc_center.connect(app="orders"), business, 7)
    tmc_center.assert_published("order.paid", key="paid-7", body={"order": 7})
    tmc_center.assert_nothing_open()
    assert coupons.orders == [7]


def test_time_passes_only_when_it_is_advanced_and_each_attempt_has_its_moment(
    tmc_center: ManualCenter, business: sa.Engine
) -> None:
    coupons = Coupons(tmc_center, failures=3)
    tmc_center.consume(coupons.consumer)
    _pay(tmc_center.connect(app="orders"), business, 7)
    before = tmc_center.now
    tmc_center.settle()
    assert len(coupons.at) == 1
    tmc_center.advance(6 * SECOND)
    assert len(coupons.at) == 1
    tmc_center.advance(timedelta(days=400))
    assert coupons.pauses() == [7, 14, 21]
    assert tmc_center.now - before == timedelta(days=400, seconds=6)
    tmc_center.assert_nothing_open()


def test_a_delayed_message_comes_at_its_time(tmc_center: ManualCenter) -> None:
    coupons = Coupons(tmc_center)
    tmc_center.consume(coupons.consumer)
    sent = tmc_center.now
    tmc_center.connect(app="orders").publish("order.paid", {"order": 1}, key="1", delay=timedelta(hours=3))
    tmc_center.advance(timedelta(hours=3) - SECOND)
    assert coupons.at == []
    tmc_center.advance(SECOND)
    assert coupons.at == [sent + timedelta(hours=3)]


@pytest.mark.parametrize(
    ("point", "paid"), [("prepare", []), ("local_commit", [7]), ("submit", [7])], ids=lambda each: str(each)
)
def test_after_a_crash_the_check_makes_message_and_transaction_agree(
    tmc_center: ManualCenter, business: sa.Engine, point: Any, paid: list[int]
) -> None:
    coupons = Coupons(tmc_center)
    tmc_center.consume(coupons.consumer)
    orders = tmc_center.connect(app="orders")
    with tmc_center.crash_after(point):
        _pay(orders, business, 7)
        raise AssertionError("it did not crash")
    assert _paid(business) == paid
    restarted = tmc_center.connect(app="orders")
    restarted.checks(business)
    tmc_center.advance(60 * SECOND)
    assert coupons.orders == paid
    tmc_center.assert_published("order.paid", key="paid-7", times=len(paid))
    tmc_center.assert_nothing_open()


def test_a_crashed_center_sends_nothing_more_and_others_work(tmc_center: ManualCenter, business: sa.Engine) -> None:
    orders, others = tmc_center.connect(app="orders"), tmc_center.connect(app="others")
    with tmc_center.crash_after("local_commit"):
        _pay(orders, business, 7)
    with pytest.raises(tmc.Unavailable, match=r"This Center crashed in crash_after\(\): connect again") as gone:
        orders.publish("order.paid", {"order": 8}, key="paid-8")
    assert type(gone.value) is tmc.Unavailable
    others.publish("other", {}, key="1")
    tmc_center.assert_published("order.paid", times=0)
    tmc_center.assert_published("other")


def test_in_asyncio_too(tmc_center: ManualCenter, business: sa.Engine) -> None:
    async def story() -> None:
        engine = create_async_engine(business.url.set(drivername="sqlite+aiosqlite"))
        center = tmc_center.connect_async(app="orders")
        tmc_center.fail_next("publish")
        with pytest.raises(tmc.Unavailable):
            await center.publish("order.paid", {"order": 6}, key="paid-6")
        with tmc_center.crash_after("local_commit"):
            async with AsyncSession(engine) as session, center.transaction(session) as tx:
                await session.execute(sa.text("INSERT INTO paid VALUES (7)"))
                tx.send("order.paid", {"order": 7}, key="paid-7")
        await engine.dispose()

    asyncio.run(story())
    tmc_center.assert_published("order.paid", times=0)
    tmc_center.connect(app="orders").checks(business)
    tmc_center.advance(60 * SECOND)
    tmc_center.assert_published("order.paid", key="paid-7")


@pytest.mark.parametrize("error", [None, tmc.KeyInProgress("Another attempt.")], ids=["default", "given"])
def test_a_call_that_fails_never_reached_the_center(
    tmc_center: ManualCenter, business: sa.Engine, error: tmc.TmcError | None
) -> None:
    orders = tmc_center.connect(app="orders")
    tmc_center.fail_next("prepare", error)
    with pytest.raises(type(error or tmc.Unavailable(""))):
        _pay(orders, business, 7)
    assert _paid(business) == []
    _pay(orders, business, 7)
    tmc_center.assert_published("order.paid", key="paid-7")


def test_a_submit_that_fails_is_made_up_for_by_the_check(tmc_center: ManualCenter, business: sa.Engine) -> None:
    orders = tmc_center.connect(app="orders")
    orders.checks(business)
    tmc_center.fail_next("submit")
    _pay(orders, business, 7)
    tmc_center.assert_published("order.paid", times=0)
    tmc_center.advance(60 * SECOND)
    tmc_center.assert_published("order.paid", key="paid-7")


def test_a_lost_ack_brings_a_second_copy(tmc_center: ManualCenter) -> None:
    coupons = Coupons(tmc_center)
    tmc_center.consume(coupons.consumer)
    tmc_center.fail_next("ack")
    tmc_center.connect(app="orders").publish("order.paid", {"order": 7}, key="paid-7")
    tmc_center.advance(60 * SECOND)
    assert coupons.orders == [7, 7]
    tmc_center.assert_nothing_open()


def test_redeliver_shows_whether_a_handler_is_idempotent(tmc_center: ManualCenter, business: sa.Engine) -> None:
    careless, careful = (
        tmc.Consumer(tmc_center.connect(app="careless")),
        tmc.Consumer(tmc_center.connect(app="careful")),
    )
    twice: list[int] = []

    @careless.listener("order.paid")
    def note(paid: dict[str, int]) -> None:
        twice.append(paid["order"])

    @careful.listener("order.paid", inbox=tmc.SqlInbox(lambda: Session(business)))
    def once(paid: dict[str, int], session: Session) -> None:
        session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": paid["order"]})

    tmc_center.consume(careless, careful)
    tmc_center.connect(app="orders").publish("order.paid", {"order": 7}, key="paid-7")
    tmc_center.redeliver("order.paid", "paid-7")
    assert (twice, _paid(business)) == ([7, 7], [7])
    with pytest.raises(AssertionError, match=r"order\.paid paid-8 was delivered to none of the running consumers"):
        tmc_center.redeliver("order.paid", "paid-8")


def test_many_messages_pass_through_a_small_prefetch(tmc_center: ManualCenter) -> None:
    coupons = Coupons(tmc_center, concurrency=1, prefetch=3)
    tmc_center.consume(coupons.consumer)
    orders = tmc_center.connect(app="orders")
    for number in range(100):
        orders.publish("order.paid", {"order": number}, key=f"paid-{number}")
    tmc_center.assert_nothing_open()
    assert sorted(coupons.orders) == list(range(100))


def test_what_an_assertion_says(tmc_center: ManualCenter, business: sa.Engine) -> None:
    coupons = Coupons(tmc_center, failures=1)
    tmc_center.consume(coupons.consumer)
    orders = tmc_center.connect(app="orders")
    orders.publish("order.paid", {"order": 7}, key="paid-7")
    orders.prepare("order.paid", {"order": 8}, key="paid-8")
    with pytest.raises(AssertionError) as wrong:
        tmc_center.assert_published("order.paid", key="paid-7", body={"order": 9})
    assert str(wrong.value).splitlines() == [
        "order.paid paid-7 with {'order': 9} was published 0 times, not 1. Of this topic there are:",
        "  paid-7: {'order': 7}",
    ]
    with pytest.raises(AssertionError) as open_:
        tmc_center.assert_nothing_open()
    first, delivery, message = str(open_.value).splitlines()
    assert first == "Still open:"
    assert delivery.startswith("  order.paid paid-7 for coupons: ")
    assert "no coupons left" in delivery
    assert message.startswith("  order.paid paid-8: Its producer has not decided yet.")


def test_what_cannot_happen_is_said(tmc_center: ManualCenter) -> None:
    with pytest.raises(ValueError, match="give prepare, local_commit or submit"):
        with tmc_center.crash_after("commit"):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError, match="give one of prepare, publish, submit"):
        tmc_center.fail_next("send")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none that the SDK raises"):
        tmc_center.fail_next("submit", ConnectionError("away"))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"Nothing crashed: .* came to the local commit of a center.transaction"):
        with tmc_center.crash_after("local_commit"):
            tmc_center.connect(app="orders").publish("a.b", b"", key="1")
    with pytest.raises(ValueError, match="open already"):
        with tmc_center.crash_after("submit"), tmc_center.crash_after("local_commit"):
            pass
    with pytest.raises(tmc.InvalidRequest, match="by=10 is no timedelta"):
        tmc_center.advance(10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="time does not go back"):
        tmc_center.advance(-SECOND)
    with pytest.raises(TypeError, match=r"takes tmc\.Consumers"):
        tmc_center.consume(Coupons)  # type: ignore[arg-type]
    with tmc.connect("127.0.0.1:1", app="orders") as elsewhere:
        with pytest.raises(ValueError, match="consumers of this center"):
            tmc_center.consume(tmc.Consumer(elsewhere))


def test_a_failure_that_never_came_is_said_at_the_end() -> None:
    with pytest.raises(AssertionError, match=r"fail_next\('submit'\): no such call came"):
        with ManualCenter() as center:
            center.fail_next("submit")
    with pytest.raises(ZeroDivisionError):  # not instead of what the test itself found
        with ManualCenter() as center:
            center.fail_next("submit")
            raise ZeroDivisionError


def test_after_its_end_it_says_so() -> None:
    with ManualCenter() as center:
        pass
    with pytest.raises(RuntimeError, match="this center is closed"):
        center.settle()


def test_a_thread_of_the_program_does_not_crash_instead_of_the_test(
    tmc_center: ManualCenter, business: sa.Engine
) -> None:
    orders = tmc_center.connect(app="orders")
    with pytest.raises(AssertionError, match="in this thread"):
        with tmc_center.crash_after("local_commit"):
            thread = threading.Thread(target=_pay, args=(orders, business, 7))
            thread.start()
            thread.join()
    tmc_center.assert_published("order.paid", key="paid-7")


def test_what_a_crashed_process_still_does_ends_at_once(tmc_center: ManualCenter, business: sa.Engine) -> None:
    orders = tmc_center.connect(app="orders")
    with tmc_center.crash_after("prepare"):
        try:
            _pay(orders, business, 7)
        finally:
            orders.publish("order.lost", b"", key="7")
    tmc_center.assert_published("order.lost", times=0)


def test_a_message_that_a_handler_publishes_is_waited_for(tmc_center: ManualCenter) -> None:
    chain = tmc_center.connect(app="coupons")
    consumer = tmc.Consumer(chain)
    reached = threading.Event()

    @consumer.listener("order.paid")
    def forward(paid: dict[str, int], message: tmc.Message) -> None:
        reached.wait(10)
        chain.publish("coupon.given", paid, key=message.key)

    tmc_center.consume(consumer)
    tmc_center.connect(app="orders").publish("order.paid", {"order": 7}, key="paid-7")
    threading.Timer(0.2, reached.set).start()
    tmc_center.assert_published("coupon.given", key="paid-7", body={"order": 7})


def test_a_key_that_was_rolled_back_first_is_found(tmc_center: ManualCenter) -> None:
    coupons, orders = Coupons(tmc_center), tmc_center.connect(app="orders")
    tmc_center.consume(coupons.consumer)
    orders.rollback(orders.prepare("order.paid", {"order": 6}, key="paid-7"))
    orders.publish("order.paid", {"order": 7}, key="paid-7")
    tmc_center.redeliver("order.paid", "paid-7")
    assert coupons.orders == [7, 7]


def test_messages_of_one_order_key_come_in_order(tmc_center: ManualCenter) -> None:
    coupons, orders = Coupons(tmc_center, failures=1), tmc_center.connect(app="orders")
    tmc_center.consume(coupons.consumer)
    for number in (1, 2, 3):
        orders.publish("order.paid", {"order": number}, key=str(number), order_key="same")
    tmc_center.settle()
    assert coupons.orders == []
    tmc_center.advance(7 * SECOND)
    assert coupons.orders == [1, 2, 3]


def test_an_outbox_is_sent_directly_or_by_its_relay(tmc_center: ManualCenter, business: sa.Engine) -> None:
    orders = tmc_center.connect(app="orders")
    tmc_center.fail_next("publish")
    with tmc.Outbox(business, orders, untouched=timedelta(0)) as outbox, Session(business) as session:
        outbox.add(session, "order.paid", {"order": 7}, key="paid-7")
        session.commit()
        eventually(lambda: outbox.store.standing().sent == 1)
    tmc_center.assert_published("order.paid", key="paid-7")


def test_a_center_answers_the_checks_of_one_database(tmc_center: ManualCenter, business: sa.Engine) -> None:
    orders = tmc_center.connect(app="orders")
    orders.checks(business)
    with pytest.raises(tmc.InvalidRequest, match="answers checks already"):
        orders.checks(business)


def test_a_crash_is_no_exception_that_a_program_survives() -> None:
    assert not issubclass(Crashed, Exception)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.app.manual.IN_MEMORY", tmp_path)
    before = {thread.name for thread in threading.enumerate()}
    with ManualCenter() as center:
        coupons = Coupons(center)
        center.consume(coupons.consumer)
        center.connect(app="orders").publish("order.paid", {"order": 7}, key="paid-7")
        assert list(tmp_path.iterdir())
    left = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in left if "_poll_wrapper" not in name} == set(), "gRPC keeps one thread of its own"
    assert not list(tmp_path.iterdir())


def test_a_service_that_rests_is_asked_again_at_its_time(tmc_center: ManualCenter, business: sa.Engine) -> None:
    """Also the pauses of checks pass on the manual clock."""
    orders = tmc_center.connect(app="orders")
    with tmc_center.crash_after("local_commit"):
        _pay(orders, business, 7)
    tmc_center.advance(60 * SECOND)  # nobody answers checks yet
    tmc_center.assert_published("order.paid", times=0)
    tmc_center.connect(app="orders").checks(business)
    tmc_center.advance(timedelta(minutes=5))
    tmc_center.assert_published("order.paid", key="paid-7")
