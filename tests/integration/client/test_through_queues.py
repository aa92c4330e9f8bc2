"""Producers of the SDK through submit queues of RabbitMQ and Kafka: the same blocks, errors and checks as over gRPC."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from confluent_kafka.admin import NewTopic
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.doors import has_queue, open_queue
from tests.support.kafka import Kafka
from tests.support.shops import open_shop
from tmc_client import aio
from tmc_client.producing.ledger import rows_for
from tmc_client.producing.producer import Prepared, prepare_request, prepared_of, wait
from tmc_client.tables import ledger, ledger_info
from tmc_common.protocol import types_pb2
from tmc_common.submission import queue_of
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.services, pytest.mark.timeout(120)]

TAG = "prod"
SOON = timedelta(seconds=1)
HEADERS = {"lang": "grün", "x-shop": "1", "CC": "2", "ce_id": "3", "content-type": "4"}
"""The last four mean something to RabbitMQ or to readers of events."""


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitMQ, kafka: Kafka
) -> Iterator[tuple[RunningCenter, str]]:
    """A center that reads the queues of both brokers, and the secret of orders' queues."""
    path = tmp_path_factory.mktemp("queues")
    with RunningCenter(
        f"sqlite:///{path}/c.db",
        rabbitmq={"url": rabbitmq.url},
        kafka={"bootstrap": kafka.bootstrap},
        submission={"rabbitmq": True, "kafka": True},
        discovery={"kind": "recorded"},
        checks={"allow": ["127.0.0.0/8:*"]},
    ) as center:
        center.subscribe("order.quick", "coupons", topic_settings={"transaction_time_ms": 300, "default_tag": TAG})
        secret = open_queue(center, "orders", TAG)
        with rabbitmq.connect() as connection:
            eventually(lambda: has_queue(connection, queue_of("orders", TAG)))
        replies = f"tmc.reply.orders.{TAG}"
        admin = kafka.admin()
        admin.create_topics([NewTopic(replies, 2)])[replies].exception(30)
        yield center, secret


@pytest.fixture(scope="module", params=["amqp", "kafka"])
def address(request: pytest.FixtureRequest) -> str:
    if request.param == "amqp":
        return str(request.getfixturevalue("rabbitmq").url).replace("amqp://", "amqp+submit://")
    return f"kafka+submit://{request.getfixturevalue('kafka').bootstrap}"


@pytest.fixture
def orders(running: tuple[RunningCenter, str], address: str) -> Iterator[tmc.Center]:
    with tmc.connect(address, app="orders", key=running[1], tag=TAG, timeout=timedelta(seconds=20)) as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = open_shop(sa.create_engine(f"sqlite:///{tmp_path}/shop.db"))
    yield engine
    engine.dispose()


@pytest.fixture
def key() -> str:
    return f"paid-{os.urandom(6).hex()}"


def _state(center: RunningCenter, key: str) -> str:
    state = center.detail("order.quick", key).message.state
    return types_pb2.MessageState.Name(state).removeprefix("MESSAGE_STATE_")


def test_a_block_is_committed_as_over_grpc(
    running: tuple[RunningCenter, str], orders: tmc.Center, shop: sa.Engine, key: str
) -> None:
    with Session(shop) as session, orders.transaction(session, prepare_timeout=timedelta(seconds=20)) as tx:
        session.execute(sa.text("INSERT INTO orders VALUES (7)"))
        for number in range(3):
            tx.send("order.quick", {"order": number}, key=f"{key}-{number}", headers=HEADERS)
    assert orders.flush(timedelta(seconds=20))
    found = running[0].detail("order.quick", f"{key}-1").message
    assert (_state(running[0], f"{key}-0"), _state(running[0], f"{key}-2")) == ("COMMITTED", "COMMITTED")
    assert (found.body, found.producer_tag) == (b'{"order":1}', TAG)
    assert {name: text for name, text in found.headers.items() if name != "traceparent"} == HEADERS
    with shop.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM tmc_ledger WHERE settled_ms IS NOT NULL")).scalar() == 3


