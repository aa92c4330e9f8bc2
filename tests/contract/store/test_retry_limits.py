"""Retry policies over every store: limits by age, jitter, and changes while rows are open. Exact times, by a manual clock."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.asking import UNKNOWN, ScriptedAsking
from tests.support.store import StoreUnderTest
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.retry import RetryKind, RetryPolicy

SCHEDULED, FAILED = ConsumptionState.SCHEDULED, ConsumptionState.FAILED
HALF_A_MINUTE = RetryPolicy(interval_ms=10_000, max_retry=100, cap_ms=10_000, max_age_ms=30_000)


def attempts_until_given_up(store: StoreUnderTest, number: int) -> list[int]:
    """Seconds from now at which it was delivered, and last when it was given up."""
    store.begin_handlers()
    began, seen = store.clock(), []
    for _ in range(1_000):
        if store.redeliver(room=None).moved:
            seen.append((store.clock() - began) // 1000)
        if store.consumption_state(number) is FAILED:
            return seen
        store.clock.advance(1)
    raise AssertionError(f"it is not given up: {seen}")


def test_a_delivery_is_not_retried_after_its_age(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    assert attempts_until_given_up(store, store.submitted()) == [0, 10, 20, 30]


def test_the_age_counts_from_the_end_of_a_delay(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    number = store.submitted(delay_ms=100_000)
    assert attempts_until_given_up(store, number) == [100, 110, 120, 130]


def test_the_first_attempt_is_made_at_any_age(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    number = store.submitted()
    store.clock.advance(3_600)  # nothing had room, or the topic was paused
    assert attempts_until_given_up(store, number) == [0, 10]


def test_a_reactivated_delivery_gets_its_whole_age_again(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    number = store.submitted()
    attempts_until_given_up(store, number)
    store.clock.advance(3_600)
    store.perform(store.reactivate_of(number))
    assert attempts_until_given_up(store, number) == [0, 10, 20, 30]


def test_a_nack_after_the_age_is_the_last(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, retry_after_ms=29_000))
    store.clock.advance(29)
    store.redeliver(room=1)
    assert store.consumption_state(number) is SCHEDULED
    store.perform(store.nack_of(number, 2))  # the next attempt would be at 39 s
    assert store.consumption_state(number) is FAILED
    assert "broken" in store.alerted("delivery failed")[0].detail


def test_given_up_by_age_without_room_at_the_outlet(store: StoreUnderTest) -> None:
    store.set_policy(HALF_A_MINUTE)
    number = store.submitted(room=1)
    store.clock.advance(30)
    store.redeliver(room=0)
    assert store.consumption_state(number) is FAILED


def test_the_next_of_an_order_key_has_its_whole_age(store: StoreUnderTest) -> None:
    store.take_ordered_topic()
    store.set_policy(HALF_A_MINUTE)
    first, second = store.sent("alice", room=1), store.sent("alice")
    store.clock.advance(29)
    store.perform(store.ack_of(first))
    assert attempts_until_given_up(store, second) == [0, 10, 20, 30]


def test_checks_stop_at_their_age_and_begin_again_when_reactivated(store: StoreUnderTest) -> None:
    store.set_checks(HALF_A_MINUTE)
    asking = ScriptedAsking(UNKNOWN)
    duty, number = store.checking(asking), store.prepared().number

    def asked_until_given_up() -> list[int]:
        began, seen = store.clock(), []
        while store.state_of(number) is MessageState.PREPARED:
            if duty.run_once():
                seen.append((store.clock() - began) // 1000)
            store.clock.advance(1)
        return seen

    assert asked_until_given_up() == [10, 20]  # the next one would be too late
    store.clock.advance(3_600)
    store.desk.reactivate("operator", store.shard, [number], "test")
    assert asked_until_given_up() == [0, 10, 20]


def test_a_shorter_limit_gives_up_at_the_next_due_time_and_a_longer_one_keeps_what_is_open(
    store: StoreUnderTest,
) -> None:
    store.set_policy(RetryPolicy(kind=RetryKind.EXPONENTIAL, interval_ms=10_000))
    short, long = store.submitted(room=1), store.submitted(room=1)
    store.clock.advance(10)
    assert store.redeliver().delivered == 2
    due_ms = store.row(short).due_ms
    store.set_policy(HALF_A_MINUTE)
    store.clock.advance(19)
    assert store.redeliver().moved == 0  # nobody is moved by the change itself
    store.set_policy(RetryPolicy(interval_ms=60_000))
    assert store.row(short).due_ms == due_ms
    store.clock.advance(1)
    assert store.redeliver(room=None).delivered == 2
    assert [store.consumption_state(each) for each in (short, long)] == [SCHEDULED, SCHEDULED]


@pytest.mark.parametrize("room", [0, 160])
def test_what_was_delivered_together_comes_again_at_sixteen_times(store: StoreUnderTest, room: int) -> None:
    store.set_policy(RetryPolicy(interval_ms=15_000, jitter_percent=100))
    numbers = [store.submitted(room) for _ in range(160)]
    if not room:
        assert store.redeliver().delivered == 160
    due = Counter(store.row(number).due_ms - store.clock() for number in numbers)
    assert set(due) <= {15_000 + part * 1_000 for part in range(16)}
    assert len(due) >= 12
    assert max(due.values()) <= 40
