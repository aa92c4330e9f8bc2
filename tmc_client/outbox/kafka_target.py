"""Send to Kafka without a center. Needs `tmc-client[kafka]`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from tmc_client.forks import abandon, watch_forks
from tmc_client.outbox.entries import Entry, Failure, Trouble
from tmc_common.cloud_events import record_headers
from tmc_common.headers import ORDER_KEY
from tmc_common.kafka import ALONE, NEVER, TOO_LARGE

_TIMEOUT_S = 10.0
_SOURCE = "/tmc/outbox"  # CloudEvents demand one, and an outbox knows no name of its service
_REFUSED = {
    *TOO_LARGE,
    *NEVER,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


def _by_topic(entry: Entry) -> str:
    return entry.topic


class KafkaTarget:
    """entries.Target. url: kafka://HOST:PORT, several with commas.  topic: of a message; by default its own.

    settings: of librdkafka, above ours. Messages of one order key go to one partition.
    """

    delays = False

    def __init__(
        self, url: str, *, topic: Callable[[Entry], str] = _by_topic, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = {
            "bootstrap.servers": url.removeprefix("kafka://"),
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": round(_TIMEOUT_S * 1000),
            "linger.ms": 5,
            "log_level": 0,  # it would write to standard error
            "error_cb": self._note,
        } | dict(settings or {})
        self._topic = topic
        self._reset()
        watch_forks(self)

    def _note(self, error: KafkaError) -> None:
        """Keep what librdkafka says of its connections: records that wait for them only time out."""
        self._last_error = f" {error.str()}"

    def _reset(self) -> None:
        self._last_error = ""
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._alone: Producer | None = None  # sends one record at a time
        self._too_large: set[int] = set()  # of the last page
        self._is_over = False

    def after_fork(self) -> None:
        """See forks.ForkAware: the producer is the parent's."""
        abandon(self._producer, self._alone)
        self._reset()

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """See entries.Target."""
        answers: dict[int, Failure | None] = {}
        with self._lock:
            try:
                if self._producer is None:
                    self._producer = Producer(self._settings)
                answers |= self._sent(self._producer, entries)
                crowded = [entry for entry in entries if entry.id in self._too_large]
                if len(entries) > 1 and crowded:  # a record that is too large takes its whole batch with it
                    if self._alone is None:
                        self._alone = Producer(self._settings | ALONE)
                    answers |= self._sent(self._alone, crowded)
            except (KafkaException, OSError) as exc:  # no producer can be made, e.g. for lack of file descriptors
                self._last_error = f" {exc}"
            if self._is_over:
                self._renew()
        silent = Failure(trouble=Trouble.AWAY, error=f"Kafka did not answer in time.{self._last_error}")
        return [answers.get(entry.id, silent) for entry in entries]

    def _sent(self, producer: Producer, entries: Sequence[Entry]) -> dict[int, Failure | None]:
        """Send these. Returns: the answers, by number of the entry."""
        answers: dict[int, Failure | None] = {}
        self._too_large.clear()
        for entry in entries:
            self._produce(producer, entry, answers)
        end = time.monotonic() + 2 * _TIMEOUT_S
        try:
            while len(answers) < len(entries) and time.monotonic() < end and not self._is_over:
                producer.poll(0.1)
        except KafkaException as exc:
            self._is_over = True
            self._last_error = f" {exc.args[0].str()}"
        return answers

    def _renew(self) -> None:
        """Begin again: an idempotent producer that has had a fatal error, e.g. a right that it lacked, takes nothing any more."""
        for producer in (self._producer, self._alone):
            if producer is not None:
                producer.purge()
        self._producer = self._alone = None
        self._is_over = False

    def _produce(self, producer: Producer, entry: Entry, answers: dict[int, Failure | None]) -> None:
        order = {ORDER_KEY: entry.order_key} if entry.order_key else {}
        event = {"id": entry.attempt_id.hex(), "source": _SOURCE, "type": entry.topic, "subject": entry.key}
        headers = record_headers(event, entry.content_type, {**entry.headers, **order})
        try:
            producer.produce(
                self._topic(entry),
                entry.body,
                (entry.order_key or entry.key).encode(),
                headers=list(headers.items()),
                on_delivery=partial(self._delivered, answers, entry.id),
            )
        except BufferError:
            answers[entry.id] = Failure(trouble=Trouble.LATER, error="The queue of librdkafka is full.")
        except KafkaException as exc:
            self._delivered(answers, entry.id, exc.args[0], None)

    def _delivered(
        self, answers: dict[int, Failure | None], number: int, error: KafkaError | None, _message: object
    ) -> None:
        if error is None:
            self._last_error = ""
            answers[number] = None
            return
        if error.code() in TOO_LARGE:
            self._too_large.add(number)
        self._is_over |= error.code() == KafkaError._FATAL
        answers[number] = _failure(error, self._last_error)

    def close(self) -> None:
        with self._lock:
            for producer in (self._producer, self._alone):
                if producer is not None:
                    producer.flush(_TIMEOUT_S)


def _failure(error: KafkaError, last_error: str = "") -> Failure:
    """last_error: of the connections; it explains why brokers are away."""
    if error.code() in _REFUSED:
        return Failure(trouble=Trouble.REFUSED, error=f"Kafka: {error.str()}")
    return Failure(trouble=Trouble.AWAY, error=f"Kafka: {error.str()}{last_error}")
