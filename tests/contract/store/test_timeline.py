"""What happened to a message, from what the store keeps of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.support.asking import AWAY, UNKNOWN, ScriptedAsking
from tests.support.store import INCARNATION, StoreUnderTest
from tmc_server.domain.checks import CheckAnswer, CheckReason, Verdict
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.retry import RetryPolicy
from tmc_server.requests.lookup import Lookup
from tmc_server.requests.timeline import Event, EventKind, Timelines
from tmc_server.store.engines import ShardMap
from tmc_server.store.journal import DIED, LOST
from tmc_server.store.reading import Reader

Timeline = Callable[[int], Sequence[Event]]
BY = f"by server run {INCARNATION}"


@pytest.fixture
def timeline(store: StoreUnderTest) -> Timeline:
    reader = Reader(ShardMap(store.database, [store.database] * 32))
    timelines = Timelines(store.watch, Lookup(store.watch, reader), reader)

    def ask(number: int) -> Sequence[Event]:
        message_id = MessageId(store.topic.number, store.orders.number, store.shard, MessageNumber(number))
        return asyncio.run(timelines.timeline(str(message_id), "", ""))[1]

    return ask


def _sentences(store: StoreUnderTest, events: Sequence[Event], since_ms: int) -> list[tuple[float, str]]:
    """Seconds since then, and sentences."""
    return [((event.at_ms - since_ms) / 1000, event.sentence) for event in events]


def test_from_the_prepare_to_the_ack(store: StoreUnderTest, timeline: Timeline) -> None:
    began = store.clock()
    number = store.prepared().number
    store.clock.advance(2)
    store.outlet.room = 1
    store.perform(store.submit_of(number))
    store.clock.advance(1)
    store.perform(store.nack_of(number, 1, error="no stock."))
    store.clock.advance(10)
    store.redeliver()
    store.clock.advance(3)
    store.perform(store.ack_of(number, 2))
    events = timeline(number)
    assert _sentences(store, events, began) == [
        (0, "Stored for orders (default)."),
        (2, "Submitted (1 subscriber), decided by its producer."),
        (2, f"Attempt 1 was handed over {BY}."),
        (3, "Attempt 1 failed: no stock."),
        (13, f"Attempt 2 was handed over {BY}."),
        (16, "Acked after 2 attempts."),
    ]
    delivery = store.subscription.number
    assert [event.subscription for event in events] == [0, 0, delivery, delivery, delivery, delivery]


def test_attempts_that_nobody_answers_and_the_operators_part(store: StoreUnderTest, timeline: Timeline) -> None:
    store.set_policy(RetryPolicy(interval_ms=10_000, max_retry=1))
    began = store.clock()
    number = store.submitted(room=1)
    store.clock.advance(10)
    store.redeliver()
    store.begin_handlers()
    for _ in range(2):
        store.clock.advance(20)
        store.redeliver()
    store.clock.advance(5)
    store.perform(store.reactivate_of(number))
    store.clock.advance(1)
    store.perform(store.cancel_of(number))
    assert _sentences(store, timeline(number), began)[2:] == [
        (0, f"Attempt 1 was handed over {BY}."),
        (10, f"Attempt 1 was not answered: {LOST}."),
        (30, f"Attempt 2 failed: {DIED}."),
        (50, f"Attempt 3 failed: {DIED}."),
        (50, f"Alert, delivery failed: given up after attempt 3: {DIED}."),
        (55, "Operator operator: reactivate consumption. Reason: test."),
        (56, "Operator operator: cancel consumption. Reason: test."),
        (56, "Cancelled after 3 attempts."),
    ]


def test_an_attempt_whose_server_died(store: StoreUnderTest, timeline: Timeline) -> None:
    began = store.clock()
    number = store.submitted(room=1)
    store.clock.advance(4)
    assert store.due.rescue(store.shard, {INCARNATION: 0}) == 1
    assert store.due.rescue(store.shard, {INCARNATION: 0}) == 0
    gone = "no ack, and the server that handed it over is gone; this attempt does not count"
    assert _sentences(store, timeline(number), began)[2:] == [
        (0, f"Attempt 1 was handed over {BY}."),
        (4, f"Attempt 1 was not answered: {gone}."),
    ]


def test_a_handler_that_asked_for_time_and_said_no_more(store: StoreUnderTest, timeline: Timeline) -> None:
    number = store.submitted(room=1)
    store.perform(store.extend_of(number, 1))
    store.clock.advance(61)
    store.redeliver()
    assert [event.kind for event in timeline(number)][2:] == [EventKind.UNANSWERED, EventKind.HANDED_OVER]


def test_what_was_answered_is_not_unanswered(store: StoreUnderTest, timeline: Timeline) -> None:
    number = store.submitted(room=1)
    store.perform(store.give_back_of(number, 1))
    store.redeliver()
    assert EventKind.UNANSWERED not in [event.kind for event in timeline(number)]


def test_checks_and_who_decided(store: StoreUnderTest, timeline: Timeline) -> None:
    number = store.prepared().number
    store.clock.advance(10)
    store.checking(ScriptedAsking(UNKNOWN)).run_once()
    store.clock.advance(20)
    store.checking(ScriptedAsking(CheckAnswer(Verdict.COMMIT, CheckReason.ANSWERED))).run_once()
    sentences = [event.sentence for event in timeline(number)]
    assert sentences[1].startswith("Check 1 decided nothing: ANSWERED")
    assert sentences[2] == "Submitted (1 subscriber), decided by a check."


def test_a_service_that_is_away_fills_no_journal(store: StoreUnderTest, timeline: Timeline) -> None:
    number = store.prepared().number
    duty = store.checking(ScriptedAsking(AWAY))
    for _ in range(5):
        store.clock.advance(60)
        duty.run_once()
    assert [event.kind for event in timeline(number)] == [EventKind.PREPARED]


def test_a_human_decides(store: StoreUnderTest, timeline: Timeline) -> None:
    number = store.prepared().number
    store.desk.decide("alice", store.shard, number, False, "the order does not exist")
    assert [event.sentence for event in timeline(number)][1:] == [
        "Operator alice: decide rollback. Reason: the order does not exist.",
        "Rolled back, decided by alice.",
    ]


def test_a_pause_from_before_it_was_stored_is_shown(store: StoreUnderTest, timeline: Timeline) -> None:
    store.catalog_store.pause_topic("alice", "order.paid", True, "wrong prices")
    store.clock.advance(60)
    number = store.submitted()
    first, *_ = timeline(number)
    assert (first.sentence, first.at_ms) == (
        "Operator alice: pause topic. Reason: wrong prices.",
        store.clock() - 60_000,
    )


def test_pauses_while_it_was_open(store: StoreUnderTest, timeline: Timeline) -> None:
    names = ("order.paid", "coupons", "default")
    store.catalog_store.pause_topic("alice", "order.paid", True, "before it was sent")
    store.catalog_store.pause_topic("alice", "order.paid", False, "before it was sent")
    store.clock.advance(1)
    number = store.submitted(room=1)
    store.clock.advance(1)
    store.catalog_store.pause_subscription("bob", *names, True, "maintenance")
    store.clock.advance(60)
    store.catalog_store.pause_subscription("bob", *names, False, "done")
    store.perform(store.ack_of(number, 1))
    store.clock.advance(1)
    store.catalog_store.pause_subscription("bob", *names, True, "after it was acked")
    acts = [event.sentence for event in timeline(number) if event.kind is EventKind.OPERATOR]
    assert acts == [
        "Operator bob: pause subscription. Reason: maintenance.",
        "Operator bob: resume subscription. Reason: done.",
    ]
