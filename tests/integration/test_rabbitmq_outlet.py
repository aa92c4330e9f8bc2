"""The publisher against a real RabbitMQ: nothing counted as delivered that the broker did not take, and no hot loops."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pika
import pytest

from tests.support.eventually import eventually
from tests.support.outlet import RecordedAnswers, SomeCatalog, a_copy
from tests.support.rabbitmq import RabbitMQ
from tmc_server.delivery import window
from tmc_server.delivery.rabbitmq import RabbitOutlet
from tmc_server.delivery.rabbitmq_queues import RabbitQueues
from tmc_server.domain.catalog import Forward
from tmc_server.domain.consumption import QueueLook

pytestmark = pytest.mark.services
_names = itertools.count(1)
FORWARDS = (Forward("rabbitmq", "there", "key.of.subscription"), Forward("rabbitmq", "missing", ""))


class Bench:
    """A publisher with two queues (subscriptions 1 and 2) and two forwards (3 and 4)."""

    def __init__(
        self,
        broker: RabbitMQ,
        url: str = "",
        declare: bool = True,
        queue_type: str = "quorum",
        forwards: tuple[Forward, ...] = FORWARDS,
    ) -> None:
        self.broker = broker
        self.consumer = f"consumer{next(_names)}"
        self.catalog = SomeCatalog(self.consumer, 2, forwards)
        self.answers = RecordedAnswers()
        self.alarms: list[tuple[str, int, str]] = []
        self.woken: list[int] = []

        def alarm(kind: str, subscription: int, detail: str) -> None:
            self.alarms.append((kind, subscription, detail))

        self.queues = RabbitQueues(url or broker.url, self.catalog, queue_type, alarm)
        if declare:
            self.queues.run_once()
        self.outlet = RabbitOutlet(
            url or broker.url, self.catalog, self.queues, self.answers, lambda: self.woken.append(1), alarm
        )
        self.outlet.start()

    def queue(self, subscription: int) -> str:
        return f"tmc.sub.{self.consumer}.default.t{subscription}"

    def send(self, subscription: int, count: int = 1, wait: bool = True) -> int:
        """Reserve and deliver up to `count` copies. Returns: how many there was room for."""
        if wait:
            eventually(lambda: self.room(subscription))
        room = self.outlet.reserve(subscription, count)
        self.outlet.deliver([a_copy(subscription) for _ in range(room)])
        return room

    def room(self, subscription: int) -> bool:
        got = self.outlet.reserve(subscription, 1)
        self.outlet.release(subscription, got)
        return got == 1

    def settled(self) -> None:
        eventually(lambda: self.outlet._window.in_flight == 0)

    def messages(self, queue: str) -> list[tuple[pika.BasicProperties, bytes]]:
        connection = self.broker.connect()
        channel = connection.channel()
        found = []
        while True:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                connection.close()
                return found
            found.append((properties, body))


@pytest.fixture
def bench(rabbitmq: RabbitMQ) -> Iterator[Bench]:
    made = Bench(rabbitmq)
    yield made
    made.outlet.stop(1)
    made.queues.close()


def test_a_copy_carries_what_a_consumer_needs(bench: Bench) -> None:
    assert bench.send(1) == 1
    bench.settled()
    ((properties, body),) = bench.messages(bench.queue(1))
    assert body == b"hello"
    assert (properties.type, properties.app_id, properties.content_type) == ("t1", "orders", "text/plain")
    assert properties.delivery_mode == 2
    properties.headers.pop("x-delivery-count")  # the broker's own
    assert properties.headers == {
        "color": "red",
        "tmc-key": "key",
        "tmc-attempt": 1,
        "tmc-subscriber": f"{bench.consumer}.default",
    }
    assert bench.answers.given_back == []


def test_many_are_confirmed_without_further_writes(bench: Bench) -> None:
    sent = 0
    while sent < 2000:
        sent += bench.send(1, 400)
    bench.settled()
    assert (bench.answers.given_back, bench.answers.acknowledged, bench.answers.refused) == ([], [], [])
    assert len(bench.messages(bench.queue(1))) == sent


def test_a_deleted_queue_pauses_alerts_heals_and_stops_nobody_else(bench: Bench) -> None:
    eventually(lambda: bench.room(1))
    connection = bench.broker.connect()
    connection.channel().queue_delete(bench.queue(1))
    connection.close()
    probes = []
    while not bench.alarms:
        probes.append(bench.send(1, 400))
        bench.settled()
        assert bench.send(2, 5, wait=False) == 5
    bench.settled()
    # The first failure may meet a full window, afterwards ten copies at most knock; three knocks in 1 + 2 seconds.
    assert len(probes) == window.ALERT_AFTER
    assert probes[1:] == [10, 10]
    assert len(bench.answers.given_back) == sum(probes)
    assert bench.alarms[0][:2] == ("queue refuses", 1)
    assert {copy.subscription for copy, _ in bench.answers.given_back} == {1}
    bench.queues.run_once()  # declares what was found missing
    assert bench.send(1) == 1
    bench.settled()
    assert len(bench.messages(bench.queue(1))) == 1
    assert len(bench.messages(bench.queue(2))) == 5 * len(probes)


def test_a_full_queue_that_rejects_is_given_back(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, declare=False)
    connection = rabbitmq.connect()
    full = {"x-queue-type": "classic", "x-max-length": 3, "x-overflow": "reject-publish"}
    connection.channel().queue_declare(bench.queue(1), durable=True, arguments=full)
    connection.close()
    bench.queues.run_once()
    assert [alarm[:2] for alarm in bench.alarms] == [("queue differs", 1)]  # used as it is, and told
    bench.send(1, 10)
    bench.settled()
    assert 5 <= len(bench.answers.given_back) <= 7  # the broker looks at the length a little late
    assert not bench.room(1)
    assert bench.send(2, 5) == 5
    bench.settled()
    assert len(bench.messages(bench.queue(2))) == 5
    bench.outlet.stop(1)
    bench.queues.close()


def test_a_broker_that_dies_gives_back_what_it_did_not_confirm_and_is_found_again() -> None:
    broker = RabbitMQ()
    bench = Bench(broker)
    sent = sum(bench.send(1, 100) for _ in range(5))
    bench.settled()
    assert bench.outlet.reserve(1, 31) == 31
    assert broker.process is not None
    os.killpg(broker.process.pid, signal.SIGSTOP)  # takes no more and answers nothing
    unconfirmed = [a_copy(1) for _ in range(30)]
    bench.outlet.deliver(unconfirmed)
    eventually(lambda: len(bench.outlet._channels[""].sent) == 30)
    broker.kill()
    eventually(lambda: not bench.outlet.connected)
    assert bench.outlet.reserve(1, 1) == 0
    assert bench.outlet.look(1) is None
    bench.outlet.deliver([a_copy(1)])  # reserved before it died
    broker.start()
    eventually(lambda: bench.room(1), seconds=60)
    more = bench.send(1)
    bench.settled()
    eventually(lambda: bench.outlet.look(1), seconds=30)
    arrived = len(bench.messages(bench.queue(1)))
    given_back = {copy.number for copy, _ in bench.answers.given_back}
    assert {copy.number for copy in unconfirmed} <= given_back
    assert arrived + len(given_back) >= sent + more + 31  # nothing is lost; what was uncertain may be there twice
    assert bench.outlet.stop() is True
    bench.queues.close()
    broker.stop()


def test_a_blocked_broker_pauses_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq.CONFIRM_TIMEOUT_S", 1.0)
    broker = RabbitMQ()
    bench = Bench(broker)
    bench.send(1)
    bench.settled()
    broker.control("set_vm_memory_high_watermark", "absolute", "1")
    bench.outlet.deliver([a_copy(1) for _ in range(bench.outlet.reserve(1, 1))])  # the alarm is told to who publishes
    eventually(lambda: bench.outlet._blocked)
    assert (bench.outlet.reserve(1, 1), bench.outlet.look(1)) == (0, None)
    in_flight = bench.outlet._window.in_flight
    broker.control("set_vm_memory_high_watermark", "absolute", "1GB")
    eventually(lambda: bench.room(1))
    bench.settled()
    assert bench.answers.given_back == []
    assert len(bench.messages(bench.queue(1))) == 1 + in_flight
    bench.outlet.stop(1)
    bench.queues.close()
    broker.stop()


def test_a_queue_that_lost_its_leader_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ 3.10, killed right after a queue was declared, forgets whose log it is; nothing else mends that."""
    monkeypatch.setattr("tmc_server.delivery.rabbitmq.CONFIRM_TIMEOUT_S", 1.0)
    broker = RabbitMQ()
    bench = Bench(broker)
    broker.kill()
    broker.start()

    def confirmed() -> bool:
        bench.queues.run_once()
        bench.send(1, wait=False)
        return bench.outlet._route(1).destination.failures == 0 and bool(bench.messages(bench.queue(1)))

    eventually(confirmed, seconds=60)
    bench.outlet.stop(1)
    bench.queues.close()
    broker.stop()


