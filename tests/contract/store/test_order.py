"""Messages of one order key: one after another, in the order of their submits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.parking import Parking
from tests.support.store import DONE, POLICY, StoreUnderTest, in_thread, server_store
from tmc_common.headers import ORDER_KEY, SEQUENCE
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.message import MessageState
from tmc_server.domain.ordering import OrderMode, order_hash
from tmc_server.errors import ConsumptionClosed
from tmc_server.store.outcomes import Wait
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

DAY_S = 86_400


@pytest.fixture
def ordered(store: StoreUnderTest) -> StoreUnderTest:
    store.take_ordered_topic()
    return store


def _states(store: StoreUnderTest, *numbers: int) -> list[C]:
    return [store.consumption_state(number) for number in numbers]


def _went_out(store: StoreUnderTest) -> list[int]:
    return [copy.number for copy in store.outlet.delivered]


def _waiting(store: StoreUnderTest) -> int:
    with store.database.reading() as connection:
        return connection.exec_driver_sql("SELECT COUNT(*) FROM tmc_waiting").scalar_one()


def _execute(store: StoreUnderTest, text: str) -> None:
    with store.database.transaction() as connection:
        connection.execute(sa.text(text))


def test_the_next_of_a_key_goes_out_with_the_ack_of_the_one_before(ordered: StoreUnderTest) -> None:
    store = ordered
    first, second, third = (store.sent("a", room=1) for _ in range(3))
    assert _states(store, first, second, third) == [C.SCHEDULED, C.WAITING, C.WAITING]
    assert _went_out(store) == [first]
    store.clock.advance(10)
    store.redeliver(room=5)
    assert _went_out(store) == [first, first]  # a redelivery of the head; the others have no due time
    store.outlet.room = 5
    store.perform(store.ack_of(first))
    assert _went_out(store) == [first, first, second]
    assert _states(store, first, second, third) == [C.ACKED, C.SCHEDULED, C.WAITING]
    store.perform(store.ack_of(second))
    store.perform(store.ack_of(third))
    assert _went_out(store) == [first, first, second, third]
    assert store.outlet.reserved == 0
    assert _waiting(store) == 0


def test_copies_say_where_they_stand(ordered: StoreUnderTest) -> None:
    store = ordered
    numbers = [store.sent("a", room=1) for _ in range(3)]
    for number in numbers:
        store.outlet.room = 1
        store.perform(store.ack_of(number))
    keys = {copy.headers[ORDER_KEY] for copy in store.outlet.delivered}
    sequences = [int(copy.headers[SEQUENCE]) for copy in store.outlet.delivered]
    assert keys == {"a"}
    assert sequences == sorted(set(sequences))
    assert sequences[0] == store.clock() * 1000


def test_a_redelivered_copy_says_the_same(ordered: StoreUnderTest) -> None:
    store = ordered
    store.sent("a", room=1)
    store.clock.advance(10)
    store.redeliver(room=1)
    first, again = store.outlet.delivered
    assert first.headers == again.headers


def test_keys_do_not_wait_for_each_other(ordered: StoreUnderTest) -> None:
    store = ordered
    numbers = [store.sent(key, room=1) for key in "abc"]
    assert _went_out(store) == numbers


def test_without_room_the_next_one_is_due_at_once(ordered: StoreUnderTest) -> None:
    store = ordered
    first, second = store.sent("a", room=1), store.sent("a")
    store.perform(store.ack_of(first))
    row = store.row(second)
    assert (row.state, row.attempt, row.due_ms) == (C.SCHEDULED, 0, store.clock())
    store.redeliver(room=1)
    assert _went_out(store) == [first, second]
    assert SEQUENCE in store.outlet.delivered[-1].headers


@pytest.mark.parametrize("publish", [True, False])
def test_the_order_of_one_batch_is_that_of_its_operations(ordered: StoreUnderTest, publish: bool) -> None:
    """Keys of messages in the opposite order, so that neither keys nor numbers can tell."""
    store = ordered
    messages = [store.a_keyed("a", key=f"message-{9 - n}", publish=publish) for n in range(5)]
    in_turn = list(reversed(messages)) if not publish else messages
    store.perform(*messages)
    if not publish:
        store.perform(*(store.submit_of(each.number) for each in in_turn))
    for each in in_turn:
        store.redeliver(room=1)
        store.perform(store.ack_of(each.number))
    assert _went_out(store) == [each.number for each in in_turn]


def test_two_decisions_in_one_batch_and_an_ack(ordered: StoreUnderTest) -> None:
    store = ordered
    first = store.sent("a", room=1)
    second, third = store.a_keyed("a"), store.a_keyed("a")
    store.perform(second, third)
    store.outlet.room = 5
    store.perform(store.submit_of(second.number), store.ack_of(first), store.submit_of(third.number))
    assert _states(store, first, second.number, third.number) == [C.ACKED, C.SCHEDULED, C.WAITING]


def test_a_prepared_message_blocks_nobody(ordered: StoreUnderTest) -> None:
    store = ordered
    early = store.a_keyed("a")
    store.perform(early)
    late = store.sent("a", room=1)
    assert _went_out(store) == [late]
    store.perform(store.submit_of(early.number))
    assert store.consumption_state(early.number) is C.WAITING


def test_a_delayed_head_holds_its_followers(ordered: StoreUnderTest) -> None:
    store = ordered
    head, follower = store.sent("a", delay_ms=60_000), store.sent("a", room=1)
    store.clock.advance(59)
    assert store.redeliver(room=5).moved == 0
    store.clock.advance(1)
    store.redeliver(room=5)
    assert _went_out(store) == [head]
    store.outlet.room = 1
    store.perform(store.ack_of(head))
    assert _went_out(store) == [head, follower]


def test_a_follower_keeps_its_own_delay(ordered: StoreUnderTest) -> None:
    store = ordered
    head, follower = store.sent("a", room=1), store.sent("a", delay_ms=60_000)
    submitted_ms = store.clock()
    store.outlet.room = 5
    store.perform(store.ack_of(head))
    assert store.row(follower).due_ms == submitted_ms + 60_000
    assert _went_out(store) == [head]


def _reject(store: StoreUnderTest, number: int) -> None:
    store.perform(store.nack_of(number, 1, reject=True))


def _use_up(store: StoreUnderTest, number: int) -> None:
    store.begin_handlers()
    for _ in range(POLICY.max_retry + 1):
        store.clock.advance(60)
        store.redeliver(room=1)
    assert store.consumption_state(number) is C.FAILED


@pytest.mark.parametrize("fail", [_reject, _use_up])
@pytest.mark.parametrize("repair", ["ack_of", "cancel_of"])
def test_a_failed_head_blocks_its_key_until_somebody_decides(ordered: StoreUnderTest, fail: Any, repair: str) -> None:
    store = ordered
    head, follower = store.sent("a", room=1), store.sent("a", room=1)
    other = store.sent("b", room=1)
    store.perform(store.ack_of(other))
    fail(store, head)
    assert _states(store, head, follower) == [C.FAILED, C.WAITING]
    assert store.repaired().changed == 0
    store.outlet.room = 1
    assert store.perform(getattr(store, repair)(head)) == [DONE]
    assert store.consumption_state(follower) is C.SCHEDULED
    assert _went_out(store)[-1] == follower


def test_a_reactivated_head_goes_first(ordered: StoreUnderTest) -> None:
    store = ordered
    head, follower = store.sent("a", room=1), store.sent("a")
    _reject(store, head)
    store.perform(store.reactivate_of(head))
    store.redeliver(room=5)
    assert _went_out(store) == [head, head]
    assert SEQUENCE in store.outlet.delivered[-1].headers
    store.perform(store.ack_of(head))
    assert store.consumption_state(follower) is C.SCHEDULED


@pytest.mark.parametrize("fail", [_reject, _use_up])
def test_with_skip_a_failed_head_lets_the_next_one_pass(ordered: StoreUnderTest, fail: Any) -> None:
    store = ordered
    store.set_order(OrderMode.SKIP)
    head, follower, last = store.sent("a", room=1), store.sent("a"), store.sent("a")
    fail(store, head)
    assert _states(store, head, follower, last) == [C.FAILED, C.SCHEDULED, C.WAITING]


def test_a_skipped_message_comes_out_of_order_and_says_so(ordered: StoreUnderTest) -> None:
    store = ordered
    store.set_order(OrderMode.SKIP)
    head, follower, last = store.sent("a", room=1), store.sent("a"), store.sent("a")
    _reject(store, head)
    store.perform(store.reactivate_of(head))
    store.redeliver(room=5)
    assert sorted(_went_out(store)[1:]) == sorted([head, follower])
    (skipped,) = [copy for copy in store.outlet.delivered[1:] if copy.number == head]
    assert skipped.headers == {ORDER_KEY: "a"}
    store.perform(store.ack_of(head))  # its ack is nobody's turn
    assert _states(store, follower, last) == [C.SCHEDULED, C.WAITING]
    store.perform(store.ack_of(follower))
    assert store.consumption_state(last) is C.SCHEDULED


@pytest.mark.parametrize("leave", ["ack_of", "cancel_of"])
def test_one_that_waits_may_leave(ordered: StoreUnderTest, leave: str) -> None:
    store = ordered
    head, middle, last = store.sent("a", room=1), store.sent("a"), store.sent("a")
    assert store.perform(getattr(store, leave)(middle)) == [DONE]
    store.perform(store.ack_of(head))
    assert store.consumption_state(last) is C.SCHEDULED
    assert _waiting(store) == 0


def test_a_cancelled_delivery_is_closed_and_audited(ordered: StoreUnderTest) -> None:
    store = ordered
    number = store.sent("a", room=1)
    assert store.perform(store.cancel_of(number), store.cancel_of(number)) == [DONE, DONE]
    row = store.row(number)
    assert (row.state, row.due_ms, row.closed_ms) == (C.CANCELLED, None, store.clock())
    store.perform(store.ack_of(number))
    assert store.consumption_state(number) is C.CANCELLED  # the late ack is answered as done
    with store.database.reading() as connection:
        actions = connection.exec_driver_sql("SELECT action, reason FROM tmc_audit WHERE actor = 'operator'").fetchall()
    assert [tuple(each) for each in actions] == [("cancel consumption", "test")]


def test_an_acked_delivery_is_not_cancelled(ordered: StoreUnderTest) -> None:
    number = ordered.sent("a", room=1)
    ordered.perform(ordered.ack_of(number))
    (answer,) = ordered.perform(ordered.cancel_of(number))
    assert isinstance(answer, ConsumptionClosed)


def test_waiting_deliveries_are_cancelled_when_the_subscription_is_removed(ordered: StoreUnderTest) -> None:
    store = ordered
    numbers = [store.sent("a", room=1) for _ in range(5)]
    store.removed()
    assert store.repaired().cancelled == 4
    store.clock.advance(60)
    store.redeliver()
    assert set(_states(store, *numbers)) == {C.CANCELLED}


def test_without_order_nobody_waits(ordered: StoreUnderTest) -> None:
    store = ordered
    head, *waiting = (store.sent("a", room=1) for _ in range(4))
    store.set_order(OrderMode.OFF)
    free = store.sent("a", room=1)
    assert store.repaired().released == 3
    store.redeliver(room=9)
    assert sorted(_went_out(store)) == sorted([head, free, *waiting])
    assert all(SEQUENCE not in copy.headers for copy in store.outlet.delivered[1:])


def test_a_head_that_failed_before_it_could_be_skipped_lets_the_next_one_pass(ordered: StoreUnderTest) -> None:
    store = ordered
    head, follower = store.sent("a", room=1), store.sent("a")
    _reject(store, head)
    store.set_order(OrderMode.SKIP)
    assert store.repaired().scheduled == 1
    assert store.consumption_state(follower) is C.SCHEDULED
    assert store.repaired().changed == 0


def test_a_line_whose_head_was_changed_by_hand_is_repaired(ordered: StoreUnderTest) -> None:
    store = ordered
    numbers = {key: (store.sent(key, room=1), store.sent(key)) for key in "abcde"}
    nn = f"{store.shard:02d}"
    _execute(store, f"UPDATE tmc_consumption_{nn} SET state = 2, due_ms = NULL WHERE message_id = {numbers['a'][0]}")
    _execute(store, f"DELETE FROM tmc_consumption_{nn} WHERE message_id = {numbers['b'][0]}")
    _execute(store, f"UPDATE tmc_order SET head_id = 0 WHERE order_hash = {order_hash('c')}")
    assert store.repaired().scheduled == 3
    freed = [store.consumption_state(follower) for _, follower in numbers.values()]
    assert freed == [C.SCHEDULED, C.SCHEDULED, C.SCHEDULED, C.WAITING, C.WAITING]


def test_a_line_is_forgotten_a_day_after_its_last_message_and_begins_above(ordered: StoreUnderTest) -> None:
    store = ordered
    first = store.sent("a", room=1)
    store.perform(store.ack_of(first))
    store.clock.advance(DAY_S)
    assert store.repaired().forgotten == 0
    store.clock.advance(0.001)
    assert store.repaired().forgotten == 1
    store.sent("a", room=1)
    before, after = (int(copy.headers[SEQUENCE]) for copy in store.outlet.delivered)
    assert after > before


def test_sequences_grow_when_the_clock_is_set_back(ordered: StoreUnderTest) -> None:
    store = ordered
    first = store.sent("a", room=1)
    store.perform(store.ack_of(first))
    store.clock.advance(-3_600)
    store.sent("a", room=1)
    before, after = (int(copy.headers[SEQUENCE]) for copy in store.outlet.delivered)
    assert after == before + 1


def test_a_check_submits_in_line(ordered: StoreUnderTest) -> None:
    store = ordered
    head = store.sent("a", room=1)
    undecided = store.a_keyed("a")
    store.perform(undecided)
    store.desk.decide("operator", store.shard, undecided.number, True, "test")
    assert _states(store, head, undecided.number) == [C.SCHEDULED, C.WAITING]


def test_a_decision_by_hand_waits_for_a_line(ordered: StoreUnderTest) -> None:
    """Nobody would retry it."""
    store = ordered
    head = store.sent("a", room=1)
    undecided = store.a_keyed("a")
    store.perform(undecided)
    parking = Parking("lines locked")
    other = store.new_writer(parking)
    ack, answers = in_thread(lambda: store.perform(store.ack_of(head), writer=other))
    assert parking.parked.wait(20)
    decide, decided = in_thread(lambda: store.desk.decide("operator", store.shard, undecided.number, True, "test"))
    decide.join(0.05)
    parking.go_on.set()
    ack.join(20)
    decide.join(20)
    assert answers == [[DONE]], decided
    assert store.consumption_state(undecided.number) is C.SCHEDULED


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("point", ["begin", "lines locked", "locked", "committed"])
@pytest.mark.parametrize("rival", ["submit", "publish", "ack"])
def test_two_servers_never_give_a_key_two_heads(ordered: StoreUnderTest, point: str, rival: str, known: bool) -> None:
    """known: the key has had a message before."""
    store = ordered
    head = store.sent("a", room=1)
    if known and rival != "ack":
        store.perform(store.ack_of(head))
    key = "a" if known else "new"
    mine, theirs = store.a_keyed(key), store.a_keyed(key, publish=rival == "publish")
    store.perform(mine, *([theirs] if rival == "submit" else []))
    other = {"submit": store.submit_of(theirs.number), "publish": theirs, "ack": store.ack_of(head)}[rival]
    parking = Parking(point)
    a, a_result = in_thread(lambda: store.perform(store.submit_of(mine.number), writer=store.new_writer(parking)))
    while a.is_alive() and not parking.parked.wait(0.002):
        pass
    b, b_result = in_thread(lambda: store.perform(other))
    b.join(0.03)
    parking.go_on.set()
    a.join(20)
    b.join(20)
    assert a_result == [[store.stored(mine.number, MessageState.COMMITTED)]], b_result
    assert len(b_result) == 1
    open_ones = [mine.number, *([theirs.number] if rival != "ack" else [])]
    assert sorted(_states(store, *open_ones)) == sorted([C.SCHEDULED, *([C.WAITING] if rival != "ack" else [])])
    assert store.repaired().changed == 0


@pytest.fixture
def with_row_locks(database_server: MariaDB | PostgreSQL) -> Iterator[StoreUnderTest]:
    """Where one transaction writes at a time, nothing is ever found locked."""
    store = server_store(database_server)
    store.take_ordered_topic()
    yield store
    store.close()


def test_a_message_does_not_overtake_one_whose_row_is_locked(with_row_locks: StoreUnderTest) -> None:
    store = with_row_locks
    first, second = store.a_keyed("a"), store.a_keyed("a")
    store.perform(first, second)
    submits = [store.submit_of(first.number), store.submit_of(second.number)]
    locking = f"SELECT id FROM tmc_message_{store.shard:02d} WHERE id = {first.number} FOR UPDATE"
    with store.database.engine.connect() as other, store.database.engine.connect() as connection:
        other.exec_driver_sql(locking).fetchall()
        assert store.writer.run(connection, store.shard, submits) == [Wait.LOCKED, Wait.LOCKED]
        other.rollback()
    store.perform(*submits)
    assert _states(store, first.number, second.number) == [C.SCHEDULED, C.WAITING]


def test_whatever_needs_a_locked_line_is_retried(with_row_locks: StoreUnderTest) -> None:
    store = with_row_locks
    head, prepared = store.sent("a", room=1), store.a_keyed("a")
    store.perform(prepared)
    operations = [store.submit_of(prepared.number), store.a_keyed("a", publish=True), store.ack_of(head)]
    with store.database.engine.connect() as other, store.database.engine.connect() as connection:
        other.exec_driver_sql("SELECT head_id FROM tmc_order FOR UPDATE").fetchall()
        assert store.writer.run(connection, store.shard, operations) == [Wait.LOCKED] * 3
        assert store.repaired().changed == 0
        other.rollback()
    assert store.consumption_state(head) is C.SCHEDULED


def test_a_delivery_is_not_given_up_while_its_line_is_locked(with_row_locks: StoreUnderTest) -> None:
    store = with_row_locks
    store.set_order(OrderMode.SKIP)
    store.begin_handlers()
    head, follower = store.sent("a", room=1), store.sent("a")
    for _ in range(POLICY.max_retry):
        store.clock.advance(60)
        store.redeliver(room=1)
    store.clock.advance(60)
    with store.database.engine.connect() as other:
        other.exec_driver_sql("SELECT head_id FROM tmc_order FOR UPDATE").fetchall()
        assert store.redeliver(room=1).moved == 0
        other.rollback()
    store.redeliver(room=1)
    assert _states(store, head, follower) == [C.FAILED, C.SCHEDULED]


def test_a_paused_subscription_that_is_removed_is_cleaned_up(ordered: StoreUnderTest) -> None:
    store = ordered
    store.catalog_store.pause_subscription("test", store.topic.name, "coupons", "", True, "test")
    store.watch.run_once()
    assert store.watch.current.is_paused(store.subscription.number)
    store.removed()
    assert not store.watch.current.is_paused(store.subscription.number)


def test_a_stale_catalog_releases_nobody(ordered: StoreUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order mode may be another one by now."""
    store = ordered
    store.set_order(OrderMode.SKIP)
    head, follower = store.sent("a", room=1), store.sent("a")
    monkeypatch.setattr(store.watch, "in_use", lambda: (store.watch.current, True))
    assert store.perform(store.nack_of(head, 1, reject=True)) == [DONE]
    assert _states(store, head, follower) == [C.FAILED, C.WAITING]
    assert store.repaired().changed == 0
    monkeypatch.undo()
    assert store.repaired().scheduled == 1
    assert store.consumption_state(follower) is C.SCHEDULED


