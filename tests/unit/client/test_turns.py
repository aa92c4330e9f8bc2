"""Whose turn it is: listeners take turns, suspects one at a time, paused listeners wait, batches fill."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.handlers import CountedReceipt, HandClock
from tests.support.messages import a_message
from tmc_client.consuming.runs import Run
from tmc_client.consuming.turns import BatchSize, Turn, Turns
from tmc_storm.eventually import eventually


def a_run(number: int, topic: str = "t", *, lost: bool = False, **changes: Any) -> Run:
    receipt = CountedReceipt()
    receipt.lost = lost
    return Run(message=a_message(number, topic=topic, **changes), limit_s=60.0, receipts=[receipt])


def added(turns: Turns, *runs: Run) -> Turns:
    for run in runs:
        assert turns.add(run)
    return turns


def taken(turns: Turns) -> list[str]:
    """Ids of the next turn's messages; none: there is no turn now."""
    turn = take(turns)
    return [run.message.id for run in turn.runs] if turn is not None else []


def take(turns: Turns) -> Turn | None:
    return turns.poll()[0]


def topics_of(turns: Turns, count: int) -> list[str]:
    found = [take(turns) for _ in range(count)]
    return [turn.runs[0].message.topic for turn in found if turn is not None]


def test_a_busy_topic_does_not_hold_up_the_others() -> None:
    turns = added(Turns(100), *(a_run(n, "bulk") for n in range(50)), a_run(50, "urgent"), a_run(51, "urgent"))
    assert topics_of(turns, 5) == ["bulk", "urgent", "bulk", "urgent", "bulk"]


def test_a_listener_has_no_more_calls_than_its_limit() -> None:
    turns = Turns(8)
    turns.open("t", 2, None)
    added(turns, *(a_run(n) for n in range(5)))
    first, second = take(turns), take(turns)
    assert take(turns) is None
    assert first is not None
    turns.end(first)
    turns.end(first)  # given up, and ended later
    assert taken(turns) == ["1-1-0-2"]
    assert second is not None
    assert take(turns) is None


def test_suspects_are_handled_one_at_a_time_beside_the_others() -> None:
    turns = added(Turns(8), *(a_run(n, redelivered=True) for n in range(3)), a_run(3), a_run(4, "other"))
    first = take(turns)
    assert first is not None
    assert first.suspect
    assert [taken(turns), taken(turns), taken(turns)] == [["1-1-0-4"], ["1-1-0-3"], []]
    turns.end(first)
    assert taken(turns) == ["1-1-0-1"]
    assert taken(turns) == []


def test_suspects_of_all_topics_are_one_at_a_time() -> None:
    turns = added(Turns(8), a_run(1, "one", redelivered=True), a_run(2, "two", redelivered=True))
    first = take(turns)
    assert take(turns) is None
    assert first is not None
    turns.end(first)
    assert taken(turns) == ["1-1-0-2"]


def test_a_suspect_is_never_in_a_batch() -> None:
    turns = Turns(8)
    turns.open("t", None, BatchSize(max_messages=3, max_wait_s=60))
    added(turns, a_run(1), a_run(2, redelivered=True), a_run(3), a_run(4))
    assert sorted([taken(turns), taken(turns)]) == [["1-1-0-1", "1-1-0-3", "1-1-0-4"], ["1-1-0-2"]]


def test_a_copy_whose_connection_is_lost_is_a_suspect() -> None:
    turn = take(added(Turns(8), a_run(1, lost=True)))
    assert turn is not None
    assert turn.suspect


def test_a_batch_waits_until_it_is_full_or_old() -> None:
    clock = HandClock()
    turns = Turns(8, clock)
    turns.open("t", None, BatchSize(max_messages=3, max_wait_s=10))
    added(turns, a_run(1))
    clock.now += 4
    added(turns, a_run(2))
    assert turns.poll() == (None, 6)
    clock.now += 6
    assert taken(turns) == ["1-1-0-1", "1-1-0-2"]
    added(turns, *(a_run(n) for n in range(3, 8)))
    assert taken(turns) == ["1-1-0-3", "1-1-0-4", "1-1-0-5"]
    assert taken(turns) == []


def test_a_paused_listener_tries_with_one_message_and_pauses_for_longer_each_time() -> None:
    clock = HandClock()
    turns = added(Turns(8, clock), *(a_run(n) for n in range(20)))
    probe = take(turns)
    assert probe is not None
    pauses = []
    for _ in range(7):
        pauses.append(turns.pause(probe))
        assert turns.pause(probe) == pauses[-1]  # another of its handlers finds the same
        turns.end(probe)
        assert turns.paused == ["t"]
        assert taken(added(turns, a_run(100, "well"))) == ["1-1-0-100"]
        assert take(turns) is None
        clock.now += pauses[-1]
        probe = take(turns)
        assert probe is not None
        assert probe.probes
        assert take(turns) is None
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    turns.resume(probe)
    assert turns.paused == []
    assert [bool(taken(turns)) for _ in range(3)] == [True] * 3


def test_after_the_stop_no_turn_comes_and_what_had_none_is_left() -> None:
    turns = added(Turns(8), a_run(1), a_run(2, redelivered=True))
    turns.open("batch", None, BatchSize(max_messages=3, max_wait_s=60))
    added(turns, a_run(3, "batch"))
    turns.stop()
    assert turns.take() is None
    assert not turns.add(a_run(4))
    assert sorted(run.message.id for run in turns.left()) == ["1-1-0-1", "1-1-0-2", "1-1-0-3"]
    assert turns.left() == []


def test_threads_that_wait_are_woken_by_a_message_an_end_and_the_stop() -> None:
    turns, seen = Turns(1), []

    def work() -> None:
        while (turn := turns.take()) is not None:
            seen.append(turn)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    added(turns, a_run(1), a_run(2))
    eventually(lambda: len(seen) == 1)
    turns.end(seen[0])
    eventually(lambda: len(seen) == 2)
    turns.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_paused_listener_is_probed_beside_handlers_that_began_before() -> None:
    clock = HandClock()
    turns = added(Turns(8, clock), *(a_run(n) for n in range(6)))
    slow, failed = take(turns), take(turns)
    assert slow is not None
    assert failed is not None
    turns.pause(failed)
    turns.end(failed)
    clock.now += 1
    probe = take(turns)
    assert probe is not None
    assert (probe.probes, slow.probes) == (True, False)
    assert take(turns) is None
    turns.resume(probe)
    turns.end(probe)
    assert taken(turns)