def test_a_block_that_fails_is_rolled_back_and_its_key_is_free(orders: tmc.Center, shop: sa.Engine, key: str) -> None:
    limit = timedelta(seconds=20)
    with pytest.raises(ZeroDivisionError), Session(shop) as session:
        with orders.transaction(session, prepare_first=True, prepare_timeout=limit) as tx:
            tx.send("order.quick", b"", key=key)
            raise ZeroDivisionError
    assert orders.flush(limit)
    orders.publish("order.quick", b"", key=key)


def test_the_center_refuses_with_the_same_errors(orders: tmc.Center, key: str) -> None:
    first = orders.prepare("order.quick", b"", key=key)
    with pytest.raises(tmc.KeyInProgress) as raised:
        orders.prepare("order.quick", b"", key=key)
    assert raised.value.message_id == first.message_id
    assert orders.submit(first) == first.message_id
    with pytest.raises(tmc.KeyCommitted):
        orders.publish("order.quick", b"", key=key)
    with pytest.raises(tmc.Decided):
        orders.rollback(first)
    with pytest.raises(tmc.InvalidRequest) as refused:
        orders.publish("order.quick", b"", key=f"{key}-2", order_key="a")
    assert (refused.value.reason, refused.value.field) == ("FIELD_INVALID", "order_key")


def test_asyncio(running: tuple[RunningCenter, str], address: str, shop: sa.Engine, key: str) -> None:
    async def pay() -> None:
        engine = create_async_engine(str(shop.url).replace("sqlite", "sqlite+aiosqlite"))
        center = aio.connect(address, app="orders", key=running[1], tag=TAG)
        limit = timedelta(seconds=20)
        async with AsyncSession(engine) as session, center.transaction(session, prepare_timeout=limit) as tx:
            tx.send("order.quick", b"", key=key)
        await center.flush(limit)
        await center.close()
        await engine.dispose()

    asyncio.run(pay())
    assert _state(running[0], key) == "COMMITTED"


def test_a_check_finds_what_a_dead_process_committed(
    running: tuple[RunningCenter, str], orders: tmc.Center, shop: sa.Engine, key: str
) -> None:
    """The service learns its check token through the queue, and says there where it answers."""
    port = free_port()
    checks = orders.checks(shop)
    checks.serve(f"127.0.0.1:{port}", advertise=f"127.0.0.1:{port}")
    _committed(orders, shop, key)
    eventually(lambda: _state(running[0], key) == "COMMITTED")


def test_what_was_committed_is_submitted_at_the_next_start(
    running: tuple[RunningCenter, str], orders: tmc.Center, shop: sa.Engine, key: str
) -> None:
    _committed(orders, shop, key)
    assert orders.resume(shop) == 1
    assert _state(running[0], key) == "COMMITTED"


def _committed(orders: tmc.Center, shop: sa.Engine, key: str) -> None:
    """Prepare a message, and commit its row: the process died before it submitted."""
    limit = timedelta(seconds=20)
    with shop.connect() as connection:
        ledger_id = bytes(connection.execute(sa.select(ledger_info.c.ledger_id)).scalar_one())
    request = prepare_request("order.quick", b"", key=key, ledger_id=ledger_id)
    message = prepared_of(request, wait(orders.producer.prepare(request, limit), limit))
    with shop.begin() as connection:
        connection.execute(sa.insert(ledger), rows_for([message]))


def test_what_only_grpc_has_is_refused_in_a_sentence(orders: tmc.Center, key: str) -> None:
    consumer = tmc.Consumer(orders)
    consumer.listener("order.quick")(lambda body: None)
    with pytest.raises(tmc.InvalidRequest, match=r"Consuming goes over gRPC: connect to host:port"):
        consumer.start()
    with pytest.raises(tmc.InvalidRequest, match="GetMessage goes over gRPC"):
        orders.get_message("1-1-1-1")
    with pytest.raises(tmc.InvalidRequest, match=r"decided by what prepare\(\) returned"):
        orders.submit("1-1-1-1")


def test_a_wrong_secret_gets_no_answer(running: tuple[RunningCenter, str], address: str, key: str) -> None:
    with tmc.connect(address, app="orders", key="00" * 32, tag=TAG, timeout=SOON) as stranger:
        with pytest.raises(tmc.DeadlineExceeded):
            stranger.publish("order.quick", b"", key=key)


