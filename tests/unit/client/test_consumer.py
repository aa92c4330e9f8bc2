"""A consumer between a scripted transport and a scripted center: who runs, what is answered, what is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

import tmc_client as tmc
from tests.support.handlers import AnswersTaken, HandClock, HandlerBench
from tests.support.messages import a_message
from tmc_client.consuming.consumer import Consumer
from tmc_client.consuming.handling import Handling
from tmc_client.consuming.inbox import Effects
from tmc_client.consuming.keeping import Keeper
from tmc_client.consuming.runs import Run
from tmc_client.consuming.turns import BatchSize
from tmc_storm.eventually import eventually


def a_run(**changes: Any) -> Run:
    return Run(message=a_message(**changes), limit_s=60.0)


Gates = dict[int, threading.Event]


@pytest.fixture
def benches() -> Iterator[Callable[..., HandlerBench]]:
    made: list[HandlerBench] = []

    def make(**settings: Any) -> HandlerBench:
        made.append(HandlerBench(**settings))
        return made[-1]

    yield make
    for bench in made:
        bench.stop()


# -- one run of a message at a time ----------------------------------------------------------------------------------


def test_a_second_copy_that_comes_while_the_first_runs_shares_its_fate(benches: Callable[..., HandlerBench]) -> None:
    bench, gate, entered = benches(), threading.Event(), []

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append(message.attempt)
        assert gate.wait(30)

    bench.start(handle)
    first = bench.arrive(a_message(attempt=1))
    eventually(lambda: entered == [1])
    second = bench.arrive(a_message(attempt=2))
    assert bench.handling.keeper.kept("1-1-0-1") == a_message(attempt=2)  # Extends name the newest
    gate.set()
    eventually(lambda: first.seen == second.seen == ["handled", "answered"])
    assert entered == [1]
    assert bench.center.answers() == [("AckMany", 2)]


def test_a_second_copy_that_comes_while_the_first_waits_for_a_thread_does_not_run(
    benches: Callable[..., HandlerBench],
) -> None:
    bench, gate, entered = benches(concurrency=1), threading.Event(), []

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append(message.id)
        assert gate.wait(30)

    bench.start(handle)
    bench.arrive(a_message(1))
    eventually(lambda: entered)
    copies = [bench.arrive(a_message(2, attempt=attempt)) for attempt in (1, 2)]
    gate.set()
    eventually(lambda: [copy.seen for copy in copies] == [["handled", "answered"]] * 2)
    assert entered == ["1-1-0-1", "1-1-0-2"]


def test_a_copy_that_comes_while_a_nack_is_on_its_way_runs_after_it(benches: Callable[..., HandlerBench]) -> None:
    bench, entered = benches(), []
    bench.center.hold = True

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append(message.attempt)
        if message.attempt == 1:
            raise RuntimeError("broken")

    bench.start(handle)
    bench.arrive(a_message(attempt=1))
    eventually(lambda: bench.center.open)
    late = bench.arrive(a_message(attempt=2))
    assert entered == [1]
    bench.center.open[0].set_result(None)
    eventually(lambda: len(bench.center.open) == 2)
    bench.center.open[1].set_result(None)
    eventually(lambda: late.seen == ["handled", "answered"])
    assert entered == [1, 2]
    assert bench.center.answers() == [("NackMany", 1), ("AckMany", 2)]


def test_a_copy_that_comes_while_an_ack_is_on_its_way_does_not_run(benches: Callable[..., HandlerBench]) -> None:
    bench, entered = benches(), []
    bench.center.hold = True
    bench.start(lambda body: entered.append(1))
    bench.arrive(a_message(attempt=1))
    eventually(lambda: bench.center.open)
    late = bench.arrive(a_message(attempt=2))
    bench.center.open[0].set_result(None)
    assert late.seen == ["handled", "answered"]
    assert entered == [1]
    assert bench.handling.wait_idle(0)
    assert bench.handling.keeper.kept("1-1-0-1") is None  # nothing extends a message that is done
    bench.center.hold = False
    bench.arrive(a_message(attempt=3))
    eventually(lambda: entered == [1, 1])  # and nothing remembers it: a later copy runs


# -- handlers that hang ----------------------------------------------------------------------------------------------


def test_a_handler_that_runs_too_long_is_nacked_and_its_thread_replaced(benches: Callable[..., HandlerBench]) -> None:
    bench, gate, entered = benches(concurrency=2, max_handling=timedelta(minutes=10)), threading.Event(), []

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append((message.id, message.attempt))
        if message.attempt == 1 and message.id == "1-1-0-1":
            assert gate.wait(30)

    bench.start(handle)
    hung = bench.arrive(a_message(1))
    eventually(lambda: entered)
    bench.clock.now += 599
    bench.handling.give_up_overdue()
    assert bench.center.answers() == []
    bench.clock.now += 1
    bench.handling.give_up_overdue()
    ((name, nack),) = bench.center.sent
    assert (name, nack.attempt, nack.handler_hangs) == ("NackMany", 1, True)
    assert "handle has run longer than its max_handling of 600 s" in nack.error
    assert hung.seen == ["handled", "answered"]
    assert bench.handling.keeper.kept("1-1-0-1") is None  # no more Extends
    assert bench.handling.threads == 2
    again = bench.arrive(a_message(1, attempt=2))  # the center delivers it again, here or elsewhere
    eventually(lambda: again.seen == ["handled", "answered"])
    assert bench.handling.hanging == 1
    gate.set()
    eventually(lambda: bench.handling.hanging == 0)
    eventually(lambda: bench.center.answers()[-1] == ("AckMany", 1))  # its effect is done, late as it is
    assert bench.handling.threads == 2


def test_an_asyncio_handler_that_runs_too_long_is_cancelled(benches: Callable[..., HandlerBench]) -> None:
    bench, entered, cancelled = benches(), threading.Event(), threading.Event()

    async def handle(body: bytes) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    bench.start(handle, max_handling=timedelta(seconds=1))
    bench.arrive(a_message())
    assert entered.wait(30)
    bench.clock.now += 1
    bench.handling.give_up_overdue()
    assert cancelled.wait(30)
    eventually(lambda: bench.handling.hanging == 0)
    assert [(name, request.handler_hangs) for name, request in bench.center.sent] == [("NackMany", True)]


def test_the_inbox_is_left_only_when_a_cancelled_handler_has_ended(benches: Callable[..., HandlerBench]) -> None:
    """Until then the handler may still use its session, which is closed with the inbox's block."""
    bench, entered, may_end = benches(), threading.Event(), threading.Event()
    seen: list[str] = []

    class _Inbox:
        is_async = stays_in_thread = False

        @contextmanager
        def once_each(self, messages: Sequence[tmc.Message]) -> Iterator[Effects]:
            try:
                yield Effects(handle=object(), messages=messages)
            finally:
                seen.append("inbox left")

    async def handle(body: bytes, session: object) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(may_end.wait, 30)
            seen.append("handler ended")

    bench.start(handle, inbox=_Inbox(), max_handling=timedelta(seconds=1))
    bench.arrive(a_message())
    assert entered.wait(30)
    bench.clock.now += 1
    bench.handling.give_up_overdue()
    after = bench.arrive(a_message(2))  # another thread has taken its place
    assert bench.handling.hanging == 1
    assert seen == []
    may_end.set()
    eventually(lambda: bench.handling.hanging == 0)
    assert seen[:2] == ["handler ended", "inbox left"]
    bench.clock.now += 1
    bench.handling.give_up_overdue()
    eventually(lambda: after.seen == ["handled", "answered"])