@pytest.mark.parametrize("change", ["DELETE FROM", "UPDATE"])
def test_an_entry_of_a_delivery_that_does_not_wait_blocks_its_line_no_longer_than_a_repair(
    ordered: StoreUnderTest, change: str
) -> None:
    store = ordered
    head, changed, last = store.sent("a", room=1), store.sent("a"), store.sent("a")
    table = f"tmc_consumption_{store.shard:02d}"
    values = " SET state = 4" if change == "UPDATE" else ""
    _execute(store, f"{change} {table}{values} WHERE message_id = {changed}")
    assert store.repaired().dropped == 1
    store.perform(store.ack_of(head))
    assert store.consumption_state(last) is C.SCHEDULED


def test_messages_from_before_order_was_switched_on_are_in_no_line(ordered: StoreUnderTest) -> None:
    store = ordered
    store.set_order(OrderMode.OFF)
    before = store.sent("a", room=1)
    store.set_order(OrderMode.STRICT)
    first, second = store.sent("a", room=1), store.sent("a", room=1)
    assert _states(store, before, first, second) == [C.SCHEDULED, C.SCHEDULED, C.WAITING]


def test_an_ack_for_an_earlier_life_of_the_subscription_moves_its_line(ordered: StoreUnderTest) -> None:
    store = ordered
    head, follower = store.sent("a", room=1), store.sent("a")
    earlier = store.subscription
    store.removed()
    store.set_order(OrderMode.STRICT)
    assert store.subscription.number != earlier.number
    assert store.perform(store.ack_of(head)) == [DONE]
    store.subscription = earlier
    assert _states(store, head, follower) == [C.ACKED, C.SCHEDULED]  # due, and cancelled by the next pass


def test_lines_of_a_removed_subscription_are_forgotten(ordered: StoreUnderTest) -> None:
    store = ordered
    store.sent("a", room=1)
    store.removed()
    store.clock.advance(60)
    store.redeliver()
    store.clock.advance(DAY_S + 1)
    assert store.repaired().forgotten == 1
    assert store.repaired().examined == 0


def test_a_routine_look_at_whole_lines_opens_no_transaction(ordered: StoreUnderTest) -> None:
    store = ordered
    for key in "abc":
        store.sent(key, room=1)
        store.sent(key)
    with store.counting() as counted:
        assert store.repaired().examined == 3
    assert counted.commits == 0
    assert not any("FOR UPDATE" in statement for statement in counted.statements)


def test_the_alert_of_a_failed_head_says_that_its_key_is_blocked(ordered: StoreUnderTest) -> None:
    store = ordered
    head, other = store.sent("a", room=1), store.sent("b", room=1)
    _reject(store, head)
    store.set_order(OrderMode.SKIP)
    _reject(store, other)
    blocked, skipped = store.alerted("delivery failed")
    assert "later messages of its order key wait" in blocked.detail
    assert "order key" not in skipped.detail
