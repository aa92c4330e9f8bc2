"""No second copy into a queue where the first may still wait: nothing is published, counted or given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.store import POLICY, StoreUnderTest
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.store.claims import claim_due
from tmc_server.store.statements import statements_of


def test_an_hour_without_a_consumer_makes_no_copies_and_no_failures(store: StoreUnderTest) -> None:
    """It made 320,000 copies and 20,000 failures of 20,000 messages where nobody looked at the queue."""
    numbers = [store.submitted(room=1) for _ in range(5)]
    store.outlet.looks_like = QueueLook(consumers=0, messages=5)
    for _ in range(360):
        store.clock.advance(10)
        moved = store.redeliver(room=None)
        assert (moved.delivered, moved.failed) == (0, 0)
    assert {(store.row(number).attempt, store.row(number).tried) for number in numbers} == {(1, 1)}
    store.outlet.looks_like = QueueLook(consumers=1, messages=0)  # it is back, and has emptied the queue
    store.clock.advance(300)
    assert store.redeliver(room=None) == Claimed(delivered=5)


def test_the_longer_a_copy_waits_the_less_often_it_is_looked_at(store: StoreUnderTest) -> None:
    number = store.submitted(room=1)
    submitted_ms = store.clock()
    store.outlet.looks_like = QueueLook(consumers=0, messages=1)
    looked = []
    while len(looked) < 8:
        store.clock.now_ms = store.row(number).due_ms
        store.redeliver(room=None)
        looked.append((store.clock() - submitted_ms) // 1000)
    assert looked == [10, 20, 40, 80, 160, 320, 620, 920]


def test_what_is_too_old_is_not_given_up_while_a_copy_waits(store: StoreUnderTest) -> None:
    store.set_policy(replace(POLICY, max_age_ms=3_600_000))
    number = store.submitted(room=1)
    store.outlet.looks_like = QueueLook(consumers=0, messages=1)
    store.clock.advance(3600)
    assert store.redeliver(room=1) == Claimed(held=1)
    store.outlet.looks_like = QueueLook(consumers=1, messages=0)
    store.clock.advance(3600)
    assert store.redeliver(room=1) == Claimed(failed=1)
    assert store.consumption_state(number) is ConsumptionState.FAILED


def test_a_copy_is_known_to_be_out_when_a_later_one_came_back(store: StoreUnderTest) -> None:
    first = store.submitted(room=1)
    store.clock.advance(5)
    second = store.submitted(room=1)
    store.perform(store.ack_of(second))
    passed_ms = store.outlet.came[store.subscription.number]
    assert passed_ms == store.clock()
    store.outlet.looks_like = QueueLook(consumers=1, messages=900, passed_ms=passed_ms)
    store.clock.advance(6)
    assert store.redeliver(room=5) == Claimed(delivered=1)
    assert store.delivered_attempts(first) == [1, 2]


def test_a_copy_behind_the_newest_answer_may_still_wait(store: StoreUnderTest) -> None:
    number = store.submitted(room=1)
    store.outlet.looks_like = QueueLook(consumers=1, messages=900, passed_ms=store.clock() - 60_000)
    store.clock.advance(10)
    assert store.redeliver(room=5) == Claimed(held=1)
    store.clock.advance(600)  # however old: consumers are at work, and it is behind them
    assert store.redeliver(room=5) == Claimed(held=1)
    store.outlet.looks_like = QueueLook(consumers=1, messages=900, passed_ms=store.clock() - 660_000, still_ms=600_000)
    store.clock.advance(300)  # consumers that get nothing done for ten minutes: the copy may be lost
    assert store.redeliver(room=5) == Claimed(delivered=1)
    assert (store.row(number).attempt, store.row(number).tried) == (2, 1)


def test_an_ack_of_an_old_copy_tells_nothing_about_the_newest(store: StoreUnderTest) -> None:
    number = store.submitted(room=1)
    store.clock.advance(10)
    store.redeliver(room=1)
    store.perform(store.ack_of(number, attempt=1))
    assert store.outlet.came == {}


def test_an_answer_that_came_meanwhile_is_not_held(store: StoreUnderTest) -> None:
    """Read as due and waiting, nacked before the claim: the consumer's own time counts."""
    number = store.submitted(room=1)
    store.clock.advance(10)
    store.outlet.looks_like = QueueLook(consumers=0, messages=5)
    with store.database.reading() as connection:
        which = {"subscription": store.subscription.number, "now": store.clock(), "limit": 10}
        before = connection.execute(statements_of(store.shard).due_consumptions, which).fetchall()
    store.perform(store.nack_of(number, 1, retry_after_ms=0))
    lease = store.leases.held()[store.shard]
    with store.database.connection() as connection, store.writer.transaction(connection, store.shard) as tx:
        assert claim_due(tx, store.subscription, before, store.outlet.looks_like, lease.guard) == Claimed()
    assert store.row(number).due_ms == store.clock()


@pytest.mark.parametrize("how", ["nack", "give back", "rescue"])
def test_who_has_no_copy_in_the_queue_is_not_held(store: StoreUnderTest, how: str) -> None:
    number = store.submitted(room=1)
    match how:
        case "nack":
            store.perform(store.nack_of(number, 1, retry_after_ms=0))
        case "give back":
            store.perform(store.give_back_of(number, 1))
        case "rescue":
            store.due.rescue(store.shard, {7: 0})
    store.outlet.looks_like = QueueLook(consumers=0, messages=900)
    assert store.redeliver(room=5) == Claimed(delivered=1)


def test_a_delivery_that_is_asked_to_wait_longer_keeps_its_place(store: StoreUnderTest) -> None:
    """Extend says that the copy came out of the queue."""
    number = store.submitted(room=1)
    store.perform(store.extend_of(number, 1, 20_000))
    assert store.outlet.came[store.subscription.number] == store.clock()
    assert store.row(number).tried_ms is None


def test_a_message_whose_copy_is_unwritten_gets_no_second_one_and_its_neighbors_do(store: StoreUnderTest) -> None:
    """Built-in delivery: a slow reader's copies wait in its stream, however long."""
    waiting, written = store.submitted(room=1), store.submitted(room=1)
    store.outlet.looks_like = QueueLook(consumers=1, unwritten={(store.shard, waiting)})
    for _ in range(3):
        store.clock.advance(3600)
        store.redeliver(room=None)
    assert store.delivered_attempts(waiting) == [1]
    assert (store.row(waiting).attempt, store.row(waiting).tried) == (1, 1)
    assert store.delivered_attempts(written) == [1, 2, 3, 4]
    store.outlet.looks_like = QueueLook(consumers=1)
    store.clock.advance(3600)
    assert store.redeliver(room=None) == Claimed(delivered=2)
