"""Which copies reach a handler, what happens to the others, and what they cost the center."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.common.test_signatures import A_MESSAGE, KEY
from tmc_client import errors
from tmc_client.consuming.received import Message
from tmc_client.consuming.screening import Calls, Screen, Suspect, signed_content
from tmc_common import signatures
from tmc_common.protocol import consumption_pb2
from tmc_storm.eventually import eventually

OTHER_KEY, STRANGERS_KEY = bytes(32), b"s" * 32
QUEUE = "tmc.sub.coupons.default.order.paid"


class _Receipt:
    def __init__(self) -> None:
        self.acked = threading.Event()

    def handled(self) -> None: ...

    def answered(self) -> None:
        self.acked.set()


class _Center:
    """Tells `keys`; `later` what it tells from the second question on. away: it answers nothing."""

    def __init__(self, *keys: bytes) -> None:
        self.keys: tuple[bytes, ...] = keys
        self.asked = 0
        self.away = 0
        self.reports: list[tuple[str, int, str]] = []
        self.handled: list[Message] = []
        self.now = 1000.0
        self.before_answer: Callable[[], None] = lambda: None
        calls = Calls(describe=self._describe, report=self._report)
        self.screen = Screen(calls, lambda message, _: self.handled.append(message), lambda: self.now)
        self._describe()
        self.asked = 0

    def _describe(self) -> None:
        self.asked += 1
        self.before_answer()
        if self.away:
            self.away -= 1
            raise errors.Unavailable("away")
        found = consumption_pb2.SubscriptionInfo(
            topic="order.paid", queue=QUEUE, delivery_keys=[key.hex() for key in self.keys]
        )
        self.screen.learn(consumption_pb2.DescribeSubscriptionsResponse(subscriptions=[found]))

    def _report(self, request: consumption_pb2.ReportForgedCopiesRequest) -> None:
        self.reports.append((request.topic, request.count, request.message_id))

    def arrive(self, message: Message = A_MESSAGE, key: bytes | None = KEY, signature: object = None) -> _Receipt:
        """key: what it is signed with."""
        receipt = _Receipt()
        if key is not None:
            signature = signatures.sign(key, signed_content(message))
        self.screen.arrive(Suspect(message=message, signature=signature, queue=QUEUE, receipt=receipt))
        return receipt


def test_a_signed_copy_is_handled_at_once_and_the_center_is_not_asked() -> None:
    center = _Center(KEY, OTHER_KEY)
    center.arrive()
    center.arrive(key=OTHER_KEY)  # the key before
    assert center.handled == [A_MESSAGE, A_MESSAGE]
    assert (center.asked, center.screen.forged) == (0, 0)


@pytest.mark.parametrize(
    "tampered",
    [{"body": b"other"}, {"headers": {}}, {"attempt": 3}, {"topic": "order.sent"}, {"id": "1-1-0-8"}, {"key": "x"}],
    ids=str,
)
def test_a_tampered_copy_is_refused(tampered: dict[str, Any]) -> None:
    center = _Center(KEY)
    signature = signatures.sign(KEY, signed_content(A_MESSAGE))
    receipt = center.arrive(replace(A_MESSAGE, **tampered), None, signature)
    center.now += 1
    assert receipt.acked.wait(10)
    assert center.handled == []
    assert center.screen.forged == 1


@pytest.mark.parametrize(
    "signature", [None, "", 7, b"\xff", "v1=", "v2=0:0", "v1=\ud800:0", f"v1={signatures.key_id(KEY)}:\ud800"], ids=repr
)
def test_a_copy_without_a_signature_of_the_center_is_refused(signature: object) -> None:
    center = _Center(KEY)
    center.now += 1
    assert center.arrive(key=None, signature=signature).acked.wait(10)
    assert (center.handled, center.screen.forged) == ([], 1)


def test_a_copy_signed_with_a_new_key_waits_for_the_center_to_tell_it() -> None:
    center = _Center(KEY)
    center.keys = (OTHER_KEY, KEY)
    center.away = 1
    center.before_answer = lambda: setattr(center, "now", center.now + 1)
    center.now += 1
    receipt = center.arrive(key=OTHER_KEY)
    eventually(lambda: center.handled == [A_MESSAGE])
    assert (center.asked, center.screen.forged, receipt.acked.is_set()) == (2, 0, False)


def test_a_copy_of_a_topic_that_is_not_known_yet_waits_for_the_center_to_tell_it() -> None:
    center = _Center(KEY)
    center.screen.learn(
        consumption_pb2.DescribeSubscriptionsResponse(
            subscriptions=[consumption_pb2.SubscriptionInfo(topic="t", delivery_keys=[OTHER_KEY.hex()])]
        )
    )
    center.now += 1
    center.arrive()
    eventually(lambda: center.handled == [A_MESSAGE])


def test_a_flood_of_forged_copies_costs_the_center_one_question_and_two_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    center = _Center(KEY)
    center.now += 1
    answer = threading.Event()
    center.before_answer = lambda: answer.wait(10) and None
    receipts = [center.arrive(replace(A_MESSAGE, id=f"1-1-0-{n}"), STRANGERS_KEY) for n in range(200)]
    answer.set()
    assert all(receipt.acked.wait(10) for receipt in receipts[:1])
    center.now += 1
    assert all(receipt.acked.wait(10) for receipt in receipts)
    eventually(lambda: sum(count for _, count, _ in center.reports) == 200)
    assert center.asked <= 2
    assert len(center.reports) <= 2
    assert {topic for topic, _, _ in center.reports} == {"order.paid"}
    assert center.reports[0][2] == "1-1-0-0"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == len(center.reports)
    assert (center.handled, center.screen.forged) == ([], 200)


def test_a_forged_topic_is_reported_for_a_subscription_of_its_queue() -> None:
    center = _Center(KEY)
    center.now += 1
    center.arrive(replace(A_MESSAGE, topic="nobody.knows"), STRANGERS_KEY)
    eventually(lambda: center.reports == [("order.paid", 1, A_MESSAGE.id)])


def test_where_the_center_tells_no_keys_nothing_is_verified() -> None:
    center = _Center()
    center.arrive(key=None)
    center.arrive(key=STRANGERS_KEY)
    assert len(center.handled) == 2


def test_a_consumer_notices_that_signatures_were_switched_on() -> None:
    center = _Center()
    center.keys = (KEY,)
    center.now += 60
    center.arrive()
    eventually(lambda: center.asked == 1)
    center.now += 60
    assert center.arrive(key=None).acked.wait(10)
    assert len(center.handled) == 1


def test_what_is_held_back_when_the_consumer_stops_comes_again() -> None:
    center = _Center(KEY)
    center.away = 1_000_000
    center.now += 1
    receipt = center.arrive(key=STRANGERS_KEY)
    eventually(lambda: center.asked)
    center.screen.stop()
    thread = center.screen._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert (receipt.acked.is_set(), center.screen.forged) == (False, 0)
