"""Dispatches checks: the kind by name, addresses from discovery and allow-list, the next one if one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tmc_common import tracing
from tmc_common.eventlog import EventLog
from tmc_server.checks.addressing import Addressing
from tmc_server.domain.catalog import App
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Asker, Endpoint
from tmc_server.errors import CheckRefused

log = EventLog("tmc.checks")

_POISON = {CheckReason.FAILED, CheckReason.TOO_LARGE, CheckReason.NOT_UNDERSTOOD}
_ASK_THE_NEXT = {CheckReason.UNREACHABLE, CheckReason.WRONG_LEDGER, CheckReason.NOT_NOW}
_HOMES = 10_000
_CALLS_FOR_POISON = 24  # enough to find one among a thousand


class CheckDispatcher:
    """domain.ports.checks.Asking. askers: by kind."""

    def __init__(self, askers: Mapping[str, Asker], addressing: Addressing) -> None:
        self._askers = askers
        self._addressing = addressing
        # By app, tag and ledger id: the instance that answered for it, and ledgers that some instance did not have.
        self._homes: dict[tuple[int, str, bytes], Endpoint] = {}
        self._strayed: set[tuple[int, str, bytes]] = set()

    def ask(
        self, target: CheckTarget, app: App, tag: str, questions: Sequence[Question], seconds: float
    ) -> list[CheckAnswer]:
        until = time.monotonic() + seconds
        asker = self._askers.get(target.kind)
        if asker is None:
            return [CheckAnswer.unknown(CheckReason.NO_TARGET, f"This server has no kind {target.kind!r}.")] * len(
                questions
            )
        ledgers = {question.ledger_id for question in questions if question.ledger_id}
        endpoints = self._addressing.endpoints(target, app, tag, ledgers)
        if isinstance(endpoints, CheckAnswer):
            return [endpoints] * len(questions)
        ask = partial(_asked, asker, target, app.check_token, until)
        answers: dict[int, CheckAnswer] = {}
        for home, indexes in self._by_home(app, tag, questions, endpoints).items():
            open_ = indexes
            for endpoint in sorted(endpoints, key=lambda each: each != home):
                found = ask(endpoint, [questions[index] for index in open_])
                for index, answer in zip(open_, found, strict=True):
                    answers[index] = _better(answers.get(index), answer)
                self._learn(app, tag, endpoint, ((questions[index], answers[index]) for index in open_))
                open_ = [index for index in open_ if answers[index].reason in _ASK_THE_NEXT]
                if not open_ or time.monotonic() > until:
                    break
        return [answers[index] for index in range(len(questions))]

    def _by_home(
        self, app: App, tag: str, questions: Sequence[Question], endpoints: Sequence[Endpoint]
    ) -> Mapping[Endpoint | None, list[int]]:
        """Indexes of the questions by the instance that has said it has their ledger, or had it last."""
        said = {endpoint.ledger_id: endpoint for endpoint in reversed(endpoints) if endpoint.ledger_id}
        found: dict[Endpoint | None, list[int]] = {}
        for index, question in enumerate(questions):
            home = said.get(question.ledger_id) or self._homes.get((app.number, tag, question.ledger_id))
            found.setdefault(home, []).append(index)
        return found

    def _learn(self, app: App, tag: str, home: Endpoint, answered: Iterable[tuple[Question, CheckAnswer]]) -> None:
        """Learn ledgers only where instances have different ones: there it matters which one is asked first."""
        for question, answer in answered:
            name = (app.number, tag, question.ledger_id)
            if answer.reason is CheckReason.WRONG_LEDGER:
                self._strayed.add(name)
            elif name in self._strayed and answer.verdict is not Verdict.UNKNOWN:
                self._strayed.discard(name)
                self._homes[name] = home
        if len(self._homes) + len(self._strayed) > _HOMES:
            self._homes, self._strayed = {}, set()

    def asks_singly(self, target: CheckTarget) -> bool:
        asker = self._askers.get(target.kind)
        if asker is None:
            return False
        try:
            return asker.asks_singly(target)
        except Exception:  # code of an installed package; this pass is about the checks of all topics
            log.exception("asker_failed", "kind %s does not say whether it asks singly: it gets batches", target.kind)
            return False

    def describe(self, target: CheckTarget, app: App, tag: str, question: Question) -> tuple[str, str]:
        endpoints = self._addressing.endpoints(target, app, tag)
        where = "nowhere" if isinstance(endpoints, CheckAnswer) else ", ".join(map(str, endpoints))
        asker = self._askers.get(target.kind)
        return f"{target.kind} {where}", asker.render(target, question) if asker is not None else ""

    def examine(self, target: CheckTarget, app: App, tag: str, untried: bool) -> None:
        asker = self._askers.get(target.kind)
        if asker is None:
            raise CheckRefused(f"There is no kind {target.kind!r}: take one of {', '.join(sorted(self._askers))}.")
        _tried(lambda: asker.accept(target))
        endpoints = self._addressing.endpoints(target, app, tag)
        if isinstance(endpoints, CheckAnswer):
            if endpoints.reason is CheckReason.REFUSED_TARGET or not untried:
                raise CheckRefused(f"{endpoints.detail or endpoints.reason.value}{_hint(endpoints.reason)}")
            return
        if not untried:
            _tried(lambda: asker.examine(target, endpoints[0], app.check_token))

    def close(self) -> None:
        for asker in self._askers.values():
            asker.close()


def _tried(attempt: Callable[[], None]) -> None:
    """A third-party asker may raise anything: to the operator it is a refusal."""
    try:
        attempt()
    except CheckRefused:
        raise
    except Exception as exc:
        log.exception("asker_failed", "trying out a check failed")
        raise CheckRefused(f"Trying it out failed: {exc!r}"[:300]) from exc


def _hint(reason: CheckReason) -> str:
    if reason is CheckReason.REFUSED_TARGET:
        return ""
    return " Start it first, give --address, or say --untried."


def _span(questions: Sequence[Question], endpoint: Endpoint) -> AbstractContextManager[object]:
    """Open a span in the trace of the first message, with links to those of the others."""
    first, *others = questions
    more: dict[str, Any] = {"server.address": endpoint.host, "server.port": endpoint.port}
    if others:
        more["messaging.batch.message_count"] = len(questions)
    attributes = tracing.messaging("check", "", first.topic, "" if others else first.message_id, more)
    links = [each.context for each in others]
    return tracing.span(f"check {first.topic}", "CLIENT", attributes, parent=first.context, links=links)


def _better(before: CheckAnswer | None, answer: CheckAnswer) -> CheckAnswer:
    """Keep the answer of an instance that cannot know now: that others lack the ledger, or are down, tells less."""
    if before is not None and before.reason is CheckReason.NOT_NOW and answer.reason in _ASK_THE_NEXT:
        return before
    return answer


def _asked(
    asker: Asker, target: CheckTarget, token: str, until: float, endpoint: Endpoint, questions: Sequence[Question]
) -> list[CheckAnswer]:
    with _span(questions, endpoint):
        return _guarded(asker, target, endpoint, token, questions, until)


def _guarded(
    asker: Asker, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
) -> list[CheckAnswer]:
    def ask(some: Sequence[Question]) -> list[CheckAnswer]:
        try:
            answers = asker.ask(target, endpoint, token, some, until)
            if len(answers) != len(some):
                raise ValueError(f"{len(answers)} answers to {len(some)} questions")
            return answers
        except Exception as exc:  # whatever an asker does wrong: its questions stay undecided, the duty goes on
            log.exception("asker_failed", "asking %s failed", endpoint)
            return [CheckAnswer.unknown(CheckReason.ASKER_FAILED, repr(exc)[:300])] * len(some)

    return without_poison(ask, questions, until - target.deadline_ms / 1000)


def without_poison(
    ask: Callable[[Sequence[Question]], list[CheckAnswer]], questions: Sequence[Question], last_start: float
) -> list[CheckAnswer]:
    """Ask a batch; bisect it if one question makes all of it fail, so that the others get answers.

    last_start: monotonic seconds, no call begins after that.
    """
    left = _CALLS_FOR_POISON

    def part(some: Sequence[Question]) -> list[CheckAnswer]:
        nonlocal left
        left -= 1
        answers = ask(some)
        spoiled = len(set(answers)) == 1 and answers[0].reason in _POISON
        if not spoiled or len(some) == 1 or left < 2 or time.monotonic() > last_start:
            return answers
        middle = len(some) // 2
        first = part(some[:middle])
        if len(set(first)) == 1 and first[0] == answers[0] and middle > 1 and left < _CALLS_FOR_POISON // 2:
            return answers  # both halves and their halves: it is the service
        # One that is away now was there for the whole: perhaps a question of it killed the service.
        halves = [*first, *part(some[middle:])]
        return [answers[0] if each.reason is CheckReason.UNREACHABLE else each for each in halves]

    return part(questions)
