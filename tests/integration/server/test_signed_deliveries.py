"""Copies that somebody else put into a queue, on a real RabbitMQ: refused, reported, and nobody's message changes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pika
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_common import signatures
from tmc_common.protocol import admin_pb2, consumption_pb2, consumption_pb2_grpc, types_pb2
from tmc_server.store.tables import alert, audit
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.mariadb, pytest.mark.services]
_names = itertools.count(1)
SLOW = types_pb2.RetryPolicy(interval_ms=3_600_000, max_retry=0)  # a copy that is lost, or counted, does not come again


@pytest.fixture(autouse=True)
def _one_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes, and whenever it begins."""
    monkeypatch.setattr("tmc_server.requests.signing._ALERT_MINUTES", 1 << 40)


@pytest.fixture(scope="module")
def center(mariadb: MariaDB, rabbitmq: RabbitMQ) -> Iterator[RunningCenter]:
    with _running(mariadb, rabbitmq) as running:
        yield running


@contextmanager
def _running(mariadb: MariaDB, rabbitmq: RabbitMQ, **delivery: Any) -> Iterator[RunningCenter]:
    with RunningCenter(
        mariadb.url(f"tmc_signed_{next(_names)}"),
        delivery={"kind": "rabbitmq", "scan_seconds": 0.05, **delivery},
        rabbitmq={"url": rabbitmq.url},
    ) as running:
        yield running


class _Queue:
    """One subscription's queue at the broker, with all that its broker user may do to it."""

    def __init__(self, rabbitmq: RabbitMQ, name: str) -> None:
        self.name = name
        self._connection = rabbitmq.connect()
        self._channel = self._connection.channel()

    def take(self, count: int = 1) -> list[tuple[pika.BasicProperties, bytes]]:
        """Wait for copies and take them out."""
        taken: list[tuple[pika.BasicProperties, bytes]] = []

        def take() -> bool:
            method, properties, body = self._channel.basic_get(self.name, auto_ack=True)
            if method is not None:
                taken.append((properties, body))
            return len(taken) == count

        eventually(take)
        return taken

    def put(self, properties: pika.BasicProperties, body: bytes) -> None:
        self._channel.basic_publish("", self.name, body, properties)

    def is_empty(self) -> bool:
        return self._channel.queue_declare(self.name, passive=True).method.message_count == 0

    def wait_for(self, count: int) -> None:
        eventually(lambda: self._channel.queue_declare(self.name, passive=True).method.message_count == count)

    def close(self) -> None:
        self._connection.close()


class _Shop:
    """A subscription with an SLOW policy, its producer, and its consumer's program with an inbox."""

    def __init__(self, center: RunningCenter, rabbitmq: RabbitMQ, tmp_path: Any, **topic_settings: Any) -> None:
        self.center = center
        self.app, self.topic = f"app{next(_names)}", f"topic.{next(_names)}"
        self.subscription = center.subscribe(self.topic, self.app, retry=SLOW, topic_settings=topic_settings)
        self.queue = _Queue(rabbitmq, self.subscription.queue)
        self.orders = tmc.connect(center.address, app="orders", key=center.keys["orders"])
        self.coupons = tmc.connect(center.address, app=self.app, key=center.keys[self.app])
        self.engine = sa.create_engine(f"sqlite:///{tmp_path}/inbox.db")
        tmc.create_tables(self.engine)
        self.consumer = tmc.Consumer(self.coupons)
        self.handled: list[tuple[bytes, str, int]] = []

        @self.consumer.listener(self.topic, inbox=tmc.SqlInbox(sessionmaker(self.engine)))
        def handle(body: bytes, session: Any, message: tmc.Message) -> None:
            self.handled.append((body, message.headers.get("color", ""), message.attempt))

    def publish(self, key: str = "k") -> None:
        self.orders.publish(self.topic, b"real", key=key, headers={"color": "red"})

    def alerts(self) -> list[str]:
        found = sa.select(alert.c.kind).filter_by(subscription_no=self.subscription.number)
        with self.center.server.store.shards.catalog.reading() as connection:
            return list(connection.execute(found).scalars())

    def consumption(self, key: str = "k") -> Any:
        return self.center.detail(self.topic, key).consumptions[0]

    def rotate(self, drop_previous: bool = False) -> Any:
        request = admin_pb2.RotateDeliveryKeyRequest(topic=self.topic, app=self.app, drop_previous=drop_previous)
        with grpc.insecure_channel(self.center.address) as channel:
            return self.center.admin(channel).RotateDeliveryKey(request, metadata=self.center.operator)

    def keys(self) -> Any:
        request = admin_pb2.GetDeliveryKeysRequest(topic=self.topic, app=self.app)
        with grpc.insecure_channel(self.center.address) as channel:
            return self.center.admin(channel).GetDeliveryKeys(request, metadata=self.center.operator)

    def describe(self) -> Any:
        with grpc.insecure_channel(self.center.address) as channel:
            (found,) = (
                consumption_pb2_grpc.ConsumptionServiceStub(channel)
                .DescribeSubscriptions(
                    consumption_pb2.DescribeSubscriptionsRequest(),
                    metadata=self.center.as_app(self.app),
                )
                .subscriptions
            )
        return found

    def close(self) -> None:
        self.queue.close()
        self.orders.close()
        self.coupons.close()
        self.engine.dispose()


