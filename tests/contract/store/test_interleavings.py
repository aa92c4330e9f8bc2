"""All ordered pairs of operations on one row: A is parked at a point of its transaction, B runs as far as it can.

Databases that lock rows are parked inside the transaction too; SQLite, with one writer at a time, before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import triggers
from tests.support.parking import Parking
from tests.support.store import StoreUnderTest, in_thread
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Prepare, Stored
from tmc_server.store.due import SqlDueWork
from tmc_server.store.due_checks import SqlCheckDesk
from tmc_server.store.retention import ClosedMessages

Run = Callable[[StoreUnderTest, Prepare, Any], Any]


def _perform(make: Callable[[StoreUnderTest, Prepare], Any]) -> Run:
    return lambda store, message, writer: store.perform(make(store, message), writer=writer)[0]


def _scan(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
    due = SqlDueWork(writer or store.writer, store.leases, store.watch)
    return store.redeliver(room=None, due=due)


def _decide_by_hand(commit: bool) -> Run:
    """As a check does: by a path of its own, which waits for locked rows."""

    def run(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
        desk = SqlCheckDesk([writer or store.writer] * 32)
        return desk.decide("operator", store.shard, message.number, commit, "test")

    return run


def _retain(store: StoreUnderTest, message: Prepare, _writer: Any) -> Any:
    return ClosedMessages(store.database, store.leases).remove(store.shard, [message.number], store.clock() + 1)


OPERATIONS: dict[str, Run] = {
    "prepare again": _perform(lambda s, m: s.again(m)),
    "submit": _perform(lambda s, m: s.submit_of(m.number)),
    "rollback": _perform(lambda s, m: s.rollback_of(m.number)),
    "ack": _perform(lambda s, m: s.ack_of(m.number)),
    "nack": _perform(lambda s, m: s.nack_of(m.number, 1)),
    "extend": _perform(lambda s, m: s.extend_of(m.number, 1)),
    "redeliver or fail": _scan,
    "reactivate": _perform(lambda s, m: s.reactivate_of(m.number)),
    "cancel": _perform(lambda s, m: s.cancel_of(m.number)),
    "commit by hand": _decide_by_hand(commit=True),
    "roll back by hand": _decide_by_hand(commit=False),
    "retention": _retain,
}


def _prepared(store: StoreUnderTest) -> Prepare:
    return store.prepared()


def _delivered(store: StoreUnderTest) -> Prepare:
    """Tried once and due again."""
    message = store.prepared()
    store.outlet.room = 1
    store.perform(store.submit_of(message.number))
    store.clock.advance(10)
    return message


def _used_up(store: StoreUnderTest) -> Prepare:
    """Tried as often as the policy allows, and due: the next pass fails it."""
    message = _delivered(store)
    for _ in range(3):
        store.redeliver(room=1)
        store.clock.advance(60)
    return message


def _failed(store: StoreUnderTest) -> Prepare:
    message = _delivered(store)
    store.perform(store.nack_of(message.number, 1, reject=True))
    return message


STARTS = {"prepared": _prepared, "delivered": _delivered, "used up": _used_up, "failed": _failed}


@pytest.fixture
def watched(store: StoreUnderTest) -> Iterator[StoreUnderTest]:
    triggers.watch(store)
    yield store
    triggers.forget(store)


@pytest.mark.parametrize("first", OPERATIONS)
def test_every_pair_keeps_the_invariants(watched: StoreUnderTest, first: str) -> None:
    store = watched
    points = (
        ("begin", "committed")
        if store.database.dialect.has_one_writer
        else ("begin", "read", "locked", "written", "committed")
    )
    for second in OPERATIONS:
        for start, make in STARTS.items():
            for point in points:
                _run_pair(store, first, second, start, make, point)


def _run_pair(
    store: StoreUnderTest, first: str, second: str, start: str, make: Callable[[StoreUnderTest], Prepare], point: str
) -> None:
    message = make(store)
    parking = Parking(point)
    a, a_result = in_thread(lambda: OPERATIONS[first](store, message, store.new_writer(parking)))
    while a.is_alive() and not parking.parked.wait(0.002):
        pass
    b, b_result = in_thread(lambda: OPERATIONS[second](store, message, None))
    b.join(0.03)  # it may have to wait for A; then it goes on when A does
    parking.go_on.set()
    a.join(20)
    b.join(20)
    story = f"{first} | {second} from {start} at {point}: {a_result} {b_result}"
    assert len(a_result) == len(b_result) == 1, story
    assert not any(isinstance(r[0], BaseException) and not hasattr(r[0], "reason") for r in (a_result, b_result)), story
    triggers.check_invariants(store, message.number)
    _check_answers(store, message, first, second, a_result[0], b_result[0], story)
    store.perform(store.rollback_of(message.number), store.ack_of(message.number))  # leave nothing due behind


def _check_answers(
    store: StoreUnderTest, message: Prepare, first: str, second: str, a: Any, b: Any, story: str
) -> None:
    state = store.state_of(message.number)
    if state is None:
        assert "retention" in (first, second), story
        return
    for name, answer in ((first, a), (second, b)):
        if name == "submit" and isinstance(answer, Stored):
            assert state is MessageState.COMMITTED, story
            assert store.row(message.number) is not None, story
        if name == "rollback" and isinstance(answer, Stored):
            assert state is MessageState.ROLLED_BACK, story
            assert store.row(message.number) is None, story
        if name == "prepare again" and isinstance(answer, Stored):
            assert answer.message_id == message.message_id, story
        if name == "ack" and not hasattr(answer, "reason"):
            closed = {ConsumptionState.ACKED} | ({ConsumptionState.CANCELLED} if "cancel" in (first, second) else set())
            assert store.consumption_state(message.number) in closed, story
        if name == "cancel" and not hasattr(answer, "reason"):
            assert store.consumption_state(message.number) is ConsumptionState.CANCELLED, story
    assert len(store.messages_with_key(message.key)) == 1, story
