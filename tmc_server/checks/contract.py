"""The contract of a kind of check, as tests: authors of one for the entry point `tmc.checkers` run these against it.

    class TestCarrierPigeons(AskerContract):
        def asker(self): return CarrierPigeons()
        def endpoint(self, behavior): ...      # a producer that behaves so, see BEHAVIOURS
        def target(self): return CheckTarget(name="", kind="pigeon", options={...})

It needs pytest, and nothing else of ours.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from tmc_server.domain.checks import CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Asker, Endpoint

BEHAVIOURS = ("commit", "rollback", "unknown", "hang", "refuse", "garbage", "away")
_NOT_ANSWERS = ("hang", "refuse", "garbage", "away")
_ENOUGH_MS = 10_000  # for a producer that answers, also on a machine with much to do
_SOON_MS = 300  # for one that hangs


class AskerContract(ABC):
    """behavior: what the producer at the endpoint does with every question; away: nobody listens there."""

    @abstractmethod
    def asker(self) -> Asker:
        """A new one."""

    @abstractmethod
    def endpoint(self, behavior: str) -> Endpoint:
        """Return where a producer behaves so."""

    @abstractmethod
    def target(self) -> CheckTarget:
        """The same for every behavior; the contract sets the deadline."""

    def questions(self, count: int) -> list[Question]:
        return [
            Question(
                message_id=f"1-1-05-{number}",
                topic="order.paid",
                key=f"k-{number}",
                biz_id="orders",
                attempt_id=bytes(16),
                ledger_id=bytes(16),
                created_ms=1_800_000_000_000,
            )
            for number in range(count)
        ]

    def _ask(self, behavior: str, count: int) -> list[Any]:
        asker = self.asker()
        asker.accept(self.target())
        target = replace(self.target(), deadline_ms=_SOON_MS if behavior == "hang" else _ENOUGH_MS)
        try:
            return asker.ask(target, self.endpoint(behavior), "TOKEN", self.questions(count), time.monotonic() + 30)
        finally:
            asker.close()

    def test_what_is_said_is_the_verdict(self) -> None:
        for behavior, verdict in (
            ("commit", Verdict.COMMIT),
            ("rollback", Verdict.ROLLBACK),
            ("unknown", Verdict.UNKNOWN),
        ):
            for answer in self._ask(behavior, 3):
                assert (answer.verdict, answer.reason) == (verdict, CheckReason.ANSWERED), behavior

    def test_there_is_one_answer_per_question(self) -> None:
        for behavior in BEHAVIOURS:
            for count in (1, 2, 40):
                assert len(self._ask(behavior, count)) == count, behavior

    def test_what_is_no_answer_is_unknown_with_a_reason_and_counts_nothing(self) -> None:
        for behavior in _NOT_ANSWERS:
            for answer in self._ask(behavior, 3):
                assert answer.verdict is Verdict.UNKNOWN, behavior
                assert not answer.reason.counts, behavior

    def test_nobody_there_is_told_apart_so_that_the_next_address_is_tried(self) -> None:
        assert {answer.reason for answer in self._ask("away", 3)} == {CheckReason.UNREACHABLE}

    def test_it_says_whether_it_asks_singly(self) -> None:
        assert self.asker().asks_singly(self.target()) in (True, False)

    def test_the_question_can_be_read(self) -> None:
        assert "k-0" in self.asker().render(self.target(), self.questions(1)[0])
