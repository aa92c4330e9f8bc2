"""A producer whose answers a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tmc_server.domain.catalog import App
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict

COMMIT, ROLLBACK = CheckAnswer(Verdict.COMMIT), CheckAnswer(Verdict.ROLLBACK)
UNKNOWN = CheckAnswer.unknown(CheckReason.ANSWERED)
AWAY = CheckAnswer.unknown(CheckReason.UNREACHABLE, "connection refused")
KILLED = CheckAnswer.unknown(CheckReason.FAILED, "no answer")
HANGS = CheckAnswer.unknown(CheckReason.TIMED_OUT)


class ScriptedAsking:
    """domain.ports.checks.Asking. usual: every answer, unless `by_key` has one.  meanwhile: run while the question is open."""

    def __init__(self, usual: CheckAnswer = COMMIT) -> None:
        self.usual = usual
        self.by_key: dict[str, CheckAnswer] = {}
        self.pages: list[list[Question]] = []
        self.tags: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def ask(
        self, target: CheckTarget, app: App, tag: str, questions: Sequence[Question], seconds: float
    ) -> list[CheckAnswer]:
        self.pages.append(list(questions))
        self.tags.append(tag)
        self.meanwhile()
        return [self.by_key.get(question.key, self.usual) for question in questions]

    def asks_singly(self, target: CheckTarget) -> bool:
        return target.kind != "grpc"

    @property
    def asked(self) -> list[str]:
        """Keys in the order of the questions."""
        return [question.key for page in self.pages for question in page]
