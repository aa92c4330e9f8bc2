"""The domain, as tables."""

from __future__ import annotations

import ast
import doctest
import itertools
import operator
import string
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.clock import ManualClock
from tmc_server.domain import consumption, message, operations, retry
from tmc_server.domain.consumption import Budget, Row
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.ids import EPOCH_MS, IdGenerator, MessageId, created_ms
from tmc_server.domain.message import Decided, MessageEvent, MessageState, digest_of
from tmc_server.domain.numbers import ANSWERED, NO_RUN, MessageNumber, RunNumber
from tmc_server.domain.placement import SHARDS, shard_of, shards_of
from tmc_server.domain.retry import RetryKind, RetryPolicy
from tmc_server.errors import AlreadyCommitted, AlreadyRolledBack, AttemptStale, ConsumptionClosed, NoIdentity
from tmc_server.store import consumptions

M, ME, CE = MessageState, MessageEvent, consumption.ConsumptionEvent
# Every transition there is, written out: what is not here is forbidden.
MESSAGE_TRANSITIONS = {
    (None, ME.PREPARE, M.PREPARED),
    (None, ME.PUBLISH, M.COMMITTED),
    (M.PREPARED, ME.SUBMIT, M.COMMITTED),
    (M.PREPARED, ME.ROLLBACK, M.ROLLED_BACK),
    (M.PREPARED, ME.EXHAUST, M.CHECK_FAILED),
    (M.CHECK_FAILED, ME.REACTIVATE, M.PREPARED),
    (M.CHECK_FAILED, ME.SUBMIT, M.COMMITTED),
    (M.CHECK_FAILED, ME.ROLLBACK, M.ROLLED_BACK),
}
CONSUMPTION_TRANSITIONS = {
    (None, CE.SUBMIT, C.SCHEDULED, False),
    (C.SCHEDULED, CE.DELIVER, C.SCHEDULED, False),
    (C.SCHEDULED, CE.GIVE_BACK, C.SCHEDULED, True),
    (C.SCHEDULED, CE.NACK, C.SCHEDULED, True),
    (C.SCHEDULED, CE.EXTEND, C.SCHEDULED, True),
    (C.SCHEDULED, CE.REJECT, C.FAILED, True),
    (C.SCHEDULED, CE.EXHAUST, C.FAILED, False),
    (C.SCHEDULED, CE.ACK, C.ACKED, False),
    (C.FAILED, CE.ACK, C.ACKED, False),
    (C.SCHEDULED, CE.REMOVE, C.CANCELLED, False),
    (C.FAILED, CE.REACTIVATE, C.SCHEDULED, False),
    (C.SCHEDULED, CE.HOLD, C.SCHEDULED, False),
    (None, CE.QUEUE, C.WAITING, False),
    (C.WAITING, CE.RELEASE, C.SCHEDULED, False),
    (C.WAITING, CE.ACK, C.ACKED, False),
    (C.WAITING, CE.REMOVE, C.CANCELLED, False),
    (C.SCHEDULED, CE.CANCEL, C.CANCELLED, False),
    (C.FAILED, CE.CANCEL, C.CANCELLED, False),
    (C.WAITING, CE.CANCEL, C.CANCELLED, False),
    (C.SCHEDULED, CE.HURRY, C.SCHEDULED, False),
}


def test_there_are_these_transitions_and_no_others() -> None:
    of_messages = {(source, event, found.to) for (source, event), found in message.TRANSITIONS.items()}
    assert of_messages == MESSAGE_TRANSITIONS
    of_consumptions = {
        (source, event, found.to, found.own_try) for (source, event), found in consumption.TRANSITIONS.items()
    }
    assert of_consumptions == CONSUMPTION_TRANSITIONS


def test_an_ack_is_true_in_every_state_in_which_a_delivery_is_open() -> None:
    """What is closed takes it without a change; an open one that did so would come again."""
    assert set(consumption.sources(CE.ACK)) == set(consumption.OPEN)


