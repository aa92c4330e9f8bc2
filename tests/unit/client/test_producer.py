"""Submits of one order key, one after another."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any, cast

import pytest

from tmc_client import errors
from tmc_client.connecting.sender import Sender
from tmc_client.producing.producer import Prepared, Producer

LIMIT = timedelta(seconds=5)


class _Sender:
    """Calls that the test answers. closed: no further call is taken."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Future[Any]]] = []
        self.closed = False

    def send(self, _kind: object, request: Any, _seconds: float) -> Future[Any]:
        if self.closed:
            raise errors.Unavailable("it is closed")
        self.calls.append((request.message_id, Future()))
        return self.calls[-1][1]

    @property
    def sent(self) -> list[str]:
        return [message_id for message_id, _ in self.calls]


def _messages(count: int) -> list[Prepared]:
    return [Prepared(message_id=f"m{n}", topic="t", key=f"k{n}", attempt_id=b"") for n in range(count)]


@pytest.fixture
def sender() -> _Sender:
    return _Sender()


@pytest.fixture
def submits(sender: _Sender) -> list[Future[Any]]:
    return Producer(cast("Sender", sender)).submit_in_turn(_messages(3), LIMIT)


def test_each_waits_for_the_answer_to_the_one_before(sender: _Sender, submits: list[Future[Any]]) -> None:
    for number, submit in enumerate(submits):
        assert sender.sent == [f"m{n}" for n in range(number + 1)]
        assert not submit.done()
        sender.calls[number][1].set_result(f"answer {number}")
        assert submit.result(0) == f"answer {number}"


def test_the_first_that_fails_fails_those_after_it(sender: _Sender, submits: list[Future[Any]]) -> None:
    sender.calls[0][1].set_result("answer")
    sender.calls[1][1].set_exception(errors.Unavailable("no server"))
    assert sender.sent == ["m0", "m1"]
    assert submits[0].result(0) == "answer"
    assert [type(submit.exception(0)) for submit in submits[1:]] == [errors.Unavailable] * 2


def test_a_call_that_is_not_taken_fails_those_after_it(sender: _Sender, submits: list[Future[Any]]) -> None:
    sender.closed = True
    sender.calls[0][1].set_result("answer")
    assert [type(submit.exception(0)) for submit in submits[1:]] == [errors.Unavailable] * 2


def test_a_cancelled_call_fails_those_after_it(sender: _Sender, submits: list[Future[Any]]) -> None:
    sender.calls[0][1].cancel()
    sender.calls[0][1].set_running_or_notify_cancel()
    assert [type(submit.exception(0)) for submit in submits] == [errors.Unavailable] * 3


def test_nothing_is_submitted_of_nothing(sender: _Sender) -> None:
    assert Producer(cast("Sender", sender)).submit_in_turn([], LIMIT) == []
    assert sender.sent == []
