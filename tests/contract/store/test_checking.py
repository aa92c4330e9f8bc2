"""The checking duty over every store: times, limits, claims, races with decisions, and the failures of earlier systems.

These were reported in RocketMQ's issues about transaction checks:
W1: committed twice, by the producer and by its check.  W2: a commit was accepted after a check had answered rollback.
W3: checks continued after the decision.  W4: the message was discarded at the limit, so a late commit was lost.
W5: a message that became due at the exact millisecond was never checked.
W6: the initial delay counted as a check, so a message was discarded without one.
W7: one bad message stopped the queue.  W8: when the executor was full, checks were rescheduled forever.
W10: check times were computed from two clocks.
"""

from __future__ import annotations

import pytest

from tests.support.asking import AWAY, COMMIT, HANGS, KILLED, ROLLBACK, UNKNOWN, ScriptedAsking
from tests.support.store import StoreUnderTest
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Stored
from tmc_server.domain.ports.checks import Checked
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import AlreadyCommitted, AlreadyRolledBack
from tmc_server.store.due_checks import SqlDueChecks

PREPARED, COMMITTED = MessageState.PREPARED, MessageState.COMMITTED
ROLLED_BACK, CHECK_FAILED = MessageState.ROLLED_BACK, MessageState.CHECK_FAILED


@pytest.fixture
def due_message(store: StoreUnderTest) -> int:
    """A prepared message whose transaction time is over."""
    number = store.prepared(key="k").number
    store.clock.advance(10)
    return number