def test_every_operation_on_a_consumption_has_its_decision() -> None:
    decided = {
        ast.unparse(case.pattern).removesuffix("()")
        for node in ast.walk(ast.parse(Path(consumptions.__file__).read_text()))
        if isinstance(node, ast.Match)
        for case in node.cases
    }
    kinds = (*operations.Consume.__subclasses__(), *operations.ByOperator.__subclasses__())
    assert decided == {each.__name__ for each in kinds} - {"ByOperator"}


def test_every_state_is_open_or_closed() -> None:
    assert message.UNDECIDED == (M.PREPARED, M.CHECK_FAILED)
    assert message.CLOSED_ITSELF == (M.ROLLED_BACK,)
    assert message.CLOSED_WITH_DELIVERIES == (M.COMMITTED,)
    assert consumption.OPEN == (C.SCHEDULED, C.FAILED, C.WAITING)
    assert consumption.CLOSED == (C.ACKED, C.CANCELLED)


class TestMessage:
    @pytest.mark.parametrize(
        ("state", "event", "expected"),
        [
            (MessageState.PREPARED, MessageEvent.SUBMIT, Decided(MessageState.COMMITTED, True)),
            (MessageState.PREPARED, MessageEvent.ROLLBACK, Decided(MessageState.ROLLED_BACK, True)),
            (MessageState.COMMITTED, MessageEvent.SUBMIT, Decided(MessageState.COMMITTED, False)),
            (MessageState.ROLLED_BACK, MessageEvent.ROLLBACK, Decided(MessageState.ROLLED_BACK, False)),
        ],
    )
    def test_decisions(self, state: MessageState, event: MessageEvent, expected: Decided) -> None:
        assert message.decide(state, event) == expected

    def test_the_opposite_decision_is_refused(self) -> None:
        assert isinstance(message.decide(MessageState.COMMITTED, MessageEvent.ROLLBACK), AlreadyCommitted)
        assert isinstance(message.decide(MessageState.ROLLED_BACK, MessageEvent.SUBMIT), AlreadyRolledBack)

    def test_transitions_have_one_letter_each(self) -> None:
        letters = [
            transition.letter for transition in (*message.TRANSITIONS.values(), *consumption.TRANSITIONS.values())
        ]
        alphabet = list(string.ascii_lowercase)
        expected = [*alphabet, *(f"a{letter}" for letter in alphabet)][: len(letters)]
        assert sorted(letters, key=lambda letter: (len(letter), letter)) == expected

    def test_the_digest_tells_contents_apart(self) -> None:
        contents = [
            (b"a", "text/plain", {}, 0),
            (b"a", "text/plain", {}, 1),
            (b"", "atext/plain", {}, 0),
            (b"a", "text/html", {}, 0),
            (b"a", "text/plain", {"x": "yz"}, 0),
            (b"a", "text/plain", {"xy": "z"}, 0),
            (b"a", "text/plain", {"x": "y", "z": ""}, 0),
        ]
        assert len({digest_of(*content) for content in contents}) == len(contents)
        assert digest_of(b"a", "t", {"x": "1", "y": "2"}, 0) == digest_of(b"a", "t", {"y": "2", "x": "1"}, 0)


def test_a_repetition_gets_an_equal_answer() -> None:
    message_id = MessageId(1, 2, 3, 4)
    first = operations.Stored(message_id=message_id, state=MessageState.COMMITTED)
    again = operations.Stored(message_id=message_id, state=MessageState.COMMITTED, changed=False)
    other = operations.Stored(message_id=message_id, state=MessageState.ROLLED_BACK)
    assert first == again
    assert not operator.ne(first, again)
    assert first != other
    assert len({first, again, other}) == 2
    assert {operations.Done(1), operations.Done(2)} == {operations.Done(3)}
    assert operations.Done(1) != first


