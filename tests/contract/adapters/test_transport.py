"""What every transport of a consumer promises: each copy once, never more than the prefetch, nothing after the stop."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.outlet import SomeCatalog, a_copy
from tmc_client.consuming.received import Message, OnMessage, Receipt, Transport
from tmc_client.consuming.screening import Calls, Screen
from tmc_client.consuming.transports.rabbitmq import Broker, Credentials, Plan, RabbitTransport
from tmc_client.consuming.transports.stream import StreamTransport
from tmc_common.addresses import HostPort
from tmc_common.protocol import consumption_pb2
from tmc_server.delivery.rabbitmq_properties import properties_of
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.rabbitmq import RabbitMQ

_numbers = itertools.count(1)


@dataclass
class Received:
    """Copies in the order in which they came."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.copies: list[tuple[Message, Receipt]] = []

    def __call__(self, message: Message, receipt: Receipt) -> None:
        with self.lock:
            self.copies.append((message, receipt))

    @property
    def keys(self) -> list[str]:
        with self.lock:
            return [message.key for message, _ in self.copies]

    def answer(self, count: int) -> None:
        """Of the first copies."""
        for _, receipt in self.copies[:count]:
            receipt.handled()
            receipt.answered()


class TransportContract(ABC):
    @abstractmethod
    def transport(self, prefetch: int, on_message: OnMessage) -> contextmanager[Transport]:
        """A new one for an empty subscription, started; closed at the end of the block."""

    @abstractmethod
    def send(self, keys: list[str]) -> None:
        """Copies for that subscription."""

    def test_each_copy_comes_once_with_what_it_carries(self) -> None:
        received = Received()
        with self.transport(100, received):
            self.send([f"k{n}" for n in range(20)])
            eventually(lambda: len(received.keys) >= 20)
        assert sorted(received.keys) == sorted(f"k{n}" for n in range(20))
        message, _ = received.copies[0]
        assert (message.body, message.content_type, message.attempt) == (b"hello", "text/plain", 1)
        assert message.headers["color"] == "red"
        assert message.producer == "orders"

    def test_there_are_never_more_copies_than_the_prefetch_without_an_answer(self) -> None:
        received = Received()
        with self.transport(5, received):
            self.send([f"k{n}" for n in range(12)])
            eventually(lambda: len(received.keys) == 5)
            received.answer(2)
            eventually(lambda: len(received.keys) == 7)
            assert len(set(received.keys)) == 7

    def test_after_the_stop_nothing_new_comes_and_both_ends_may_be_called_twice(self) -> None:
        received = Received()
        with self.transport(1, received) as made:
            self.send(["first", "second"])
            eventually(lambda: received.keys == ["first"])
            made.stop()
            received.answer(1)
            made.stop()
            made.close()
        assert received.keys == ["first"]

    def test_what_it_brings_is_well_formed(self) -> None:
        received = Received()
        with self.transport(10, received) as made:
            self.send(["one"])
            eventually(lambda: received.keys == ["one"])
            assert made.malformed == 0


class TestStream(TransportContract):
    @pytest.fixture(autouse=True)
    def center(self, tmp_path) -> Iterator[None]:
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as self.running,
            tmc.connect(self.running.address, app="orders") as self.orders,
            tmc.connect(self.running.address, app="coupons") as self.coupons,
        ):
            yield

    @contextmanager
    def transport(self, prefetch: int, on_message: OnMessage) -> Iterator[Transport]:
        made = StreamTransport(self.coupons.connection, ["t1"], prefetch, on_message)
        made.start()
        self.running.subscribed()
        yield made
        made.stop()
        made.close()

    def send(self, keys: list[str]) -> None:
        for key in keys:
            self.orders.publish("t1", "hello", key=key, headers={"color": "red"})


