"""All ordered pairs of operations on one row: A is parked at a point of its transaction, B runs as far as it can.

Databases that lock rows are parked inside the transaction too; SQLite, with one writer at a time, before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support import triggers
from tests.support.asking import COMMIT
from tests.support.parking import Parking
from tests.support.store import StoreUnderTest, in_thread
from tmc_server.domain.bulk import BulkAction, BulkJob, Place, Selection
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import BulkJobNumber
from tmc_server.domain.operations import Prepare, Stored
from tmc_server.domain.ports.checks import Checked
from tmc_server.errors import SubscriptionUnknown
from tmc_server.store.bulk_work import SqlBulkWork
from tmc_server.store.due import SqlDueWork
from tmc_server.store.due_checks import SqlCheckStore
from tmc_server.store.replays import SqlReplays
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.tables import shard_tables

Run = Callable[[StoreUnderTest, Prepare, Any], Any]


def _perform(make: Callable[[StoreUnderTest, Prepare], Any]) -> Run:
    return lambda store, message, writer: store.perform(make(store, message), writer=writer)[0]


def _scan(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
    due = SqlDueWork(writer or store.writer, store.leases, store.watch)
    return store.redeliver(room=None, due=due)


def _decide_by_hand(commit: bool) -> Run:
    """As a check does: by a path of its own, which waits for locked rows."""

    def run(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
        desk = SqlCheckStore(lambda _shard: writer or store.writer)
        return desk.decide("operator", store.shard, message.number, commit, "test")

    return run


def _retain(store: StoreUnderTest, message: Prepare, _writer: Any) -> Any:
    return ClosedMessages(store.database, store.leases).remove(store.shard, [message.number], store.clock() + 1)


def _check(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
    """A question that is answered with COMMIT."""
    desk = SqlCheckStore(lambda _shard: writer or store.writer)
    pending = desk.begin("ann", store.shard, message.number, 60_000)
    return None if pending is None else desk.record(store.shard, [Checked(pending, COMMIT, 0)])


def _bulk(store: StoreUnderTest, _message: Prepare, writer: Any) -> Any:
    place = Place(shard=store.shard, topic=store.topic.number, subscription=store.subscription.number)
    everything = {"from_ms": 0, "to_ms": 0, "fingerprint": "", "as_of_ms": store.clock()}
    job = BulkJob(
        number=BulkJobNumber(store.ids.next()),
        dry_run="",
        action=BulkAction.REACTIVATE,
        selection=Selection(places=(place,), state=ConsumptionState.FAILED, **everything),
        count=1,
        rate=1,
        actor="operator",
        reason="test",
        created_ms=0,
        start_ms=0,
    )
    return SqlBulkWork(writer or store.writer, store.leases, store.ids).step(job, store.shard, 100)


def _replay(store: StoreUnderTest, message: Prepare, writer: Any) -> Any:
    replays = SqlReplays(lambda _shard: writer or store.writer, store.ids)
    return replays.replay("operator", store.shard, message.number, store.subscription.number, "test")


def _pause(store: StoreUnderTest, _message: Prepare | None = None, _writer: Any = None, paused: bool = True) -> None:
    """It holds deliveries back at the outlet, see tests/integration/server/test_order.py; rows stay as they are."""
    store.catalog_store.pause_subscription("operator", "order.paid", "coupons", "default", paused, "test")
    store.watch.run_once()


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
    "check verdict": _check,
    "bulk reactivate": _bulk,
    "replay": _replay,
    "pause": _pause,
    "retention": _retain,
}
OF_MESSAGES = {"prepare again", "submit", "rollback", "commit by hand", "roll back by hand", "check verdict"}


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


def _acked(store: StoreUnderTest) -> Prepare:
    message = _delivered(store)
    store.perform(store.ack_of(message.number))
    return message


STARTS = {"prepared": _prepared, "delivered": _delivered, "used up": _used_up, "failed": _failed, "acked": _acked}


def _starts(first: str, second: str) -> list[str]:
    """Those that make a difference to this pair: before the submit there is no delivery, after it no undecided message."""
    of_messages = {first, second} & OF_MESSAGES
    if of_messages:
        return ["prepared", "delivered"]
    if "pause" in (first, second):
        return ["delivered", "used up"]
    if {first, second} & {"replay", "retention"}:
        return ["delivered", "used up", "failed", "acked"]
    return ["delivered", "used up", "failed"]


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
        for start in _starts(first, second):
            for point in points:
                _run_pair(store, first, second, start, STARTS[start], point)


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
    if "pause" in (first, second):
        _pause(store, paused=False)
    _leave_nothing_due(store, message)


def _leave_nothing_due(store: StoreUnderTest, message: Prepare) -> None:
    table = shard_tables(store.shard).consumption
    with store.database.reading() as connection:
        open_ = connection.execute(sa.select(table.c.message_id).where(table.c.due_ms.is_not(None))).scalars().all()
    store.perform(store.rollback_of(message.number), *(store.ack_of(each) for each in {message.number, *open_}))


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
        if name == "replay" and not {first, second} & OF_MESSAGES:  # its delivery is there, locked or not
            assert not isinstance(answer, SubscriptionUnknown), story
    assert len(store.messages_with_key(message.key)) == 1, story
