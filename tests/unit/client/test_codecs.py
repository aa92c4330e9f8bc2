"""Bodies by their declared types."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import subprocess
import sys
import uuid
from typing import Any, NamedTuple, TypedDict

import pydantic
import pytest

from tmc_client import codecs, errors
from tmc_common.protocol import types_pb2


class Paid(pydantic.BaseModel):
    order: int
    note: str = ""


@dataclasses.dataclass
class Shipped:
    order: int


class Currency(enum.Enum):
    EURO = "EUR"


@dataclasses.dataclass(frozen=True)
class Line:
    sku: uuid.UUID
    price: decimal.Decimal
    model: Paid | None = None


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict):
    gift: bool


@pydantic.dataclasses.dataclass
class Checked:
    order: pydantic.PositiveInt


@dataclasses.dataclass
class Everything:
    at: datetime.datetime
    day: datetime.date
    after: datetime.timedelta
    currency: Currency
    lines: list[Line]
    by_name: dict[str, Line]
    by_id: dict[uuid.UUID, int]
    where: Point
    options: Options
    raw: bytes
    either: int | str
    note: str | None = None


LINE = Line(uuid.UUID(int=7), decimal.Decimal("19.90"), Paid(order=7))
EVERYTHING = Everything(
    at=datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC),
    day=datetime.date(2026, 1, 2),
    after=datetime.timedelta(hours=36),
    currency=Currency.EURO,
    lines=[LINE, dataclasses.replace(LINE, model=None)],
    by_name={"first": LINE},
    by_id={uuid.UUID(int=8): 1},
    where=Point(1, 2),
    options={"gift": True},
    raw=b"\x00\xff",
    either="x",
)


@pytest.mark.parametrize(
    ("body", "wanted", "content_type"),
    [
        (b"\x00\xff", bytes, codecs.BYTES),
        ("grüße", str, codecs.TEXT),
        ({"a": [1, None]}, dict, codecs.JSON),
        ([1, 2], list[int], codecs.JSON),
        (Paid(order=7, note="é"), Paid, codecs.JSON),
        (Shipped(7), Shipped, codecs.JSON),
        (EVERYTHING, Everything, codecs.JSON),
        ([LINE, LINE], list[Line], codecs.JSON),
        ([Paid(order=1)], list[Paid], codecs.JSON),
        (Checked(order=7), Checked, codecs.JSON),
        (uuid.UUID(int=9), uuid.UUID, codecs.JSON),
        (7, int | None, codecs.JSON),
        (None, int | None, codecs.JSON),
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
    assert codecs.decode(*codecs.encode(body), object) == expected


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"{", dict),
        (b"[]", dict),
        (b"\xff", str),
        (b'{"order": "x"}', Paid),
        (b'{"no": 1}', Shipped),
        (b'{"order": "x"}', Shipped),
        (b'["x"]', list[int]),
        (b'{"order": 0}', Checked),
        (b"{}", subprocess.Popen),
    ],
)
def test_bytes_that_do_not_fit_are_named(data: bytes, wanted: Any) -> None:
    with pytest.raises(errors.CodecError, match="The body is no"):
        codecs.decode(data, codecs.JSON, wanted)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(errors.CodecError, match="type object cannot be sent"):
        codecs.encode(object())


def test_a_field_that_the_consumer_does_not_know_yet_is_ignored() -> None:
    assert codecs.decode(b'{"order":7,"new":{"a":1}}', codecs.JSON, Shipped) == Shipped(7)
    nested = b'{"sku":"00000000-0000-0000-0000-000000000007","price":"19.90","model":{"order":7,"new":1},"new":[]}'
    assert codecs.decode(nested, codecs.JSON, Line) == LINE


def test_json_of_earlier_versions_is_read() -> None:
    """Dataclasses went through asdict, and the standard library writes what is no JSON."""
    assert codecs.decode(b'{"order":7}', codecs.JSON, Shipped) == Shipped(7)
    assert codecs.decode(b'{"a":Infinity}', codecs.JSON, dict[str, float]) == {"a": float("inf")}
    assert codecs.encode(Shipped(7))[0] == b'{"order":7}'


@pytest.mark.parametrize("body", [float("nan"), {"a": object()}, {object(): 1}, [types_pb2.ItemError()]])
def test_what_json_cannot_carry_is_refused_with_what_can_travel(body: object) -> None:
    with pytest.raises(errors.CodecError, match=r"cannot be sent: .* Send bytes, str, "):
        codecs.encode(body)


def test_reading_bodies_loads_their_library_at_first_use() -> None:
    script = "import sys, tmc_client; assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


class StoppedError(Exception):
    """A signal handler raises it, such as Celery's SoftTimeLimitExceeded."""


class Slow:
    def model_dump_json(self) -> str:
        raise StoppedError

    @classmethod
    def model_validate_json(cls, _body: bytes) -> Slow:
        raise StoppedError


def test_what_a_signal_handler_raises_meanwhile_is_no_fault_of_the_body() -> None:
    with pytest.raises(StoppedError):
        codecs.encode(Slow())
    with pytest.raises(StoppedError):
        codecs.decode(b"{}", "application/json", Slow)