class TestConsumption:
    ROW = Row(C.SCHEDULED, attempt=2, tried=2, due_ms=50)
    POLICY = RetryPolicy(interval_ms=1000, max_retry=3)
    BUDGET = Budget(number=MessageNumber(1), since_ms=0)

    @pytest.mark.parametrize("state", [C.ACKED, C.FAILED, C.CANCELLED])
    def test_what_is_closed_takes_no_nack_and_no_extend(self, state: C) -> None:
        row = Row(state, 2, 2, None)
        assert isinstance(consumption.decide_nack(row, 2, self.POLICY, 0, self.BUDGET), ConsumptionClosed)
        assert isinstance(consumption.decide_extend(row, 2, 10, 0), ConsumptionClosed)
        assert consumption.decide_give_back(row, 2, 0, 0) is None

    @pytest.mark.parametrize("attempt", [1, 3])
    def test_what_belongs_to_one_try_is_refused_for_another(self, attempt: int) -> None:
        assert isinstance(consumption.decide_nack(self.ROW, attempt, self.POLICY, 0, self.BUDGET), AttemptStale)
        assert isinstance(consumption.decide_extend(self.ROW, attempt, 10, 0), AttemptStale)
        assert consumption.decide_give_back(self.ROW, attempt, 0, 0) is None

    @pytest.mark.parametrize(
        ("attempt", "begun", "tried_ms", "goes"),
        [
            (0, 0, 0, True),  # delayed
            (2, ANSWERED, 0, True),  # waits for its retry
            (2, 0, 40_000, True),  # nobody has answered for a minute: lost
            (2, 0, 40_001, False),  # on its way
            (2, 0, 0, False),  # with a consumer, which asked for more time
            (2, 7, 1, False),  # in a handler
        ],
    )
    def test_only_what_is_not_under_way_is_delivered_now(
        self, attempt: int, begun: int, tried_ms: int, goes: bool
    ) -> None:
        row = Row(C.SCHEDULED, attempt=attempt, tried=attempt, due_ms=500_000, begun=begun)
        decision = consumption.decide_deliver_now(row, tried_ms, now=100_000)
        if goes:
            assert decision == replace(row, due_ms=100_000)
        else:
            assert isinstance(decision, ConsumptionClosed)

    def test_what_is_due_is_not_delivered_sooner(self) -> None:
        assert consumption.decide_deliver_now(Row(C.SCHEDULED, 0, 0, due_ms=50), 0, now=100_000) is None

    @pytest.mark.parametrize("state", [C.ACKED, C.FAILED, C.CANCELLED, C.WAITING])
    def test_only_what_is_scheduled_is_delivered_now(self, state: C) -> None:
        assert isinstance(consumption.decide_deliver_now(Row(state, 1, 1, None), 0, now=0), ConsumptionClosed)

    def test_acks(self) -> None:
        acked = Row(C.ACKED, 2, 2, None)
        assert consumption.decide_ack(self.ROW, 0) == acked
        assert consumption.decide_ack(Row(C.FAILED, 2, 2, None), 0) == acked
        assert consumption.decide_ack(acked, 0) is None
        assert consumption.decide_ack(Row(C.CANCELLED, 2, 2, None), 0) is None

    def test_the_last_nack_fails(self) -> None:
        last = Row(C.SCHEDULED, 4, 4, 50)
        assert consumption.decide_nack(last, 4, self.POLICY, 0, self.BUDGET) == Row(C.FAILED, 4, 4, None, ANSWERED)

    def test_due_rows(self) -> None:
        assert consumption.decide_due(self.ROW, self.POLICY, True, 100, self.BUDGET) == Row(C.SCHEDULED, 3, 3, 3100)
        assert consumption.decide_due(Row(C.SCHEDULED, 9, 4, 0), self.POLICY, True, 100, self.BUDGET) == Row(
            C.FAILED, 9, 4, None
        )
        assert consumption.decide_due(self.ROW, self.POLICY, False, 100, self.BUDGET) == Row(C.CANCELLED, 2, 2, None)

    def test_a_copy_that_nobody_began_does_not_count_and_the_next_wait_is_longer(self) -> None:
        waits = []
        for lost_ms in (999, 1_000, 2_500, 100_000, 10_000_000):
            after = consumption.decide_due(
                Row(C.SCHEDULED, 7, 1, 0), self.POLICY, True, 0, self.BUDGET, lost_ms=lost_ms
            )
            assert (after.state, after.attempt, after.tried) == (C.SCHEDULED, 8, 1)
            waits.append(after.due_ms)
        assert waits == [1_000, 2_000, 4_000, 128_000, 300_000]

    def test_a_policy_without_a_wait_still_waits_after_a_loss(self) -> None:
        after = consumption.decide_due(
            Row(C.SCHEDULED, 1, 1, 0), RetryPolicy(interval_ms=0), True, 0, self.BUDGET, lost_ms=700
        )
        assert after.due_ms == 1_024

    def test_the_policys_own_wait_may_be_longer_than_that(self) -> None:
        slow = RetryPolicy(interval_ms=900_000)
        after = consumption.decide_due(Row(C.SCHEDULED, 1, 1, 0), slow, True, 0, self.BUDGET, lost_ms=10_000_000)
        assert after.due_ms == 900_000

    def test_one_run_of_an_attempt_begins_and_no_other(self) -> None:
        first, second = RunNumber(11), RunNumber(12)
        begun = consumption.decide_extend(self.ROW, 2, 10, 100, first)
        assert begun == Row(C.SCHEDULED, 2, 2, 110, begun=first)
        assert isinstance(begun, Row)
        assert consumption.decide_extend(begun, 2, 10, 100, first) == begun  # its answer was lost
        assert isinstance(consumption.decide_extend(begun, 2, 10, 100, second), AttemptStale)
        assert consumption.decide_extend(begun, 2, 10, 100, NO_RUN) == begun  # a copy that waits for a handler
        assert consumption.decide_give_back(begun, 2, 0, 0) is None

    @pytest.mark.parametrize("retry_after_ms", [None, 5])
    def test_no_run_begins_an_attempt_that_is_over(self, retry_after_ms: int | None) -> None:
        over = consumption.decide_nack(self.ROW, 2, self.POLICY, 0, self.BUDGET, retry_after_ms=retry_after_ms)
        assert isinstance(over, Row)
        assert (over.begun, over.tried) == (ANSWERED, 2 if retry_after_ms is None else 1)
        assert isinstance(consumption.decide_extend(over, 2, 10, 0, RunNumber(1)), AttemptStale)
        assert consumption.decide_give_back(over, 2, 0, 0) is None
        again = consumption.decide_nack(over, 2, self.POLICY, 0, self.BUDGET, retry_after_ms=7)
        assert isinstance(again, Row)
        assert again.tried == over.tried

    @pytest.mark.parametrize(("state", "event"), list(itertools.product(C, consumption.ConsumptionEvent)))
    def test_every_pair_is_an_arrow_or_no_source(self, state: C, event: consumption.ConsumptionEvent) -> None:
        assert ((state, event) in consumption.TRANSITIONS) == (state in consumption.sources(event))


