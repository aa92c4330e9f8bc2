"""Where an outbox sends to: the center, RabbitMQ without one, and the outbox as the fallback of transaction blocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client import aio
from tmc_client.local.sessions import SessionTransaction
from tmc_client.outbox.center_target import CenterTarget
from tmc_client.outbox.entries import Entry, Failure, Trouble
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ


@pytest.fixture
def business(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('outbox')}/c.db") as made:
        yield made


@pytest.fixture
def center(running: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(running.address, app="orders", key=running.keys["orders"]) as made:
        yield made


def entry(key: str, **changes: Any) -> Entry:
    values: dict[str, Any] = {"topic": "order.paid", "order_key": "", "line": "", "body": b"{}", "headers": {}}
    values |= {"content_type": "application/json", "delay_ms": 0, "attempt_id": os.urandom(16), "created_ms": 1}
    return Entry(id=1, key=key, **(values | changes))


def troubles(found: Any) -> list[Trouble | None]:
    return [failure.trouble if isinstance(failure, Failure) else None for failure in found]


class TestTheCenter:
    def test_a_message_that_is_sent_twice_is_one(self, running: RunningCenter, center: tmc.Center) -> None:
        target, message = CenterTarget(center.producer), entry("twice")
        assert list(target.send([message, message])) == [None, None]
        assert list(target.send([message])) == [None]
        assert running.detail("order.paid", "twice").message.key == "twice"

    def test_what_it_says(self, center: tmc.Center) -> None:
        target = CenterTarget(center.producer)
        center.prepare("order.paid", {}, key="open")
        found = target.send([entry("fine"), entry("k", topic="nowhere"), entry("open"), entry("", body=b"")])
        assert troubles(found) == [None, Trouble.REFUSED, Trouble.LATER, Trouble.REFUSED]

    def test_a_full_topic_is_sent_later_and_others_at_once(self, running: RunningCenter, center: tmc.Center) -> None:
        running.subscribe("bulk.full", "coupons", topic_settings={"unacked_limit": 1})
        target = CenterTarget(center.producer)
        eventually(lambda: troubles(target.send([entry(os.urandom(4).hex(), topic="bulk.full")])) == [Trouble.LATER])
        assert troubles(target.send([entry("x", topic="bulk.full"), entry("not held up")])) == [Trouble.LATER, None]

    def test_away(self) -> None:
        with tmc.connect("127.0.0.1:1", app="orders", timeout=timedelta(seconds=1)) as nobody:
            target = CenterTarget(nobody.producer)
            assert troubles(target.send([entry("a"), entry("b")])) == [Trouble.AWAY] * 2
        assert troubles(target.send([entry("a")])) == [Trouble.AWAY]  # the connection is closed


def test_a_target_may_have_a_producer_of_its_own(center: tmc.Center, tmp_path: Path) -> None:
    class Counting:
        delays = True

        def __init__(self) -> None:
            self.producer, self.sent = center.producer, 0

        def send(self, entries: Any) -> list[None]:
            self.sent += len(entries)
            return [None] * len(entries)

        def close(self) -> None:
            """Nothing is open."""

    target = Counting()
    engine = sa.create_engine(f"sqlite:///{tmp_path}/own.db", poolclass=sa.NullPool)
    tmc.create_tables(engine)
    with tmc.Outbox(engine, target) as outbox, Session(engine) as session:
        outbox.add(session, "order.paid", {}, key="own")
        session.commit()
        eventually(lambda: target.sent)
    assert "return" in get_type_hints(tmc.Outbox.__init__)


class Deaf:
    """A producer that does not hear what the center answers to its Prepares."""

    def __init__(self, producer: Any) -> None:
        self.submit, self.rollback, self._prepare = producer.submit, producer.rollback, producer.prepare

    def prepare(self, request: Any, timeout: timedelta) -> Future[Any]:
        self._prepare(request, timeout).result(10)
        return Future()


class TestTheFallback:
    def test_a_block_commits_while_the_center_is_away(
        self, business: sa.Engine, running: RunningCenter, center: tmc.Center
    ) -> None:
        short = timedelta(milliseconds=200)
        with tmc.connect("127.0.0.1:1", app="orders") as nobody:
            box = tmc.Outbox(business, center, direct=False, untouched=timedelta(0))
            with Session(business) as session, nobody.transaction(session, prepare_timeout=short, fallback=box) as tx:
                tx.send("order.paid", {"n": 1}, key="meanwhile")
        with business.connect() as connection:
            assert connection.execute(sa.select(ledger)).all() == []
        assert box.store.standing().unsent == 1
        assert box.relay().run_once() == 0.0
        assert running.detail("order.paid", "meanwhile").message.key == "meanwhile"

    def test_of_an_asyncio_block(self, business: sa.Engine, center: tmc.Center) -> None:
        box = tmc.Outbox(business, center, direct=False)

        async def story() -> None:
            engine = create_async_engine(business.url.set(drivername="sqlite+aiosqlite"))
            short = timedelta(milliseconds=200)
            async with aio.connect("127.0.0.1:1", app="orders") as nobody:
                async with (
                    AsyncSession(engine) as session,
                    nobody.transaction(session, prepare_timeout=short, fallback=box) as tx,
                ):
                    tx.send("order.paid", {"n": 1}, key="async")
            await engine.dispose()

        asyncio.run(story())
        assert [kept.key for kept in box.store.by_key("async")] == ["async"]

    def test_order_keys_and_what_could_never_be_sent_are_refused(self, business: sa.Engine) -> None:
        box = tmc.Outbox(business, tmc.connect("127.0.0.1:1", app="orders"), direct=False)
        short = timedelta(milliseconds=100)
        with tmc.connect("127.0.0.1:1", app="orders") as nobody:
            for fields, sentence in (
                ({"key": "k", "order_key": "o"}, "takes no order_key"),
                ({"key": "k" * 500}, "key must be 1 to 128 characters"),
            ):
                with (
                    pytest.raises(tmc.InvalidRequest, match=sentence),
                    Session(business) as session,
                    nobody.transaction(session, prepare_timeout=short, fallback=box) as tx,
                ):
                    tx.send("order.paid", {}, **fields)
        assert box.store.standing().unsent == 0

    def test_what_the_center_refuses_is_refused(self, business: sa.Engine, center: tmc.Center) -> None:
        box = tmc.Outbox(business, center, direct=False)
        with (
            pytest.raises(tmc.NotFound),
            Session(business) as session,
            center.transaction(session, fallback=box) as tx,
        ):
            tx.send("nowhere", {}, key="k")
        assert box.store.standing().unsent == 0

    def test_a_message_that_was_prepared_before_the_center_went_away_is_sent_once(
        self, business: sa.Engine, running: RunningCenter, center: tmc.Center
    ) -> None:
        """The first attempt is rolled back, then the one of the outbox takes its key."""
        box = tmc.Outbox(business, center, direct=False, untouched=timedelta(0))
        short = timedelta(milliseconds=500)
        deaf: Any = Deaf(center.producer)
        with (
            Session(business) as session,
            Transaction(deaf, center.settle, SessionTransaction(session), short, box) as tx,
        ):
            tx.send("order.paid", {"n": 1}, key="half")
        relay = box.relay()
        eventually(lambda: relay.run_once() == 0.0)
        assert box.store.standing().sent == 1
        assert running.detail("order.paid", "half").message.state == types_pb2.MESSAGE_STATE_COMMITTED


@pytest.fixture
def queue(rabbitmq: RabbitMQ) -> Callable[[], list[Any]]:
    """Reads what is in the queue `order.paid`."""

    def read() -> list[Any]:
        connection = rabbitmq.connect()
        channel = connection.channel()
        channel.queue_declare("order.paid", durable=True)
        found = []
        while (message := channel.basic_get("order.paid", auto_ack=True))[0] is not None:
            found.append(message)
        connection.close()
        return found

    read()
    return read


@pytest.mark.services
class TestRabbitMQ:
    def test_messages_arrive_with_all_that_was_said(self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]) -> None:
        target = tmc.RabbitTarget(rabbitmq.url)
        message = entry("k-1", body=b"body", headers={"trace": "t", "CC": "elsewhere"}, order_key="one")
        assert list(target.send([message, *(entry(f"k{number}") for number in range(600))])) == [None] * 601
        (_, properties, body), *others = queue()
        assert (body, properties.content_type, properties.type) == (b"body", "application/json", "order.paid")
        assert properties.headers == {
            "trace": "t",
            "tmc-user-CC": "elsewhere",
            "tmc-key": "k-1",
            "tmc-order-key": "one",
        }
        assert (properties.message_id, properties.delivery_mode) == (message.attempt_id.hex(), 2)
        assert len(others) == 600
        target.close()

    def test_without_a_queue_it_is_refused(self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]) -> None:
        target = tmc.RabbitTarget(rabbitmq.url, routing_key=lambda entry: entry.key)
        found = target.send([entry("order.paid"), entry("no.such.queue"), entry("order.paid")])
        assert troubles(found) == [None, Trouble.REFUSED, None]
        assert isinstance(found[1], Failure)
        assert found[1].error == "No queue is bound to exchange '' for routing key 'no.such.queue'."
        assert len(queue()) == 2
        target.close()

    def test_what_amqp_cannot_carry_is_refused_alone(self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]) -> None:
        target = tmc.RabbitTarget(rabbitmq.url)
        bad = [
            entry("a", headers={"h" * 300: ""}),
            entry("b", topic="\u4e2d" * 100),
            entry("c", body=b"", topic="\u4e2d" * 90),
        ]
        found = target.send([*bad, entry("fine")])
        assert troubles(found) == [Trouble.REFUSED] * 3 + [None]
        assert list(map(bool, target.send(bad))) == [True] * 3
        assert len(queue()) == 1
        target.close()

    def test_an_exchange_that_is_not_there_takes_nothing_and_the_next_page_is_sent(
        self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]
    ) -> None:
        absent = tmc.RabbitTarget(rabbitmq.url, exchange="no.such.exchange")
        assert troubles(absent.send([entry("a"), entry("b")])) == [Trouble.AWAY] * 2
        absent.close()
        target = tmc.RabbitTarget(rabbitmq.url)
        assert list(target.send([entry("c")])) == [None]
        target.close()

    def test_a_message_that_closes_the_channel_is_refused_alone(
        self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]
    ) -> None:
        """Larger than the broker's administrator allows."""
        rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 100000).")
        try:
            target = tmc.RabbitTarget(rabbitmq.url)
            entries = [entry(f"k{n}", body=b"x" * (150_000 if n == 5 else 10)) for n in range(9)]
            assert troubles(target.send(entries)) == [Trouble.REFUSED if n == 5 else None for n in range(9)]
            assert troubles(target.send(entries[5:6])) == [Trouble.REFUSED]
            assert troubles(target.send(entries[:1])) == [None]
            target.close()
        finally:
            rabbitmq.control("eval", "application:set_env(rabbit, max_message_size, 134217728).")
        assert {got[1].headers["tmc-key"] for got in queue()} == {f"k{n}" for n in range(9) if n != 5}

    def test_what_was_not_published_is_not_taken(self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]) -> None:
        """The connection breaks in the middle of a page: here on a body that is none."""
        target = tmc.RabbitTarget(rabbitmq.url)
        body: Any = 7
        assert troubles(target.send([entry("a"), entry("b", body=body), entry("c")])) == [Trouble.AWAY] * 3
        assert list(target.send([entry("d")])) == [None]
        target.close()

    def test_away(self) -> None:
        target = tmc.RabbitTarget("amqp://guest:guest@127.0.0.1:1/")
        found = target.send([entry("a")])
        assert troubles(found) == [Trouble.AWAY]
        target.close()

    def test_after_a_lost_connection_the_next_page_opens_another(
        self, rabbitmq: RabbitMQ, queue: Callable[[], list[Any]]
    ) -> None:
        target = tmc.RabbitTarget(rabbitmq.url)
        assert list(target.send([entry("a")])) == [None]
        rabbitmq.control("close_all_connections", "test")
        eventually(lambda: list(target.send([entry("b")])) == [None])
        assert len(queue()) >= 2
        target.close()
