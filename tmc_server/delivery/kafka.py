"""Forwarding into Kafka: an entry point with the same contract as forwarding into RabbitMQ. Needs `tmc-center[kafka]`.

Unverified: it was tested against the mock cluster inside librdkafka only, never against a real Kafka. Brokers:
TMC_KAFKA_BOOTSTRAP (host:port, commas between several).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from tmc_common.eventlog import EventLog
from tmc_common.headers import ORDER_KEY
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.window import Destination, Window
from tmc_server.domain.catalog import FORWARD_KEY
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy, ForwardAnswers
from tmc_server.metrics import METRICS

log = EventLog("tmc.kafka")

_AWAY = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT, KafkaError._PURGE_QUEUE}


class KafkaForwarder:
    """domain.ports.delivery.Outlet. settings: of librdkafka, above ours."""

    def __init__(
        self,
        catalog: CatalogSource,
        answers: ForwardAnswers,
        wake: Callable[[], None],
        settings: dict[str, Any] | None = None,
        window: int = 2000,
    ) -> None:
        self._catalog = catalog
        self._spans = PublishSpans(catalog)
        self._answers = answers
        self._window = Window(window, 64 << 20, wake)
        self._destinations: dict[SubscriptionNumber, Destination] = {}
        self._settings = {
            "bootstrap.servers": os.environ.get("TMC_KAFKA_BOOTSTRAP", ""),
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": 10_000,
            "linger.ms": 5,
        } | (settings or {})
        self._producer: Producer | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="tmc-kafka", daemon=True)

    def start(self) -> None:
        """Without brokers in the environment nothing is forwarded: rows wait."""
        if self._settings["bootstrap.servers"] or "test.mock.num.brokers" in self._settings:
            self._producer = Producer(self._settings)
            self._thread.start()

    def stop(self) -> bool:
        self._stopping.set()
        left = self._producer.flush(10) if self._producer is not None else 0
        if self._thread.is_alive():
            self._thread.join(5)
        return left == 0

    def _poll(self) -> None:
        assert self._producer is not None
        while not self._stopping.is_set():
            self._producer.poll(0.1)

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
        assert self._producer is not None
        for copy in copies:
            forward = self._catalog.current.subscriptions[copy.subscription].forward
            assert forward is not None
            # Messages of one order key belong into one partition.
            key = copy.headers.get(FORWARD_KEY) or forward.key or copy.headers.get(ORDER_KEY) or copy.key
            message_id = str(MessageId(copy.topic, copy.producer, copy.shard, copy.number))
            headers = {**copy.headers, "tmc-message-id": message_id, "tmc-attempt": str(copy.attempt)}
            try:
                self._producer.produce(
                    forward.target, copy.body, key.encode(), headers=list(headers.items()), on_delivery=self._on(copy)
                )
            except (KafkaException, BufferError) as exc:
                self._forget(copy)
                self._answers.give_back([copy], after_ms=1000)
                log.warning("kafka_unavailable", "Kafka takes nothing now: %s", exc)
        METRICS.published.inc(len(copies))

    def _on(self, copy: Copy) -> Callable[[Any, Any], None]:
        began = time.monotonic()

        def delivered(error: Any, _message: Any) -> None:
            self._forget(copy)
            lasted_s, why = time.monotonic() - began, "" if error is None else str(error.str())
            self._spans.published([copy], lasted_s, "kafka", why)
            if error is None:
                self._window.succeeded(self._destination(copy.subscription))
                self._answers.acknowledge([copy])
            elif error.code() in _AWAY:
                pause_s = self._window.failed(self._destination(copy.subscription)).pause_s
                METRICS.given_back.labels("connection lost").inc()
                self._answers.give_back([copy], after_ms=round(pause_s * 1000))
            else:
                METRICS.returned.inc()
                self._answers.refuse([copy], f"Kafka: {error.str()}")

        return delivered

    def _forget(self, copy: Copy) -> None:
        self._window.release(self._destination(copy.subscription), 1)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        """No-op: the center's consumers do not read from Kafka."""

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        return QueueLook() if self._producer is not None else None

    def _destination(self, subscription: SubscriptionNumber) -> Destination:
        return self._destinations.setdefault(subscription, Destination(f"kafka for subscription {subscription}"))