def test_a_consumer_whose_handlers_all_hang_takes_no_more_and_ends_its_process(
    benches: Callable[..., HandlerBench], caplog: pytest.LogCaptureFixture
) -> None:
    bench, gate, entered = benches(concurrency=2, max_handling=timedelta(seconds=1)), threading.Event(), []

    def handle(body: bytes) -> None:
        entered.append(1)
        assert gate.wait(30)

    bench.start(handle)
    for number in (1, 2):
        bench.arrive(a_message(number))
        eventually(lambda number=number: len(entered) == number)
        assert not bench.broken.is_set()
        bench.clock.now += 1
        bench.handling.give_up_overdue()
    assert bench.broken.wait(30)
    assert [record.levelname for record in caplog.records].count("CRITICAL") == 1
    bench.arrive(a_message(3))
    assert bench.handling.wait_idle(30)
    assert len(entered) == 2
    assert "2 handlers hang" in bench.handling.broken
    gate.set()


def test_run_raises_when_its_handlers_hang_so_that_a_supervisor_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(handling: Handling) -> None:
        handling.broken = "2 handlers hang"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Handling, "start", start)
    consumer = Consumer(AnswersTaken())  # type: ignore[arg-type]
    consumer.listener("t")(lambda body: None)
    with pytest.raises(RuntimeError, match="2 handlers hang"):
        consumer.run()


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(seconds=-1)])
def test_a_limit_that_is_none_is_refused(wrong: timedelta) -> None:
    with pytest.raises(ValueError, match="max_handling must be positive"):
        Consumer(AnswersTaken(), max_handling=wrong)  # type: ignore[arg-type]


