"""A center with MariaDB and RabbitMQ, and consumers of the SDK."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pika
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2, consumption_pb2, consumption_pb2_grpc, types_pb2
from tmc_server.delivery import rabbitmq_exchanges
from tmc_server.domain.catalog import Forward
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.errors import ForwardRefused
from tmc_server.store.tables import alert, shard_tables
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.mariadb, pytest.mark.services]
_names = itertools.count(1)
FAST = types_pb2.RetryPolicy(interval_ms=300, max_retry=3)


@pytest.fixture(scope="module")
def center(mariadb: MariaDB, rabbitmq: RabbitMQ) -> Iterator[RunningCenter]:
    with RunningCenter(
        mariadb.url("tmc_delivery"),
        delivery={"kind": "rabbitmq", "scan_seconds": 0.05},
        rabbitmq={"url": rabbitmq.url},
        limits={"items_per_second": 0},
    ) as running:
        yield running


@pytest.fixture
def orders(center: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as connection:
        yield connection


def _topic() -> str:
    return f"topic.{next(_names)}"


def _connect(center: RunningCenter, app: str) -> tmc.Center:
    return tmc.connect(center.address, app=app, key=center.keys[app])


def _consumptions(center: RunningCenter, subscription: int) -> Counter[str]:
    """How many rows of a subscription are in which state, all shards."""
    found: Counter[str] = Counter()
    database = center.server.store.shards.catalog
    for shard in range(32):
        table = shard_tables(shard).consumption
        query = (
            sa.select(table.c.state, sa.func.count())
            .where(table.c.subscription_no == subscription)
            .group_by(table.c.state)
        )
        with database.reading() as connection:
            for state, count in connection.execute(query):
                found[ConsumptionState(state).name] += count
    return found


def _alerts(center: RunningCenter, subscription: int) -> list[str]:
    with center.server.store.shards.catalog.reading() as connection:
        return list(connection.execute(sa.select(alert.c.kind).filter_by(subscription_no=subscription)).scalars())


def test_multi_queues_each_topic_to_its_listener(center: RunningCenter, orders: tmc.Center) -> None:
    app = f"app{next(_names)}"
    topics = [_topic(), _topic()]
    made = [center.subscribe(topic, app) for topic in topics]
    assert [subscription.queue for subscription in made] == [f"tmc.sub.{app}.default.{topic}" for topic in topics]
    got: list[tuple[str, object, str]] = []
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)
        for topic in topics:

            @consumer.listener(topic)
            def handle(body: dict, message: tmc.Message) -> None:
                got.append((message.topic, body, message.headers.get("color", "")))

        with consumer:
            for topic in topics:
                orders.publish(topic, {"topic": topic}, key="k", headers={"color": "red"})
            eventually(lambda: len(got) == 2)
    assert sorted(got) == sorted((topic, {"topic": topic}, "red") for topic in topics)
    assert _consumptions(center, made[0].number) == {"ACKED": 1}


def test_a_single_queue_brings_all_its_topics_to_one_object(center: RunningCenter, orders: tmc.Center) -> None:
    app = f"app{next(_names)}"
    topics = [_topic(), _topic()]
    single = {"queue_mode": types_pb2.QUEUE_MODE_SINGLE}
    made = [center.subscribe(topic, app, topic_settings=single) for topic in topics]
    assert {subscription.queue for subscription in made} == {f"tmc.sub.{app}.default"}
    got: list[str] = []

    class Everything:
        def consume(self, message: tmc.Message) -> None:
            got.append(message.topic)

    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)
        consumer.attach(Everything())
        with consumer:
            for topic in topics:
                orders.publish(topic, b"x", key="k")
            eventually(lambda: sorted(got) == sorted(topics))
    assert _consumptions(center, made[1].number) == {"ACKED": 1}


def test_what_a_foreign_program_puts_into_the_queue_stops_no_copies(
    center: RunningCenter, orders: tmc.Center, rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    app, topic = f"app{next(_names)}", _topic()
    queue = center.subscribe(topic, app).queue
    broker = rabbitmq.connect()
    channel = broker.channel()
    foreign = [
        pika.BasicProperties(),
        pika.BasicProperties(message_id="1-1-0-1", type=topic, headers={"tmc-attempt": "first"}),
        pika.BasicProperties(message_id="ours?", type=topic, headers={"tmc-attempt": 1, "tmc-key": "k"}),
        pika.BasicProperties(message_id=b"\xff", type=b"\xff", headers={"n": None}),
    ]
    for properties in foreign:
        channel.basic_publish("", queue, b"\xff", properties)
    got: list[tuple[bytes, int]] = []
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            got.append((body, message.interval_ms))

        with consumer:
            orders.publish(topic, b"ours", key="k")
            eventually(lambda: got == [(b"ours", 10_000)])
            assert consumer.malformed_copies == len(foreign)
    assert channel.queue_declare(queue, passive=True).method.message_count == 0
    broker.close()
    assert not [record for record in caplog.records if "no copies come" in record.getMessage()]


def test_reject_later_and_failures_follow_the_policy(center: RunningCenter, orders: tmc.Center) -> None:
    app, topic = f"app{next(_names)}", _topic()
    subscription = center.subscribe(topic, app, retry=FAST)
    tries: Counter[str] = Counter()
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            tries[message.key] += 1
            if message.key == "reject":
                raise tmc.Reject("never")
            if message.key == "later" and message.attempt == 1:
                raise tmc.Later(timedelta(milliseconds=1))
            if message.key == "broken":
                raise RuntimeError("always")

        with consumer:
            eventually(lambda: consumer.health() == [])  # or the center alerts that nobody reads
            for key in ("reject", "later", "broken", "good"):
                orders.publish(topic, b"x", key=key)
            eventually(lambda: _consumptions(center, subscription.number) == {"ACKED": 2, "FAILED": 2})
    assert tries == {"reject": 1, "later": 2, "broken": 4, "good": 1}
    assert _alerts(center, subscription.number) == ["delivery failed"] * 2
    errors = [tried.error for tried in center.detail(topic, "broken").failed_attempts]
    assert errors == ["RuntimeError: always"] * 4


def test_a_handler_that_takes_long_gets_no_second_copy(center: RunningCenter, orders: tmc.Center) -> None:
    app, topic = f"app{next(_names)}", _topic()
    subscription = center.subscribe(topic, app, retry=types_pb2.RetryPolicy(interval_ms=600, max_retry=3))
    attempts: list[int] = []
    go_on = threading.Event()
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection, concurrency=1, prefetch=4)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            attempts.append(message.attempt)
            go_on.wait(30)

        with consumer:
            for number in range(3):  # two of them wait for the only handler
                orders.publish(topic, b"x", key=f"k{number}")
            eventually(lambda: attempts)
            first = center.detail(topic, "k0").consumptions[0].due_ms
            eventually(lambda: center.detail(topic, "k2").consumptions[0].due_ms > first + 2000)
            go_on.set()
            eventually(lambda: _consumptions(center, subscription.number) == {"ACKED": 3})
    assert attempts == [1, 1, 1]


def test_a_queue_deleted_under_its_consumer_is_healed(
    center: RunningCenter, orders: tmc.Center, rabbitmq: RabbitMQ
) -> None:
    app, topic = f"app{next(_names)}", _topic()
    subscription = center.subscribe(topic, app, retry=FAST)
    got: list[str] = []
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            got.append(message.key)

        with consumer:
            orders.publish(topic, b"x", key="before")
            eventually(lambda: got == ["before"])
            broker = rabbitmq.connect()
            broker.channel().queue_delete(subscription.queue)
            broker.close()
            orders.publish(topic, b"x", key="after")
            eventually(lambda: got == ["before", "after"])
    eventually(lambda: center.detail(topic, "after").consumptions[0].closed_ms)
    assert center.detail(topic, "after").consumptions[0].tried == 1  # the returned copies were not counted


def test_a_consumer_that_the_broker_never_answers_starts_over(
    center: RunningCenter, orders: tmc.Center, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmc_client.consuming.transports.rabbitmq._PATIENCE_S", 0.5)
    asked: list[str] = []
    consume = pika.channel.Channel.basic_consume

    def swallowed_once(channel: pika.channel.Channel, queue: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(queue)
        return consume(channel, queue, *args, **kwargs) if len(asked) > 1 else None

    monkeypatch.setattr("pika.channel.Channel.basic_consume", swallowed_once)
    app, topic = f"app{next(_names)}", _topic()
    center.subscribe(topic, app, retry=FAST)
    got: list[str] = []
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            got.append(message.key)

        with consumer:
            orders.publish(topic, b"x", key="k")
            eventually(lambda: got == ["k"])
    assert len(asked) == 2


def test_nobody_reads_for_a_while(
    center: RunningCenter, orders: tmc.Center, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve retry intervals without a consumer: at most one extra copy of each message, none given up."""
    monkeypatch.setattr("tmc_server.duties.redelivering._RESTART_S", 3.0)
    app, topic, count = f"app{next(_names)}", _topic(), 20_000 if LONG else 5_000
    subscription = center.subscribe(
        topic, app, retry=types_pb2.RetryPolicy(interval_ms=500, max_retry=2), topic_settings={"spread": 4}
    )
    from tests.support.callers import publish_many

    publish_many(center.address, center.keys["orders"], topic, count)
    broker = rabbitmq.connect()
    channel = broker.channel()
    eventually(
        lambda: channel.queue_declare(subscription.queue, passive=True).method.message_count >= count, seconds=60
    )
    held = time.time() * 1000 + 6_000
    eventually(lambda: time.time() * 1000 > held)
    assert _consumptions(center, subscription.number) == {"SCHEDULED": count}
    depth = channel.queue_declare(subscription.queue, passive=True).method.message_count
    broker.close()
    assert depth <= 2 * count
    assert "no consumer" in _alerts(center, subscription.number)
    copies: Counter[str] = Counter()
    lock = threading.Lock()
    with _connect(center, app) as connection:
        consumer = tmc.Consumer(connection, concurrency=8, prefetch=400)

        @consumer.listener(topic)
        def handle(body: bytes, message: tmc.Message) -> None:
            with lock:
                copies[message.id] += 1

        with consumer:
            eventually(lambda: _consumptions(center, subscription.number) == {"ACKED": count}, seconds=120)
    assert len(copies) == count
    assert max(copies.values()) <= 2


