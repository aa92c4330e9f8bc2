"""A real Kafka: forwarding, the outbox and submit topics, also while the broker is killed."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from confluent_kafka import Consumer
from confluent_kafka.admin import NewTopic
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.doors import KafkaDoor, Step, open_queue
from tests.support.kafka import Kafka
from tmc_client.outbox.entries import Entry, Trouble
from tmc_client.outbox.kafka_target import KafkaTarget
from tmc_common.protocol import types_pb2
from tmc_common.submission import dead_queue_of, queue_of
from tmc_storm.eventually import eventually

pytestmark = pytest.mark.services


class Read:
    """Everything in a topic, again and again from its beginning. make: the topic first."""

    def __init__(self, kafka: Kafka, topic: str, make: bool = True) -> None:
        if make:
            admin = kafka.admin()
            admin.create_topics([NewTopic(topic, 3)])[topic].exception(30)
        settings = {"bootstrap.servers": kafka.bootstrap, "group.id": os.urandom(8).hex(), "log_level": 0}
        self._consumer: Any = Consumer(settings | {"auto.offset.reset": "earliest"})
        self._consumer.subscribe([topic])
        self.records: list[Any] = []

    def all(self) -> list[Any]:
        self.records += [each for each in self._consumer.consume(500, 0.1) if each.error() is None]
        return self.records

    def close(self) -> None:
        self._consumer.close()


_numbers = itertools.count(1)


def an_entry(topic: str, size: int) -> Entry:
    number = next(_numbers)
    return Entry(
        id=number,
        topic=topic,
        key=f"k{number}",
        order_key="",
        line="",
        body=os.urandom(size),
        content_type="",
        headers={},
        delay_ms=0,
        attempt_id=number.to_bytes(16, "big"),
        created_ms=1,
    )


@pytest.fixture
def center(tmp_path: Path, kafka: Kafka) -> Iterator[RunningCenter]:
    with RunningCenter(
        f"sqlite:///{tmp_path}/c.db", kafka={"bootstrap": kafka.bootstrap}, submission={"kafka": True}
    ) as running:
        yield running


def test_a_forward_reaches_its_topic_whatever_happens_to_the_broker(center: RunningCenter, kafka: Kafka) -> None:
    topic = f"events-{os.urandom(4).hex()}"
    read = Read(kafka, topic)
    forward = types_pb2.Forward(kind="kafka", target=topic)
    center.subscribe(
        "order.events", "analytics", forward=forward, retry=types_pb2.RetryPolicy(interval_ms=500, max_retry=3)
    )
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
        for number in range(200):
            if number == 100:
                eventually(lambda: len(read.all()) >= 50)
                kafka.kill()
            orders.publish("order.events", b"%d" % number, key=f"k{number}")
    kafka.start()
    eventually(lambda: {each.value() for each in read.all()} == {b"%d" % number for number in range(200)})
    (one, *_) = [each for each in read.records if each.value() == b"7"]
    headers = {name: value.decode() for name, value in one.headers()}
    assert (one.key(), headers["ce_subject"], headers["ce_tmcattempt"]) == (b"k7", "k7", "1")
    eventually(lambda: center.detail("order.events", "k150").consumptions)
    failed = center.run_admin("list-consumptions", "order.events", "--app", "analytics", "--state", "failed", "--json")
    assert '"key"' not in failed.stdout  # an outage uses up no retries
    read.close()


def test_an_inbox_gives_forwarded_records_one_effect_whatever_is_read_again(
    center: RunningCenter, kafka: Kafka, tmp_path: Path
) -> None:
    topic = f"coupons-{os.urandom(4).hex()}"
    read = Read(kafka, topic)
    center.subscribe("order.coupons", "coupons", forward=types_pb2.Forward(kind="kafka", target=topic))
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE coupon (number INTEGER)"))
    inbox = tmc.SqlInbox(sessionmaker(engine))
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
        for number in range(20):
            orders.publish("order.coupons", {"number": number}, key=f"k{number}")
    eventually(lambda: len(read.all()) >= 20)
    for record in read.records * 2:  # as after a crash between an effect and the commit of its offset
        message = tmc.Message.from_record(record.headers(), record.value())
        with inbox.once(message) as session:
            if session is not None:
                session.execute(sa.text("INSERT INTO coupon VALUES (:number)"), json.loads(message.body))
    with engine.connect() as connection:
        assert connection.scalars(sa.text("SELECT number FROM coupon ORDER BY number")).all() == list(range(20))
    read.close()
    engine.dispose()


def test_the_outbox_sends_to_kafka(tmp_path: Path, kafka: Kafka) -> None:
    topic = f"outbox-{os.urandom(4).hex()}"
    read = Read(kafka, topic)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    with tmc.Outbox(engine, f"kafka://{kafka.bootstrap}") as outbox:
        for number in range(50):
            with Session(engine) as session:
                outbox.add(session, topic, {"n": number}, key=f"k{number}", order_key="one line")
                session.commit()
        eventually(lambda: len({each.value() for each in read.all()}) == 50)
    assert len({each.partition() for each in read.records}) == 1
    firsts = list(dict.fromkeys(each.value() for each in read.records))
    assert firsts == [b'{"n":%d}' % number for number in range(50)]
    first = read.records[0]
    message = tmc.Message.from_record(first.headers(), first.value(), subscriber="coupons")
    assert (message.topic, message.key, message.order_key) == (topic, "k0", "one line")
    read.close()
    engine.dispose()


def test_a_record_that_is_too_large_takes_no_other_with_it(kafka: Kafka) -> None:
    topic = f"limited-{os.urandom(4).hex()}"
    admin = kafka.admin()
    admin.create_topics([NewTopic(topic, 1, config={"max.message.bytes": "50000"})])[topic].result(30)
    target = KafkaTarget(f"kafka://{kafka.bootstrap}")
    for _ in range(3):
        answers = target.send([an_entry(topic, 100_000 if number == 7 else 100) for number in range(20)])
        assert [answer and answer.trouble for answer in answers] == [
            Trouble.REFUSED if number == 7 else None for number in range(20)
        ]
        assert target.send([an_entry(topic, 1_000) for _ in range(100)]) == [None] * 100  # together they are too large
    target.close()


def test_refused_records_are_kept_and_the_next_ones_are_taken(center: RunningCenter, kafka: Kafka) -> None:
    door = KafkaDoor(kafka.bootstrap, "orders", open_queue(center, "orders"))
    eventually(lambda: queue_of("orders", "default") in kafka.admin().list_topics(timeout=5).topics)
    dead = Read(kafka, dead_queue_of("orders"), make=False)
    run = os.urandom(4).hex()
    bad = Step(op="publish", key="", attempt=os.urandom(16), body=run.encode(), headers={"shop": "1"})
    door.publish(bad)
    door.flush()
    answers = door.send(
        Step(op="publish", key=f"{run}a", attempt=os.urandom(16)),
        Step(
            op="publish", key=f"{run}b", attempt=os.urandom(16), body=b"x" * 900_000
        ),  # below Kafka's limit, above ours
        Step(op="publish", key=f"{run}c", attempt=os.urandom(16)),
    )
    assert [answer.outcome for answer in answers] == ["COMMITTED", "FIELD_INVALID", "COMMITTED"]
    eventually(lambda: [each for each in dead.all() if each.value() == run.encode()])
    (kept,) = [each for each in dead.records if each.value() == run.encode()]
    headers = {name: value.decode() for name, value in kept.headers()}
    assert (headers["tmc-reason"], headers["shop"], headers["ce_tmcop"]) == ("FIELD_INVALID", "1", "publish")
    dead.close()
    door.close()


def test_many_answers_do_not_stop_a_partition(center: RunningCenter, kafka: Kafka) -> None:
    """More than may be here at once, all answered: the partition is paused, and read again."""
    door = KafkaDoor(kafka.bootstrap, "orders", open_queue(center, "orders"))
    eventually(lambda: queue_of("orders", "default") in kafka.admin().list_topics(timeout=5).topics)
    lines = f"{os.urandom(4).hex()}-line"
    center.subscribe("order.lines", "coupons", topic_settings={"ordered": True})
    steps = [
        Step(op="publish", topic="order.lines", key=f"{lines}{i}", order_key=lines, attempt=os.urandom(16))
        for i in range(2_500)
    ]
    assert {answer.outcome for answer in door.send(*steps)} == {"COMMITTED"}
    door.close()


def test_a_center_that_starts_before_kafka_reads_when_it_is_there(tmp_path: Path) -> None:
    kafka = Kafka()
    kafka.kill()
    with RunningCenter(
        f"sqlite:///{tmp_path}/c.db", kafka={"bootstrap": kafka.bootstrap}, submission={"kafka": True}
    ) as center:
        secret = open_queue(center, "orders")
        kafka.start()
        eventually(lambda: queue_of("orders", "default") in kafka.admin().list_topics(timeout=5).topics)
        door = KafkaDoor(kafka.bootstrap, "orders", secret)
        assert door.send(Step(op="publish", attempt=os.urandom(16)))[0].outcome == "COMMITTED"
        door.close()
    kafka.stop()
