"""Reads submit topics of Kafka: all servers are one consumer group, which shares their partitions.

The offset of a partition is committed up to the first record that is not settled. A record is settled when it is stored,
or when Kafka has confirmed its answer, or its copy in the topic of what was refused. What comes again is idempotent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tmc_common import submission as wire
from tmc_common.eventlog import EventLog
from tmc_server.submission.answers import JSON, Settled
from tmc_server.submission.intake import WINDOW, Intake
from tmc_server.submission.letters import Letter, Place

log = EventLog("tmc.submission")

_GROUP = "tmc-submission"
_POLL_S = 0.05
_COMMIT_S = 1.0
_PAGE = 500
_TRY_AGAIN_S = 5.0
_CLOSE_S = 5.0
_CONTENT_TYPE = "content-type"
_Partition = tuple[str, int]

OpenIntake = Callable[[Place, Callable[[Sequence[Settled]], None]], Intake]
"""Makes the intake of a partition. Its second argument is called on the loop with what is done."""


@dataclass(eq=False, kw_only=True)
class _Reading:
    """A partition that this server reads. open: offsets that are not settled, ascending.  next: the first that was not read.

    committed: as Kafka knows.  is_paused: as many are here as may be.
    """

    intake: Intake
    work: Future[None]
    open: dict[int, None] = field(default_factory=dict)
    next: int = -1
    committed: int = -1
    is_paused: bool = False

    @property
    def position(self) -> int:
        """Return up to where everything is settled."""
        return next(iter(self.open), self.next)


class KafkaReader:
    """settings: of librdkafka, bootstrap.servers among them."""

    def __init__(self, settings: Mapping[str, str], loop: asyncio.AbstractEventLoop, open_intake: OpenIntake) -> None:
        self._settings: dict[str, Any] = {**settings, "log_level": 0, "error_cb": self._note_failure}
        self._loop = loop
        self._open_intake = open_intake
        self._wanted: frozenset[Place] = frozenset()
        self._readings: dict[_Partition, _Reading] = {}
        self._finished: deque[tuple[_Partition, _Reading, Sequence[Settled]]] = deque()
        self._failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tmc-submission-kafka", daemon=True)

    def want(self, places: Collection[Place]) -> None:
        """Read the topics of these and no others. From any thread."""
        self._wanted = frozenset(places)
        if self._wanted and not self._thread.is_alive() and not self._stopping.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Finish what is under way, then leave the group. Blocks; not on the loop."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(3 * _CLOSE_S)

    # -- on its thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read()
            except KafkaException as exc:
                self._note_failure(exc)
            self._stopping.wait(_TRY_AGAIN_S)

    def _note_failure(self, reason: object) -> None:
        """Say once that Kafka is away. The library says it again and again, from within calls of its own."""
        self._failures += 1
        if self._failures == 1:
            log.warning("submission_lost", "Kafka is away, submit topics are not read: %s", reason)

    def _read(self) -> None:
        """Read until it is stopped. Raises what the library raises."""
        producer = Producer(
            {
                **self._settings,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,
                "message.timeout.ms": 10_000,
            }
        )
        consumer = Consumer(
            {
                **self._settings,
                "group.id": _GROUP,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "range",
                "queued.max.messages.kbytes": 16_384,
            }
        )
        try:
            self._follow(consumer, producer)
        finally:
            self._leave(consumer, list(self._readings))
            producer.flush(_CLOSE_S)
            consumer.close()

    def _follow(self, consumer: Any, producer: Any) -> None:
        subscribed: frozenset[Place] = frozenset()
        commit_at = 0.0
        while not self._stopping.is_set():
            if self._wanted != subscribed:
                subscribed = self._wanted
                self._subscribe(consumer, subscribed)
            if not subscribed:
                self._stopping.wait(_COMMIT_S)
                continue
            self._arrived(consumer, consumer.consume(_PAGE, _POLL_S))
            self._finish(consumer, producer)
            producer.poll(0)
            if time.monotonic() >= commit_at:
                self._commit(consumer, self._readings)
                commit_at = time.monotonic() + _COMMIT_S

    def _subscribe(self, consumer: Any, places: Iterable[Place]) -> None:
        topics = [place.queue for place in places]
        self._create(sorted({*topics, *(wire.dead_queue_of(place.app) for place in places)}))
        if topics:
            consumer.subscribe(topics, on_revoke=self._leave, on_lost=self._lose)
        else:
            self._leave(consumer, list(self._readings))
            consumer.unsubscribe()

    def _create(self, topics: Sequence[str]) -> None:
        """Make the topics that are missing, with the broker's own numbers of partitions and replicas."""
        if not topics:
            return
        admin = AdminClient(self._settings)
        for name, made in admin.create_topics([NewTopic(name) for name in topics]).items():
            try:
                made.result(_CLOSE_S)
            except KafkaException as exc:
                if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    log.warning("submit_topic_not_made", "topic %s cannot be made: make it yourself: %s", name, exc)

    def _arrived(self, consumer: Any, records: Sequence[Any]) -> None:
        pages: dict[_Partition, list[Letter]] = {}
        for record in records:
            if record.error() is not None:
                self._note_failure(record.error().str())
                continue
            if self._failures:
                log.info("submission_connected", "Kafka is back: submit topics are read again")
                self._failures = 0
            pages.setdefault((record.topic(), record.partition()), []).append(letter_of(record))
        for partition, letters in pages.items():
            reading = self._reading(partition)
            if reading is None:
                continue
            reading.open |= dict.fromkeys(letter.number for letter in letters)
            reading.next = letters[-1].number + 1
            self._loop.call_soon_threadsafe(reading.intake.arrived, letters)
            if len(reading.open) >= WINDOW and not reading.is_paused:
                consumer.pause([TopicPartition(*partition)])
                reading.is_paused = True

    def _reading(self, partition: _Partition) -> _Reading | None:
        """Return None: its topic was closed a moment ago."""
        found = self._readings.get(partition)
        place = next((place for place in self._wanted if place.queue == partition[0]), None)
        if found is None and place is not None:
            intake = self._open_intake(place, partial(self._done, partition))
            work = asyncio.run_coroutine_threadsafe(intake.run(), self._loop)
            found = self._readings[partition] = _Reading(intake=intake, work=work)
        return found

    def _done(self, partition: _Partition, settled: Sequence[Settled]) -> None:
        """Take what is done, on the loop."""
        reading = self._readings.get(partition)
        if reading is not None:
            self._finished.append((partition, reading, settled))

    def _finish(self, consumer: Any, producer: Any) -> None:
        while self._finished:
            partition, reading, several = self._finished.popleft()
            if self._readings.get(partition) is not reading:
                continue  # another server has it now
            for settled in several:
                self._answer(producer, reading, partition[0], settled)
            if reading.is_paused and len(reading.open) < WINDOW // 2:
                consumer.resume([TopicPartition(*partition)])
                reading.is_paused = False

    def _answer(self, producer: Any, reading: _Reading, topic: str, settled: Settled) -> None:
        if settled.reply:
            headers = {wire.CORRELATION: settled.letter.correlation_id, _CONTENT_TYPE: JSON}
            self._produce(producer, reading, topic, settled, settled.letter.reply_to, settled.reply, headers)
        elif settled.refusal is not None:
            self._bury(producer, reading, topic, settled)
        else:
            reading.open.pop(settled.letter.number, None)

    def _bury(self, producer: Any, reading: _Reading, topic: str, settled: Settled) -> None:
        letter = settled.letter
        dead = f"{topic.rpartition('.')[0]}.{wire.DEAD}"
        attributes = {f"{wire.KAFKA_PREFIX}{name}": value for name, value in letter.attributes.items()}
        headers = {**letter.headers, **attributes, _CONTENT_TYPE: letter.content_type, **settled.notes}
        self._produce(producer, reading, topic, settled, dead, letter.body, headers)

    def _produce(
        self,
        producer: Any,
        reading: _Reading,
        topic: str,
        settled: Settled,
        target: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        def delivered(error: Any, _record: Any) -> None:
            if error is None:
                reading.open.pop(settled.letter.number, None)
            elif settled.refusal is not None and not target.endswith(f".{wire.DEAD}"):
                self._bury(producer, reading, topic, settled)  # nobody reads its answers
            elif settled.refusal is None:
                reading.open.pop(settled.letter.number, None)  # it is stored; only the answer is lost
            else:
                log.warning("submission_not_kept", "what was refused cannot be put into %s: %s", target, error.str())
                self._answer(producer, reading, topic, settled)

        encoded = [(name, text.encode()) for name, text in headers.items() if text]
        while True:
            try:
                producer.produce(target, body, headers=encoded, on_delivery=delivered)
                return
            except BufferError:
                producer.poll(_POLL_S)

    def _commit(self, consumer: Any, partitions: Iterable[_Partition], wait: bool = False) -> None:
        due = [
            (partition, reading, reading.position)
            for partition in partitions
            if (reading := self._readings.get(partition)) is not None and reading.position > reading.committed
        ]
        if not due:
            return
        offsets = [TopicPartition(*partition, position) for partition, _, position in due]
        try:
            consumer.commit(offsets=offsets, asynchronous=not wait)
        except KafkaException as exc:
            log.debug("submission_cut", "offsets are not committed: %s", exc)
            return
        for _, reading, position in due:
            reading.committed = position

    def _leave(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Finish what is under way there, and commit: another server goes on from there."""
        names = [each if isinstance(each, tuple) else (each.topic, each.partition) for each in partitions]
        leaving = [(name, self._readings[name]) for name in names if name in self._readings]
        for _, reading in leaving:
            self._loop.call_soon_threadsafe(reading.intake.close)
        for _, reading in leaving:
            try:
                reading.work.result(_CLOSE_S)
            except Exception as exc:  # noqa: BLE001 - what it did not finish comes again
                log.debug("submission_cut", "a submit topic is left unfinished: %r", exc)
        for partition, reading, several in list(self._finished):
            if self._readings.get(partition) is reading:
                for settled in several:
                    if not settled.reply and settled.refusal is None:
                        reading.open.pop(settled.letter.number, None)
        self._commit(consumer, names, wait=True)
        self._lose(consumer, partitions)

    def _lose(self, _consumer: Any, partitions: Sequence[Any]) -> None:
        for each in partitions:
            name = each if isinstance(each, tuple) else (each.topic, each.partition)
            reading = self._readings.pop(name, None)
            if reading is not None:
                self._loop.call_soon_threadsafe(reading.intake.close)


def letter_of(record: Any) -> Letter:
    attributes: dict[str, str] = {}
    headers: dict[str, str] = {}
    is_damaged = False
    content_type = ""
    for name, value in record.headers() or ():
        try:
            text = (value or b"").decode()
        except UnicodeDecodeError:
            is_damaged = True
            continue
        if attribute := wire.attribute_of(name):
            attributes[attribute] = text
        elif name.lower() == _CONTENT_TYPE:
            content_type = text
        else:
            headers[name] = text
    return Letter(
        number=record.offset(),
        attributes=attributes,
        headers=headers,
        content_type=content_type or attributes.get(wire.CONTENT_TYPE, ""),
        body=record.value() or b"",
        reply_to=attributes.get(wire.REPLY_TO, ""),
        correlation_id=attributes.get(wire.CORRELATION, "") or attributes.get(wire.ID, ""),
        is_damaged=is_damaged,
    )
