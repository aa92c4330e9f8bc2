"""Random lives of ordered messages: one delivery per order key is under way, and in the end all are delivered."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.store import StoreUnderTest
from tmc_common.headers import ORDER_KEY, SEQUENCE
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.ordering import OrderMode

_KEYS = st.sampled_from(["a", "b"])
_OPEN = (C.SCHEDULED, C.FAILED, C.WAITING)


@dataclass
class _Line:
    """Messages of one key in the order of their submits. out_of_order: reactivated after they were skipped."""

    numbers: list[int] = field(default_factory=list)
    out_of_order: set[int] = field(default_factory=set)


class Lines(RuleBasedStateMachine):
    store: StoreUnderTest  # set by the test

    @initialize(mode=st.sampled_from([OrderMode.STRICT, OrderMode.SKIP]))
    def begin(self, mode: OrderMode) -> None:
        self.mode = mode
        self.store.take_ordered_topic(mode)
        self.lines: dict[str, _Line] = defaultdict(_Line)
        self.prepared: list[tuple[str, int]] = []
        self.store.outlet.delivered.clear()

    @rule(key=_KEYS, room=st.sampled_from([0, 1]), delay_ms=st.sampled_from([0, 0, 30_000]))
    def send(self, key: str, room: int, delay_ms: int) -> None:
        self.lines[key].numbers.append(self.store.sent(key, room=room, delay_ms=delay_ms))

    @rule(key=_KEYS)
    def prepare(self, key: str) -> None:
        operation = self.store.a_keyed(key)
        self.store.perform(operation)
        self.prepared.append((key, operation.number))

    @rule(data=st.data(), by_hand=st.booleans())
    def submit_late(self, data: st.DataObject, by_hand: bool) -> None:
        if self.prepared:
            key, number = self.prepared.pop(data.draw(st.integers(0, len(self.prepared) - 1)))
            if by_hand:
                self.store.desk.decide("operator", self.store.shard, number, True, "test")
            else:
                self.store.perform(self.store.submit_of(number))
            self.lines[key].numbers.append(number)

    @rule(data=st.data(), how=st.sampled_from(["ack", "reject", "cancel", "reactivate", "nack", "give back"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        every = [(key, number) for key, line in self.lines.items() for number in line.numbers]
        if not every:
            return
        key, number = data.draw(st.sampled_from(every))
        row = self.store.row(number)
        overtaken = row.state == C.FAILED and self._head(key) != number
        self.store.outlet.room = data.draw(st.integers(0, 2))
        self.store.perform(
            {
                "ack": self.store.ack_of(number),
                "reject": self.store.nack_of(number, row.attempt, reject=True),
                "nack": self.store.nack_of(number, row.attempt, retry_after_ms=0),
                "give back": self.store.give_back_of(number, row.attempt),
                "cancel": self.store.cancel_of(number),
                "reactivate": self.store.reactivate_of(number),
            }[how]
        )
        self.store.outlet.room = 0
        if how == "reactivate" and overtaken:
            self.lines[key].out_of_order.add(number)

    def _in_turn(self, key: str) -> list[int]:
        return [number for number in self.lines[key].numbers if number not in self.lines[key].out_of_order]

    def _head(self, key: str) -> int | None:
        """The first that is open, and not skipped."""
        blocking = _OPEN if self.mode is OrderMode.STRICT else (C.SCHEDULED, C.WAITING)
        return next((n for n in self._in_turn(key) if self.store.row(n).state in blocking), None)

    @rule(seconds=st.sampled_from([1, 30, 200]))
    def redeliver(self, seconds: int) -> None:
        self.store.clock.advance(seconds)
        self.store.redeliver(room=1)

    @rule()
    def repair(self) -> None:
        assert self.store.repaired().changed == 0  # there is nothing to repair, whatever happened

    @invariant()
    def only_the_first_of_a_key_is_under_way(self) -> None:
        for key in getattr(self, "lines", {}):
            scheduled = [n for n in self._in_turn(key) if self.store.row(n).state == C.SCHEDULED]
            head = self._head(key)
            assert scheduled in ([], [head])
            if head is not None:
                assert self.store.row(head).state != C.WAITING, "a delivery waits, but none is under way"

    @invariant()
    def copies_in_turn_have_growing_sequences(self) -> None:
        last: dict[str, int] = {}
        for copy in self.store.outlet.delivered:
            if SEQUENCE in copy.headers:
                key, sequence = copy.headers[ORDER_KEY], int(copy.headers[SEQUENCE])
                assert sequence >= last.get(key, 0)
                last[key] = sequence

    def teardown(self) -> None:
        """Everything that is still open can be delivered."""
        lines = getattr(self, "lines", {})
        for _ in range(2 * sum(len(line.numbers) for line in lines.values()) + 2):
            for line in lines.values():
                for number in line.numbers:
                    state = self.store.row(number).state
                    if state == C.FAILED:
                        self.store.perform(self.store.reactivate_of(number))
                    elif state == C.SCHEDULED:
                        self.store.perform(self.store.ack_of(number))
        for line in lines.values():
            assert {C(self.store.row(number).state) for number in line.numbers} <= {C.ACKED, C.CANCELLED}


def test_random_lines_keep_their_order(store: StoreUnderTest) -> None:
    class LinesHere(Lines):
        pass

    LinesHere.store = store
    run_state_machine_as_test(
        LinesHere,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