def test_a_forwarding_subscription(center: RunningCenter, orders: tmc.Center, rabbitmq: RabbitMQ) -> None:
    broker = rabbitmq.connect()
    channel = broker.channel()
    channel.exchange_declare("events", "topic", durable=True)
    channel.queue_declare("analytics", durable=True)
    channel.queue_bind("analytics", "events", "paid.#")
    app, topic = f"app{next(_names)}", _topic()
    forward = types_pb2.Forward(kind="rabbitmq", target="events", key="paid.everywhere")
    subscription = center.subscribe(topic, app, retry=FAST, forward=forward)
    assert (subscription.queue, subscription.forward) == ("", forward)
    orders.publish(topic, b"good", key="good")
    orders.publish(topic, b"own", key="own", headers={"tmc-forward-key": "paid.own"})
    orders.publish(topic, b"bad", key="bad", headers={"tmc-forward-key": "nobody.listens"})
    eventually(lambda: _consumptions(center, subscription.number) == {"ACKED": 2, "FAILED": 1})
    bodies = {channel.basic_get("analytics", auto_ack=True)[2] for _ in range(2)}
    assert bodies == {b"good", b"own"}
    assert channel.basic_get("analytics", auto_ack=True)[0] is None
    broker.close()
    detail = center.detail(topic, "bad")
    assert [tried.attempt for tried in detail.failed_attempts] == [1, 2, 3, 4]
    assert "NO_ROUTE" in detail.failed_attempts[0].error
    assert _alerts(center, subscription.number) == ["delivery failed"]