class TestRetry:
    def test_the_docstring_example_holds(self) -> None:
        result = doctest.testmod(retry)
        assert (result.attempted > 0, result.failed) == (True, 0)

    @pytest.mark.parametrize(
        ("policy", "seconds"),
        [
            (RetryPolicy(interval_ms=10_000), [10, 30, 60, 100]),
            (RetryPolicy(kind=RetryKind.EXPONENTIAL, interval_ms=10_000), [10, 30, 70, 150]),
            (RetryPolicy(interval_ms=10_000, cap_ms=15_000), [10, 25, 40, 55]),
            (RetryPolicy(kind=RetryKind.EXPONENTIAL, interval_ms=10_000, cap_ms=20_000), [10, 30, 50, 70]),
        ],
    )
    def test_tries_fall_at(self, policy: RetryPolicy, seconds: list[int]) -> None:
        at = list(itertools.accumulate(policy.delay_after_ms(tried) // 1000 for tried in range(1, 5)))
        assert at == seconds

    @given(st.sampled_from(RetryKind), st.integers(10, 86_400_000), st.integers(10, 86_400_000))
    def test_distances_grow_up_to_the_cap_however_many_tries(self, kind: RetryKind, interval: int, cap: int) -> None:
        policy = RetryPolicy(kind=kind, interval_ms=interval, max_retry=10_000, cap_ms=cap)
        distances = [policy.delay_after_ms(tried) for tried in (*range(1, 50), 10_000, 1 << 40)]
        assert distances == sorted(distances)
        assert 0 < distances[0] <= distances[-1] <= cap

    def test_jitter_adds_up_to_its_percentage_in_sixteen_parts_and_is_the_same_when_repeated(self) -> None:
        policy = RetryPolicy(interval_ms=15_000, jitter_percent=20)
        numbers = [MessageNumber(each) for each in range(7 << 40, (7 << 40) + 1_600)]
        delays = [policy.delay_for_ms(1, number) for number in numbers]
        assert sorted(set(delays)) == [15_000 + part * 200 for part in range(16)]
        assert all(70 <= delays.count(delay) <= 130 for delay in set(delays))
        assert delays == [policy.delay_for_ms(1, number) for number in numbers]
        second = [policy.delay_for_ms(2, number) - 30_000 for number in numbers]
        together = sum(1 for one, two in zip(delays, second, strict=True) if 2 * (one - 15_000) == two)
        assert together < 200  # those that came together do not come together again

    def test_age_uses_a_budget_up_but_never_the_first_attempt(self) -> None:
        policy = RetryPolicy(max_retry=100, max_age_ms=60_000)
        assert not policy.is_used_up(tried=0, age_ms=10**9)
        assert not policy.is_used_up(tried=5, age_ms=59_999)
        assert policy.is_used_up(tried=1, age_ms=60_000)
        assert not RetryPolicy(max_retry=100).is_used_up(tried=1, age_ms=10**12)


class TestPlacement:
    @given(st.integers(0, 31), st.integers(1, 32), st.text())
    def test_a_key_stays_in_its_topics_shards(self, index: int, spread: int, key: str) -> None:
        assert shard_of(index, spread, key.encode("utf-8", "replace").decode()) in shards_of(index, spread)

    def test_the_function_is_a_promise_to_stored_data(self) -> None:
        assert [shard_of(30, 4, key) for key in ("a", "b", "paid-7")] == [
            (30 + crc32(key.encode()) % 4) % SHARDS for key in ("a", "b", "paid-7")
        ]
        assert shard_of(30, 4, "paid-7") == 0


class TestIds:
    @given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 31), st.integers(0, 2**63 - 1))
    def test_ids_survive_being_written_and_read(self, topic: int, app: int, shard: int, number: int) -> None:
        made = MessageId(topic, app, shard, number)
        assert MessageId.parse(str(made)) == made

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "1",
            "1-2-3-4",
            "1-2-32-4",
            "1-2-03-9223372036854775808",
            "a-b-03-4",
            "1-2-03-4 ",
            "٣-2-03-4",
            "1-2-03-4\n",
        ],
    )
    def test_what_is_no_id_is_none(self, text: str) -> None:
        assert MessageId.parse(text) is None

    def test_numbers_grow_whatever_the_clock_does(self) -> None:
        clock = ManualClock()
        ids = IdGenerator(clock)
        ids.lease(3, 0, clock() + 10_000)
        made = [ids.next() for _ in range(5000)]
        clock.now_ms -= 3_600_000
        made += [ids.next() for _ in range(5000)]
        assert made == sorted(set(made))

    def test_no_number_outside_the_lease(self) -> None:
        clock = ManualClock()
        ids = IdGenerator(clock)
        with pytest.raises(NoIdentity):
            ids.next()
        ids.lease(3, 0, clock() + 1000)
        ids.next()
        clock.advance(1)
        with pytest.raises(NoIdentity):
            ids.next()

    def test_the_next_holder_starts_where_the_lease_ended(self) -> None:
        clock = ManualClock()
        first, second = IdGenerator(clock), IdGenerator(clock)
        first.lease(3, 0, clock() + 1000)
        last = [first.next() for _ in range(10)][-1]
        clock.now_ms -= 5000
        second.lease(3, clock() + 6000, clock() + 60_000)
        assert second.next() > last
        assert created_ms(second.next()) >= 1_800_000_000_000 + 1000

    def test_numbers_fit_63_bits_for_decades(self) -> None:
        clock = ManualClock(EPOCH_MS + 60 * 365 * 86_400_000)
        ids = IdGenerator(clock)
        ids.lease(1023, 0, clock() + 1)
        assert 0 < ids.next() < 1 << 63
