"""Checks go to the next instance of a service if nobody is there, or if it has another ledger."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tmc_server.checks.asking import CheckDispatcher
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Endpoint

TARGET = CheckTarget(name="", kind="scripted")
APP: Any = SimpleNamespace(number=1, check_token="token")
COMMIT = CheckAnswer(Verdict.COMMIT)


class Instances:
    """Each has one ledger; `down` says nothing."""

    def __init__(self, *ledgers: str) -> None:
        self.places = [
            Endpoint(host="shop", address=f"10.0.0.{number}", port=50051) for number, _ in enumerate(ledgers)
        ]
        self.ledgers = dict(zip(self.places, ledgers, strict=True))
        self.asked: list[tuple[str, list[str]]] = []

    def endpoints(self, _target: object, _app: object, _tag: str, _ledgers: object) -> list[Endpoint]:
        return self.places

    def asks_singly(self, _target: object) -> bool:
        return False

    def ask(
        self, _target: object, endpoint: Endpoint, _token: str, questions: Sequence[Question], _until: float
    ) -> list[CheckAnswer]:
        ledger = self.ledgers[endpoint]
        self.asked.append((ledger, [question.key for question in questions]))
        if ledger == "busy":
            return [CheckAnswer.unknown(CheckReason.NOT_NOW)] * len(questions)
        if ledger == "down":
            return [CheckAnswer.unknown(CheckReason.UNREACHABLE)] * len(questions)
        wrong = CheckAnswer.unknown(CheckReason.WRONG_LEDGER)
        return [COMMIT if question.ledger_id.decode() == ledger else wrong for question in questions]


def _question(key: str, ledger: str) -> Question:
    return Question(
        message_id=f"1-1-0-{key}",
        topic="t",
        key=key,
        biz_id="shop",
        attempt_id=b"",
        ledger_id=ledger.encode(),
        created_ms=0,
    )


def _ask(dispatcher: CheckDispatcher, *questions: Question) -> list[CheckAnswer]:
    return dispatcher.ask(TARGET, APP, "default", questions, 5.0)


@pytest.fixture
def instances() -> Instances:
    return Instances("down", "north", "south")


@pytest.fixture
def dispatcher(instances: Instances) -> CheckDispatcher:
    askers: Any = {"scripted": instances}
    addressing: Any = instances
    return CheckDispatcher(askers, addressing)


def test_each_question_reaches_the_instance_that_has_its_ledger(
    instances: Instances, dispatcher: CheckDispatcher
) -> None:
    answers = _ask(dispatcher, _question("a", "south"), _question("b", "north"), _question("c", "south"))
    assert answers == [COMMIT] * 3
    assert instances.asked == [("down", ["a", "b", "c"]), ("north", ["a", "b", "c"]), ("south", ["a", "c"])]


def test_the_instance_that_had_a_ledger_is_asked_first_from_then_on(
    instances: Instances, dispatcher: CheckDispatcher
) -> None:
    _ask(dispatcher, _question("a", "south"))
    instances.asked.clear()
    assert _ask(dispatcher, _question("b", "south"), _question("c", "south")) == [COMMIT] * 2
    assert instances.asked == [("south", ["b", "c"])]


def test_a_ledger_that_no_instance_has_stays_unknown(instances: Instances, dispatcher: CheckDispatcher) -> None:
    (answer,) = _ask(dispatcher, _question("a", "west"))
    assert (answer.verdict, answer.reason) == (Verdict.UNKNOWN, CheckReason.WRONG_LEDGER)
    assert not answer.reason.counts


def test_an_instance_that_knows_is_the_only_one_asked() -> None:
    instances = Instances("north", "south")
    askers: Any = {"scripted": instances}
    addressing: Any = instances
    assert _ask(CheckDispatcher(askers, addressing), _question("a", "north")) == [COMMIT]
    assert instances.asked == [("north", ["a"])]


def test_an_instance_that_cannot_know_now_does_not_hide_the_one_that_can() -> None:
    instances = Instances("busy", "south")
    askers: Any = {"scripted": instances}
    addressing: Any = instances
    dispatcher = CheckDispatcher(askers, addressing)
    known, unknown = _ask(dispatcher, _question("a", "south"), _question("b", "west"))
    assert known == COMMIT
    assert unknown.reason is CheckReason.NOT_NOW  # the ledger may be that of the instance that cannot know
