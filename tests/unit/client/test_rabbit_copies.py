"""What comes out of a queue: copies of the center, and whatever else somebody publishes there."""

from __future__ import annotations

import struct
from typing import Any

import pika
import pytest

from tmc_client.consuming.received import Message
from tmc_client.consuming.screening import Calls, Screen
from tmc_client.consuming.transports import rabbitmq
from tmc_client.consuming.transports.rabbitmq import Credentials, Plan, RabbitTransport, _Reader, message_of

HEADERS = {"tmc-key": "k", "tmc-attempt": 2, "tmc-subscriber": "coupons.default", "tmc-interval-ms": 700, "trace": "x"}


def _properties(**changes: Any) -> pika.BasicProperties:
    usual: dict[str, Any] = {
        "message_id": "1-2-03-4",
        "type": "order.paid",
        "content_type": "text/plain",
        "app_id": "orders",
        "headers": HEADERS,
    }
    return pika.BasicProperties(**usual | changes)


def test_a_copy_of_the_center_is_read_whole() -> None:
    assert message_of(_properties(), b"body") == Message(
        id="1-2-03-4",
        topic="order.paid",
        key="k",
        body=b"body",
        content_type="text/plain",
        headers={"trace": "x"},
        attempt=2,
        producer="orders",
        subscriber="coupons.default",
        interval_ms=700,
    )


def test_the_signature_is_no_header_of_the_user() -> None:
    assert message_of(_properties(headers=HEADERS | {"tmc-signature": "v1=0:0"}), b"").headers == {"trace": "x"}


def test_a_copy_of_an_older_center_has_no_interval() -> None:
    headers = {name: value for name, value in HEADERS.items() if name != "tmc-interval-ms"}
    assert message_of(_properties(headers=headers), b"").interval_ms == 0


MALFORMED = {
    "no properties": pika.BasicProperties(),
    "headers None": _properties(headers=None),
    "no message id": _properties(message_id=None),
    "foreign message id": _properties(message_id="f3b1-uuid"),
    "message id not UTF-8": _properties(message_id=b"\xff\xfe"),
    "no topic": _properties(type=None),
    "topic not UTF-8": _properties(type=b"\xff"),
    "attempt not numeric": _properties(headers=HEADERS | {"tmc-attempt": "first"}),
    "attempt zero": _properties(headers=HEADERS | {"tmc-attempt": 0}),
    "attempt a table": _properties(headers=HEADERS | {"tmc-attempt": {"a": 1}}),
    "attempt true": _properties(headers=HEADERS | {"tmc-attempt": True}),
    "attempt beyond": _properties(headers=HEADERS | {"tmc-attempt": 2**31}),
    "no attempt": _properties(headers={"tmc-key": "k", "tmc-subscriber": "a.b"}),
    "interval not numeric": _properties(headers=HEADERS | {"tmc-interval-ms": b"\xff"}),
    "header name not UTF-8": _properties(headers=HEADERS | {b"\xff": "x"}),
}


class _Channel:
    def __init__(self) -> None:
        self.acked: list[int] = []

    def basic_ack(self, tag: int) -> None:
        self.acked.append(tag)


class _Method:
    delivery_tag = 7
    redelivered = False


@pytest.mark.parametrize("properties", MALFORMED.values(), ids=MALFORMED)
def test_what_the_center_did_not_make_is_acked_away_and_counted_and_no_handler_sees_it(
    properties: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Message] = []

    def plan() -> Plan:
        raise AssertionError("nobody asks for the plan")

    def unasked(*_: object) -> Any:
        raise AssertionError("the center is not asked about what it did not make")

    calls = Calls(describe=unasked, report=unasked)
    screen = Screen(calls, lambda message, _receipt: seen.append(message))
    transport = RabbitTransport(plan, Credentials("u", "p"), 10, screen)
    reader, channel = _Reader(transport, "queue"), _Channel()
    reader._on_copy(channel, _Method(), properties, b"body")
    assert seen == []
    assert channel.acked == [7]
    assert transport.malformed == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    reader._on_copy(channel, _Method(), _properties(), b"body")
    assert len(seen) == 1


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHL", kind, 1, len(payload)) + payload + b"\xce"


def test_properties_that_the_library_cannot_decode_are_none_and_the_next_frame_is_read() -> None:
    table = b"\x01hZ"  # a field of type Z, which nobody knows
    bad = struct.pack(">HHQH", 60, 0, 5, 1 << 13) + struct.pack(">L", len(table)) + table
    connection = rabbitmq._ConsumerConnection.__new__(rabbitmq._ConsumerConnection)
    connection._frame_buffer = _frame(2, bad) + _frame(3, b"hello")
    consumed, header = connection._read_frame()
    assert (header.body_size, header.properties) == (5, pika.BasicProperties())
    connection._frame_buffer = connection._frame_buffer[consumed:]
    _, body = connection._read_frame()
    assert body.fragment == b"hello"