# -- what a consumer before may have died over -------------------------------------------------------------------------


def test_the_center_is_asked_before_a_redelivered_copy_is_handled(benches: Callable[..., HandlerBench]) -> None:
    bench, entered = benches(), []
    bench.center.hold = True
    bench.start(lambda body: entered.append(1))
    receipt = bench.arrive(a_message(redelivered=True))
    eventually(lambda: bench.center.sent)
    name, asked = bench.center.sent[0]
    assert (name, asked.attempt, asked.run > 0, entered) == ("ExtendMany", 1, True, [])
    bench.center.hold = False
    bench.center.open[0].set_result(None)
    eventually(lambda: receipt.seen == ["handled", "answered"])
    assert entered == [1]


@pytest.mark.parametrize("refusal", [tmc.Decided("another run has begun"), tmc.Gone("closed long ago")])
def test_a_redelivered_copy_that_others_handle_or_have_handled_is_let_go(
    benches: Callable[..., HandlerBench], refusal: tmc.TmcError
) -> None:
    bench, entered = benches(), []
    bench.center.hold = True
    bench.start(lambda body: entered.append(1))
    receipt = bench.arrive(a_message(redelivered=True))
    eventually(lambda: bench.center.open)
    bench.center.open[0].set_exception(refusal)
    eventually(lambda: receipt.seen == ["handled", "answered"])
    assert (entered, bench.center.answers()) == ([], [])
    assert bench.handling.wait_idle(30)


def test_a_center_that_is_down_is_asked_until_it_answers(benches: Callable[..., HandlerBench]) -> None:
    bench, entered = benches(), []
    bench.center.hold = True
    bench.start(lambda body: entered.append(1))
    receipt = bench.arrive(a_message(redelivered=True))
    eventually(lambda: bench.center.open)
    bench.center.open[0].set_exception(tmc.Unavailable("down"))
    eventually(lambda: len(bench.center.open) == 2)
    bench.center.hold = False
    bench.center.open[1].set_result(None)
    eventually(lambda: receipt.seen == ["handled", "answered"])
    assert entered == [1]


def test_a_consumer_that_stops_while_it_asks_takes_back_what_the_center_may_have_noted(
    benches: Callable[..., HandlerBench],
) -> None:
    bench = benches()
    bench.center.hold = True
    bench.start(lambda body: None)
    receipt = bench.arrive(a_message(redelivered=True))
    eventually(lambda: bench.center.open)
    bench.handling.begin_no_more()
    bench.center.hold = False
    bench.center.open[0].set_exception(tmc.DeadlineExceeded("no answer"))
    eventually(lambda: receipt.seen == ["handled", "answered"])
    name, answer = bench.center.sent[-1]
    assert (name, answer.not_begun, answer.HasField("retry_after_ms"), answer.retry_after_ms) == (
        "NackMany",
        False,
        True,
        0,
    )
    (asked,) = [request for name, request in bench.center.sent if name == "ExtendMany"]
    assert answer.run == asked.run != 0, "another run that has begun meanwhile is left alone"


