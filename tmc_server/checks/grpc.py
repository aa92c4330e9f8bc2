"""Kind `grpc`: tmc.v1.CheckService, many questions in one call; Check alone for services that have only that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from tmc_common.protocol import check_pb2
from tmc_server.checks.channels import LONGEST_ANSWER, LONGEST_SINGLE, Channels, call_each, call_one
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.errors import CheckRefused

_ONE = "/tmc.v1.CheckService/Check"
_MANY = "/tmc.v1.CheckService/CheckMany"
_NAMELESS = CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "A result of CheckMany has to name its message_id.")
_SINGLE_FOR_S = 600.0  # how long a service counts as one without CheckMany


def request_of(question: Question) -> check_pb2.CheckRequest:
    return check_pb2.CheckRequest(
        message_id=question.message_id,
        topic=question.topic,
        key=question.key,
        attempt_id=question.attempt_id,
        ledger_id=question.ledger_id,
        created_ms=question.created_ms,
    )


_UNKNOWN_REASONS: dict[int, CheckReason] = {
    check_pb2.UNKNOWN_REASON_NOT_NOW: CheckReason.NOT_NOW,
    check_pb2.UNKNOWN_REASON_WRONG_LEDGER: CheckReason.WRONG_LEDGER,
}


def answer_of(question: Question, response: check_pb2.CheckResponse) -> CheckAnswer:
    """Return what a well-formed response means."""
    if response.message_id and response.message_id != question.message_id:
        return CheckAnswer.unknown(CheckReason.OTHER_MESSAGE, f"It is about {response.message_id[:64]}.")
    detail = response.detail[:500]
    said = int(response.verdict)
    if said in (Verdict.COMMIT, Verdict.ROLLBACK):
        return CheckAnswer(Verdict(said), detail=detail)
    if said in (0, Verdict.UNKNOWN):
        return CheckAnswer.unknown(_UNKNOWN_REASONS.get(int(response.unknown_reason), CheckReason.ANSWERED), detail)
    return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, f"Verdict {said} is none.")


class GrpcChecks:
    """domain.ports.checks.Asker."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._single: dict[tuple[Endpoint, bool], float] = {}  # until when

    def accept(self, target: CheckTarget) -> None:
        if target.options:
            raise CheckRefused(f"grpc takes no options, not {', '.join(sorted(target.options))}: leave them out.")

    def asks_singly(self, target: CheckTarget) -> bool:
        """See domain.ports.checks.Asker. A service without CheckMany gets its pages call by call."""
        return False

    def examine(self, target: CheckTarget, endpoint: Endpoint, token: str) -> None:
        call = self._channels.method(target, endpoint, _MANY)
        answer = call_one(call, check_pb2.CheckManyRequest().SerializeToString(), target, token, LONGEST_ANSWER)
        if isinstance(answer, CheckAnswer) and answer.reason is CheckReason.WRONG_PROTOCOL:
            raise CheckRefused(f"{endpoint}: {answer.detail}")
        if isinstance(answer, CheckAnswer) and answer.reason in (CheckReason.UNREACHABLE, CheckReason.TIMED_OUT):
            raise CheckRefused(
                f"{endpoint} does not answer ({answer.detail}): start the service, or correct the address."
            )
        if isinstance(answer, CheckAnswer) and answer.reason is CheckReason.NO_METHOD:
            one = self._channels.method(target, endpoint, _ONE)
            answer = call_one(one, check_pb2.CheckRequest().SerializeToString(), target, token, LONGEST_SINGLE)
            if isinstance(answer, CheckAnswer) and answer.reason is CheckReason.NO_METHOD:
                raise CheckRefused(f"{endpoint} has no tmc.v1.CheckService: add one, or take another kind of check.")

    def render(self, target: CheckTarget, question: Question) -> str:
        return (
            f"{_MANY[1:]} message_id={question.message_id} topic={question.topic} key={question.key}"
            f" attempt_id={question.attempt_id.hex()} ledger_id={question.ledger_id.hex()} created_ms={question.created_ms}"
        )

    def ask(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        place = (endpoint, target.tls)
        if self._single.get(place, 0.0) <= time.monotonic():
            answers = self._ask_together(target, endpoint, token, questions)
            if answers is not None:
                return answers
            now = time.monotonic()
            self._single = {name: end for name, end in self._single.items() if end > now} | {place: now + _SINGLE_FOR_S}
        return self._ask_each(target, endpoint, token, questions, until)

    def _ask_together(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question]
    ) -> list[CheckAnswer] | None:
        """Ask with CheckMany; None if the service does not have it."""
        request = check_pb2.CheckManyRequest(items=map(request_of, questions))
        call = self._channels.method(target, endpoint, _MANY)
        answer = call_one(call, request.SerializeToString(), target, token, LONGEST_ANSWER)
        if isinstance(answer, CheckAnswer):
            return None if answer.reason is CheckReason.NO_METHOD else [answer] * len(questions)
        try:
            results = check_pb2.CheckManyResponse.FromString(answer).results
        except DecodeError:
            return [CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "The bytes are no CheckManyResponse.")] * len(
                questions
            )
        if len(results) != len(questions):
            wrong = f"{len(results)} answers to {len(questions)} questions."
            return [CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, wrong)] * len(questions)
        return [
            answer_of(question, result) if result.message_id else _NAMELESS
            for question, result in zip(questions, results, strict=True)
        ]

    def _ask_each(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        call = self._channels.method(target, endpoint, _ONE)
        requests = [request_of(question).SerializeToString() for question in questions]
        raw = call_each(call, requests, target, token, until)
        return [
            answer if isinstance(answer, CheckAnswer) else _parse_one(question, answer)
            for question, answer in zip(questions, raw, strict=True)
        ]

    def close(self) -> None:
        """The caller of __init__ closes the channels."""


def _parse_one(question: Question, answer: bytes) -> CheckAnswer:
    try:
        return answer_of(question, check_pb2.CheckResponse.FromString(answer))
    except DecodeError:
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "The bytes are no CheckResponse.")