@pytest.fixture
def shop(center: RunningCenter, rabbitmq: RabbitMQ, tmp_path: Any) -> Iterator[_Shop]:
    made = _Shop(center, rabbitmq, tmp_path)
    yield made
    made.close()


def _signed_by(secret: bytes, properties: pika.BasicProperties) -> pika.BasicProperties:
    """As a stranger would, who knows everything but the key."""
    properties.headers[signatures.HEADER] = signatures.sign(secret, b"whatever")
    return properties


def test_a_forged_copy_with_a_real_id_runs_no_handler_and_the_real_one_is_handled(shop: _Shop) -> None:
    shop.publish()
    ((real, body),) = shop.queue.take()
    before = shop.consumption()
    unsigned = {name: value for name, value in real.headers.items() if name != signatures.HEADER}
    forged = pika.BasicProperties(message_id=real.message_id, type=real.type, app_id=real.app_id, headers=unsigned)
    shop.queue.put(forged, b"forged")
    shop.queue.put(_signed_by(b"s" * 32, forged), b"forged, too")
    with shop.consumer:
        eventually(lambda: shop.consumer.forged_copies == 2)
        eventually(lambda: shop.alerts() == ["forged copies"])
        assert (shop.handled, shop.consumption()) == ([], before)
        shop.queue.put(real, body)
        eventually(lambda: shop.handled == [(b"real", "red", 1)])
        eventually(lambda: shop.consumption().state == types_pb2.CONSUMPTION_STATE_ACKED)
    assert shop.queue.is_empty()
    assert (shop.consumer.forged_copies, shop.consumer.malformed_copies) == (2, 0)
    assert shop.alerts() == ["forged copies"]


@pytest.mark.parametrize("part", ["body", "header", "attempt", "topic", "id", "producer", "subscriber"])
def test_a_copy_that_was_changed_on_its_way_is_refused(shop: _Shop, part: str) -> None:
    shop.publish()
    ((properties, body),) = shop.queue.take()
    changed: dict[str, Any] = {"headers": dict(properties.headers)}
    match part:
        case "body":
            body = b"other"
        case "header":
            changed["headers"]["color"] = "blue"
        case "attempt":
            changed["headers"]["tmc-attempt"] = 2
        case "subscriber":
            changed["headers"]["tmc-subscriber"] = "somebody.else"
        case "topic":
            changed["type"] = "order.paid"
        case "producer":
            changed["app_id"] = "coupons"
        case "id":
            changed["message_id"] = f"{properties.message_id}1"
    usual = {"message_id": properties.message_id, "type": properties.type, "app_id": properties.app_id}
    shop.queue.put(pika.BasicProperties(content_type=properties.content_type, **usual | changed), body)
    with shop.consumer:
        eventually(lambda: shop.consumer.forged_copies == 1)
        assert shop.handled == []
    assert shop.consumption().state == types_pb2.CONSUMPTION_STATE_SCHEDULED


def test_a_rotation_refuses_nothing_that_is_in_the_queue(shop: _Shop) -> None:
    """Every copy has only one try: one that is refused is missing at the end."""
    shop.publish("before")
    shop.queue.wait_for(1)
    first = shop.keys().key
    second = shop.rotate()
    assert (second.previous, second.key != first) == (first, True)
    shop.publish("after")
    shop.queue.wait_for(2)
    with shop.consumer:
        eventually(lambda: len(shop.handled) == 2)
        with pytest.raises(grpc.RpcError) as caught:
            shop.rotate()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        third = shop.rotate(drop_previous=True)
        assert third.previous == second.key
        shop.publish("rotated while the consumer runs")
        eventually(lambda: len(shop.handled) == 3)
    assert shop.consumer.forged_copies == 0
    assert list(shop.describe().delivery_keys) == [third.key, third.previous]


