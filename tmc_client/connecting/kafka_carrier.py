"""Carries letters through Kafka. Answers come to a topic of the app, from which each process takes its own.

Needs `tmc-client[kafka]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tmc_client import errors
from tmc_client.connecting.submit_queue import Letter
from tmc_client.forks import abandon
from tmc_common import submission
from tmc_common.cloud_events import record_headers
from tmc_common.kafka import headers_of

_CONNECT_S = 5.0
_PAUSE_S = 0.005  # the library would wait in C, where no greenlet runs
_PAGE = 500
_IDLE_S = 10.0  # after which what others were answered meanwhile is not read
_LARGEST_BYTES = 64 << 20  # the broker decides
_REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
}
_INVALID = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._INVALID_ARG}
_REPLIES = "replies"


class KafkaCarrier:
    """See submit_queue.Carrier. url: kafka://HOST:PORT,.../?replies=TOPIC&SETTING=VALUE, with settings of librdkafka."""

    def __init__(self, url: str, app: str, tag: str) -> None:
        """Raises ValueError: it is no address of Kafka."""
        place = urlsplit(url)
        if not place.netloc or "@" in place.netloc:
            raise ValueError("give HOST:PORT; user and password are settings, ?sasl.username=...&sasl.password=...")
        given = dict(parse_qsl(place.query))
        self._topic = submission.queue_of(app, tag)
        self._replies = given.pop(_REPLIES, submission.replies_of(app) + tag)
        if not self._replies.startswith(submission.replies_of(app)):
            raise ValueError(
                f"replies={self._replies} is no topic for answers: they begin with {submission.replies_of(app)}"
            )
        self._settings = {"bootstrap.servers": place.netloc, "log_level": 0, **given}
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._error: KafkaError | None = None
        self._read_at = 0.0

    def after_fork(self) -> None:
        """See submit_queue.Carrier."""
        abandon(self._producer, self._consumer)
        self._producer = self._consumer = None

    def reply(self, correlation: str) -> Mapping[str, str]:
        """Return where answers go, and what they repeat."""
        return {submission.REPLY_TO: self._replies, submission.CORRELATION: correlation}

    def send(self, letters: Mapping[str, Letter], seconds: float) -> None:
        """See submit_queue.Carrier."""
        with self._translating():
            producer = self._ready(min(max(seconds, 0.1), _CONNECT_S))
            for letter in letters.values():
                producer.produce(
                    self._topic,
                    letter.body,
                    letter.key.encode(),
                    headers=list(_headers(letter).items()),
                    on_delivery=self._on_delivery,
                )

    def receive(self, seconds: float) -> Mapping[str, bytes]:
        """See submit_queue.Carrier."""
        assert self._producer is not None
        assert self._consumer is not None
        answers: dict[str, bytes] = {}
        end = time.monotonic() + seconds
        with self._translating():
            while not answers and time.monotonic() < end:
                self._producer.poll(0)
                if self._error is not None:
                    raise KafkaException(self._error)
                for record in self._consumer.consume(_PAGE, 0):
                    if record.error() is None:
                        correlation = dict(headers_of(record) or ()).get(submission.CORRELATION) or b""
                        answers[correlation.decode(errors="replace")] = record.value()
                if not answers:
                    time.sleep(_PAUSE_S)
        self._read_at = time.monotonic()
        return answers

    def _ready(self, seconds: float) -> Producer:
        """Raises KafkaException, Unavailable."""
        if self._producer is None:
            self._producer = Producer(
                {"message.max.bytes": _LARGEST_BYTES, **self._settings, "enable.idempotence": True, "linger.ms": 1}
            )
        if self._consumer is None or time.monotonic() - self._read_at > _IDLE_S:
            self._follow(seconds)
        self._error = None
        return self._producer

    def _follow(self, seconds: float) -> None:
        """Read answers from here on. Raises KafkaException, Unavailable."""
        if self._consumer is None:
            own = {"group.id": self._replies, "enable.auto.commit": False, "queued.max.messages.kbytes": 1024}
            self._consumer = Consumer(self._settings | own)
        topic = self._consumer.list_topics(self._replies, seconds).topics[self._replies]
        if topic.error is not None:
            raise errors.Unavailable(
                f"Kafka has no topic {self._replies} for the answers: create it, or name another one in the address,"
                f" ?replies=tmc.reply.APP.NAME ({topic.error.str()})"
            )
        parts = [TopicPartition(self._replies, number) for number in topic.partitions]
        for part in parts:
            _, part.offset = self._consumer.get_watermark_offsets(part, seconds)
        self._consumer.assign(parts)
        self._read_at = time.monotonic()

    def _on_delivery(self, error: KafkaError | None, _record: object) -> None:
        if error is not None:
            self._error = error

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Translate the library's errors; after one, everything is opened again."""
        try:
            yield
        except (KafkaException, BufferError) as exc:
            self.close()
            raise _translated(exc.args[0]) from exc

    def close(self) -> None:
        """Close the consumer; what the producer still has is dropped, and repeated by who asked for it."""
        producer, consumer = self._producer, self._consumer
        self._producer = self._consumer = None
        if producer is not None:
            producer.purge()
            producer.flush(1.0)
        if consumer is not None:
            consumer.close()


def _headers(letter: Letter) -> dict[str, str]:
    attributes = {name: text for name, text in letter.attributes.items() if name != submission.SPECVERSION}
    return record_headers(attributes, letter.content_type, submission.own_headers(letter.headers))


def _translated(cause: object) -> errors.TmcError:
    text = cause.str() if isinstance(cause, KafkaError) else str(cause)
    code = cause.code() if isinstance(cause, KafkaError) else None
    if code in _REFUSED:
        return errors.NotAuthenticated(f"Kafka does not let us submit: {text}")
    if code in _INVALID:
        return errors.InvalidRequest(f"Kafka does not take this: {text}")
    return errors.Unavailable(f"Kafka does not take what is submitted: {text}")