def test_a_lost_connection_tells_the_center_at_once_whose_handlers_run(benches: Callable[..., HandlerBench]) -> None:
    bench, gate, entered = benches(), threading.Event(), []

    def handle(body: bytes) -> None:
        entered.append(1)
        assert gate.wait(30)

    bench.start(handle)
    bench.arrive(a_message())
    eventually(lambda: entered)
    bench.handling.keeper.hurry()
    eventually(lambda: bench.center.sent)
    assert bench.center.sent[0][1].run > 0
    gate.set()


def test_a_waiting_copy_that_was_with_another_consumer_meanwhile_is_asked_about(
    benches: Callable[..., HandlerBench],
) -> None:
    bench, gate, entered = benches(concurrency=1), threading.Event(), []

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append(message.id)
        assert gate.wait(30)

    bench.start(handle)
    bench.arrive(a_message(1))
    eventually(lambda: entered)
    bench.arrive(a_message(2))
    bench.arrive(a_message(2, redelivered=True))
    gate.set()
    eventually(lambda: len(entered) == 2)
    assert [request.message_id for name, request in bench.center.sent if name == "ExtendMany"] == ["1-1-0-2"]


def test_a_first_copy_is_handled_without_asking(benches: Callable[..., HandlerBench]) -> None:
    bench = benches()
    bench.start(lambda body: None)
    receipt = bench.arrive(a_message())
    eventually(lambda: receipt.seen == ["handled", "answered"])
    assert [name for name, _ in bench.center.sent] == ["AckMany"]


def test_an_extend_names_the_run_once_its_handler_has_begun(benches: Callable[..., HandlerBench]) -> None:
    bench, gate, entered = benches(concurrency=1), threading.Event(), []

    def handle(body: bytes, message: tmc.Message) -> None:
        entered.append(message.id)
        assert gate.wait(30)

    bench.start(handle)
    bench.arrive(a_message(1))
    eventually(lambda: entered)
    bench.arrive(a_message(2))
    bench.clock.now += 5
    bench.handling.keeper.run_once()
    begun = {request.message_id: request.run > 0 for name, request in bench.center.sent if name == "ExtendMany"}
    assert begun == {"1-1-0-1": True, "1-1-0-2": False}
    gate.set()


def test_what_no_handler_began_is_given_back_at_the_stop(benches: Callable[..., HandlerBench]) -> None:
    bench, gate, entered = benches(concurrency=1), threading.Event(), []

    def handle(body: bytes) -> None:
        entered.append(1)
        assert gate.wait(30)

    bench.start(handle)
    receipts = [bench.arrive(a_message(number)) for number in range(1, 4)]
    eventually(lambda: entered)
    bench.handling.begin_no_more()
    assert bench.handling.give_back_waiting() == 2
    late = bench.arrive(a_message(4))
    gate.set()
    assert bench.handling.wait_idle(30)
    eventually(lambda: [receipt.seen for receipt in (*receipts, late)] == [["handled", "answered"]] * 4)
    given_back = [request.message_id for name, request in bench.center.sent if name == "NackMany" and request.not_begun]
    assert given_back == ["1-1-0-2", "1-1-0-3", "1-1-0-4"]
    assert [request.message_id for name, request in bench.center.sent if name == "AckMany"] == ["1-1-0-1"]
    assert entered == [1]


@pytest.mark.parametrize("error", [ValueError("half of \ud83d"), tmc.Reject("half of \ud83d")])
def test_an_error_that_is_no_text_is_answered(benches: Callable[..., HandlerBench], error: Exception) -> None:
    bench = benches()

    def handle(_body: Any) -> None:
        raise error

    bench.start(handle)
    receipt = bench.arrive(a_message())
    eventually(lambda: receipt.seen == ["handled", "answered"])
    assert bench.center.sent[-1][1].error.endswith("half of ?")


def test_later_without_a_duration_is_a_mistake_of_its_handler(benches: Callable[..., HandlerBench]) -> None:
    bench = benches()

    def handle(_body: Any) -> None:
        wrong: Any = 60
        raise tmc.Later(wrong)

    bench.start(handle)
    receipt = bench.arrive(a_message())
    eventually(lambda: receipt.seen == ["handled", "answered"])
    answer = bench.center.sent[-1][1]
    assert answer.error == "TypeError: Later(after) is a timedelta, such as timedelta(seconds=60), not 60."
    assert not answer.HasField("retry_after_ms")