@pytest.mark.services
class TestRabbitMQ(TransportContract):
    @pytest.fixture(autouse=True)
    def queue(self, rabbitmq: RabbitMQ) -> Iterator[None]:
        self.broker = rabbitmq
        self.name = f"transport.contract.{next(_numbers)}"
        self.connection = rabbitmq.connect()
        self.channel = self.connection.channel()
        self.channel.queue_declare(self.name)
        yield
        self.channel.queue_delete(self.name)
        self.connection.close()

    @contextmanager
    def transport(
        self, prefetch: int, on_message: OnMessage, *others: str, concurrency: int = 1, dead_nodes: int = 0
    ) -> Iterator[Transport]:
        calls = Calls(describe=lambda: None, report=lambda _: None)
        screen = Screen(calls, on_message)
        found = consumption_pb2.SubscriptionInfo(topic="t1", queue=self.name)
        screen.learn(consumption_pb2.DescribeSubscriptionsResponse(subscriptions=[found]))
        dead = [HostPort("127.0.0.1", free_port()) for _ in range(dead_nodes)]
        place = Broker(nodes=[*dead, HostPort("127.0.0.1", self.broker.port)], virtual_host="/", tls=False)
        made = RabbitTransport(
            lambda: Plan(broker=place, queues=[self.name, *others]),
            Credentials("guest", "guest"),
            prefetch,
            screen,
            concurrency=concurrency,
        )
        made.start()
        yield made
        made.stop()
        made.close()
        screen.stop()

    def send(self, keys: list[str]) -> None:
        catalog = SomeCatalog("coupons", 1).current
        for key in keys:
            copy = a_copy(1, key=key)
            self.channel.basic_publish("", self.name, copy.body, properties_of(copy, catalog))

    def test_where_one_node_of_the_broker_is_down_another_one_is_taken(self) -> None:
        received = Received()
        with self.transport(10, received, dead_nodes=2):
            self.send(["one"])
            eventually(lambda: received.keys == ["one"])

    def test_a_missing_queue_keeps_no_other_from_being_read_and_is_read_when_it_comes(self) -> None:
        received, late = Received(), f"{self.name}.late"
        with self.transport(10, received, late) as made:
            self.send(["one"])
            eventually(lambda: received.keys == ["one"])
            eventually(lambda: made.unread == [late])
            self.channel.queue_declare(late)
            eventually(lambda: made.unread == [])
        self.channel.queue_delete(late)

    def test_a_queue_that_is_deleted_is_read_again_and_the_others_meanwhile(self) -> None:
        received, other = Received(), f"{self.name}.other"
        self.channel.queue_declare(other)
        with self.transport(10, received, other) as made:
            eventually(lambda: made.unread == [])
            self.channel.queue_delete(other)
            eventually(lambda: made.unread == [other])
            self.send(["meanwhile"])
            eventually(lambda: received.keys == ["meanwhile"])
            assert not received.copies[0][1].lost
            self.channel.queue_declare(other)
            eventually(lambda: made.unread == [])
        self.channel.queue_delete(other)

    def test_a_busy_queue_keeps_all_handlers_busy_however_many_queues_there_are(self) -> None:
        received = Received()
        others = [f"{self.name}.{number}" for number in range(20)]
        for each in others:
            self.channel.queue_declare(each)
        with self.transport(10, received, *others, concurrency=8):
            self.send([f"k{n}" for n in range(12)])
            eventually(lambda: len(received.keys) == 8)
            received.answer(8)
            eventually(lambda: len(received.keys) == 12)
        for each in others:
            self.channel.queue_delete(each)

    def test_what_the_broker_gives_again_says_so_and_the_first_copy_is_lost(self) -> None:
        received, again = Received(), Received()
        with self.transport(10, received):
            self.send(["one"])
            eventually(lambda: received.keys == ["one"])
            ((message, receipt),) = received.copies
            assert (message.redelivered, receipt.lost) == (False, False)
        assert receipt.lost
        with self.transport(10, again):
            eventually(lambda: again.keys == ["one"])
            assert again.copies[0][0].redelivered
