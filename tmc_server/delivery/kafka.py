"""Forwarding into Kafka: an entry point with the same contract as forwarding into RabbitMQ. Needs `tmc-center[kafka]`.

A copy that cannot be delivered now is given back, uncounted, once librdkafka has given it up; until then no other copy of
its message is made. A copy that can never be delivered makes its message FAILED at once. A record that is too large for
the broker takes its whole batch with it: all of it is sent again, one record at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from tmc_common.cloud_events import record_headers
from tmc_common.eventlog import EventLog
from tmc_common.headers import FORWARD_KEY, ORDER_KEY
from tmc_common.kafka import ALONE, NEVER, TOO_LARGE
from tmc_server.delivery.cloud_events import attributes_of
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.window import ALERT_AFTER, Destination, Window
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy, ForwardAnswers, ForwarderUnavailable
from tmc_server.metrics import METRICS

log = EventLog("tmc.kafka")

_PURGE_S = 1.0
_AGAIN_S = 2.0


def count_brokers(settings: Mapping[str, Any], seconds: float) -> int:
    """Ask Kafka how many brokers it has. Blocks. Raises OSError: it does not answer, or the settings are none.

    librdkafka says by callback why it cannot connect, and then by an exception that nobody answered.
    """
    said: list[str] = []
    quiet = {"log_level": 0, "error_cb": lambda error: said.append(error.str())}
    try:
        client = AdminClient({**settings, **quiet})
        try:
            return len(client.list_topics(timeout=seconds).brokers)
        finally:
            client.poll(0)
    except KafkaException as exc:
        raise OSError(said[0] if said else exc.args[0].str()) from exc


class KafkaForwarder:
    """domain.ports.delivery.Outlet. settings: of librdkafka, above ours, bootstrap.servers among them."""

    def __init__(
        self,
        catalog: CatalogSource,
        answers: ForwardAnswers,
        wake: Callable[[], None],
        settings: Mapping[str, Any],
        window: int = 2000,
    ) -> None:
        self._catalog = catalog
        self._spans = PublishSpans(catalog)
        self._answers = answers
        self._window = Window(window, 64 << 20, wake)
        self._destinations: dict[SubscriptionNumber, Destination] = {}
        self._settings: dict[str, Any] = {
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": 10_000,
            "linger.ms": 5,
            "log_level": 0,  # it would write to standard error, beside our log
            "error_cb": self._note,
        } | dict(settings)
        if not settings:
            raise ForwarderUnavailable("[kafka] bootstrap is not set")
        self._producer: Producer | None = None
        self._is_over = False  # the producer takes nothing any more
        self._lock = threading.Lock()  # nothing is handed over while another producer is made
        self._last_error = ""
        self._alone: Producer | None = None  # sends one record at a time
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="tmc-kafka", daemon=True)

    def start(self) -> None:
        self._producer = Producer(self._settings)
        self._thread.start()

    def stop(self) -> bool:
        self._stopping.set()
        left = self._producer.flush(10) if self._producer is not None else 0
        if self._alone is not None:  # the answers of the first one may have made it
            left += self._alone.flush(10)
        if self._thread.is_alive():
            self._thread.join(5)
        return left == 0

    def _poll(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._is_over:
                    self._renew()
                assert self._producer is not None
                self._producer.poll(0.1)
                if self._alone is not None:
                    self._alone.poll(0)
            except Exception:  # a fatal error, or a fault of ours in what it calls
                self._is_over = True
                log.exception("kafka_begins_again", "another producer for Kafka is made")
                self._stopping.wait(_AGAIN_S)

    def _renew(self) -> None:
        """Begin again: an idempotent producer that has had a fatal error, e.g. a right that it lacked, takes nothing any more.

        What it had is given back.
        """
        made = Producer(self._settings)  # raises where a file of its settings is gone
        with self._lock:
            over = [each for each in (self._producer, self._alone) if each is not None]
            self._producer, self._alone, self._is_over = made, None, False
        for producer in over:
            producer.purge()
            end = time.monotonic() + _PURGE_S
            while len(producer) and time.monotonic() < end:
                with suppress(Exception):  # what is left is served by the next call
                    producer.flush(0.1)

    @property
    def in_flight(self) -> int:
        """Copies that are reserved, or handed to librdkafka and not confirmed yet."""
        return self._window.in_flight

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        if self._producer is None or self._stopping.is_set():
            return 0
        return self._window.reserve(self._destination(subscription), wanted)

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        self._window.release(self._destination(subscription), count)

    def deliver(self, copies: Sequence[Copy]) -> None:
        with self._lock:
            assert self._producer is not None
            for copy in copies:
                self._destination(copy.subscription).unconfirmed.add((copy.shard, copy.number))
                self._produce(self._producer, copy)
        METRICS.published.inc(len(copies))

    def _produce(self, producer: Producer, copy: Copy) -> None:
        forward = self._catalog.current.subscriptions[copy.subscription].forward
        assert forward is not None
        # Messages of one order key belong into one partition.
        key = copy.headers.get(FORWARD_KEY) or forward.key or copy.headers.get(ORDER_KEY) or copy.key
        headers = record_headers(attributes_of(copy, self._catalog.current), copy.content_type, copy.headers)
        on_delivery = self._on(copy, alone=producer is self._alone)
        try:
            producer.produce(
                forward.target, copy.body, key.encode(), headers=list(headers.items()), on_delivery=on_delivery
            )
        except KafkaException as exc:
            self._failed(copy, exc.args[0], alone=True)  # librdkafka itself refuses this one record
        except BufferError as exc:
            self._give_back(copy, str(exc))

    def _on(self, copy: Copy, *, alone: bool) -> Callable[[Any, Any], None]:
        began = time.monotonic()

        def delivered(error: Any, _message: Any) -> None:
            lasted_s, why = time.monotonic() - began, "" if error is None else str(error.str())
            self._spans.published([copy], lasted_s, "kafka", why)
            if error is not None:
                self._failed(copy, error, alone=alone)
                return
            self._last_error = ""
            self._answers.acknowledge([copy])
            self._forget(copy)
            self._window.succeeded(self._destination(copy.subscription))

        return delivered

    def _failed(self, copy: Copy, error: Any, *, alone: bool) -> None:
        if error.code() in TOO_LARGE and not alone:
            if self._alone is None:
                self._alone = Producer(self._settings | ALONE)
            self._produce(self._alone, copy)
        elif error.code() in NEVER | TOO_LARGE:
            METRICS.returned.inc()
            self._answers.refuse([copy], f"Kafka: {error.str()}", final=True)
            self._forget(copy)
        else:
            self._is_over |= error.code() == KafkaError._FATAL
            self._give_back(copy, str(error.str()))

    def _note(self, error: Any) -> None:
        """Keep what librdkafka says of its connections: records that wait for them only time out."""
        self._last_error = f" ({error.str()})"

    def _give_back(self, copy: Copy, why: str) -> None:
        why += self._last_error
        failure = self._window.failed(self._destination(copy.subscription))
        METRICS.given_back.labels("connection lost").inc()
        self._answers.give_back([copy], after_ms=round(failure.pause_s * 1000))
        self._forget(copy)
        if failure.begins_a_pause:
            log.warning("kafka_refuses", "Kafka refuses messages for now: %s", why)
            if failure.pauses >= ALERT_AFTER:
                self._answers.complain(copy.subscription, f"Kafka: {why}")

    def _forget(self, copy: Copy) -> None:
        destination = self._destination(copy.subscription)
        destination.unconfirmed.discard((copy.shard, copy.number))
        self._window.release(destination, 1)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        """Do nothing: the center's consumers do not read from Kafka."""

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        destination = self._destination(subscription)
        if self._producer is None or self._window.rests(destination):
            return None
        return QueueLook(consumers=1, unwritten=frozenset(destination.unconfirmed))

    def _destination(self, subscription: SubscriptionNumber) -> Destination:
        return self._destinations.setdefault(subscription, Destination(f"kafka for subscription {subscription}"))