@pytest.mark.parametrize(
    ("address", "options", "sentence"),
    [
        ("amqp+submit://h/", {"key": "secret"}, "64 hexadecimal digits"),
        ("amqp+submit://h/", {"tls": tmc.Tls()}, "a broker's TLS is in its address"),
        ("amqp+submit://h/", {"proxy": "http://p:1"}, "a broker's TLS is in its address"),
        ("nats+submit://h/", {}, "nats+submit:// is no submit queue: give one of amqp, amqps, kafka"),
        ("amqp+submit://h/", {"tag": "dead"}, "that queue has what was refused"),
        ("amqp+submit://u:hunter/2@h/", {}, "This is no address of a broker: give amqp+submit://USER:PASSWORD@HOST"),
        ("kafka+submit://u:p@h:9092", {}, "user and password are settings"),
        ("kafka+submit://h:9092/?replies=answers", {}, "they begin with tmc.reply.orders."),
    ],
)
def test_mistakes_are_said_before_anything_is_sent(address: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(tmc.InvalidRequest) as raised:
        tmc.connect(address, app="orders", **options)
    assert sentence in str(raised.value)
    assert "hunter" not in str(raised.value)


def test_settings_that_kafka_does_not_know_are_named(kafka: Kafka, key: str) -> None:
    with tmc.connect(f"kafka+submit://{kafka.bootstrap}/?sasl.pasword=x", app="orders") as orders:
        with pytest.raises(tmc.InvalidRequest, match=r'No such configuration property: "sasl.pasword"'):
            orders.publish("order.quick", b"", key=key)


def test_a_submit_of_what_is_not_there_is_refused_at_once(orders: tmc.Center, key: str) -> None:
    """Without its id the center would wait for the prepare, and with it all calls of this process."""
    unknown = Prepared(message_id="1-1-00-4", topic="order.quick", key=key, attempt_id=tmc.new_attempt_id())
    with pytest.raises(tmc.NotFound):
        orders.submit(unknown)


def test_forked_children_submit_and_end_well(running: tuple[RunningCenter, str], address: str, key: str) -> None:
    program = (
        "import os, sys, tmc_client as tmc\n"
        "center = tmc.connect(sys.argv[1], app='orders', key=sys.argv[2], tag='prod')\n"
        "center.publish('order.quick', b'', key=sys.argv[3] + '-0')\n"
        "child = os.fork()\n"
        "center.publish('order.quick', b'', key=sys.argv[3] + ('-1' if child else '-2'))\n"
        "center.close()\n"
        "sys.exit(os.waitpid(child, 0)[1] if child else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, address, running[1], key], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [_state(running[0], f"{key}-{number}") for number in range(3)] == ["COMMITTED"] * 3


def test_a_connection_that_the_broker_closed_is_replaced(
    running: tuple[RunningCenter, str], rabbitmq: RabbitMQ, key: str
) -> None:
    address = rabbitmq.url.replace("amqp://", "amqp+submit://")
    with tmc.connect(address, app="orders", key=running[1], tag=TAG, timeout=timedelta(seconds=20)) as orders:
        orders.publish("order.quick", b"", key=f"{key}-1")
        rabbitmq.control("close_all_connections", "as an administrator does")
        orders.publish("order.quick", b"", key=f"{key}-2")
    assert _state(running[0], f"{key}-2") == "COMMITTED"


def test_no_queue_and_no_broker_are_said(rabbitmq: RabbitMQ, kafka: Kafka, key: str) -> None:
    url = rabbitmq.url.replace("amqp://", "amqp+submit://")
    for address, sentence in {
        url: "No queue at the broker takes what coupons.default submits: is it open",
        url.replace("guest:guest", "guest:wrong"): "does not let this user in",
        f"amqp+submit://127.0.0.1:{free_port()}/": "RabbitMQ does not take what is submitted",
        f"kafka+submit://{kafka.bootstrap}/?replies=tmc.reply.coupons.no": "Kafka has no topic tmc.reply.coupons.no for",
    }.items():
        with tmc.connect(address, app="coupons", timeout=SOON) as center:
            with pytest.raises(tmc.TmcError, match=sentence):
                center.publish("order.quick", b"", key=key)