def test_a_dropped_key_signs_nothing_any_more(shop: _Shop) -> None:
    shop.publish()
    stolen = shop.keys().key
    ((properties, body),) = shop.queue.take()
    shop.rotate()
    shop.rotate(drop_previous=True)
    assert stolen not in list(shop.describe().delivery_keys)
    shop.queue.put(properties, body)
    with shop.consumer:
        eventually(lambda: shop.consumer.forged_copies == 1)
    assert shop.handled == []


def test_a_report_about_a_message_that_does_not_exist_is_accepted_and_alerted_once(shop: _Shop) -> None:
    with grpc.insecure_channel(shop.center.address) as channel:
        stub = consumption_pb2_grpc.ConsumptionServiceStub(channel)
        for message_id in ("1-1-0-1", "nonsense", ""):
            request = consumption_pb2.ReportForgedCopiesRequest(topic=shop.topic, count=3, message_id=message_id)
            stub.ReportForgedCopies(request, metadata=shop.center.as_app(shop.app))
        elsewhere = consumption_pb2.ReportForgedCopiesRequest(topic="order.paid", count=1)
        stub.ReportForgedCopies(elsewhere, metadata=shop.center.as_app(shop.app))
    eventually(lambda: shop.alerts() == ["forged copies"])


def test_keys_are_shown_to_their_own_app_only_and_reads_by_operators_are_audited(shop: _Shop) -> None:
    secret = shop.keys().key
    with grpc.insecure_channel(shop.center.address) as channel:
        listed = shop.center.admin(channel).ListSubscriptions(
            admin_pb2.ListSubscriptionsRequest(), metadata=shop.center.operator
        )
        stub = consumption_pb2_grpc.ConsumptionServiceStub(channel)
        others = stub.DescribeSubscriptions(
            consumption_pb2.DescribeSubscriptionsRequest(), metadata=shop.center.as_app("coupons")
        )
    catalog = shop.center.server.store.watch.current
    assert secret not in f"{listed}{others}{catalog!r}"
    assert bytes.fromhex(secret).hex() in shop.describe().delivery_keys
    with shop.center.server.store.shards.catalog.reading() as connection:
        actions = connection.execute(sa.select(audit.c.action).where(audit.c.actor == "admin")).scalars().all()
    assert "show delivery keys" in actions


def test_a_subscription_that_comes_back_accepts_what_its_earlier_life_left_in_the_queue(shop: _Shop) -> None:
    key = shop.keys().key
    with grpc.insecure_channel(shop.center.address) as channel:
        request = admin_pb2.RemoveSubscriptionRequest(topic=shop.topic, app=shop.app)
        shop.center.admin(channel).RemoveSubscription(request, metadata=shop.center.operator)
    shop.center.subscribe(shop.topic, shop.app, retry=SLOW)
    assert shop.keys().key == key


def test_switched_off_nothing_is_signed_and_nothing_verified(
    mariadb: MariaDB, rabbitmq: RabbitMQ, tmp_path: Any
) -> None:
    with _running(mariadb, rabbitmq, signatures=False) as center:
        shop = _Shop(center, rabbitmq, tmp_path)
        shop.publish()
        ((properties, body),) = shop.queue.take()
        assert signatures.HEADER not in properties.headers
        assert list(shop.describe().delivery_keys) == []
        shop.queue.put(properties, body)
        with shop.consumer:
            eventually(lambda: shop.handled == [(b"real", "red", 1)])
            eventually(lambda: shop.consumption().state == types_pb2.CONSUMPTION_STATE_ACKED)
        shop.close()


def test_copies_of_an_unsigned_topic_are_not_signed_beside_a_signed_one_of_the_same_consumer(
    center: RunningCenter, rabbitmq: RabbitMQ, tmp_path: Any
) -> None:
    shop = _Shop(center, rabbitmq, tmp_path, unsigned_copies=True)
    signed = center.subscribe(f"{shop.topic}.signed", shop.app, retry=SLOW)
    handled: list[bytes] = []

    @shop.consumer.listener(signed.topic)
    def handle(body: bytes) -> None:
        handled.append(body)

    shop.publish("looked at")
    ((properties, _),) = shop.queue.take()
    assert signatures.HEADER not in properties.headers
    with shop.consumer:
        shop.publish("handled")
        eventually(lambda: [attempt for _, _, attempt in shop.handled] == [1])
        forger = _Queue(rabbitmq, signed.queue)
        properties.type = signed.topic
        forger.put(properties, b"forged")
        shop.orders.publish(signed.topic, b"real", key="k")
        eventually(lambda: handled == [b"real"] and shop.consumer.forged_copies == 1)
        forger.close()
    for ask in (shop.keys, shop.rotate):
        with pytest.raises(grpc.RpcError, match="topic must be one whose copies are signed"):
            ask()
    shop.close()


