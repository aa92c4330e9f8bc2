"""Signatures of copies: what they cover, and that no two copies share one."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.outlet import SomeCatalog
from tmc_client.consuming.received import Message
from tmc_client.consuming.screening import signed_content
from tmc_client.consuming.transports.rabbitmq import message_of
from tmc_common import signatures
from tmc_server.delivery.rabbitmq_properties import properties_of, sign_copy
from tmc_server.domain.ports.delivery import Copy

KEY = bytes(range(32))
A_MESSAGE = Message(
    id="1-1-0-7",
    topic="order.paid",
    key="k",
    body=b"body",
    content_type="text/plain",
    headers={"trace": "x", "x-delay": "1"},
    attempt=2,
    producer="orders",
    subscriber="coupons.default",
    interval_ms=700,
)
CHANGED: dict[str, Any] = {
    "id": "1-1-0-8",
    "topic": "order.sent",
    "key": "K",
    "body": b"Body",
    "content_type": "",
    "headers": {"trace": "x", "x-delay": "2"},
    "attempt": 3,
    "producer": "order",
    "subscriber": "coupons.test",
    "interval_ms": 70,
}
texts = st.text(max_size=6)
messages = st.builds(
    Message,
    id=texts,
    topic=texts,
    key=texts,
    body=st.binary(max_size=6),
    content_type=texts,
    headers=st.dictionaries(texts, texts, max_size=3),
    attempt=st.integers(1, 30),
    producer=texts,
    subscriber=texts,
    interval_ms=st.integers(0, 30),
)


def a_copy(headers: dict[str, str], body: bytes = b"body") -> Copy:
    return Copy(
        shard=0,
        number=7,
        subscription=1,
        attempt=2,
        topic=1,
        producer=1,
        key="k",
        body=body,
        content_type="text/plain",
        headers=headers,
    )


@given(messages, messages, st.sets(st.sampled_from([field.name for field in fields(Message)]), max_size=2))
def test_two_copies_have_one_encoding_only_if_they_are_the_same(
    one: Message, stranger: Message, differ_in: set[str]
) -> None:
    other = replace(one, **{name: getattr(stranger, name) for name in differ_in})
    assert (signed_content(one) == signed_content(other)) == (one == other)


@given(st.lists(texts, min_size=2, max_size=2), st.lists(texts, min_size=2, max_size=2))
def test_text_does_not_move_from_one_field_to_its_neighbor(one: list[str], other: list[str]) -> None:
    """The same characters in all, cut elsewhere."""
    first = replace(A_MESSAGE, topic=one[0], key=one[1])
    second = replace(A_MESSAGE, topic=other[0], key=other[1])
    assert (signed_content(first) == signed_content(second)) == (one == other)


@pytest.mark.parametrize("field", [field.name for field in fields(Message) if field.name != "redelivered"])
def test_whatever_a_handler_gets_is_signed(field: str) -> None:
    signature = signatures.sign(KEY, signed_content(A_MESSAGE))
    tampered = replace(A_MESSAGE, **{field: CHANGED[field]})
    assert signatures.verify(KEY, signed_content(A_MESSAGE), signature)
    assert not signatures.verify(KEY, signed_content(tampered), signature)


def test_the_order_of_headers_does_not_matter() -> None:
    backwards = replace(A_MESSAGE, headers=dict(reversed(A_MESSAGE.headers.items())))
    assert signed_content(backwards) == signed_content(A_MESSAGE)


def test_a_signature_names_its_key_and_does_not_hold_it() -> None:
    signature = signatures.sign(KEY, b"signed")
    assert signature == f"v1={signatures.key_id(KEY)}:{hmac.digest(KEY, b'signed', 'sha256').hex()}"
    assert signatures.key_id_of(signature) == hashlib.sha256(KEY).hexdigest()[:8]


@pytest.mark.parametrize("signature", [None, 7, b"v1=0:0", "", "v2=0:0", "v1", {"a": 1}])
def test_what_is_no_signature_names_no_key(signature: object) -> None:
    assert signatures.key_id_of(signature) == ""


HEADERS = [{}, {"trace": "x"}, {"CC": "a", "x-delay": "1", "tmc-forward-key": "k"}, {"name": "größer 注文", "a": ""}]


@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_program_of_the_page_about_signatures_agrees(headers: dict[str, str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "signatures.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    copy = a_copy(headers)
    properties = properties_of(copy, SomeCatalog("coupons").current)
    sign_copy(copy, properties, KEY, {})
    assert names["is_genuine"]([bytes(32), KEY], properties, copy.body)
    assert not names["is_genuine"]([bytes(32)], properties, copy.body)
    assert not names["is_genuine"]([KEY], properties, b"other")
    properties.headers["color"] = "blue"
    assert not names["is_genuine"]([KEY], properties, copy.body)


@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_what_the_center_signs_is_what_the_sdk_verifies(headers: dict[str, str]) -> None:
    copy = a_copy(headers)
    properties = properties_of(copy, SomeCatalog("coupons").current)
    sign_copy(copy, properties, KEY, {})
    signature = properties.headers[signatures.HEADER]
    assert signatures.verify(KEY, signed_content(message_of(properties, copy.body)), signature)


def test_subscriptions_of_one_message_share_the_digest_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[bytes] = []
    digest = signatures.body_digest
    monkeypatch.setattr(signatures, "body_digest", lambda body: digested.append(body) or digest(body))
    digests: dict[tuple[int, int], bytes] = {}
    catalog = SomeCatalog("coupons").current
    for subscription in (1, 2):
        copy = structs.replace(a_copy({}), subscription=subscription)
        sign_copy(copy, properties_of(copy, catalog), KEY, digests)
    assert digested == [b"body"]
