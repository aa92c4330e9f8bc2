"""The calls of the SDK as letters of a submit queue, over a broker that is played here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import tmc_client as tmc
from tmc_client.connecting.connection import Identity
from tmc_client.connecting.submit_queue import Letter, SubmitQueue
from tmc_common.protocol import message_pb2
from tmc_common.signatures import verify
from tmc_common.submission import signed

SECRET = "0a" * 32
ATTEMPT = bytes(range(16))


class Played:
    """See submit_queue.Carrier. answer: to each letter; None: none."""

    def __init__(self, answer: Mapping[str, Any] | None, refuses: tmc.TmcError | None = None) -> None:
        self.answer = answer
        self._refuses = refuses
        self.refuses_from = 1  # letters at once
        self.now = 0.0
        self._waiting: list[str] = []
        self.letters: list[Letter] = []
        self.forks = 0

    def reply(self, correlation: str) -> Mapping[str, str]:
        return {"tmcreplyto": "tmc.reply.orders.shop", "tmccorrelation": correlation}

    def send(self, letters: Mapping[str, Letter], seconds: float) -> None:
        self.letters += letters.values()
        if self._refuses is not None and len(letters) >= self.refuses_from:
            raise self._refuses
        self._waiting += letters

    def receive(self, seconds: float) -> Mapping[str, bytes]:
        if self.answer is None:
            self.now += seconds
            return {}
        waiting, self._waiting = self._waiting, []
        return {each: json.dumps(self.answer).encode() for each in ["another's", *waiting]}

    def close(self) -> None: ...
    def after_fork(self) -> None:
        self.forks += 1


def _queue(played: Played, key: str = SECRET, **more: Any) -> SubmitQueue:
    identity = Identity(app="orders", key=key, tag="prod", **more)
    return SubmitQueue("amqp+submit://u:p@h/", identity, played, lambda: played.now)


def _prepare(played: Played, key: str = SECRET, **more: Any) -> Any:
    return _prepared(_queue(played, key, **more))[0]


def _prepared(queue: SubmitQueue, count: int = 1) -> Any:
    request = message_pb2.PrepareRequest(
        topic="order.paid",
        key="paid-7",
        attempt_id=ATTEMPT,
        body=b"{}",
        content_type="application/json",
        headers={"shop": "Zürich"},
        ledger_id=b"l" * 16,
        delay_ms=5,
    )
    call = queue.unary("/tmc.v1.MessageService/PrepareMany", message_pb2.PrepareManyResponse)
    return call(message_pb2.PrepareManyRequest(items=[request] * count), timeout=1.0).results


def test_a_call_is_a_signed_event() -> None:
    played = Played({"messageId": "1-1-5-7", "state": "MESSAGE_STATE_PREPARED"})
    assert _prepare(played, check_address="10.0.0.7:8080").message_id == "1-1-5-7"
    (letter,) = played.letters
    attributes = dict(letter.attributes)
    content = signed("tmc.submit.orders.prod", attributes, "application/json", b"{}", {"shop": "Zürich"})
    assert verify(bytes.fromhex(SECRET), content, attributes.pop("tmcsignature"))
    del attributes["tmccorrelation"]
    assert attributes == {
        "specversion": "1.0",
        "source": "/tmc/orders",
        "id": ATTEMPT.hex(),
        "type": "order.paid",
        "subject": "paid-7",
        "tmcop": "prepare",
        "tmcdelay": "5",
        "tmcledger": (b"l" * 16).hex(),
        "tmccheckaddress": "10.0.0.7:8080",
        "tmcreplyto": "tmc.reply.orders.shop",
    }


def test_a_queue_that_is_not_signed_gets_no_address_and_tells_no_token() -> None:
    played = Played({"messageId": "1-1-5-7", "state": "MESSAGE_STATE_PREPARED"})
    _prepare(played, key="", check_address="10.0.0.7:8080")
    assert not {"tmcsignature", "tmccheckaddress"} & set(played.letters[0].attributes)
    queue = SubmitQueue("amqp+submit://h/", Identity(app="orders"), played)
    describe = queue.unary("/tmc.v1.MessageService/DescribeChecks", message_pb2.DescribeChecksResponse)
    with pytest.raises(tmc.InvalidRequest, match="tells nobody the check token"):
        describe(message_pb2.DescribeChecksRequest(), timeout=1.0)


def test_what_is_not_answered_is_to_be_repeated() -> None:
    error = _prepare(Played(None)).error
    assert (error.code, error.message[:63]) == (14, "The center has not answered in its submit queue: is a server up")
    assert error.message.endswith("What it refuses without an answer is in tmc.submit.orders.dead.")


def test_a_repeat_waits_for_the_answer_to_what_is_in_the_queue() -> None:
    played = Played(None)
    queue = _queue(played)
    assert _prepared(queue)[0].error.code == 14
    played.answer = {"messageId": "1-1-5-7", "state": "MESSAGE_STATE_PREPARED"}
    assert _prepared(queue)[0].message_id == "1-1-5-7"
    assert len(played.letters) == 1


def test_after_a_while_a_repeat_is_put_into_the_queue_again() -> None:
    played = Played(None)
    queue = _queue(played)
    _prepared(queue)
    played.now += 31
    _prepared(queue)
    assert len(played.letters) == 2
    assert [letter.attributes["tmccorrelation"] for letter in played.letters] == [
        played.letters[0].attributes["tmccorrelation"]
    ] * 2


def test_one_that_the_broker_does_not_take_fails_alone() -> None:
    played = Played(
        {"messageId": "1-1-5-7", "state": "MESSAGE_STATE_PREPARED"}, refuses=tmc.InvalidRequest("too large")
    )
    played.refuses_from = 3
    queue = _queue(played)
    call = queue.unary("/tmc.v1.MessageService/PublishMany", message_pb2.PublishManyResponse)
    items = [
        message_pb2.PublishRequest(topic="t", key=str(number), attempt_id=bytes([number] * 16)) for number in range(4)
    ]
    results = call(message_pb2.PublishManyRequest(items=items), timeout=1.0).results
    assert [result.message_id for result in results] == ["1-1-5-7"] * 4


def test_after_it_was_closed_nothing_is_sent() -> None:
    played = Played(None)
    queue = _queue(played)
    queue.close()
    with pytest.raises(tmc.Unavailable, match="connect again"):
        _prepared(queue)
    assert played.letters == []


def test_a_submit_names_the_message_too_so_that_the_center_does_not_wait_for_its_prepare() -> None:
    played = Played({"messageId": "1-1-5-7", "state": "MESSAGE_STATE_COMMITTED"})
    call = _queue(played).unary("/tmc.v1.MessageService/SubmitMany", message_pb2.SubmitManyResponse)
    request = message_pb2.SubmitRequest(message_id="1-1-5-7", topic="order.paid", key="k", attempt_id=ATTEMPT)
    call(message_pb2.SubmitManyRequest(items=[request]), timeout=1.0)
    assert played.letters[0].attributes["tmcmessage"] == "1-1-5-7"


def test_a_broker_that_lets_nobody_in_is_said_of_each_item() -> None:
    error = _prepare(Played(None, refuses=tmc.NotAuthenticated("RabbitMQ does not let this user submit"))).error
    assert (error.code, error.message) == (7, "RabbitMQ does not let this user submit")


def test_an_answer_of_a_later_center_is_understood() -> None:
    later = {"error": {"reason": "OF_A_LATER_VERSION", "code": 9, "message": "no", "more": 1}, "another": True}
    error = _prepare(Played(later)).error
    assert (error.code, error.reason, error.message) == (9, 0, "no")


def test_the_token_of_checks_comes_through_the_queue_and_says_where_they_are_answered() -> None:
    played = Played({"checkToken": "secret"})
    queue = SubmitQueue("amqp+submit://h/", Identity(app="orders", key=SECRET), played)
    queue.announce("10.0.0.7:8080", b"l" * 16)
    describe = queue.unary("/tmc.v1.MessageService/DescribeChecks", message_pb2.DescribeChecksResponse)
    assert describe(message_pb2.DescribeChecksRequest(), timeout=1.0).check_token == "secret"
    attributes = played.letters[0].attributes
    assert (attributes["tmcop"], attributes["tmccheckaddress"]) == ("describe", "10.0.0.7:8080")
    assert attributes["tmccheckledger"] == (b"l" * 16).hex()


def test_a_forked_child_uses_nothing_of_its_parent() -> None:
    played = Played(None)
    SubmitQueue("amqp+submit://h/", Identity(app="orders"), played).after_fork()
    assert played.forks == 1


@pytest.mark.parametrize(
    "address",
    ["amqp+submit://shop:hunter2@h/", "kafka+submit://h:9092/?sasl.username=shop&sasl.password=hunter2&acks=all"],
)
def test_the_address_is_shown_without_its_password(address: str) -> None:
    with tmc.connect(address, app="orders") as center:
        assert "hunter2" not in repr(center)
        assert "h:9092" in repr(center) or "@h/" in repr(center)


def test_an_answer_that_comes_during_another_call_is_kept_for_the_repeat() -> None:
    played = Played(None)
    queue = _queue(played)
    _prepared(queue)
    played.answer = {"messageId": "1-1-5-7", "state": "MESSAGE_STATE_COMMITTED"}
    call = queue.unary("/tmc.v1.MessageService/SubmitMany", message_pb2.SubmitManyResponse)
    for key in ("another", "and another"):
        request = message_pb2.SubmitRequest(topic="order.paid", key=key, attempt_id=ATTEMPT)
        call(message_pb2.SubmitManyRequest(items=[request]), timeout=1.0)
    assert _prepared(queue)[0].message_id == "1-1-5-7"
    assert [letter.attributes["tmcop"] for letter in played.letters] == ["prepare", "submit", "submit"]