def test_a_forward_is_signed_with_the_key_that_operators_are_shown(center: RunningCenter, rabbitmq: RabbitMQ) -> None:
    app, topic, exchange = f"app{next(_names)}", f"topic.{next(_names)}", f"events.{next(_names)}"
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.exchange_declare(exchange, "fanout")
    channel.queue_declare(exchange)
    channel.queue_bind(exchange, exchange)
    center.subscribe(topic, app, forward=types_pb2.Forward(kind="rabbitmq", target=exchange, key="k"))
    queue = _Queue(rabbitmq, exchange)
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
        orders.publish(topic, b"real", key="k")
        ((properties, _),) = queue.take()
    with grpc.insecure_channel(center.address) as admin:
        request = admin_pb2.GetDeliveryKeysRequest(topic=topic, app=app)
        keys = center.admin(admin).GetDeliveryKeys(request, metadata=center.operator)
    assert signatures.key_id_of(properties.headers[signatures.HEADER]) == signatures.key_id(bytes.fromhex(keys.key))
    queue.close()
    connection.close()


def _documented_permissions(user: str) -> list[str]:
    """Regular expressions for configure, write and read: a row of the table in docs/operating.md."""
    page = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(user)} \| `(.*)` \| `(.*)` \| `(.*)` \|$", page, re.MULTILINE)
    return [each.replace(r"\|", "|") for each in row]


def _user(rabbitmq: RabbitMQ, name: str, permissions: list[str]) -> pika.URLParameters:
    rabbitmq.control("add_user", name, "secret")
    rabbitmq.control("set_permissions", "-p", "/", name, *permissions)
    return pika.URLParameters(f"amqp://{name}:secret@127.0.0.1:{rabbitmq.port}/%2F")


def test_with_the_documented_permissions_all_works_and_an_app_can_only_read_its_own_queues(
    mariadb: MariaDB, rabbitmq: RabbitMQ, tmp_path: Any
) -> None:
    suffix = next(_names)
    _user(rabbitmq, f"center{suffix}", _documented_permissions("the center"))
    url = f"amqp://center{suffix}:secret@127.0.0.1:{rabbitmq.port}/%2F"
    with RunningCenter(
        mariadb.url(f"tmc_permitted_{suffix}"),
        delivery={"kind": "rabbitmq", "scan_seconds": 0.05},
        rabbitmq={"url": url},
    ) as center:
        shop = _Shop(center, rabbitmq, tmp_path)
        other_queue = center.subscribe(shop.topic, f"{shop.app}-test").queue
        may = [each.replace("coupons", shop.app) for each in _documented_permissions("app `coupons`, all tags")]
        parameters = _user(rabbitmq, f"user{suffix}", may)
        assert _refused(parameters, lambda channel: channel.basic_publish("", shop.queue.name, b"x"))
        assert _refused(parameters, lambda channel: channel.basic_get(other_queue))
        assert _refused(parameters, lambda channel: channel.queue_purge(other_queue))
        assert _refused(parameters, lambda channel: channel.queue_delete(shop.queue.name))
        assert _refused(parameters, lambda channel: channel.queue_declare("tmc.sub.mine"))
        assert not _refused(parameters, lambda channel: channel.basic_get(other_queue.replace("-test", "")))
        consumer = tmc.Consumer(shop.coupons, broker_user=f"user{suffix}", broker_password="secret")
        handled: list[bytes] = []

        @consumer.listener(shop.topic)
        def handle(body: bytes) -> None:
            handled.append(body)

        with consumer:
            shop.publish()
            eventually(lambda: handled == [b"real"])
            eventually(lambda: shop.consumption().state == types_pb2.CONSUMPTION_STATE_ACKED)
        shop.close()


def test_a_user_of_one_tag_reads_the_queues_of_that_tag_only(rabbitmq: RabbitMQ) -> None:
    connection = rabbitmq.connect()
    suffixes = ("coupons.prod", "coupons.prod.order.paid", "coupons.production", "coupons.test", "coupons-test.prod")
    for queue in suffixes:
        connection.channel().queue_declare(f"tmc.sub.{queue}")
    user = _user(rabbitmq, f"user{next(_names)}", _documented_permissions("app `coupons`, tag `prod` only"))
    refused = [_refused(user, lambda channel, q=queue: channel.basic_get(f"tmc.sub.{q}")) for queue in suffixes]
    assert refused == [False, False, True, True, True]
    connection.close()


def _refused(parameters: pika.URLParameters, act: Any) -> bool:
    """Whether the broker closes a channel over this, since it is not allowed."""
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        try:
            act(channel)
        except pika.exceptions.ChannelClosedByBroker as exc:
            return bool(exc.reply_code == 403)
        return False
