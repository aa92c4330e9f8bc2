"""Random lives of messages, compared with a model that knows nothing of SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.dose import LONG
from tests.support.store import DONE, POLICY, StoreUnderTest
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.message import MessageState as M
from tmc_server.domain.operations import Prepare
from tmc_server.errors import TmcError


@dataclass
class Life:
    """What the model believes of one message."""

    operation: Prepare
    state: M = M.PREPARED
    duty: C | None = None
    attempt: int = 0
    tried: int = 0
    due: int | None = None
    out_ms: int | None = None  # since when its last copy is out, with nobody known to have begun it
    begun: int = 0  # the run of a handler that has begun this attempt


ANSWERED = -1
"""Instead of a run: this attempt is over."""


class Lives(RuleBasedStateMachine):
    store: StoreUnderTest  # set by the test
    messages = Bundle("messages")

    @initialize()
    def begin(self) -> None:
        self.lives: list[Life] = []

    @rule(target=messages, delay=st.sampled_from([0, 0, 30_000]))
    def prepare(self, delay: int) -> Life:
        life = Life(self.store.prepared(delay_ms=delay))
        self.lives.append(life)
        return life

    @rule(life=messages)
    def prepare_again(self, life: Life) -> None:
        (answer,) = self.store.perform(self.store.again(life.operation))
        if life.state is M.ROLLED_BACK:
            assert isinstance(answer, TmcError)
        else:
            assert answer == self.store.stored(life.operation.number, life.state)

    @rule(life=messages, by_attempt=st.booleans(), room=st.sampled_from([0, 1]))
    def submit(self, life: Life, by_attempt: bool, room: int) -> None:
        self.store.outlet.room = room
        make = (
            self.store.decide_attempt(life.operation, True)
            if by_attempt
            else self.store.submit_of(life.operation.number)
        )
        (answer,) = self.store.perform(make)
        self.store.outlet.room = 0
        if life.state is M.ROLLED_BACK:
            assert isinstance(answer, TmcError)
            return
        assert answer == self.store.stored(life.operation.number, M.COMMITTED)
        if life.state is M.PREPARED:
            life.state, life.duty = M.COMMITTED, C.SCHEDULED
            if room and not life.operation.delay_ms:
                self._tried(life)
            else:
                life.due = self.store.clock() + life.operation.delay_ms

    def _tried(self, life: Life) -> None:
        lost_ms = 0 if life.out_ms is None else self.store.clock() - life.out_ms
        life.attempt += 1
        life.tried += life.out_ms is None or not life.tried
        wait_ms = POLICY.delay_after_ms(life.tried)
        while life.out_ms is not None and wait_ms <= lost_ms and wait_ms < 300_000:
            wait_ms = min(2 * wait_ms, 300_000)
        life.due = self.store.clock() + wait_ms
        life.out_ms, life.begun = self.store.clock(), 0

    @rule(life=messages, by_attempt=st.booleans())
    def rollback(self, life: Life, by_attempt: bool) -> None:
        make = (
            self.store.decide_attempt(life.operation, False)
            if by_attempt
            else self.store.rollback_of(life.operation.number)
        )
        (answer,) = self.store.perform(make)
        if life.state is M.COMMITTED:
            assert isinstance(answer, TmcError)
            return
        assert answer == self.store.stored(life.operation.number, M.ROLLED_BACK)
        life.state = M.ROLLED_BACK

    @rule(life=messages)
    def ack(self, life: Life) -> None:
        (answer,) = self.store.perform(self.store.ack_of(life.operation.number))
        assert isinstance(answer, TmcError) if life.duty is None else answer == DONE
        if life.duty in (C.SCHEDULED, C.FAILED):
            life.duty, life.due = C.ACKED, None

    @rule(life=messages, attempt=st.integers(1, 5), reject=st.booleans(), after=st.sampled_from([None, 0, 7_000]))
    def nack(self, life: Life, attempt: int, reject: bool, after: int | None) -> None:
        operation = self.store.nack_of(life.operation.number, attempt, reject=reject, retry_after_ms=after)
        (answer,) = self.store.perform(operation)
        if life.duty is not C.SCHEDULED or attempt != life.attempt:
            assert isinstance(answer, TmcError)
            return
        assert answer == DONE
        was_answered = life.begun == ANSWERED
        life.out_ms, life.begun = None, ANSWERED
        if reject or (after is None and life.tried > POLICY.max_retry):
            life.duty, life.due = C.FAILED, None
        elif after is None:
            life.due = self.store.clock() + POLICY.delay_after_ms(life.tried)
        else:
            life.tried -= bool(life.tried) and not was_answered
            life.due = self.store.clock() + after

    @rule(life=messages, attempt=st.integers(1, 5))
    def give_back(self, life: Life, attempt: int) -> None:
        self.store.perform(self.store.give_back_of(life.operation.number, attempt))
        if life.duty is C.SCHEDULED and attempt == life.attempt and not life.begun:
            life.tried, life.due = max(0, life.tried - 1), self.store.clock()
            life.out_ms, life.begun = None, ANSWERED

    @rule(life=messages, attempt=st.integers(1, 5), run=st.sampled_from([1, 2]))
    def begin_a_handler(self, life: Life, attempt: int, run: int) -> None:
        (answer,) = self.store.perform(self.store.extend_of(life.operation.number, attempt, 5_000, run))
        if life.duty is not C.SCHEDULED or attempt != life.attempt or life.begun not in (0, run):
            assert isinstance(answer, TmcError)
            return
        assert answer == DONE
        life.begun, life.out_ms = run, None
        life.due = max(life.due or 0, self.store.clock() + 5_000)

    @rule(life=messages)
    def reactivate(self, life: Life) -> None:
        (answer,) = self.store.perform(self.store.reactivate_of(life.operation.number))
        if life.duty is C.FAILED:
            assert answer == DONE
            life.duty, life.tried, life.due = C.SCHEDULED, 0, self.store.clock()
            life.out_ms, life.begun = None, ANSWERED
        else:
            assert isinstance(answer, TmcError)

    @rule()
    def redeliver(self) -> None:
        self.store.outlet.delivered.clear()
        self.store.redeliver(room=None)
        expected = set()
        for life in self.lives:
            if life.due is not None and life.due <= self.store.clock():
                if life.tried > POLICY.max_retry and life.out_ms is None:
                    life.duty, life.due = C.FAILED, None
                else:
                    self._tried(life)
                    expected.add((life.operation.number, life.attempt))
        own = {life.operation.number for life in self.lives}
        assert {(c.number, c.attempt) for c in self.store.outlet.delivered if c.number in own} == expected

    @rule(seconds=st.sampled_from([0.001, 5, 10, 40]))
    def time_passes(self, seconds: float) -> None:
        self.store.clock.advance(seconds)

    @invariant()
    def rows_are_as_the_model_says(self) -> None:
        for life in getattr(self, "lives", []):
            number = life.operation.number
            assert self.store.state_of(number) is life.state
            row: Any = self.store.row(number)
            if life.duty is None:
                assert row is None
            else:
                assert (row.state, row.attempt, row.tried, row.due_ms) == (
                    life.duty,
                    life.attempt,
                    life.tried,
                    life.due,
                )

    def teardown(self) -> None:
        for life in getattr(self, "lives", []):
            self.store.perform(self.store.rollback_of(life.operation.number), self.store.ack_of(life.operation.number))


def test_random_lives_agree_with_the_model(store: StoreUnderTest) -> None:
    class LivesHere(Lives):
        pass

    LivesHere.store = store
    run_state_machine_as_test(
        LivesHere,
        settings=settings(
            max_examples=1_000 if LONG else 20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
