"""Bodies by their declared types."""

from __future__ import annotations

import dataclasses
from typing import Any

import pydantic
import pytest

from tmc_client import codecs, errors
from tmc_client.protocol import types_pb2


class Paid(pydantic.BaseModel):
    order: int
    note: str = ""


@dataclasses.dataclass
class Shipped:
    order: int


@pytest.mark.parametrize(
    ("body", "wanted", "content_type"),
    [
        (b"\x00\xff", bytes, codecs.BYTES),
        ("grüße", str, codecs.TEXT),
        ({"a": [1, None]}, dict, codecs.JSON),
        ([1, 2], list[int], codecs.JSON),
        (Paid(order=7, note="é"), Paid, codecs.JSON),
        (Shipped(7), Shipped, codecs.JSON),
        (types_pb2.ItemError(code=3, message="x"), types_pb2.ItemError, codecs.PROTOBUF),
    ],
)
def test_bodies_survive_the_way(body: object, wanted: Any, content_type: str) -> None:
    data, kind = codecs.encode(body)
    assert kind == content_type
    assert codecs.decode(data, kind, wanted) == body


@pytest.mark.parametrize(("body", "expected"), [(b"x", b"x"), ("x", "x"), ({"a": 1}, {"a": 1})])
def test_without_a_declared_type_the_content_type_decides(body: object, expected: object) -> None:
    assert codecs.decode(*codecs.encode(body), Any) == expected


@pytest.mark.parametrize(
    ("data", "wanted"),
    [(b"{", dict), (b"[]", dict), (b"\xff", str), (b'{"order": "x"}', Paid), (b'{"no": 1}', Shipped)],
)
def test_bytes_that_do_not_fit_are_named(data: bytes, wanted: Any) -> None:
    with pytest.raises(errors.CodecError, match="The body is no"):
        codecs.decode(data, codecs.JSON, wanted)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(errors.CodecError, match="type object cannot be sent"):
        codecs.encode(object())
