"""The publisher against a real RabbitMQ: nothing counted as delivered that the broker did not take, and no hot loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pika
import pytest
from msgspec import structs

from tests.support.outlet import ProgressInMemory, RecordedAnswers, SomeCatalog, a_copy
from tmc_common.headers import from_wire
from tmc_server.delivery import window
from tmc_server.delivery.rabbitmq import RabbitOutlet
from tmc_server.delivery.rabbitmq_properties import properties_of
from tmc_server.delivery.rabbitmq_queues import RabbitQueues
from tmc_server.domain.catalog import Catalog, Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ports.delivery import Copy, SharedProgress
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.rabbitmq import RabbitMQ

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
        other_owner_of: int = 0,
        progress: SharedProgress | None = None,
        consumer: str = "",
        single_node: bool = True,
    ) -> None:
        self.broker = broker
        self.consumer = consumer or f"consumer{next(_names)}"
        self.catalog = SomeCatalog(self.consumer, 2, forwards, other_owner_of)
        self.answers = RecordedAnswers()
        self.alerts: list[tuple[str, int, str]] = []
        self.woken: list[int] = []

        def raise_alert(kind: str, subscription: int, detail: str) -> None:
            self.alerts.append((kind, subscription, detail))

        self.queues = RabbitQueues(url or broker.url, self.catalog, queue_type, raise_alert, single_node=single_node)
        if declare:
            self.queues.run_once()
        self.outlet = RabbitOutlet(
            url=url or broker.url,
            catalog=self.catalog,
            queues=self.queues,
            answers=self.answers,
            wake=lambda: self.woken.append(1),
            raise_alert=raise_alert,
            progress=progress or ProgressInMemory().of_server(1),
        )
        self.outlet.start()

    def close(self) -> None:
        self.outlet.stop(1)
        self.queues.close()

    def delete(self, queue: str) -> None:
        connection = self.broker.connect()
        connection.channel().queue_delete(queue)
        connection.close()

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
        eventually(lambda: self.outlet.in_flight == 0)

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
    made.close()


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
        "tmc-interval-ms": 10_000,
    }
    assert bench.answers.given_back == []


def test_many_are_confirmed_without_further_writes(bench: Bench) -> None:
    sent = 0
    while sent < 2000:
        sent += bench.send(1, 400)
    bench.settled()
    assert (bench.answers.given_back, bench.answers.acknowledged, bench.answers.refused) == ([], [], [])
    assert len(bench.messages(bench.queue(1))) == sent


def test_a_deleted_queue_is_declared_again_and_alerted_every_time_and_stops_nobody_else(bench: Bench) -> None:
    for deletion in (1, 2):
        eventually(lambda: bench.room(1))
        before = len(bench.answers.given_back)
        bench.delete(bench.queue(1))
        sent = bench.send(1, 400)
        bench.settled()
        assert bench.send(2, 5, wait=False) == 5
        bench.settled()
        assert {copy.subscription for copy, _ in bench.answers.given_back} == {1}
        assert len(bench.answers.given_back) - before == sent
        bench.queues.run_once()  # declares what was found missing
        assert [alert[:2] for alert in bench.alerts] == [("queue missing", 1)] * deletion
        assert bench.send(1) == 1  # the first copy after its pause
        bench.settled()
        assert len(bench.messages(bench.queue(1))) == 1
    assert len(bench.messages(bench.queue(2))) == 10


def test_a_queue_that_refused_for_long_and_is_then_deleted_is_declared_again(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, declare=False)
    full = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
    connection = rabbitmq.connect()
    connection.channel().queue_declare(bench.queue(1), durable=True, arguments=full)
    connection.close()
    bench.queues.run_once()
    probes = []
    while ("queue refuses", 1) not in [alert[:2] for alert in bench.alerts]:
        probes.append(bench.send(1, 400))
        bench.settled()
    assert len(probes) == window.ALERT_AFTER
    assert probes[1:] == [10, 10]
    bench.delete(bench.queue(1))

    def arrives() -> bool:
        bench.queues.run_once()
        bench.send(1, wait=False)
        bench.settled()
        return bool(bench.messages(bench.queue(1)))

    eventually(arrives, seconds=60)
    bench.close()


def test_with_few_channels_producers_share_them(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, f"{rabbitmq.url}?channel_max=2", other_owner_of=2)
    for subscription in (1, 2):
        assert bench.send(subscription) == 1
    bench.settled()
    assert [len(bench.messages(bench.queue(subscription))) for subscription in (1, 2)] == [1, 1]
    assert set(bench.outlet.lanes) == {("", 0)}
    bench.close()


def test_nothing_is_published_to_a_queue_that_was_not_declared_yet(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, declare=False)
    eventually(lambda: bench.outlet.lanes and all(lane.ready for lane in bench.outlet.lanes.values()))
    assert bench.outlet.reserve(1, 5) == 0
    bench.queues.run_once()
    assert bench.send(1, 5) == 5
    bench.settled()
    assert bench.answers.given_back == []
    bench.close()


class TestPoison:
    """A copy for whose content the broker closes the channel, without saying which one it was."""

    @pytest.fixture
    def poisonous(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
        """Headers reach the broker under their own names, so that CC closes the channel. App 3 owns topic 2."""
        monkeypatch.setattr("tmc_server.delivery.rabbitmq_properties.to_wire", dict)
        return bench

    @staticmethod
    def poison(subscription: int = 1) -> Copy:
        return a_copy(subscription, headers={"CC": "not an array"})

    @staticmethod
    def deliver(bench: Bench, copies: Sequence[Copy]) -> None:
        for copy in copies:
            eventually(lambda copy=copy: bench.outlet.reserve(copy.subscription, 1) == 1)
        bench.outlet.deliver(copies)
        bench.settled()

    def test_the_culprit_is_found_and_counted_and_its_neighbors_arrive(self, poisonous: Bench) -> None:
        culprit = self.poison()
        self.deliver(poisonous, [*(a_copy(1) for _ in range(30)), culprit, *(a_copy(1) for _ in range(30))])
        assert [copy for copy, _ in poisonous.answers.refused] == [culprit]
        assert poisonous.answers.given_back == []
        arrived = [properties.message_id for properties, _ in poisonous.messages(poisonous.queue(1))]
        assert len(set(arrived)) == 60
        assert len(arrived) <= 120  # those before the culprit may have arrived unconfirmed, alone and in its group

    def test_several_culprits_are_each_found(self, poisonous: Bench) -> None:
        culprits = [self.poison() for _ in range(3)]
        self.deliver(poisonous, [copy for culprit in culprits for copy in (a_copy(1), culprit, a_copy(1))])
        assert sorted(copy.number for copy, _ in poisonous.answers.refused) == [copy.number for copy in culprits]
        assert len({properties.message_id for properties, _ in poisonous.messages(poisonous.queue(1))}) == 6

    def test_a_known_culprit_is_sent_alone_and_costs_its_neighbors_no_second_copy(self, poisonous: Bench) -> None:
        culprit = self.poison()
        self.deliver(poisonous, [culprit])
        again = structs.replace(culprit, attempt=2)
        self.deliver(poisonous, [*(a_copy(1) for _ in range(30)), again, *(a_copy(1) for _ in range(30))])
        assert [copy for copy, _ in poisonous.answers.refused] == [culprit, again]
        assert len(poisonous.messages(poisonous.queue(1))) == 60

    def test_another_producer_has_a_channel_of_its_own(self, rabbitmq: RabbitMQ, poisonous: Bench) -> None:
        bench = Bench(rabbitmq, other_owner_of=2)
        culprits = [self.poison() for _ in range(3)]
        neighbors = [a_copy(2, producer=3) for _ in range(30)]
        self.deliver(bench, [*neighbors[:10], *culprits, *neighbors[10:]])
        assert len(bench.answers.refused) == 3
        arrived = [properties.message_id for properties, _ in bench.messages(bench.queue(2))]
        assert len(arrived) == 30  # each once: their channel was never closed
        bench.close()

    def test_a_body_over_the_brokers_limit_is_refused_alone(self) -> None:
        broker = RabbitMQ()
        broker.control("eval", "application:set_env(rabbit, max_message_size, 5000).")
        bench = Bench(broker)
        large = a_copy(1, body=b"x" * 10_000)
        self.deliver(bench, [a_copy(1), large, a_copy(1)])
        assert [(copy, "larger" in error) for copy, error in bench.answers.refused] == [(large, True)]
        assert len({properties.message_id for properties, _ in bench.messages(bench.queue(1))}) == 2
        bench.close()
        broker.stop()

    def test_a_fault_of_ours_while_publishing_costs_one_copy_and_no_room(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = a_copy(1)

        def broken(copy: Copy, catalog: Catalog) -> pika.BasicProperties:
            if copy is bad:
                raise RuntimeError("nobody foresaw this")
            return properties_of(copy, catalog)

        monkeypatch.setattr("tmc_server.delivery.rabbitmq.properties_of", broken)
        self.deliver(bench, [a_copy(1), bad, a_copy(1)])
        assert [copy for copy, _ in bench.answers.refused] == [bad]
        assert len(bench.messages(bench.queue(1))) == 2
        assert bench.outlet.bytes_in_flight == 0


@pytest.mark.parametrize("name", ["CC", "BCC", "cc", "x-delay", "x-death", "X-Match"])
def test_user_headers_with_names_of_the_broker_arrive_under_a_prefix(bench: Bench, name: str) -> None:
    eventually(lambda: bench.outlet.reserve(1, 1) == 1)
    bench.outlet.deliver([a_copy(1, headers={name: "somebody@example.org", "color": "red"})])
    bench.settled()
    ((properties, _),) = bench.messages(bench.queue(1))
    assert bench.answers.refused == bench.answers.given_back == []
    assert properties.headers[f"tmc-user-{name}"] == "somebody@example.org"
    assert from_wire({k: v for k, v in properties.headers.items() if not k.startswith("tmc-") or name in k}) == {
        name: "somebody@example.org",
        "color": "red",
    }


def test_a_full_queue_that_rejects_is_given_back(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, declare=False)
    connection = rabbitmq.connect()
    full = {"x-queue-type": "classic", "x-max-length": 3, "x-overflow": "reject-publish"}
    connection.channel().queue_declare(bench.queue(1), durable=True, arguments=full)
    connection.close()
    bench.queues.run_once()
    assert [alert[:2] for alert in bench.alerts] == [("queue differs", 1)]  # used as it is
    bench.send(1, 10)
    bench.settled()
    assert 5 <= len(bench.answers.given_back) <= 7  # the broker looks at the length a little late
    assert not bench.room(1)
    assert bench.send(2, 5) == 5
    bench.settled()
    assert len(bench.messages(bench.queue(2))) == 5
    bench.close()


def test_a_broker_that_dies_gives_back_what_it_did_not_confirm_and_is_found_again() -> None:
    broker = RabbitMQ()
    bench = Bench(broker)
    sent = sum(bench.send(1, 100) for _ in range(5))
    bench.settled()
    assert bench.outlet.reserve(1, 31) == 31
    broker.suspend()
    unconfirmed = [a_copy(1) for _ in range(30)]
    bench.outlet.deliver(unconfirmed)
    eventually(lambda: sum(lane.in_flight for lane in bench.outlet.lanes.values()) == 30)
    broker.kill()
    eventually(lambda: not bench.outlet.connected)
    assert bench.outlet.reserve(1, 1) == 0
    assert bench.outlet.look(1) is None
    bench.outlet.deliver([a_copy(1)])  # reserved before it died
    broker.start()
    eventually(lambda: bench.room(1), seconds=60)
    more = bench.send(1)
    bench.settled()
    eventually(lambda: bench.outlet.look(1))
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
    # The broker reports its memory alarm to connections that publish.
    bench.outlet.deliver([a_copy(1) for _ in range(bench.outlet.reserve(1, 1))])
    eventually(lambda: bench.outlet.is_blocked)
    assert (bench.outlet.reserve(1, 1), bench.outlet.look(1)) == (0, None)
    in_flight = bench.outlet.in_flight
    broker.control("set_vm_memory_high_watermark", "absolute", "1GB")
    eventually(lambda: bench.room(1))
    bench.settled()
    assert bench.answers.given_back == []
    assert len(bench.messages(bench.queue(1))) == 1 + in_flight
    bench.close()
    broker.stop()


def test_a_queue_that_lost_its_leader_is_declared_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
    bench.close()
    broker.stop()


def test_a_queue_that_nothing_runs_is_declared_again(bench: Bench) -> None:
    """As after a kill between the queue's record and its log: each reader loses its connection."""
    bench.broker.control("eval", f"ra:force_delete_server(quorum_queues, {{'%2F_{bench.queue(1)}', node()}}).")
    assert bench.queues.look(bench.queue(1)) is None
    bench.queues.run_once()
    assert bench.send(1) == 1
    bench.settled()
    assert len(bench.messages(bench.queue(1))) == 1


