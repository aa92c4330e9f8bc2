"""Records of Kafka and events of webhooks, read back as the messages that were sent."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tmc_client as tmc
from tmc_common.cloud_events import record_headers
from tmc_common.headers import HEADER_NAME

SENT = tmc.Message(
    id="1-1-16-7",
    topic="order.paid",
    key="paid-7",
    body=b'{"total":5}',
    content_type="application/json",
    headers={"shop": "Köln", "tmc-order-key": "7", "tmc-sequence": "12"},
    attempt=2,
    producer="orders",
    subscriber="coupons.default",
)
NAMES = st.one_of(st.from_regex(HEADER_NAME, fullmatch=True), st.sampled_from(["ce_id", "Content-Type", "x-a", "CC"]))


def _record(message: tmc.Message, **others: str) -> list[tuple[str, bytes]]:
    event = {"id": message.id, "source": f"/tmc/{message.producer}", "type": message.topic, "subject": message.key}
    headers = record_headers({**event, **others}, message.content_type, message.headers)
    return [(name, text.encode()) for name, text in headers.items()]


def _event(**changes: Any) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": "1-1-16-7",
        "source": "/tmc/orders",
        "type": "order.paid",
        "subject": "paid-7",
        "datacontenttype": "application/json",
        "tmcattempt": 2,
        "tmcsubscriber": "coupons.default",
        "tmcheaders": json.dumps(dict(SENT.headers)),
        "data": {"total": 5},
    } | changes


@given(headers=st.dictionaries(NAMES.filter(lambda name: not name.lower().startswith("tmc-")), st.text(max_size=20)))
def test_a_forwarded_record_is_the_message_that_was_sent(headers: dict[str, str]) -> None:
    sent = dataclasses.replace(SENT, headers=headers)
    record = _record(sent, tmcattempt="2", tmcsubscriber="coupons.default")
    assert tmc.Message.from_record(record, sent.body) == sent


def test_headers_of_others_may_be_anything() -> None:
    record = [*_record(SENT, tmcsubscriber="coupons.default"), ("agent", b"\xff"), ("other", None)]
    read = tmc.Message.from_record(record, SENT.body)
    assert {name: read.headers[name] for name in ("agent", "other")} == {"agent": "\ufffd", "other": ""}


def test_a_record_of_an_outbox_names_no_subscriber() -> None:
    record = _record(SENT)
    with pytest.raises(tmc.CodecError, match="names no subscriber, give one"):
        tmc.Message.from_record(record, SENT.body)
    read = tmc.Message.from_record(record, SENT.body, subscriber="mail")
    assert (read.subscriber, read.attempt, read.order_key, read.sequence) == ("mail", 1, "7", 12)


def test_a_posted_event_is_the_message_that_was_sent() -> None:
    assert tmc.Message.from_event(_event()) == SENT


def test_bytes_and_traces_of_an_event() -> None:
    event = _event(
        data_base64=base64.b64encode(b"\x00\xff").decode(), datacontenttype="image/png", traceparent="00-1-2-01"
    )
    del event["data"], event["tmcheaders"]
    read = tmc.Message.from_event(event)
    assert (read.body, read.content_type, read.headers) == (b"\x00\xff", "image/png", {"traceparent": "00-1-2-01"})


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (None, "it names no subscriber"),
        ([("ce_tmcsubscriber", b"a.b")], "it has no 'id'"),
        ([("ce_id", b"\xff")], "can't decode"),
        ([*_record(SENT), ("ce_tmcsubscriber", b"a.b"), ("ce_tmcattempt", b"one")], "'one'"),
    ],
)
def test_other_records_are_refused(headers: Any, says: str) -> None:
    with pytest.raises(tmc.CodecError, match="no record of a center or an outbox: ") as refused:
        tmc.Message.from_record(headers, b"")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "changes", [{"tmcheaders": "{"}, {"tmcheaders": "[]"}, {"data_base64": "%"}, {"source": None}, {"tmcattempt": None}]
)
def test_other_events_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(tmc.CodecError, match="no event of a center: "):
        tmc.Message.from_event(_event(**changes))