def test_an_answer_that_cannot_be_sent_costs_no_thread(
    benches: Callable[..., HandlerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, seen = benches(concurrency=1), list[int]()
    send = bench.center.send

    def fail_once(*given: Any) -> Any:
        monkeypatch.setattr(bench.center, "send", send)
        raise ValueError("a fault of ours")

    monkeypatch.setattr(bench.center, "send", fail_once)
    bench.start(lambda _body: seen.append(1))
    first = bench.arrive(a_message(1))
    eventually(lambda: first.seen == ["handled", "answered"])
    second = bench.arrive(a_message(2))
    eventually(lambda: second.seen == ["handled", "answered"])
    assert (seen, bench.center.answers()) == ([1, 1], [("AckMany", 1)])


# -- inboxes that are down -----------------------------------------------------------------------------------------------


class DownInbox:
    """Cannot be opened, or not committed, until it is `well`."""

    stays_in_thread = is_async = False

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.well = False

    @contextmanager
    def once_each(self, messages: Sequence[tmc.Message]) -> Iterator[Effects]:
        if self.fails_at == "open" and not self.well:
            raise OSError("the database is down")
        yield Effects(handle=None, messages=messages)
        if self.fails_at == "commit" and not self.well:
            raise tmc.errors.InboxDown("the database went down")


@pytest.mark.parametrize("fails_at", ["open", "commit"])
@pytest.mark.parametrize("batch", [None, BatchSize(max_messages=2, max_wait_s=0.01)])
def test_an_inbox_that_is_down_postpones_and_pauses_its_listener(
    benches: Callable[..., HandlerBench],
    fails_at: str,
    batch: BatchSize | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    bench, inbox, handled = benches(concurrency=2), DownInbox(fails_at), []
    bench.start(lambda body: handled.append(1), inbox=inbox, batch=batch)
    for number in range(1, 9):
        bench.arrive(a_message(number, content_type="application/json", body=b"1"))
    eventually(lambda: bench.handling.paused == ["t"])
    postponed = [request for name, request in bench.center.sent if name == "NackMany"]
    assert all(request.retry_after_ms > 0 and "inbox" in request.error for request in postponed)
    assert "AckMany" not in {name for name, _ in bench.center.sent}
    inbox.well = True
    eventually(lambda: bench.handling.wait_idle(0) and bench.handling.paused == [])
    acked = {request.message_id for name, request in bench.center.sent if name == "AckMany"}
    assert len(acked) >= 4
    assert "works again" in caplog.text


# -- Extends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval_ms", "times"),
    [(10_000, [1, 6, 11, 16]), (1_000, [0.5, 1, 1.5, 2]), (100, [0.05, 0.1, 0.15, 0.2]), (0, [1, 6, 11, 16])],
)
def test_extends_follow_the_interval_that_came_with_the_copy(interval_ms: int, times: list[float]) -> None:
    center, clock, seen = AnswersTaken(), HandClock(), []
    keeper = Keeper(center, clock)  # type: ignore[arg-type]
    keeper.begin(a_run(interval_ms=interval_ms))
    for step in range(1, 2000):
        clock.now = 1000 + step / 100
        if keeper.run_once():
            seen.append(step / 100)
    assert seen[:4] == pytest.approx(times, abs=0.011)
    assert {request.extend_ms for _, request in center.sent} == {max(interval_ms or 10_000, 1000)}


def test_the_interval_of_the_topic_serves_copies_without_one() -> None:
    center, clock = AnswersTaken(), HandClock()
    keeper = Keeper(center, clock)  # type: ignore[arg-type]
    keeper.expect("t", 1000)
    keeper.begin(a_run())
    clock.now += 0.5
    assert keeper.run_once() == 1


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_finds_no_lock_that_its_parent_held() -> None:
    """A Consumer is new in the child, with locks of its own; those of the parent are held by nobody there."""
    consumer = Consumer(AnswersTaken())  # type: ignore[arg-type]
    consumer.listener("t")(lambda body: None)
    held = [value for value in vars(consumer).values() if isinstance(value, type(threading.Lock()))]
    assert held
    for lock in held:
        lock.acquire()
    child = os.fork()
    if child == 0:
        consumer.stop(timedelta(0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