def _refused(center: RunningCenter, topic: str, app: str, **settings: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        center.subscribe(topic, app, **settings)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def test_a_forward_to_an_exchange_that_is_not_there_is_refused_and_stored_by_nobody(
    center: RunningCenter, rabbitmq: RabbitMQ
) -> None:
    app, topic = f"app{next(_names)}", _topic()
    forward = types_pb2.Forward(kind="rabbitmq", target="evnets")
    assert _refused(center, topic, app, forward=forward) == (
        f"There is no exchange 'evnets' in virtual host '/' of the broker at 127.0.0.1:{rabbitmq.port}: check the name, "
        "declare it first, or say --untried."
    )
    number = center.server.store.watch.current.topic_by_name[topic].number
    assert not [each for each in center.server.store.watch.current.subscriptions.values() if each.topic == number]
    assert center.subscribe(topic, app, forward=forward, untried=True).forward == forward


def test_a_forward_to_an_exchange_that_every_broker_has_is_accepted(center: RunningCenter) -> None:
    for target in ("amq.topic", "amq.direct", "amq.fanout", "amq.headers"):
        forward = types_pb2.Forward(kind="rabbitmq", target=target)
        assert center.subscribe(_topic(), f"app{next(_names)}", forward=forward).forward == forward


def test_the_policy_of_a_forward_can_be_changed_when_its_exchange_is_gone(
    center: RunningCenter, rabbitmq: RabbitMQ
) -> None:
    broker = rabbitmq.connect()
    broker.channel().exchange_declare("leaves", "fanout")
    app, topic = f"app{next(_names)}", _topic()
    forward = types_pb2.Forward(kind="rabbitmq", target="leaves")
    made = center.subscribe(topic, app, retry=FAST, forward=forward)
    broker.channel().exchange_delete("leaves")
    slower = types_pb2.RetryPolicy(interval_ms=900, max_retry=3)
    changed = center.subscribe(topic, app, retry=slower, forward=forward)
    assert (changed.number, changed.retry.interval_ms) == (made.number, 900)
    # A new subscription is looked up, also one of the same name after a removal.
    with grpc.insecure_channel(center.address) as channel:
        request = admin_pb2.RemoveSubscriptionRequest(topic=topic, app=app)
        center.admin(channel).RemoveSubscription(request, metadata=center.operator)
    assert "There is no exchange 'leaves'" in _refused(center, topic, app, forward=forward)
    broker.close()


def test_a_forward_that_no_broker_confirms_is_refused_unless_untried(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        port = reserved.getsockname()[1]
        url = f"amqp://guest:Hunter2-marked@127.0.0.1:{port}/%2F"
        forward = types_pb2.Forward(kind="rabbitmq", target="events")
        with RunningCenter(f"sqlite:///{tmp_path}/c.db", rabbitmq={"url": url}) as center:
            text = _refused(center, "to.nobody", "stranger", forward=forward)
            assert text.startswith(
                f"Nobody can say whether there is an exchange 'events': the broker at 127.0.0.1:{port} cannot be asked ("
            )
            assert text.endswith("). Repeat when it can, or say --untried.")
            assert "Hunter2" not in text
            assert center.subscribe("to.nobody", "stranger", forward=forward, untried=True).forward == forward


def test_a_broker_that_accepts_connections_and_says_nothing_confirms_no_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rabbitmq_exchanges, "_PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exchanges = rabbitmq_exchanges.RabbitExchanges(f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/%2F")
        with pytest.raises(ForwardRefused, match="cannot be asked"):
            exchanges.examine(Forward("rabbitmq", "events", ""))


def test_subscribe_streams_are_refused_where_queues_deliver(center: RunningCenter) -> None:
    with grpc.insecure_channel(center.address) as channel:
        stub = consumption_pb2_grpc.ConsumptionServiceStub(channel)
        stream = stub.Subscribe(
            iter([consumption_pb2.SubscribeRequest(topics=["order.paid"])]), metadata=center.as_app("coupons")
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "DescribeSubscriptions" in caught.value.details()


def test_a_copy_that_the_broker_gives_to_another_consumer_waits_for_the_handler_that_runs(
    center: RunningCenter, orders: tmc.Center, rabbitmq: RabbitMQ
) -> None:
    """As after a lost connection, or the broker's consumer_timeout: the center is asked who handles it."""
    app, topic = f"app{next(_names)}", _topic()
    made = center.subscribe(topic, app, retry=types_pb2.RetryPolicy(interval_ms=1000, max_retry=0))
    entered: list[str] = []
    gate = threading.Event()

    def consume(connection: tmc.Center, name: str) -> tmc.Consumer:
        consumer = tmc.Consumer(connection, concurrency=1)

        @consumer.listener(topic)
        def handle(body: bytes) -> None:
            entered.append(name)
            assert gate.wait(300)

        return consumer

    with _connect(center, app) as first, _connect(center, app) as second, consume(first, "one"):
        orders.publish(topic, b"x", key="k")
        eventually(lambda: entered == ["one"])
        before = rabbitmq.control("-q", "list_connections", "--no-table-headers", "pid").split()  # also the center's
        with consume(second, "two") as two:
            eventually(lambda: two.health() == [])
            for connection in before:
                rabbitmq.control("close_connection", connection, "a restart")
            eventually(lambda: two.received_copies)  # the first one connects again a second later
            eventually(lambda: two.is_idle)  # it has let it go
            assert entered == ["one"]
            gate.set()
            eventually(lambda: _consumptions(center, made.number) == {"ACKED": 1})
    assert entered == ["one"]
