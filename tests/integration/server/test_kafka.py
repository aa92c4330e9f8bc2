"""Forwarding to Kafka, on the mock cluster inside librdkafka, which fails on request; test_kafka_broker.py has a real one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from confluent_kafka import Consumer, KafkaError

from tests.support.mock_kafka import INIT_PRODUCER_ID, MockKafka
from tests.support.outlet import RecordedAnswers, SomeCatalog, a_copy
from tmc_server.delivery import kafka
from tmc_server.delivery.kafka import KafkaForwarder
from tmc_server.domain.catalog import Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ports.delivery import ForwarderUnavailable
from tmc_storm.eventually import eventually

FORWARDS = (Forward("kafka", "events", ""), Forward("kafka", "events", "of the subscription"))


class Bench:
    """Subscriptions 1 and 2 forward to the topic `events`."""

    def __init__(self, **settings: object) -> None:
        self.catalog = SomeCatalog("consumer", 0, FORWARDS)
        self.answers = RecordedAnswers()
        self.outlet = KafkaForwarder(self.catalog, self.answers, lambda: None, {"test.mock.num.brokers": 1, **settings})
        self.outlet.start()

    def send(self, *copies: object) -> None:
        for copy in copies:
            assert self.outlet.reserve(copy.subscription, 1) == 1
        self.outlet.deliver(copies)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.outlet.stop()


def test_a_confirm_is_the_ack(bench: Bench) -> None:
    copies = [a_copy(1) for _ in range(50)]
    bench.send(*copies)
    eventually(lambda: len(bench.answers.acknowledged) == 50)
    eventually(lambda: bench.outlet.in_flight == 0)
    assert (bench.answers.refused, bench.answers.given_back) == ([], [])
    assert bench.outlet.look(1) == QueueLook(consumers=1)


def test_what_arrives_carries_key_and_headers(bench: Bench) -> None:
    plain, own, subscribed = a_copy(1), a_copy(1, headers={"tmc-forward-key": "own"}), a_copy(2)
    ordered = a_copy(1, headers={"tmc-order-key": "alice"})
    bench.send(plain, own, subscribed, ordered)
    eventually(lambda: len(bench.answers.acknowledged) == 4)
    got = {message.key(): message for message in _received(bench, 4)}
    assert {(key, message.value()) for key, message in got.items()} == {
        (key, b"hello") for key in (b"key", b"of the subscription", b"own", b"alice")
    }
    assert dict(got[b"alice"].headers())["tmc-order-key"] == b"alice"


def test_an_error_that_ends_a_producer_ends_no_deliveries() -> None:
    """A right that was missing for a moment: librdkafka never uses that producer again."""
    cluster = MockKafka()
    cluster.refuse(INIT_PRODUCER_ID, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    bench = Bench(**{"test.mock.num.brokers": 0, "bootstrap.servers": cluster.bootstrap})
    first, next_ = a_copy(1), a_copy(1)
    bench.send(first)
    eventually(lambda: bench.answers.given_back)
    eventually(lambda: bench.outlet.reserve(1, 1))  # after its pause
    bench.outlet.deliver([next_])
    eventually(lambda: bench.answers.acknowledged == [next_])
    assert bench.outlet.in_flight == 0
    bench.outlet.stop()
    cluster.close()


def test_a_record_is_a_cloud_event(bench: Bench) -> None:
    copy = a_copy(
        1, body=b'{"n": 1}', content_type="application/json", headers={"shop": "1", "ce_id": "x", "Content-Type": "y"}
    )
    bench.send(copy)
    (message,) = _received(bench, 1)
    headers = dict(message.headers())
    event = from_binary_event(KafkaMessage(headers=headers, key=None, value=message.value()))
    attributes = event.get_attributes()
    attributes.pop("time")  # of the library
    assert attributes == {
        "specversion": "1.0",
        "id": f"1-1-03-{copy.number}",
        "source": "/tmc/orders",
        "type": "t1",
        "subject": "key",
        "datacontenttype": "application/json",
        "tmcattempt": "1",
        "tmcsubscriber": "consumer.default",
    }
    assert event.get_data() == {"n": 1}
    bench.send(a_copy(1, content_type=""))
    without = dict(_received(bench, 2)[1].headers())
    assert from_binary_event(KafkaMessage(headers=without, key=None, value=b"x")).get_datacontenttype() is None
    own = {name: text for name, text in headers.items() if not name.startswith("ce_") and name != "content-type"}
    assert own == {"shop": b"1", "tmc-user-ce_id": b"x", "tmc-user-Content-Type": b"y"}


def _received(bench: Bench, count: int) -> list[Any]:
    (broker,) = bench.outlet._producer.list_topics(timeout=5).brokers.values()
    reader = Consumer(
        {
            "bootstrap.servers": f"{broker.host}:{broker.port}",
            "group.id": str(uuid.uuid4()),
            "auto.offset.reset": "earliest",
        }
    )
    reader.subscribe(["events"])
    found: list[Any] = []
    while len(found) < count:
        message = reader.poll(1)
        if message is not None and message.error() is None:
            found.append(message)
    reader.close()
    return found


def test_a_message_that_is_too_large_for_kafka_is_failed_at_once_and_alone() -> None:
    bench = Bench(**{"message.max.bytes": 1000})
    large, small = a_copy(1, body=b"x" * 2000), a_copy(1)
    bench.send(large, small)
    eventually(lambda: bench.answers.acknowledged == [small])
    eventually(lambda: bench.outlet.in_flight == 0)
    assert bench.answers.final == [large]
    assert "too large" in bench.answers.refused[0][1].lower()
    assert bench.answers.given_back == []
    bench.outlet.stop()


class Refusing:
    """A producer whose broker refuses each batch with a record over its limit."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.batches = settings.get("batch.num.messages") != 1
        self.waiting: list[tuple[bytes, Callable[[object, object], None]]] = []

    def produce(self, _topic: str, body: bytes, _key: bytes, *, headers: object, on_delivery: Any) -> None:
        self.waiting.append((body, on_delivery))
        if not self.batches:
            self.answer()

    def answer(self) -> None:
        batch, self.waiting = self.waiting, []
        refused = any(len(body) > 1000 for body, _ in batch)
        for _, on_delivery in batch:
            on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE) if refused else None, None)

    def poll(self, _seconds: float) -> None: ...

    def flush(self, _seconds: float) -> int:
        return 0


