"""A message that the center always refuses is refused where it is recorded: otherwise its transaction would commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.producing import FakeTarget
from tmc_client.tables import outbox as outbox_table
from tmc_common import fields
from tmc_common.protocol import message_pb2, message_pb2_grpc

# What is said of a message beside a good topic, body and key -> the field that is named.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "outer blanks in a key": ({"key": " paid-7"}, "key"),
    "a newline in a key": ({"key": "paid\n7"}, "key"),
    "a key of 129 characters": ({"key": "k" * 129}, "key"),
    "no key": ({"key": ""}, "key"),
    "a key of replays": ({"key": "replay.7"}, "key"),
    "a topic with a blank": ({"topic": "order paid"}, "topic"),
    "no topic": ({"topic": ""}, "topic"),
    "a header of the center": ({"headers": {"tmc-attempt": "7"}}, "headers"),
    "a header with a blank": ({"headers": {"a b": "7"}}, "headers"),
    "a header with a newline": ({"headers": {"a": "7\n8"}}, "headers"),
    "65 headers": ({"headers": {f"h{number}": "" for number in range(65)}}, "headers"),
    "9,000 bytes of headers": ({"headers": {"a": "x" * 9_000}}, "headers"),
    "a negative delay": ({"delay": timedelta(seconds=-1)}, "delay_ms"),
    "a delay of two years": ({"delay": timedelta(days=730)}, "delay_ms"),
    "an order key with a tab": ({"order_key": "a\tb"}, "order_key"),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("refused")
    with RunningCenter(f"sqlite:///{folder}/c.db") as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(made)
    yield made
    made.dispose()


def _call(send: Callable[..., Any], said: dict[str, Any]) -> tmc.InvalidRequest:
    values = {"topic": "order.paid", "body": {}, "key": "paid-7", **said}
    with pytest.raises(tmc.InvalidRequest) as caught:
        send(values.pop("topic"), values.pop("body"), **values)
    return caught.value


@pytest.mark.parametrize("kind", REFUSED)
def test_every_face_refuses_it_as_the_center_does(running: RunningCenter, engine: sa.Engine, kind: str) -> None:
    said, field = REFUSED[kind]
    with (
        tmc.connect(running.address, app="orders", key=running.keys["orders"]) as center,
        tmc.Outbox(engine, FakeTarget()) as box,
        Session(engine) as session,
    ):
        errors = [_call(lambda *args, **more: box.add(session, *args, **more), said), _call(center.publish, said)]
        with box.transaction(session) as tx:
            errors.append(_call(tx.send, said))
        with center.transaction(session) as block:
            errors.append(_call(block.send, said))
        session.commit()
        assert session.execute(sa.select(outbox_table)).all() == []
    values = {"topic": "order.paid", "key": "paid-7", "headers": {}, "order_key": "", "delay": timedelta(0)} | said
    request = message_pb2.PublishRequest(
        topic=values["topic"],
        key=values["key"],
        headers=values["headers"],
        order_key=values["order_key"],
        delay_ms=round(values["delay"].total_seconds() * 1000),
        attempt_id=bytes(16),
    )
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as refused:
        message_pb2_grpc.MessageServiceStub(channel).Publish(request, metadata=running.as_app("orders"), timeout=60)
    assert {(error.reason, error.field, str(error)) for error in errors} == {
        ("FIELD_INVALID", field, str(refused.value.details()))
    }


def test_half_of_a_surrogate_pair_is_refused(engine: sa.Engine) -> None:
    """Protobuf cannot carry it to the center, whose answer is therefore not compared."""
    with tmc.Outbox(engine, FakeTarget()) as box, Session(engine) as session:
        for said in ({"headers": {"a": "\ud800"}}, {"key": "\ud800"}):
            assert "cannot be sent" in str(_call(lambda *args, **more: box.add(session, *args, **more), said))


def test_a_block_refuses_what_its_fallback_would_refuse(running: RunningCenter, engine: sa.Engine) -> None:
    """At once, not when the center is away."""
    with (
        tmc.connect(running.address, app="orders", key=running.keys["orders"]) as center,
        tmc.Outbox(engine, center, body_bytes=1_000) as box,
        Session(engine) as session,
        center.transaction(session, fallback=box) as block,
    ):
        error = _call(block.send, {"body": b"x" * 1_001})
    assert (error.reason, error.field) == ("FIELD_INVALID", "body")


def test_an_outbox_refuses_a_body_that_its_center_does_not_take(engine: sa.Engine) -> None:
    large = b"x" * (fields.BODY_BYTES + 1)
    with tmc.Outbox(engine, FakeTarget()) as box, Session(engine) as session:
        error = _call(lambda *args, **more: box.add(session, *args, **more), {"body": large})
        assert (error.reason, error.field) == ("FIELD_INVALID", "body")
    with tmc.Outbox(engine, FakeTarget(), body_bytes=1 << 20) as box, Session(engine) as session:
        box.add(session, "order.paid", large, key="paid-7")
        session.commit()
