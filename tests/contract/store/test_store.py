"""The store contract: the same suite on SQLite and MariaDB."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.support.store import DONE, INCARNATION, POLICY, StoreUnderTest
from tmc_server.domain.catalog import WEBHOOK, Forward, NewApp
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import ANSWERED
from tmc_server.domain.operations import Stored
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.errors import (
    AlreadyCommitted,
    AlreadyRolledBack,
    AttemptStale,
    ConsumptionClosed,
    ContentDiffers,
    KeyCommitted,
    KeyInProgress,
    MessageUnknown,
    SubscriptionUnknown,
    TmcError,
)
from tmc_server.store.catalog import CatalogStore
from tmc_server.store.engines import StoreConflict


class TestPreparing:
    def test_a_prepared_message_is_stored_and_nobody_gets_it(self, store: StoreUnderTest) -> None:
        operation = store.a_prepare(body=b"\x00\xff body")
        assert store.perform(operation) == [store.stored(operation.number, MessageState.PREPARED)]
        row = store.message_row(operation.number)
        assert row.body == b"\x00\xff body"
        assert row.due_ms == store.clock() + store.topic.transaction_time_ms
        assert store.row(operation.number) is None

    @pytest.mark.parametrize("longer_ms", [-1, 50_000])
    def test_a_longer_local_transaction_is_checked_later_a_shorter_one_is_not_checked_earlier(
        self, store: StoreUnderTest, longer_ms: int
    ) -> None:
        usual_ms = store.topic.transaction_time_ms
        number = store.prepared(transaction_time_ms=usual_ms + longer_ms).number
        assert store.message_row(number).due_ms == store.clock() + usual_ms + max(0, longer_ms)

    def test_the_same_attempt_again_gets_the_stored_answer(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        assert store.perform(store.again(first)) == [store.stored(first.number, MessageState.PREPARED)]
        assert len(store.messages_with_key(first.key)) == 1

    def test_the_same_attempt_after_submit_says_committed(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        store.perform(store.submit_of(first.number))
        assert store.perform(store.again(first)) == [store.stored(first.number, MessageState.COMMITTED)]

    def test_the_same_attempt_with_another_body_is_refused_and_changes_nothing(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        (answer,) = store.perform(store.again(first, body=b"other"))
        assert isinstance(answer, ContentDiffers)
        assert store.message_row(first.number).body == first.body

    def test_another_attempt_meets_an_open_one(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        (answer,) = store.perform(store.a_prepare(key=first.key))
        assert isinstance(answer, KeyInProgress)
        assert answer.message_id.endswith(str(first.number))

    def test_another_attempt_meets_a_submitted_one(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        store.perform(store.submit_of(first.number))
        (answer,) = store.perform(store.a_prepare(key=first.key))
        assert isinstance(answer, KeyCommitted)
        assert answer.message_id.endswith(str(first.number))

    def test_a_rollback_frees_the_key(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        store.perform(store.rollback_of(first.number))
        second = store.a_prepare(key=first.key)
        assert store.perform(second) == [store.stored(second.number, MessageState.PREPARED)]

    def test_of_two_attempts_in_one_batch_one_wins_and_the_other_is_refused(self, store: StoreUnderTest) -> None:
        first, twin = store.a_prepare(key="double-click"), store.a_prepare(key="double-click")
        answers = store.perform(first, twin)
        assert answers[0] == store.stored(first.number, MessageState.PREPARED)
        assert isinstance(answers[1], KeyInProgress)

    def test_repeats_in_one_batch_get_one_answer(self, store: StoreUnderTest) -> None:
        first = store.a_prepare()
        answers = store.perform(first, store.again(first), store.again(first))
        assert answers == [store.stored(first.number, MessageState.PREPARED)] * 3
        assert len(store.messages_with_key(first.key)) == 1

    def test_a_taken_key_does_not_hurt_its_neighbors(self, store: StoreUnderTest) -> None:
        taken = store.prepared()
        neighbors = [store.a_prepare() for _ in range(150)]
        loser = store.a_prepare(key=taken.key)
        answers = store.perform(*neighbors[:75], loser, *neighbors[75:])
        assert isinstance(answers.pop(75), KeyInProgress)
        assert answers == [store.stored(n.number, MessageState.PREPARED) for n in neighbors]

    @pytest.mark.parametrize(("one", "other"), [("a", "A"), ("a", "ä"), ("straße", "strasse"), ("\u00e9", "e\u0301")])
    def test_keys_that_look_alike_are_different_keys(self, store: StoreUnderTest, one: str, other: str) -> None:
        answers = store.perform(store.a_prepare(key=one), store.a_prepare(key=other))
        assert all(isinstance(answer, Stored) for answer in answers)

    def test_the_same_key_in_another_environment_is_another_message(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        other = store.a_prepare(key=first.key, producer_tag="staging")
        assert store.perform(other) == [store.stored(other.number, MessageState.PREPARED)]


class TestDeciding:
    def test_submit_makes_one_row_per_subscriber(self, store: StoreUnderTest) -> None:
        store.catalog_store.register_app("test", NewApp(id="mail", service_name="mail", biz_id="mail"))
        store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="mail", tag="", policy=POLICY)
        )
        store.watch.run_once()
        number = store.submitted()
        assert store.state_of(number) is MessageState.COMMITTED
        assert store.message_row(number).due_ms is None
        assert store.redeliver(room=10) == Claimed(delivered=2)
        assert {copy.subscription for copy in store.outlet.delivered} == {1, 2}

    def test_submit_twice_is_one_submit(self, store: StoreUnderTest) -> None:
        operation = store.prepared()
        for _ in range(2):
            assert store.perform(store.submit_of(operation.number)) == [
                store.stored(operation.number, MessageState.COMMITTED)
            ]
        assert store.redeliver(room=10) == Claimed(delivered=1)

    def test_the_opposite_decision_is_refused_and_alerted_once(self, store: StoreUnderTest) -> None:
        committed, rolled_back = store.prepared(), store.prepared()
        store.perform(store.submit_of(committed.number), store.rollback_of(rolled_back.number))
        for _ in range(2):
            answers = store.perform(store.rollback_of(committed.number), store.submit_of(rolled_back.number))
            assert isinstance(answers[0], AlreadyCommitted)
            assert isinstance(answers[1], AlreadyRolledBack)
        assert store.state_of(committed.number) is MessageState.COMMITTED
        assert store.state_of(rolled_back.number) is MessageState.ROLLED_BACK
        assert sorted(alert.number for alert in store.alerts.unsent(10)) == [committed.number, rolled_back.number]

    def test_opposite_decisions_in_one_batch_the_first_one_counts(self, store: StoreUnderTest) -> None:
        operation = store.prepared()
        answers = store.perform(store.rollback_of(operation.number), store.submit_of(operation.number))
        assert answers[0] == store.stored(operation.number, MessageState.ROLLED_BACK)
        assert isinstance(answers[1], AlreadyRolledBack)
        assert store.row(operation.number) is None

    def test_a_decision_about_an_unknown_message_is_refused(self, store: StoreUnderTest) -> None:
        answers = store.perform(store.submit_of(store.ids.next()), store.rollback_of(store.ids.next()))
        assert all(isinstance(answer, MessageUnknown) for answer in answers)

    def test_a_number_with_a_foreign_topic_is_unknown(self, store: StoreUnderTest) -> None:
        operation = store.prepared()
        mine = replace(store.topic, number=99, name="mine", table_index=5)
        forged = structs.replace(store.submit_of(operation.number), topic=mine)
        (answer,) = store.perform(forged)
        assert isinstance(answer, MessageUnknown)
        assert store.state_of(operation.number) is MessageState.PREPARED

    def test_decisions_by_attempt_find_their_message(self, store: StoreUnderTest) -> None:
        one, two = store.prepared(), store.prepared()
        answers = store.perform(store.decide_attempt(one, commit=True), store.decide_attempt(two, commit=False))
        assert answers == [
            store.stored(one.number, MessageState.COMMITTED),
            store.stored(two.number, MessageState.ROLLED_BACK),
        ]

    def test_a_twin_cannot_roll_back_the_other(self, store: StoreUnderTest) -> None:
        owner, twin = store.prepared(), None
        twin = store.a_prepare(key=owner.key)
        store.perform(twin)
        assert store.perform(store.decide_attempt(twin, commit=False)) == [store.stored(None, MessageState.ROLLED_BACK)]
        assert store.state_of(owner.number) is MessageState.PREPARED

    def test_submit_of_an_unknown_attempt_is_refused(self, store: StoreUnderTest) -> None:
        (answer,) = store.perform(store.decide_attempt(store.a_prepare(), commit=True))
        assert isinstance(answer, MessageUnknown)

    def test_a_rollback_that_overtakes_its_prepare_stops_it(self, store: StoreUnderTest) -> None:
        late = store.a_prepare()
        assert store.perform(store.decide_attempt(late, commit=False)) == [store.stored(None, MessageState.ROLLED_BACK)]
        (answer,) = store.perform(late)
        assert isinstance(answer, AlreadyRolledBack)
        assert store.messages_with_key(late.key) == []

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_tombstone_survives_transactions_that_are_run_again(self, store: StoreUnderTest, times: int) -> None:
        late, left = store.a_prepare(), [times]

        def lose(point: str) -> None:
            if point == "committed" or not left[0]:
                return
            if point == "buried":
                left[0] -= 1
                raise StoreConflict("lost against another transaction")

        rollback = store.decide_attempt(late, commit=False)
        assert store.perform(rollback, writer=store.new_writer(lose)) == [store.stored(None, MessageState.ROLLED_BACK)]
        assert left == [0]
        assert isinstance(store.perform(late)[0], AlreadyRolledBack)

    def test_one_attempt_id_for_two_keys_is_two_attempts(self, store: StoreUnderTest) -> None:
        one = store.a_prepare()
        other = store.a_prepare(attempt_id=one.attempt_id)
        store.perform(store.decide_attempt(one, commit=False))
        assert store.perform(other) == [store.stored(other.number, MessageState.PREPARED)]

    def test_the_prepare_of_a_rolled_back_attempt_is_refused(self, store: StoreUnderTest) -> None:
        first = store.prepared()
        store.perform(store.rollback_of(first.number))
        (answer,) = store.perform(store.again(first))
        assert isinstance(answer, AlreadyRolledBack)

    def test_publish_is_prepare_and_submit_in_one(self, store: StoreUnderTest) -> None:
        operation = store.a_prepare(publish=True)
        assert store.perform(operation) == [store.stored(operation.number, MessageState.COMMITTED)]
        assert store.perform(store.again(operation)) == [store.stored(operation.number, MessageState.COMMITTED)]
        assert store.redeliver(room=10) == Claimed(delivered=1)


class TestDelivering:
    def test_with_room_the_first_copy_goes_out_at_submit(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1, body=b"now")
        assert [(copy.body, copy.attempt) for copy in store.outlet.delivered] == [(b"now", 1)]
        row = store.row(number)
        assert (row.attempt, row.tried, row.due_ms) == (1, 1, store.clock() + 10_000)

    def test_without_room_it_is_due_at_once_and_not_tried(self, store: StoreUnderTest) -> None:
        row = store.row(store.submitted())
        assert (row.attempt, row.tried, row.due_ms) == (0, 0, store.clock())

    def test_tries_fall_at_0_10_30_60_and_then_it_is_failed(self, store: StoreUnderTest) -> None:
        store.begin_handlers()
        number = store.submitted()
        start, tries = store.clock(), []
        for _ in range(130):
            before = len(store.outlet.delivered)
            store.redeliver(room=5)
            tries += [(store.clock() - start) // 1000] * (len(store.outlet.delivered) - before)
            store.clock.advance(1)
            if store.consumption_state(number) is ConsumptionState.FAILED:
                break
        assert tries == [0, 10, 30, 60]
        assert (store.clock() - start) // 1000 == 101  # one interval after the last try, seen at second 100
        assert store.delivered_attempts(number) == [1, 2, 3, 4]
        assert [alert.kind for alert in store.alerts.unsent(10)] == ["delivery failed"]

    def test_nothing_is_tried_without_room_however_long_it_takes(self, store: StoreUnderTest) -> None:
        number = store.submitted()
        for _ in range(10):
            store.clock.advance(3600)
            assert store.redeliver(room=0) == Claimed()
        assert store.row(number).attempt == 0
        assert store.redeliver(room=1) == Claimed(delivered=1)

    def test_a_used_up_row_fails_without_room_too(self, store: StoreUnderTest) -> None:
        store.begin_handlers()
        number = store.submitted()
        for _ in range(4):
            store.redeliver(room=1)
            store.clock.advance(100)
        assert store.redeliver(room=0) == Claimed(failed=1)
        assert store.consumption_state(number) is ConsumptionState.FAILED

    def test_a_delayed_message_waits_for_its_time(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=5, delay_ms=60_000)
        assert store.outlet.delivered == []
        store.clock.advance(59.999)
        assert store.redeliver(room=5) == Claimed()
        store.clock.advance(0.001)
        assert store.redeliver(room=5) == Claimed(delivered=1)
        assert store.delivered_attempts(number) == [1]

    def test_an_ack_is_final(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        assert store.perform(store.ack_of(number)) == [DONE]
        assert store.perform(store.ack_of(number)) == [DONE]
        store.clock.advance(10_000)
        assert store.redeliver(room=5) == Claimed()
        assert isinstance(store.perform(store.nack_of(number, 1))[0], ConsumptionClosed)
        assert store.consumption_state(number) is ConsumptionState.ACKED
        assert store.row(number).closed_ms is not None

    def test_an_ack_of_an_older_copy_counts(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.clock.advance(10)
        store.redeliver(room=1)
        assert store.perform(store.ack_of(number)) == [DONE]

    def test_a_late_ack_wins_over_failed(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.perform(store.nack_of(number, 1, reject=True))
        assert store.consumption_state(number) is ConsumptionState.FAILED
        assert store.perform(store.ack_of(number)) == [DONE]
        assert store.consumption_state(number) is ConsumptionState.ACKED

    def test_acks_of_unknown_messages_are_refused(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        answers = store.perform(store.ack_of(number), store.ack_of(store.ids.next()))
        assert answers[0] == DONE
        assert isinstance(answers[1], SubscriptionUnknown)

    def test_a_nack_follows_the_policy_and_is_journaled(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.clock.advance(3)
        assert store.perform(store.nack_of(number, 1)) == [DONE]
        assert store.row(number).due_ms == store.clock() + 10_000

    def test_a_handler_that_hangs_alerts_its_owner_once_per_try(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        for _ in range(2):
            assert store.perform(store.nack_of(number, 1, hangs=True)) == [DONE]
        (alert,) = store.alerts.unsent(10)
        assert (alert.kind, alert.number, alert.attempt, alert.detail) == ("handler hangs", number, 1, "broken")
        assert isinstance(store.perform(store.nack_of(number, 7, hangs=True))[0], AttemptStale)
        assert len(store.alerts.unsent(10)) == 1

    def test_a_nack_can_name_its_own_time(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.perform(store.nack_of(number, 1, retry_after_ms=5))
        assert store.row(number).due_ms == store.clock() + 5

    def test_a_nack_of_an_older_try_changes_nothing(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.clock.advance(10)
        store.redeliver(room=1)
        before = store.row(number)
        assert isinstance(store.perform(store.nack_of(number, 1))[0], AttemptStale)
        assert store.row(number) == before

    def test_reject_fails_at_once_with_an_alert(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        assert store.perform(store.nack_of(number, 1, reject=True)) == [DONE]
        assert store.consumption_state(number) is ConsumptionState.FAILED
        assert len(store.alerts.unsent(10)) == 1

    def test_extend_pushes_the_next_try_away_and_never_nearer(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.perform(store.extend_of(number, 1, 60_000))
        assert store.row(number).due_ms == store.clock() + 60_000
        store.perform(store.extend_of(number, 1, 1))
        assert store.row(number).due_ms == store.clock() + 60_000

    def test_a_given_back_try_does_not_count_but_its_number_is_used(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        assert store.perform(store.give_back_of(number, 1)) == [DONE]
        row = store.row(number)
        assert (row.attempt, row.tried, row.due_ms) == (1, 0, store.clock())
        store.redeliver(room=1)
        assert store.delivered_attempts(number) == [1, 2]

    def test_a_give_back_after_the_ack_is_void(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.perform(store.ack_of(number))
        assert store.perform(store.give_back_of(number, 1)) == [DONE]
        assert store.consumption_state(number) is ConsumptionState.ACKED

    def test_reactivation_gives_a_fresh_budget_and_keeps_counting_attempts(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        store.perform(store.nack_of(number, 1, reject=True))
        assert store.perform(store.reactivate_of(number)) == [DONE]
        assert isinstance(store.perform(store.reactivate_of(number))[0], ConsumptionClosed)
        store.redeliver(room=1)
        row = store.row(number)
        assert (row.state, row.attempt, row.tried) == (ConsumptionState.SCHEDULED, 2, 1)

    def test_a_removed_subscription_cancels_its_open_rows_and_gets_no_new_ones(self, store: StoreUnderTest) -> None:
        number = store.submitted()
        store.clock.advance(1)
        store.removed()
        later = store.submitted()
        assert store.redeliver(room=5) == Claimed(cancelled=1)
        assert store.consumption_state(number) is ConsumptionState.CANCELLED
        assert store.row(later) is None
        assert store.perform(store.ack_of(number)) == [DONE]
        assert store.consumption_state(number) is ConsumptionState.CANCELLED

    def test_of_an_earlier_registration_nothing_is_delivered_again(self, store: StoreUnderTest) -> None:
        failed, waits, rejected = (store.submitted(room=1) for _ in range(3))
        store.perform(store.nack_of(failed, 1, reject=True), store.nack_of(waits, 1))
        first = store.subscription.number
        store.removed()
        store.subscription = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        store.watch.run_once()
        again = store.perform(store.reactivate_of(failed), store.deliver_now_of(waits))
        assert all(isinstance(each, ConsumptionClosed) for each in again)
        assert store.perform(store.nack_of(rejected, 1, reject=True)) == [DONE]
        states = [ConsumptionState(store.row(number, first).state) for number in (failed, waits, rejected)]
        # Nobody is to deal with what is rejected there: FAILED, it would stay until somebody cancels it.
        assert states == [ConsumptionState.FAILED, ConsumptionState.SCHEDULED, ConsumptionState.CANCELLED]

    def test_a_failed_transaction_gives_its_room_back(self, store: StoreUnderTest) -> None:
        def explode(point: str) -> None:
            if point == "locked":
                raise RuntimeError("boom")

        operation = store.prepared()
        store.outlet.room = 1
        publish = store.a_prepare(publish=True)
        with pytest.raises(RuntimeError):
            store.perform(publish, store.submit_of(operation.number), writer=store.new_writer(explode))
        assert (store.outlet.room, store.outlet.reserved) == (1, 0)
        assert store.state_of(operation.number) is MessageState.PREPARED
        assert store.messages_with_key(publish.key) == []

    def test_a_page_is_never_larger_than_the_room(self, store: StoreUnderTest) -> None:
        for _ in range(10):
            store.submitted()
        assert store.redeliver(room=4) == Claimed(delivered=4)
        assert len(store.outlet.delivered) == 4

    def test_tries_of_a_run_that_is_gone_are_due_again_and_uncounted(self, store: StoreUnderTest) -> None:
        number = store.submitted(room=1)
        assert store.due.rescue(store.shard, {INCARNATION + 1: 0}) == 0
        assert store.due.rescue(store.shard, {INCARNATION: 0}) == 1
        row = store.row(number)
        assert (row.attempt, row.tried, row.due_ms) == (1, 0, store.clock())
        assert store.due.rescue(store.shard, {INCARNATION: 0}) == 0

    def test_only_its_last_moments_are_uncertain(self, store: StoreUnderTest) -> None:
        early = store.submitted(room=1)
        store.clock.advance(5)
        late = store.submitted(room=1)
        assert store.due.rescue(store.shard, {INCARNATION: store.clock()}) == 1
        assert (store.row(early).tried, store.row(late).tried) == (1, 0)

    def test_what_was_to_be_posted_waited_in_the_memory_of_its_server(self, store: StoreUnderTest) -> None:
        hook = Forward(kind=WEBHOOK, target="http://shop.test/paid", key="")
        wanted = NewSubscription(topic="order.paid", app="coupons", tag="hook", policy=POLICY, forward=hook)
        posted = store.catalog_store.register_subscription("test", wanted).number
        store.watch.run_once()
        number = store.submitted(room=2)
        store.clock.advance(5)
        assert store.due.rescue(store.shard, {INCARNATION: store.clock()}) == 1
        assert (store.row(number).tried, store.row(number, posted).tried) == (1, 0)

    def test_a_copy_that_an_uncertain_commit_counted_is_taken_back_and_no_other_of_its_attempt(
        self, store: StoreUnderTest
    ) -> None:
        number, at = store.submitted(room=1), store.clock()
        before = store.row(number)
        assert store.perform(store.give_back_of(number, 1, tried_ms=at - 1)) == [DONE]
        assert store.row(number) == before
        store.perform(store.give_back_of(number, 1, tried_ms=at))
        assert (store.row(number).tried, store.row(number).due_ms) == (0, at)

    def test_what_several_runs_left_behind_is_rescued_together(self, store: StoreUnderTest) -> None:
        tried = []
        wanted = NewSubscription(topic="order.paid", app="coupons", tag="second", policy=POLICY)
        store.catalog_store.register_subscription("test", wanted)
        store.watch.run_once()
        for incarnation in (INCARNATION, INCARNATION + 1, INCARNATION + 2):
            store.writer = store.new_writer(incarnation=incarnation)
            tried.append(store.submitted(room=2))
        store.clock.advance(5)
        gone = {INCARNATION: 0, INCARNATION + 1: store.clock(), INCARNATION + 2: 0}
        assert (store.due.rescue(store.shard, gone), store.due.rescue(store.shard, gone)) == (4, 0)
        assert [store.row(number).tried for number in tried] == [0, 1, 0]

    @pytest.mark.parametrize("answer", ["nack", "extend"])
    def test_what_the_consumer_answered_is_not_rescued(self, store: StoreUnderTest, answer: str) -> None:
        number = store.submitted(room=1)
        later = store.nack_of(number, 1, retry_after_ms=3_600_000)
        store.perform(later if answer == "nack" else store.extend_of(number, 1))
        before = store.row(number)
        assert store.due.rescue(store.shard, {INCARNATION: 0}) == 0
        assert store.row(number) == before

    def test_a_removal_that_is_taken_back_in_time_leaves_no_gap(self, store: StoreUnderTest) -> None:
        slow = CatalogStore(store.database, change_delay_ms=5000)
        open_one = store.submitted()
        slow.remove_subscription("test", "order.paid", "coupons", "")
        store.clock.advance(1)
        slow.register_subscription("test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY))
        for seconds in (0, 3, 10):
            store.clock.advance(seconds)
            store.watch.run_once()
            assert store.row(store.submitted()) is not None
        assert store.redeliver(room=10) == Claimed(delivered=4)
        assert store.consumption_state(open_one) is ConsumptionState.SCHEDULED


def test_an_operator_who_delivers_now_in_the_batch_of_a_nack_counts_nothing(store: StoreUnderTest) -> None:
    number = store.submitted(room=1)
    store.begin_handlers()
    postponed = store.nack_of(number, 1, retry_after_ms=3_600_000)
    store.perform(postponed, store.deliver_now_of(number))
    row = store.row(number)
    assert (row.due_ms, row.tried, row.begun, row.tried_ms) == (store.clock(), 0, ANSWERED, None)


def test_what_was_extended_in_the_same_batch_is_not_delivered_now(store: StoreUnderTest) -> None:
    number = store.submitted(room=1)
    store.clock.advance(61)
    extended, hurried = store.perform(store.extend_of(number, 1), store.deliver_now_of(number))
    assert isinstance(hurried, ConsumptionClosed)
    assert not isinstance(extended, TmcError)