def test_a_record_that_is_too_large_for_the_broker_does_not_take_its_batch_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Refusing] = []

    def producer(settings: dict[str, object]) -> Refusing:
        made.append(Refusing(settings))
        return made[-1]

    monkeypatch.setattr(kafka, "Producer", producer)
    bench = Bench()
    small, large = [a_copy(1) for _ in range(59)], a_copy(1, body=b"x" * 2000)
    bench.send(*small, large)
    made[0].answer()
    assert bench.answers.acknowledged == small
    assert (bench.answers.final, bench.answers.given_back) == ([large], [])
    assert bench.outlet.in_flight == 0
    bench.outlet.stop()


def test_while_kafka_has_not_answered_no_second_copy_is_made() -> None:
    catalog, answers = SomeCatalog("consumer", 0, FORWARDS), RecordedAnswers()
    settings = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 60_000, "log_level": 0}
    outlet = KafkaForwarder(catalog, answers, lambda: None, settings)
    outlet.start()
    assert outlet.reserve(1, 1) == 1
    copy = a_copy(1)
    outlet.deliver([copy])
    look = outlet.look(1)
    assert look is not None
    assert look.unwritten == {(copy.shard, copy.number)}
    outlet.stop()


def test_brokers_that_are_away_count_nothing(caplog: pytest.LogCaptureFixture) -> None:
    catalog, answers = SomeCatalog("consumer", 0, FORWARDS), RecordedAnswers()
    settings = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 500, "log_level": 0}
    outlet = KafkaForwarder(catalog, answers, lambda: None, settings)
    outlet.start()
    assert outlet.reserve(1, 1) == 1
    outlet.deliver([a_copy(1)])
    eventually(lambda: answers.given_back)
    assert outlet.look(1) is None  # it is away
    assert "Connection refused" in caplog.text
    assert (answers.refused, answers.acknowledged) == ([], [])
    assert outlet.reserve(1, 1) == 0  # a pause of its own
    outlet.stop()


def test_without_brokers_it_is_no_forwarder() -> None:
    """So its rows wait, and their owner is alerted that this server cannot forward them."""
    with pytest.raises(ForwarderUnavailable, match=r"\[kafka\] bootstrap"):
        KafkaForwarder(SomeCatalog("consumer", 0, FORWARDS), RecordedAnswers(), lambda: None, {})
