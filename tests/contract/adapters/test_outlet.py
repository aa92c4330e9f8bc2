"""What every outlet promises, the outlet of the store's tests included: room is never overdrawn, no copy gets lost."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest
from msgspec import structs

from tests.support.outlet import ProgressInMemory, RecordedAnswers, SomeCatalog, a_copy
from tests.support.receiver import Posted, Reply, receiver
from tests.support.store import RecordingOutlet
from tmc_server.delivery.kafka import KafkaForwarder
from tmc_server.delivery.rabbitmq import RabbitOutlet
from tmc_server.delivery.rabbitmq_queues import RabbitQueues
from tmc_server.delivery.routing import RoutingOutlet
from tmc_server.delivery.stream import StreamOutlet
from tmc_server.delivery.webhook import WebhookForwarder
from tmc_server.domain.catalog import WEBHOOK, WEBHOOK_BATCH, Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.egress import Egress
from tmc_server.domain.ports.delivery import Copy, Outlet
from tmc_server.outgoing import client_tls
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

ROOM = 10_000  # more than any of these outlets has


class OutletContract(ABC):
    """subscription: one whose copies the outlet takes; it has room soon after the outlet was opened."""

    subscription: ClassVar[int] = 1

    @pytest.fixture
    def outlet(self) -> Iterator[Outlet]:
        with self.opened() as made:
            eventually(lambda: self._has_room(made))
            yield made

    @abstractmethod
    def opened(self) -> contextmanager[Outlet]:
        """A new one, closed at the end of the block."""

    @abstractmethod
    def ended(self) -> Sequence[Copy]:
        """Copies that were taken over by what is behind the outlet, and those that were given back."""

    def _has_room(self, outlet: Outlet) -> bool:
        got = outlet.reserve(self.subscription, 1)
        outlet.release(self.subscription, got)
        return got == 1

    def test_room_is_at_most_what_is_wanted(self, outlet: Outlet) -> None:
        assert outlet.reserve(self.subscription, 0) == 0
        assert outlet.reserve(self.subscription, 1) == 1
        outlet.release(self.subscription, 1)

    def test_room_that_was_released_can_be_reserved_again(self, outlet: Outlet) -> None:
        for _ in range(3):
            got = outlet.reserve(self.subscription, ROOM)
            assert 0 < got <= ROOM
            outlet.release(self.subscription, got)

    def test_each_copy_comes_to_an_end(self, outlet: Outlet) -> None:
        copies = [a_copy(self.subscription) for _ in range(outlet.reserve(self.subscription, 5))]
        outlet.deliver(copies)
        eventually(lambda: {copy.number for copy in self.ended()} == {copy.number for copy in copies})

    def test_several_threads_lose_and_double_nothing(self, outlet: Outlet) -> None:
        sent: list[Copy] = []

        def work() -> None:
            for _ in range(20):
                copies = [a_copy(self.subscription) for _ in range(outlet.reserve(self.subscription, 1))]
                outlet.deliver(copies)
                sent.extend(copies)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: sorted(copy.number for copy in self.ended()) == sorted(copy.number for copy in sent))

    def test_progress_and_looks_are_answered_whatever_came_before(self, outlet: Outlet) -> None:
        outlet.drained_until(self.subscription, 0)
        outlet.drained_until(self.subscription, 1_800_000_000_000)
        assert isinstance(outlet.look(self.subscription), QueueLook | None)


class TestStreams(OutletContract):
    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        loop = asyncio.new_event_loop()
        self._ended: list[Copy] = []
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        made = StreamOutlet(loop, self._ended.extend, lambda: None)
        asyncio.run_coroutine_threadsafe(self._start(made), loop).result(10)
        yield made
        asyncio.run_coroutine_threadsafe(self._end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def _start(self, outlet: StreamOutlet) -> None:
        self._consumer = asyncio.create_task(self._consume(outlet))

    async def _end(self) -> None:
        self._consumer.cancel()
        await asyncio.gather(self._consumer, return_exceptions=True)

    async def _consume(self, outlet: StreamOutlet) -> None:
        stream = outlet.open([self.subscription])
        stream.add_credit(1000)
        while True:
            self._ended += await stream.next_batch(100, 1 << 20)

    def ended(self) -> Sequence[Copy]:
        return list(self._ended)


class _WithAnswers(OutletContract):
    """Outlets that say what became of copies."""

    answers: RecordedAnswers

    def ended(self) -> Sequence[Copy]:
        with self.answers.lock:
            back = [copy for copy, _ in [*self.answers.given_back, *self.answers.refused]]
            return [*self.answers.acknowledged, *back]


class TestKafka(_WithAnswers):
    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        self.answers = RecordedAnswers()
        catalog = SomeCatalog("consumer", 0, [Forward("kafka", "events", "")])
        made = KafkaForwarder(catalog, self.answers, lambda: None, {"test.mock.num.brokers": 1})
        made.start()
        yield made
        made.stop()


class TestWebhook(_WithAnswers):
    kind = WEBHOOK

    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        self.answers = RecordedAnswers()
        with receiver() as self.shop:
            catalog = SomeCatalog("consumer", 0, [Forward(self.kind, self.shop.url, "")])
            allow = Egress(["127.0.0.0/8:*"])
            made = WebhookForwarder(catalog, self.answers, lambda: None, allow, client_tls(None))
            made.start()
            yield made
            assert made.stop()


class TestWebhookBatches(TestWebhook):
    kind = WEBHOOK_BATCH

    def test_a_copy_that_was_refused_is_not_given_back_although_the_next_one_of_it_is_here(
        self, outlet: Outlet
    ) -> None:
        """The batch fails, so each is posted alone. The first fails, and comes again before the others are through."""
        first, second, third = (a_copy(self.subscription) for _ in range(outlet.reserve(self.subscription, 3)))

        def answer(posted: Posted) -> Reply:
            if posted.events[0]["tmcattempt"] != first.attempt:
                return Reply(503)
            if not self.answers.refused:
                return Reply(500)
            assert outlet.reserve(self.subscription, 1) == 1
            outlet.deliver([structs.replace(first, attempt=first.attempt + 1)])
            return Reply(503)

        self.shop.answer = answer
        outlet.deliver([first, second, third])
        eventually(lambda: len(self.ended()) == 4)
        assert [copy for copy, _ in self.answers.refused] == [first]
        given_back = [(copy.number, copy.attempt) for copy, _ in self.answers.given_back]
        again = (first.number, first.attempt + 1)
        assert sorted(given_back) == sorted([(second.number, 1), (third.number, 1), again])


@pytest.mark.services
class TestRabbitMQ(_WithAnswers):
    @pytest.fixture(autouse=True)
    def broker(self, rabbitmq: RabbitMQ) -> None:
        self.rabbitmq = rabbitmq

    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        self.answers = RecordedAnswers()
        catalog = SomeCatalog("contract", 1)
        queues = RabbitQueues(self.rabbitmq.url, catalog, "classic", lambda *_: None)
        queues.run_once()
        made = RabbitOutlet(
            url=self.rabbitmq.url,
            catalog=catalog,
            queues=queues,
            answers=self.answers,
            wake=lambda: None,
            raise_alert=lambda *_: None,
            progress=ProgressInMemory().of_server(1),
        )
        made.start()
        self._queue = "tmc.sub.contract.default.t1"
        self._connection = self.rabbitmq.connect()
        self._received: list[Copy] = []
        yield made
        made.stop(1)
        queues.close()
        self._connection.channel().queue_delete(self._queue)
        self._connection.close()

    def ended(self) -> Sequence[Copy]:
        """Taken by the queue, or given back."""
        channel = self._connection.channel()
        while True:
            method, properties, _ = channel.basic_get(self._queue, auto_ack=True)
            if method is None:
                break
            number = int(properties.message_id.rpartition("-")[2])
            self._received.append(a_copy(self.subscription, number=number))
        channel.close()
        return [*self._received, *super().ended()]


class TestOfTheStoresTests(OutletContract):
    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        self.made = RecordingOutlet(room=100)
        yield self.made
        assert self.made.reserved == 0

    def ended(self) -> Sequence[Copy]:
        return self.made.delivered


class TestRouting(TestOfTheStoresTests):
    @contextmanager
    def opened(self) -> Iterator[Outlet]:
        self.made = RecordingOutlet(room=100)
        yield RoutingOutlet(SomeCatalog("consumer", 1), self.made, {}, lambda *_: None)
        assert self.made.reserved == 0