def test_only_a_queue_that_holds_nothing_and_serves_nobody_is_made_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    delete = pika.adapters.blocking_connection.BlockingChannel.queue_delete

    def noted(channel: Any, queue: str) -> Any:
        deleted.append(queue)
        return delete(channel, queue)

    monkeypatch.setattr("pika.adapters.blocking_connection.BlockingChannel.queue_delete", noted)
    bench.send(1)
    bench.settled()  # a copy waits in the first queue
    for subscription in (1, 2):
        bench.queues.heal(bench.queue(subscription), silent=True)
    bench.queues.run_once()
    assert deleted == [bench.queue(2)]
    assert len(bench.messages(bench.queue(1))) == 1
    assert bench.send(2) == 1  # it is there again
    bench.settled()
    assert len(bench.messages(bench.queue(2))) == 1


def test_a_broker_that_never_answers_is_connected_anew(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq.PATIENCE_S", 0.5)
    asked: list[int] = []
    confirm = pika.channel.Channel.confirm_delivery

    def swallowed_once(channel: pika.channel.Channel, *args: Any, **kwargs: Any) -> None:
        asked.append(1)
        if len(asked) > 1:
            confirm(channel, *args, **kwargs)

    monkeypatch.setattr("pika.channel.Channel.confirm_delivery", swallowed_once)
    bench = Bench(rabbitmq)
    bench.send(1)  # waits until there is room, so until the channel is ready
    bench.settled()
    assert len(asked) == 2
    bench.outlet.stop(1)
    bench.queues.close()


def test_a_permission_that_is_revoked_stops_publishing_and_comes_back() -> None:
    broker = RabbitMQ()
    broker.control("add_user", "center", "secret")
    broker.control("set_permissions", "center", ".*", ".*", ".*")
    bench = Bench(broker, broker.url.replace("guest:guest", "center:secret"))
    bench.send(1)
    bench.settled()
    broker.control("set_permissions", "center", ".*", "^$", ".*")
    broker.control("close_all_connections", "permissions changed")  # a busy channel goes on with what it was allowed
    eventually(lambda: not bench.outlet.connected)
    bench.send(1, 10)
    eventually(lambda: bench.answers.given_back)
    bench.settled()
    assert bench.send(1, 10, wait=False) == 0  # its channel is closed, and opened again a second later at the earliest
    broker.control("set_permissions", "center", ".*", ".*", ".*")
    eventually(lambda: bench.room(1), seconds=60)
    before = len(bench.answers.given_back)
    bench.send(1)
    bench.settled()
    assert len(bench.answers.given_back) == before
    bench.outlet.stop(1)
    bench.queues.close()
    broker.stop()


def test_looking_at_a_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    bench.send(1, 7)
    bench.settled()
    bench.outlet.came_out(1, 1234)
    eventually(lambda: bench.outlet.look(1) == QueueLook(0, 7, 1234, 0))
    connection = bench.broker.connect()
    channel = connection.channel()
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume(bench.queue(1), lambda *_: None)
    eventually(lambda: _without_time(bench.outlet.look(1)) == QueueLook(1, 4, 1234))
    connection.close()


def _without_time(look: QueueLook | None) -> QueueLook | None:
    return replace(look, still_ms=0) if look is not None else None


class TestForwarding:
    """Subscription 3 goes to exchange `there`, 4 to one that does not exist."""

    @pytest.fixture
    def exchange(self, bench: Bench) -> str:
        """A queue bound to the exchange with one routing key."""
        connection = bench.broker.connect()
        channel = connection.channel()
        channel.exchange_declare("there", "direct", durable=True)
        channel.queue_declare("forwarded", durable=True)
        channel.queue_purge("forwarded")
        channel.queue_bind("forwarded", "there", "key.of.subscription")
        channel.queue_bind("forwarded", "there", "special")
        connection.close()
        return "forwarded"

    def test_a_confirm_is_the_ack(self, bench: Bench, exchange: str) -> None:
        assert bench.send(3, 20) == 20
        eventually(lambda: len(bench.answers.acknowledged) == 20)
        assert len(bench.messages(exchange)) == 20

    def test_a_message_may_bring_its_own_key(self, bench: Bench, exchange: str) -> None:
        eventually(lambda: bench.room(3))
        assert bench.outlet.reserve(3, 2) == 2
        special, nowhere = (a_copy(3, headers={"tmc-forward-key": key}) for key in ("special", "nowhere"))
        bench.outlet.deliver([special, nowhere])
        eventually(lambda: bench.answers.acknowledged and bench.answers.refused)
        assert bench.answers.acknowledged == [special]
        assert [(copy, "NO_ROUTE" in error) for copy, error in bench.answers.refused] == [(nowhere, True)]

    def test_a_key_that_no_frame_can_hold_stops_nobody_else(self, bench: Bench, exchange: str) -> None:
        eventually(lambda: bench.room(3))
        assert bench.outlet.reserve(3, 3) == 3
        good, long, fine = a_copy(3), a_copy(3, headers={"tmc-forward-key": "\u00fc" * 200}), a_copy(3)
        bench.outlet.deliver([good, long, fine])
        eventually(lambda: len(bench.answers.acknowledged) == 2)
        assert [copy for copy, _ in bench.answers.refused] == [long]
        bench.settled()
        assert bench.outlet._window.bytes == 0

    def test_two_subscriptions_that_forward_one_message_to_one_place(self, rabbitmq: RabbitMQ, exchange: str) -> None:
        nowhere = Forward("rabbitmq", "there", "nowhere")
        bench = Bench(rabbitmq, forwards=(nowhere, nowhere))
        subscriptions = bench.catalog.current.subscriptions
        subscriptions[4] = replace(subscriptions[4], tag="test")
        eventually(lambda: bench.room(3))
        first = a_copy(3)
        twins = [first, replace(first, subscription=4)]
        for copy in twins:
            assert bench.outlet.reserve(copy.subscription, 1) == 1
        bench.outlet.deliver(twins)
        eventually(lambda: len(bench.answers.refused) == 2)
        assert bench.answers.acknowledged == []
        bench.outlet.stop(1)
        bench.queues.close()

    def test_an_exchange_that_is_missing_stops_nobody_else(self, bench: Bench, exchange: str) -> None:
        assert bench.send(4, 1) == 1
        eventually(lambda: bench.answers.refused)
        assert "no exchange 'missing'" in bench.answers.refused[0][1]
        assert bench.send(3, 1, wait=True) == 1
        assert bench.send(1, 1, wait=True) == 1
        eventually(lambda: len(bench.answers.acknowledged) == 1)
        assert bench.answers.given_back == []


def test_classic_queues_by_choice(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, queue_type="classic")
    bench.send(1)
    bench.settled()
    listed = rabbitmq.control("list_queues", "name", "type", "arguments")
    assert f"{bench.queue(1)}\tclassic" in listed
    assert bench.alarms == []
    bench.outlet.stop(1)
    bench.queues.close()


def test_stopping_waits_for_the_confirms(bench: Bench) -> None:
    sent = bench.send(1, 500)
    assert bench.outlet.stop() is True
    assert len(bench.messages(bench.queue(1))) == sent