class TestWhenItIsAsked:
    def test_not_before_the_transaction_time_and_at_its_millisecond(self, store: StoreUnderTest) -> None:
        """W5: what falls due at the exact millisecond was never checked."""
        asking = ScriptedAsking()
        store.prepared()
        store.clock.advance(9.999)
        assert not store.checking(asking).run_once()
        assert asking.pages == []
        store.clock.advance(0.001)
        assert store.checking(asking).run_once()
        assert len(asking.asked) == 1

    def test_unknown_answers_follow_the_policy_to_the_limit(self, store: StoreUnderTest) -> None:
        """W6: the waiting time before the first check is none of the checks. T8: 10, 20, 40, 70 s after the prepare."""
        store.set_checks(RetryPolicy(interval_ms=10_000, max_retry=3))
        asking = ScriptedAsking(UNKNOWN)
        duty, number, began = store.checking(asking), store.prepared().number, store.clock()
        seen = []
        while store.state_of(number) is PREPARED:
            store.clock.advance(0.5)
            if duty.run_once():
                seen.append((store.clock() - began) // 1000)
        assert seen == [10, 20, 40, 70]
        assert store.state_of(number) is CHECK_FAILED
        assert [alert.number for alert in store.alerted("check failed")] == [number]
        store.clock.advance(3600)
        assert not duty.run_once()  # nobody guesses, and nobody asks on

    def test_an_unreachable_producer_costs_no_check_and_alerts_once_an_hour(self, store: StoreUnderTest) -> None:
        """N of them are as good as one: fifteen unreachable checks rolled messages back elsewhere."""
        store.set_checks(RetryPolicy(interval_ms=1_000, max_retry=2), CheckTarget(name="", kind="grpc", batch=10))
        began = store.clock()
        numbers = [store.prepared().number for _ in range(50)]
        asking = ScriptedAsking(AWAY)
        duty = store.checking(asking)
        for _ in range(4 * 720):
            store.clock.advance(5)
            duty.run_once()
        assert {store.state_of(number) for number in numbers} == {PREPARED}
        hours = [round((alert.created_ms - began) / 3_600_000) for alert in store.alerted("producer not reached")]
        assert hours == [1, 2, 3]
        assert len(asking.pages) <= 4 * 60 + 10  # a page a minute, not one per message and second
        asking.usual = COMMIT
        for _ in range(130):
            store.clock.advance(1)
            duty.run_once()
        assert {store.state_of(number) for number in numbers} == {COMMITTED}

    def test_a_hiccup_of_the_producer_holds_up_what_is_due_for_its_rest_and_no_longer(
        self, store: StoreUnderTest
    ) -> None:
        store.set_checks(RetryPolicy(), CheckTarget(name="", kind="grpc", batch=5))
        numbers = [store.prepared().number for _ in range(20)]
        store.clock.advance(10)
        asking = ScriptedAsking(AWAY)
        duty = store.checking(asking)
        duty.run_once()
        duty.run_once()
        assert len(asking.pages) == 1
        asking.usual = COMMIT
        store.clock.advance(1)
        for _ in range(5):  # the pages are short at first
            duty.run_once()
        states = [store.state_of(number) for number in numbers]
        assert states.count(COMMITTED) == 15  # the five that were asked come a second later
        store.clock.advance(1)
        duty.run_once()
        assert {store.state_of(number) for number in numbers} == {COMMITTED}

    def test_a_check_is_asked_in_the_environment_of_the_sender(self, store: StoreUnderTest) -> None:
        store.prepared(producer_tag="blue", key="b")
        store.prepared(producer_tag="green", key="g")
        store.clock.advance(10)
        asking = ScriptedAsking()
        store.checking(asking).run_once()
        assert sorted(zip(asking.tags, asking.asked, strict=True)) == [("blue", "b"), ("green", "g")]

    def test_a_named_target_is_used_and_an_unknown_one_decides_nothing(self, store: StoreUnderTest) -> None:
        store.set_checks(
            RetryPolicy(),
            CheckTarget(name="", kind="grpc"),
            CheckTarget(name="old", kind="http", options={"path": "/v"}),
        )
        store.prepared(key="usual")
        store.prepared(key="named", check_target="old")
        store.prepared(key="gone", check_target="removed")
        store.clock.advance(10)
        kinds: dict[str, str] = {}

        class Noting(ScriptedAsking):
            def ask(self, target, app, tag, questions, seconds):
                kinds.update({question.key: target.kind for question in questions})
                return super().ask(target, app, tag, questions, seconds)

        store.checking(Noting()).run_once()
        assert kinds == {"usual": "grpc", "named": "http", "gone": ""}


class TestWhatComesOfIt:
    def test_commit_delivers_to_every_subscriber(self, store: StoreUnderTest, due_message: int) -> None:
        store.outlet.room = 10
        store.checking(ScriptedAsking(COMMIT)).run_once()
        assert store.state_of(due_message) is COMMITTED
        assert store.delivered_attempts(due_message) == [1]

    def test_rollback_frees_the_key_and_refuses_the_late_submit(self, store: StoreUnderTest, due_message: int) -> None:
        """W2: a commit was accepted after a check had said rollback."""
        store.checking(ScriptedAsking(ROLLBACK)).run_once()
        assert store.state_of(due_message) is ROLLED_BACK
        assert isinstance(store.perform(store.submit_of(due_message))[0], AlreadyRolledBack)
        assert store.row(due_message) is None
        assert isinstance(store.perform(store.a_prepare(key="k"))[0], Stored)

    def test_a_decided_message_is_not_asked_about(self, store: StoreUnderTest, due_message: int) -> None:
        """W3: checks went on after the decision."""
        store.perform(store.submit_of(due_message))
        asking = ScriptedAsking()
        assert not store.checking(asking).run_once()
        assert asking.pages == []

    def test_a_late_submit_after_the_limit_is_a_decision(self, store: StoreUnderTest, due_message: int) -> None:
        """W4: after the limit nothing is discarded: the producer may still say what became of it."""
        store.set_checks(RetryPolicy(max_retry=0))
        store.checking(ScriptedAsking(UNKNOWN)).run_once()
        assert store.state_of(due_message) is CHECK_FAILED
        assert isinstance(store.perform(store.submit_of(due_message))[0], Stored)
        assert store.state_of(due_message) is COMMITTED
        assert store.row(due_message) is not None

    def test_its_key_stays_taken_while_a_human_has_to_decide(self, store: StoreUnderTest, due_message: int) -> None:
        store.set_checks(RetryPolicy(max_retry=0))
        store.checking(ScriptedAsking(UNKNOWN)).run_once()
        [answer] = store.perform(store.a_prepare(key="k"))
        assert type(answer).__name__ == "KeyInProgress"

    def test_the_answer_that_decided_nothing_can_be_read(self, store: StoreUnderTest, due_message: int) -> None:
        store.checking(ScriptedAsking(UNKNOWN)).run_once()
        row = store.message_row(due_message)
        assert (row.check_attempt, row.checked, row.check_answer) == (1, 1, "ANSWERED: The producer said so.")


class TestRaces:
    def test_a_submit_during_the_question_wins_over_unknown(self, store: StoreUnderTest, due_message: int) -> None:
        asking = ScriptedAsking(UNKNOWN)
        asking.meanwhile = lambda: store.perform(store.submit_of(due_message))
        store.checking(asking).run_once()
        assert store.state_of(due_message) is COMMITTED
        assert store.message_row(due_message).due_ms is None

    def test_both_saying_commit_is_one_commit(self, store: StoreUnderTest, due_message: int) -> None:
        """W1: one message was committed twice, by the producer and by its check."""
        asking = ScriptedAsking(COMMIT)
        asking.meanwhile = lambda: store.perform(store.submit_of(due_message))
        store.outlet.room = 10
        store.checking(asking).run_once()
        store.redeliver(room=10)
        assert store.delivered_attempts(due_message) == [1]
        assert store.alerted("contradiction") == []

    def test_opposite_answers_keep_the_first_and_tell_somebody(self, store: StoreUnderTest, due_message: int) -> None:
        asking = ScriptedAsking(ROLLBACK)
        asking.meanwhile = lambda: store.perform(store.submit_of(due_message))
        store.checking(asking).run_once()
        assert store.state_of(due_message) is COMMITTED
        assert [alert.number for alert in store.alerted("contradiction")] == [due_message]
        assert isinstance(store.perform(store.rollback_of(due_message))[0], AlreadyCommitted)

    @pytest.mark.parametrize("late", [COMMIT, ROLLBACK, UNKNOWN, AWAY])
    def test_an_answer_counts_for_its_own_check_only(self, store: StoreUnderTest, due_message: int, late) -> None:
        """A server that slept between question and answer finds that another check has begun."""
        [old] = store.checks.claim(store.shard, store.checks.read(store.shard, store.topic.number, 10), 1_000)
        store.clock.advance(1)
        [new] = store.checks.claim(store.shard, store.checks.read(store.shard, store.topic.number, 10), 1_000)
        before = store.message_row(due_message)
        settled = store.checks.record(store.shard, [Checked(old, late)], False)
        assert settled.overtaken == 1
        assert store.message_row(due_message) == before
        store.checks.record(store.shard, [Checked(new, COMMIT)], False)
        assert store.state_of(due_message) is COMMITTED

    def test_a_claim_holds_only_with_the_lease(self, store: StoreUnderTest, due_message: int) -> None:
        asleep = SqlDueChecks(store.writer, store.leases, store.watch)
        pending = asleep.read(store.shard, store.topic.number, 10)
        with store.database.transaction() as connection:
            connection.exec_driver_sql("UPDATE tmc_lease SET epoch = epoch + 1, owner = 99")
        assert asleep.claim(store.shard, pending, 1_000) == []
        assert asleep.hold(store.shard, pending, 1_000, "away") == 0
        assert store.message_row(due_message).check_attempt == 0

    def test_a_message_is_not_claimed_twice(self, store: StoreUnderTest, due_message: int) -> None:
        pending = store.checks.read(store.shard, store.topic.number, 10)
        assert len(store.checks.claim(store.shard, pending, 5_000)) == 1
        assert store.checks.claim(store.shard, pending, 5_000) == []
        assert store.message_row(due_message).check_attempt == 1

    def test_a_server_that_died_with_a_claim_is_followed_by_another_check(
        self, store: StoreUnderTest, due_message: int
    ) -> None:
        store.checks.claim(store.shard, store.checks.read(store.shard, store.topic.number, 10), 5_000)
        asking = ScriptedAsking()
        store.clock.advance(4.999)
        store.checking(asking).run_once()
        assert asking.pages == []
        store.clock.advance(0.001)
        store.checking(asking).run_once()
        assert store.state_of(due_message) is COMMITTED
        assert store.message_row(due_message).checked == 0


class TestOneDoesNotHoldUpTheOthers:
    def test_a_message_that_is_never_known_does_not_stop_its_neighbors(self, store: StoreUnderTest) -> None:
        """W7: one bad message stopped the queue for ever."""
        bad = store.prepared(key="bad").number
        good = [store.prepared().number for _ in range(300)]
        store.clock.advance(10)
        asking = ScriptedAsking(COMMIT)
        asking.by_key["bad"] = UNKNOWN
        duty = store.checking(asking)
        while duty.run_once():
            pass
        assert {store.state_of(number) for number in good} == {COMMITTED}
        assert store.state_of(bad) is PREPARED

    def test_a_service_that_is_away_does_not_hide_what_is_due_after_it(self, store: StoreUnderTest) -> None:
        store.set_checks(RetryPolicy(), CheckTarget(name="", kind="grpc", batch=10))
        for _ in range(100):
            store.prepared(producer_tag="away")
        last = store.prepared(producer_tag="there").number
        store.clock.advance(10)

        class Half(ScriptedAsking):
            def ask(self, target, app, tag, questions, seconds):
                self.usual = AWAY if tag == "away" else COMMIT
                return super().ask(target, app, tag, questions, seconds)

        asking = Half()
        duty = store.checking(asking)
        for _ in range(30):
            duty.run_once()
        assert store.state_of(last) is COMMITTED
        assert asking.tags.count("away") == 1  # and the others of the same service moved on unasked

    @pytest.mark.parametrize("bad", [0, 13])
    @pytest.mark.parametrize("outcome", [HANGS, KILLED, AWAY], ids=["hangs", "dies", "dies in a call of gRPC"])
    def test_a_message_on_which_the_endpoint_hangs_or_dies_is_left_behind(
        self, store: StoreUnderTest, outcome: CheckAnswer, bad: int
    ) -> None:
        store.set_checks(RetryPolicy(), CheckTarget(name="", kind="grpc", batch=64))
        numbers = [store.prepared(key=f"k{number}").number for number in range(64)]

        class Hanging(ScriptedAsking):
            def ask(self, target, app, tag, questions, seconds):
                self.usual = outcome if any(question.key == f"k{bad}" for question in questions) else COMMIT
                return super().ask(target, app, tag, questions, seconds)

        asking = Hanging()
        duty = store.checking(asking)
        for _ in range(1200):
            store.clock.advance(1.0)
            duty.run_once()
        states = [store.state_of(number) for number in numbers]
        assert states.count(COMMITTED) == 63
        assert states[bad] is PREPARED

    def test_a_question_that_goes_wrong_alone_waits_alone(self, store: StoreUnderTest) -> None:
        bad = store.prepared(key="bad").number
        asking = ScriptedAsking(COMMIT)
        asking.by_key["bad"] = CheckAnswer.unknown(CheckReason.FAILED, "status 500")
        duty = store.checking(asking)
        for _ in range(60):  # half an hour in which a message falls due every 30 s, and is asked about at once
            good = store.prepared().number
            store.clock.advance(10)
            duty.run_once()
            assert store.state_of(good) is COMMITTED
            store.clock.advance(20)
            duty.run_once()
        assert store.state_of(bad) is PREPARED
        assert store.message_row(bad).checked == 0
        assert asking.asked.count("bad") <= 60

    def test_answers_that_cannot_be_stored_renew_nothing(self, store: StoreUnderTest, due_message: int) -> None:
        """W8, W10: a full executor renewed checks for ever; here a lost answer costs one claim and no count."""

        class Breaks(ScriptedAsking):
            def ask(self, target, app, tag, questions, seconds):
                super().ask(target, app, tag, questions, seconds)
                raise RuntimeError("no room")

        duty = store.checking(Breaks())
        duty.run_once()
        row = store.message_row(due_message)
        assert (row.check_attempt, row.checked) == (1, 0)
        assert not duty.run_once()  # claimed until the deadline is over, then asked again
        store.clock.advance(60)
        store.checking(ScriptedAsking()).run_once()
        assert store.state_of(due_message) is COMMITTED


class TestOperators:
    @pytest.fixture
    def failed(self, store: StoreUnderTest, due_message: int) -> int:
        store.set_checks(RetryPolicy(interval_ms=10_000, max_retry=0))
        store.checking(ScriptedAsking(UNKNOWN)).run_once()
        return due_message

    def test_reactivated_it_is_asked_again_and_numbers_go_on(self, store: StoreUnderTest, failed: int) -> None:
        assert store.desk.reactivate("ann", store.shard, [failed], "producer mended") == 1
        assert store.desk.reactivate("ben", store.shard, [failed], "me too") == 0
        store.checking(ScriptedAsking(UNKNOWN)).run_once()
        row = store.message_row(failed)
        assert (MessageState(row.state), row.check_attempt) == (CHECK_FAILED, 3)  # the reactivation took a number
        assert len(store.alerted("check failed")) == 2  # one per episode
        with store.database.reading() as connection:
            notes = connection.exec_driver_sql(
                "SELECT actor, action, reason FROM tmc_audit WHERE action = 'reactivate check'"
            ).fetchall()
        assert [tuple(note) for note in notes] == [("ann", "reactivate check", "producer mended")]

    def test_an_answer_to_an_earlier_check_undoes_no_reactivation(self, store: StoreUnderTest, failed: int) -> None:
        asked = store.desk.begin("ann", store.shard, failed, 5_000)
        assert asked is not None
        store.desk.reactivate("ben", store.shard, [failed], "producer mended")
        assert store.desk.record(store.shard, [Checked(asked, UNKNOWN)]).overtaken == 1
        assert store.state_of(failed) is PREPARED

    def test_failed_ones_are_found_by_time(self, store: StoreUnderTest, failed: int) -> None:
        made = store.message_row(failed).created_ms
        shards, topic = [store.shard], store.topic.number
        assert store.desk.failed_checks(shards, topic, 0, 0, 10) == [(store.shard, failed)]
        assert store.desk.failed_checks(shards, topic, made, made + 1, 10) == [(store.shard, failed)]
        assert store.desk.failed_checks(shards, topic, made + 1, 0, 10) == []
        assert store.desk.failed_checks(shards, topic, 0, made, 10) == []

    @pytest.mark.parametrize(("commit", "state"), [(True, COMMITTED), (False, ROLLED_BACK)])
    def test_a_human_decides(self, store: StoreUnderTest, failed: int, commit: bool, state: MessageState) -> None:
        store.desk.decide("ann", store.shard, failed, commit, "seen in the books")
        assert store.state_of(failed) is state
        assert (store.row(failed) is not None) is commit
        store.desk.decide("ann", store.shard, failed, commit, "again")
        with pytest.raises(AlreadyCommitted if commit else AlreadyRolledBack):
            store.desk.decide("ann", store.shard, failed, not commit, "changed my mind")

    def test_asked_now_though_not_due(self, store: StoreUnderTest) -> None:
        number = store.prepared().number
        pending = store.desk.begin("ann", store.shard, number, 5_000)
        assert pending is not None
        store.desk.record(store.shard, [Checked(pending, COMMIT)])
        assert store.state_of(number) is COMMITTED
        assert store.desk.begin("ann", store.shard, number, 5_000) is None

    def test_asked_now_a_failed_one_may_be_decided_and_stays_failed_otherwise(
        self, store: StoreUnderTest, failed: int
    ) -> None:
        pending = store.desk.begin("ann", store.shard, failed, 5_000)
        assert pending is not None
        store.desk.record(store.shard, [Checked(pending, UNKNOWN)])
        assert store.state_of(failed) is CHECK_FAILED
        again = store.desk.begin("ann", store.shard, failed, 5_000)
        assert again is not None
        store.desk.record(store.shard, [Checked(again, ROLLBACK)])
        assert store.state_of(failed) is ROLLED_BACK


@pytest.mark.parametrize("reason", ["NOT_NOW", "WRONG_LEDGER"])
def test_a_producer_that_cannot_know_now_uses_up_no_checks(
    store: StoreUnderTest, due_message: int, reason: str
) -> None:
    """Its database is down for three hours while its endpoint answers."""
    store.set_checks(RetryPolicy(interval_ms=10_000, max_retry=1))
    asking = ScriptedAsking(CheckAnswer.unknown(CheckReason[reason], "LEDGER_AWAY"))
    duty = store.checking(asking)
    for _ in range(180):
        duty.run_once()
        store.clock.advance(60)
    assert len(asking.pages) >= 100
    assert store.state_of(due_message) is PREPARED
    assert [alert.kind for alert in store.alerted("check failed")] == []
    asking.usual = COMMIT
    duty.run_once()
    assert store.state_of(due_message) is COMMITTED