def test_only_an_empty_queue_without_consumers_is_declared_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_in_a_cluster_a_silent_queue_is_left_to_its_majority(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, deleted = Bench(rabbitmq, single_node=False), []
    monkeypatch.setattr(
        "pika.adapters.blocking_connection.BlockingChannel.queue_delete", lambda _, queue: deleted.append(queue)
    )
    bench.queues.heal(bench.queue(1), silent=True)
    bench.queues.run_once()
    assert deleted == []
    assert bench.queues.is_known(bench.queue(1))
    bench.close()


def test_a_deleted_queue_that_nothing_is_published_to_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_AGAIN_S", -1.0)
    bench.delete(bench.queue(1))
    bench.queues.run_once()
    assert [alert[:2] for alert in bench.alerts] == [("queue missing", 1)]
    assert bench.messages(bench.queue(1)) == []  # it is there


def test_a_queue_without_subscription_is_deleted_when_it_is_empty_and_nobody_reads_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_AGAIN_S", -1.0)
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    bench.send(1)
    bench.settled()
    current = bench.catalog.current
    removed = {number: replace(each, removed_ms=1) for number, each in current.subscriptions.items() if number == 1}
    bench.catalog.current = replace(current, subscriptions={**current.subscriptions, **removed})

    def exists(subscription: int) -> bool:
        connection = bench.broker.connect()
        try:
            connection.channel().queue_declare(bench.queue(subscription), passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        finally:
            connection.close()
        return True

    bench.queues.run_once()
    assert exists(1)  # it holds a copy
    assert len(bench.messages(bench.queue(1))) == 1
    connection = bench.broker.connect()
    connection.channel().basic_consume(bench.queue(1), lambda *_: None)
    eventually(lambda: bench.queues.look(bench.queue(1)) == (1, 0))
    bench.queues.run_once()
    assert exists(1)  # it has a consumer
    connection.close()
    eventually(lambda: bench.queues.run_once() or not exists(1))
    bench.queues.run_once()
    assert exists(2)
    assert bench.alerts == []
    bench.catalog.current = current
    bench.queues.run_once()
    assert exists(1)
    assert bench.alerts == []


def test_a_queue_that_cannot_be_declared_is_not_taken_for_a_deleted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    broker = RabbitMQ()
    broker.control("set_vhost_limits", "-p", "/", '{"max-queues": 1}')
    bench = Bench(broker)
    for _ in range(3):
        bench.queues.run_once()
        bench.outlet.look(2)
    assert [alert[:2] for alert in bench.alerts] == [("queue refuses", 2)]
    assert (bench.queues.is_known(bench.queue(1)), bench.queues.is_known(bench.queue(2))) == (True, False)
    assert bench.send(1) == 1
    bench.settled()
    bench.close()
    broker.stop()


def test_a_copy_that_is_not_confirmed_in_time_is_not_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a queue without a leader: what is on its way may still arrive."""
    monkeypatch.setattr("tmc_server.delivery.rabbitmq.CONFIRM_TIMEOUT_S", 0.5)
    broker = RabbitMQ()
    bench = Bench(broker)
    bench.send(1)
    bench.settled()
    assert bench.outlet.reserve(1, 20) == 20
    broker.suspend()
    copies = [a_copy(1) for _ in range(20)]
    bench.outlet.deliver(copies)
    eventually(lambda: bench.outlet.in_flight == 0)  # they have left the window to others
    assert bench.outlet.unconfirmed(1) == {(copy.shard, copy.number) for copy in copies}
    assert bench.answers.given_back == []
    assert bench.outlet.reserve(1, 1) == 0  # its pause
    broker.resume()
    eventually(lambda: not bench.outlet.unconfirmed(1))
    assert bench.answers.given_back == []
    assert len(bench.messages(bench.queue(1))) == 21
    bench.close()
    broker.stop()


def test_a_broker_that_never_answers_is_reconnected(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
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
    bench.close()


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
    bench.close()
    broker.stop()


def test_looking_at_a_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    bench.send(1, 7)
    bench.settled()
    bench.outlet.drained_until(1, 1234)
    eventually(lambda: bench.outlet.look(1) == QueueLook(consumers=0, messages=7, passed_ms=1234, still_ms=0))
    connection = bench.broker.connect()
    channel = connection.channel()
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume(bench.queue(1), lambda *_: None)
    eventually(lambda: _without_time(bench.outlet.look(1)) == QueueLook(consumers=1, messages=4, passed_ms=1234))
    connection.close()


def test_a_missing_queue_that_is_only_looked_at_is_declared_again_and_alerted(bench: Bench) -> None:
    eventually(lambda: bench.outlet.look(1))
    bench.delete(bench.queue(1))
    eventually(lambda: bench.outlet.look(1) == QueueLook() and bench.queues.run_once() is False and bench.alerts)
    assert [alert[:2] for alert in bench.alerts] == [("queue missing", 1)]
    assert bench.send(1) == 1
    bench.settled()
    assert len(bench.messages(bench.queue(1))) == 1


def test_what_came_out_is_known_to_the_server_that_took_no_ack(rabbitmq: RabbitMQ) -> None:
    progress = ProgressInMemory()
    acked, blind = (Bench(rabbitmq, progress=progress.of_server(run), consumer="shared", forwards=()) for run in (1, 2))
    blind.send(1)
    blind.settled()
    acked.outlet.drained_until(1, 1234)
    acked.outlet.share_progress()
    look = eventually(lambda: blind.outlet.look(1))
    assert look.passed_ms == 1234
    blind.outlet.share_progress()
    assert [run for _, run in progress.rows] == [1]  # what was heard is not passed on as one's own
    for bench in (acked, blind):
        bench.close()


def test_a_queue_that_never_answers_is_left_alone_and_holds_up_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._ANSWER_S", 0.2)
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    declare = pika.channel.Channel.queue_declare
    asked: list[str] = []

    def swallowed(channel: pika.channel.Channel, queue: str, *args: Any, **keywords: Any) -> Any:
        asked.append(queue)
        if queue != bench.queue(1):
            return declare(channel, queue, *args, **keywords)
        return None

    monkeypatch.setattr("pika.channel.Channel.queue_declare", swallowed)
    eventually(lambda: bench.room(1))
    assert [bench.outlet.look(1) for _ in range(5)] == [None] * 5
    assert asked.count(bench.queue(1)) == 1  # it rests
    assert bench.outlet.look(2) == QueueLook()
    bench.queues.run_once()
    assert bench.send(2) == 1


def test_a_queue_rests_for_longer_each_time_until_it_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._ANSWER_S", 0.05)
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LOOK_FOR_S", 0.0)
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._FIRST_REST_S", 0.01)
    monkeypatch.setattr("tmc_server.delivery.rabbitmq_queues._LONGEST_REST_S", 0.04)
    declare = pika.channel.Channel.queue_declare

    def silent(times: int) -> list[str]:
        caplog.clear()
        monkeypatch.setattr("pika.channel.Channel.queue_declare", lambda *_args, **_keywords: None)
        eventually(lambda: bench.outlet.look(1) or len(_rests(caplog)) >= times)
        monkeypatch.setattr("pika.channel.Channel.queue_declare", declare)
        eventually(lambda: bench.outlet.look(1))
        return _rests(caplog)[:times]

    eventually(lambda: bench.room(1))
    assert silent(4) == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert silent(1) == ["0.01 s"]


def _rests(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line.rpartition(" for ")[2] for line in lines if "does not answer: it is left alone" in line]


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
        assert bench.outlet.bytes_in_flight == 0

    def test_two_subscriptions_that_forward_one_message_to_one_place(self, rabbitmq: RabbitMQ, exchange: str) -> None:
        nowhere = Forward("rabbitmq", "there", "nowhere")
        bench = Bench(rabbitmq, forwards=(nowhere, nowhere))
        subscriptions = bench.catalog.current.subscriptions
        subscriptions[4] = replace(subscriptions[4], tag="test")
        eventually(lambda: bench.room(3))
        first = a_copy(3)
        twins = [first, structs.replace(first, subscription=4)]
        for copy in twins:
            assert bench.outlet.reserve(copy.subscription, 1) == 1
        bench.outlet.deliver(twins)
        eventually(lambda: len(bench.answers.refused) == 2)
        assert bench.answers.acknowledged == []
        bench.close()

    def test_an_exchange_that_is_missing_stops_nobody_else(self, bench: Bench, exchange: str) -> None:
        assert bench.send(4, 1) == 1
        eventually(lambda: bench.answers.refused)
        assert "no exchange 'missing'" in bench.answers.refused[0][1]
        assert bench.send(3, 1, wait=True) == 1
        assert bench.send(1, 1, wait=True) == 1
        eventually(lambda: len(bench.answers.acknowledged) == 1)
        assert bench.answers.given_back == []


def test_where_one_node_of_the_broker_is_down_another_one_is_taken(rabbitmq: RabbitMQ) -> None:
    nodes = f"127.0.0.1:{free_port()},127.0.0.1:{rabbitmq.port}"
    bench = Bench(rabbitmq, url=f"amqp://guest:guest@{nodes}/%2F", declare=False)
    for _ in range(2):  # one of them is the dead one
        with suppress(pika.exceptions.AMQPError):
            bench.queues.run_once()
    assert bench.send(1) == 1
    bench.settled()
    assert len(bench.messages(bench.queue(1))) == 1
    bench.close()


def test_classic_queues_by_choice(rabbitmq: RabbitMQ) -> None:
    bench = Bench(rabbitmq, queue_type="classic")
    bench.send(1)
    bench.settled()
    listed = rabbitmq.control("list_queues", "name", "type", "arguments")
    assert f"{bench.queue(1)}\tclassic" in listed
    assert bench.alerts == []
    bench.close()


def test_stopping_waits_for_the_confirms(bench: Bench) -> None:
    sent = bench.send(1, 500)
    assert bench.outlet.stop() is True
    assert len(bench.messages(bench.queue(1))) == sent
