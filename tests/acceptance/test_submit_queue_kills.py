"""Submit queues while servers and brokers are killed: each step counts once, each refusal is kept, the order holds."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pika
import pytest
from confluent_kafka import Consumer

import tmc_client as tmc
from tests.support.cluster import Cluster
from tests.support.doors import KafkaDoor, RabbitDoor, Step, has_queue
from tests.support.dose import LONG
from tests.support.kafka import Kafka
from tmc_common.protocol import admin_pb2
from tmc_common.submission import dead_queue_of, queue_of
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800 if LONG else 300)]
_MESSAGES = 20_000 if LONG else 600
_ORDER_KEYS = 7
_KILLS = 6 if LONG else 3
_OF_SDK = 2_000 if LONG else 100


def _steps(number: int) -> list[Step]:
    """Each third one is ordered, each fifth is rolled back, and one in fifty is refused."""
    attempt = hashlib.sha256(b"%d" % number).digest()[:16]
    body = b"%d" % number
    if number % 50 == 49:
        return [Step(op="publish", key="", attempt=attempt, body=body)]
    first = Step(op="prepare", key=f"m{number}", attempt=attempt, body=body)
    if number % 3 == 0:
        first = replace(first, topic="order.lines", order_key=f"line-{number % _ORDER_KEYS}")
    return [first, replace(first, op="rollback" if number % 5 == 4 else "submit", body=b"")]


def _kind(number: int) -> str:
    return "refused" if number % 50 == 49 else "rolled back" if number % 5 == 4 else "committed"


class _Sdk(threading.Thread):
    """A service with the SDK, which prepares and submits through the same queue meanwhile. wrong: what it did not expect."""

    def __init__(self, address: str, secret: str) -> None:
        super().__init__(daemon=True)
        self._center = tmc.connect(address, app="orders", key=secret, timeout=timedelta(seconds=5))
        self.wrong: list[tmc.TmcError] = []

    def run(self) -> None:
        try:
            with self._center:
                for number in range(_OF_SDK):
                    attempt = tmc.new_attempt_id()
                    prepare = partial(self._center.prepare, "order.paid", b"", key=f"sdk-{number}", attempt_id=attempt)
                    self._repeated(partial(self._center.submit, self._repeated(prepare)))
        except tmc.TmcError as exc:
            self.wrong.append(exc)

    def _repeated(self, call: Callable[[], Any]) -> Any:
        while True:
            with suppress(tmc.DeadlineExceeded, tmc.Unavailable):
                return call()


class _Rabbit:
    """Publishes over a connection that it makes again; what was not confirmed is published again."""

    def __init__(self, cluster: Cluster, secret: str) -> None:
        self._cluster = cluster
        self._secret = secret
        self.sdk = _Sdk(cluster.broker.url.replace("amqp://", "amqp+submit://"), secret)
        self._door: RabbitDoor | None = None

    def publish(self, number: int) -> None:
        while True:
            try:
                if self._door is None:
                    self._door = RabbitDoor(self._cluster.broker.connect(), "orders", self._secret)
                for step in _steps(number):
                    self._door.publish(step)
                return
            except (pika.exceptions.AMQPError, OSError):
                self.close()
                time.sleep(0.1)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def flush(self) -> None: ...

    def dead(self) -> list[bytes]:
        door = RabbitDoor(self._cluster.broker.connect(), "orders", self._secret)
        found = [body for _, body in door.dead()]
        door.close()
        return found

    def kill(self) -> None:
        self._cluster.broker.kill()
        self._cluster.broker.start()


class _Kafka:
    def __init__(self, kafka: Kafka, secret: str) -> None:
        self._kafka = kafka
        self._door = KafkaDoor(kafka.bootstrap, "orders", secret)
        self.sdk = _Sdk(f"kafka+submit://{kafka.bootstrap}/?replies=tmc.reply.orders.tests", secret)
        self._reader: Any = Consumer(
            {"bootstrap.servers": kafka.bootstrap, "group.id": "dead", "auto.offset.reset": "earliest", "log_level": 0}
        )
        self._reader.subscribe([dead_queue_of("orders")])

    def publish(self, number: int) -> None:
        for step in _steps(number):
            self._door.publish(step)

    def flush(self) -> None:
        self._door.flush()

    def dead(self) -> list[bytes]:
        return [record.value() for record in self._reader.consume(500, 0.5) if record.error() is None]

    def kill(self) -> None:
        self._kafka.kill()
        self._kafka.start()

    def close(self) -> None:
        self._reader.close()
        self._door.close()


@pytest.fixture(params=["rabbitmq", "kafka"])
def broker(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, _Rabbit | _Kafka]]:
    kafka = Kafka() if request.param == "kafka" else None
    settings = {"TMC_SUBMISSION__RABBITMQ": "true"}
    if kafka is not None:
        settings = {"TMC_SUBMISSION__KAFKA": "true", "TMC_KAFKA__BOOTSTRAP": kafka.bootstrap}
    with Cluster(servers=2, own_broker=True, **settings) as cluster:
        cluster.register("orders", "coupons")
        transaction = {"transaction_time_ms": 120_000}  # nobody answers checks here
        made = [
            cluster.subscribe("order.paid", "coupons", topic_settings=transaction),
            cluster.subscribe("order.lines", "coupons", topic_settings={"ordered": True, **transaction}),
        ]
        secret = cluster.admin("OpenSubmitQueue", admin_pb2.OpenSubmitQueueRequest(id="orders")).secret
        cluster.in_effect(*made)
        if kafka is None:
            with cluster.broker.connect() as connection:
                eventually(lambda: has_queue(connection, queue_of("orders", "default")))
            publisher = _Rabbit(cluster, secret)
            yield cluster, publisher
            publisher.close()
        else:
            reader = _Kafka(kafka, secret)
            yield cluster, reader
            reader.close()
    if kafka is not None:
        kafka.stop()


def _kill_in_turn(cluster: Cluster, broker: _Rabbit | _Kafka) -> Iterator[None]:
    def server(number: int) -> Callable[[], None]:
        def kill() -> None:
            cluster.servers[number].kill()
            cluster.servers[number].start()

        return kill

    while True:
        for kill in (server(0), broker.kill, server(1)):
            kill()
            yield


@pytest.mark.takes_turns("killed servers")
def test_each_step_counts_once(broker: tuple[Cluster, _Rabbit | _Kafka], note: Callable[[str], None]) -> None:
    cluster, producer = broker
    kills = _kill_in_turn(cluster, producer)
    got: dict[int, list[int]] = {}
    center = tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"])
    consumer = tmc.Consumer(center)

    @consumer.listener("order.lines")
    def line(body: bytes) -> None:
        number = int(body)
        got.setdefault(number % _ORDER_KEYS, []).append(number)

    @consumer.listener("order.paid")
    def paid(_body: bytes) -> None: ...

    with center, consumer:
        producer.sdk.start()
        for number in range(_MESSAGES):
            producer.publish(number)
            if number % (_MESSAGES // (_KILLS + 1)) == _MESSAGES // (_KILLS + 1) - 1 and number < _MESSAGES * 0.9:
                next(kills)
        producer.flush()
        producer.sdk.join()
        assert producer.sdk.wrong == []
        kinds = [_kind(number) for number in range(_MESSAGES)]
        rolled_back = {f"m{number}" for number, kind in enumerate(kinds) if kind == "rolled back"}

        def all_decided() -> bool:
            counts = cluster.messages()
            is_committed = counts["COMMITTED"] == kinds.count("committed") + _OF_SDK
            is_committed = is_committed and counts["ROLLED_BACK"] <= len(rolled_back)
            is_all = set(counts) <= {"COMMITTED", "ROLLED_BACK"}
            return is_committed and is_all and cluster.rolled_back() == rolled_back

        eventually(all_decided, describe=lambda: (cluster.messages(), rolled_back ^ cluster.rolled_back()))
        dead: set[bytes] = set()

        def all_dead() -> bool:
            dead.update(producer.dead())
            return len(dead) == kinds.count("refused")

        eventually(all_dead, describe=lambda: (len(dead), kinds.count("refused")))
        of_lines = {number for number in range(_MESSAGES) if number % 3 == 0 and kinds[number] == "committed"}
        eventually(lambda: {number for several in got.values() for number in several} == of_lines)
    for several in got.values():
        firsts = list(dict.fromkeys(several))
        assert firsts == sorted(firsts)
    note(f"submit queue, {type(producer).__name__[1:]}: {_MESSAGES} messages, {_KILLS} kills, lost 0, out of order 0")
