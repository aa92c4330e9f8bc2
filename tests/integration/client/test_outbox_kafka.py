"""The outbox over the mock cluster inside librdkafka; tests/integration/server/test_kafka_broker.py has a real one."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from confluent_kafka import Consumer, KafkaError
from confluent_kafka.admin import AdminClient

import tmc_client as tmc
from tests.support.mock_kafka import INIT_PRODUCER_ID, MockKafka
from tests.support.producing import FakeTarget
from tmc_client.outbox import Outbox
from tmc_client.outbox.entries import Entry, Trouble
from tmc_client.outbox.kafka_target import KafkaTarget

_numbers = itertools.count(1)


def an_entry(**changes: Any) -> Entry:
    number = next(_numbers)
    made = Entry(
        id=number,
        topic="order.paid",
        key=f"k{number}",
        order_key="",
        line="",
        body=b"hello",
        content_type="text/plain",
        headers={"h": "1"},
        delay_ms=0,
        attempt_id=number.to_bytes(16, "big"),
        created_ms=1,
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def brokers() -> Iterator[str]:
    """The mock cluster lives as long as the client that started it."""
    cluster = AdminClient({"test.mock.num.brokers": 1})
    (broker,) = cluster.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del cluster


def _received(brokers: str, topic: str, count: int) -> list[Any]:
    reader = Consumer({"bootstrap.servers": brokers, "group.id": str(uuid.uuid4()), "auto.offset.reset": "earliest"})
    reader.subscribe([topic])
    found: list[Any] = []
    while len(found) < count:
        message = reader.poll(1)
        if message is not None and message.error() is None:
            found.append(message)
    reader.close()
    return found


def test_messages_arrive_with_key_headers_and_id(brokers: str) -> None:
    target = KafkaTarget(f"kafka://{brokers}")
    plain, ordered = an_entry(), an_entry(order_key="alice")
    assert target.send([plain, ordered]) == [None, None]
    target.close()
    found = {dict(message.headers())["ce_subject"]: message for message in _received(brokers, "order.paid", 2)}
    assert found[plain.key.encode()].key() == plain.key.encode()
    assert found[ordered.key.encode()].key() == b"alice"
    assert dict(found[ordered.key.encode()].headers()) == {
        "h": b"1",
        "tmc-order-key": b"alice",
        "ce_specversion": b"1.0",
        "ce_id": ordered.attempt_id.hex().encode(),
        "ce_source": b"/tmc/outbox",
        "ce_type": b"order.paid",
        "ce_subject": ordered.key.encode(),
        "content-type": b"text/plain",
    }


def test_what_is_too_large_is_refused_alone(brokers: str) -> None:
    target = KafkaTarget(f"kafka://{brokers}", settings={"message.max.bytes": 1000})
    answers = target.send([an_entry(body=b"x" * 2000), an_entry(topic="small")])
    target.close()
    assert [answer and answer.trouble for answer in answers] == [Trouble.REFUSED, None]


def test_after_an_error_that_ends_a_producer_the_next_page_has_another_one() -> None:
    """A right that was missing for a moment: librdkafka never uses that producer again."""
    cluster = MockKafka()
    cluster.refuse(INIT_PRODUCER_ID, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    target = KafkaTarget(f"kafka://{cluster.bootstrap}")
    (answer,) = target.send([an_entry()])
    assert answer is not None
    assert answer.trouble is Trouble.AWAY
    assert target.send([an_entry()]) == [None]
    target.close()
    cluster.close()


def test_brokers_that_are_away(brokers: str) -> None:
    target = KafkaTarget("kafka://127.0.0.1:1", settings={"message.timeout.ms": 300, "log_level": 0})
    (answer,) = target.send([an_entry()])
    target.close()
    assert answer is not None
    assert answer.trouble is Trouble.AWAY


def test_a_target_is_found_by_its_address(brokers: str, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    with Outbox(engine, f"kafka://{brokers}") as outbox:
        with engine.connect() as connection, outbox.transaction(connection) as tx:
            tx.send("by.address", {"order": 7}, key="paid-7")
        assert outbox.flush()
    engine.dispose()
    assert _received(brokers, "by.address", 1)[0].value() == b'{"order":7}'


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("carrier://pigeon", r"knows no target for carrier://: installed are amqp, amqps, kafka"),
        (FakeTarget, r"sends to a Center .* or to a target, not to type"),
    ],
)
def test_a_target_that_cannot_be(target: Any, sentence: str, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with pytest.raises(tmc.InvalidRequest, match=sentence):
        Outbox(engine, target)
    engine.dispose()
