"""Reads submit topics of Kafka: all servers are one consumer group, which shares their partitions.

The offset of a partition is committed up to the first record that is not settled. A record is settled when it is stored,
or when Kafka has confirmed its answer, or its copy in the topic of what was refused. What comes again is idempotent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tmc_common import submission as wire
from tmc_common.cloud_events import KAFKA_PREFIX
from tmc_common.eventlog import EventLog
from tmc_common.headers import PREFIX
from tmc_common.kafka import ALONE, NEVER, TOO_LARGE, headers_of
from tmc_server.submission.answers import JSON, OpenIntake, Settled
from tmc_server.submission.intake import WINDOW, Intake
from tmc_server.submission.letters import Letter, Place

log = EventLog("tmc.submission")

_GROUP = "tmc-submission"
_POLL_S = 0.05
_FULL_S = 0.005  # or until something is settled; confirms of answers make room too
_PAUSE_AFTER_S = 1.0
_COMMIT_S = 1.0
_PAGE = WINDOW // 2
_MOST_BYTES = 100_000_000
_TRY_AGAIN_S = 5.0
_CLOSE_S = 5.0
_CONTENT_TYPE = "content-type"
_EXISTS = KafkaError.TOPIC_ALREADY_EXISTS
_UNKNOWN = -1  # offset
_Partition = tuple[str, int]


@dataclass(eq=False, kw_only=True)
class _Reading:
    """A partition that this server reads. open: offsets that are not settled, ascending.  next: the first that was not read.

    committed: what was last sent for it; _UNKNOWN: nothing, or Kafka refused it.
    full_since: as many are here as may be, since that second; None: there is room.
    """

    topic: str
    partition: int
    intake: Intake
    work: Future[None]
    open: dict[int, None] = field(default_factory=dict)
    next: int = _UNKNOWN
    committed: int = _UNKNOWN
    full_since: float | None = None
    is_paused: bool = False

    @property
    def position(self) -> int:
        """Return up to where everything is settled."""
        return next(iter(self.open), self.next)

    def place(self, offset: int | None = None) -> Any:
        name = (self.topic, self.partition)
        return TopicPartition(*name) if offset is None else TopicPartition(*name, offset)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Outgoing:
    """An answer, or a letter that is_buried: on its way to the topic of what was refused.

    is_alone: in no batch with others.  is_cut: without its body and headers, which Kafka never takes.
    """

    reading: _Reading
    settled: Settled
    is_buried: bool
    is_alone: bool = False
    is_cut: bool = False


class KafkaReader:
    """settings: of librdkafka, bootstrap.servers among them."""

    def __init__(self, settings: Mapping[str, str], loop: asyncio.AbstractEventLoop, open_intake: OpenIntake) -> None:
        self._settings: dict[str, Any] = {**settings, "log_level": 0, "error_cb": self._note_failure}
        self._producing: dict[str, Any] = {
            **self._settings,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "message.timeout.ms": 10_000,
            "message.max.bytes": _MOST_BYTES,  # the broker has a limit of its own
        }
        self._one_by_one: Producer | None = None
        self._loop = loop
        self._open_intake = open_intake
        self._wanted: frozenset[Place] = frozenset()
        self._readings: dict[_Partition, _Reading] = {}
        self._finished: deque[tuple[_Reading, Sequence[Settled]]] = deque()
        self._settled = threading.Event()  # there is more in _finished
        self._again: deque[tuple[float, _Outgoing]] = deque()  # not taken by Kafka, and when to try again
        self._failures = 0
        self._is_keeping = True  # what was refused is taken
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
            except Exception:  # a fault of ours; a new consumer starts from nothing
                log.exception("submission_failed", "reading submit topics failed, and begins again")
            self._stopping.wait(_TRY_AGAIN_S)

    def _note_failure(self, reason: object) -> None:
        """Say once that Kafka is away. The library says it again and again, from within calls of its own."""
        self._failures += 1
        if self._failures == 1:
            log.warning("submission_lost", "Kafka is away, submit topics are not read: %s", reason)

    def _read(self) -> None:
        """Read until it is stopped. Raises what the library raises."""
        producer = Producer(self._producing)
        consumer = Consumer(
            {
                **self._settings,
                "group.id": _GROUP,
                "enable.auto.commit": False,
                "on_commit": self._committed,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "roundrobin",
                "session.timeout.ms": 10_000,  # as long as a killed server keeps its partitions from the others
                "queued.max.messages.kbytes": 16_384,
            }
        )
        try:
            self._follow(consumer, producer)
        finally:
            self._leave(consumer, list(self._readings.values()), producer)
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
            if any(reading.full_since is not None and not reading.is_paused for reading in self._readings.values()):
                self._settled.wait(_FULL_S)
                self._settled.clear()
            else:
                self._arrived(consumer.consume(_PAGE, _POLL_S))
            self._finish(producer)
            producer.poll(0)
            if self._one_by_one is not None:
                self._one_by_one.poll(0)
            self._pause_and_resume(consumer)
            if time.monotonic() >= commit_at:
                self._commit(consumer, self._readings.values())
                commit_at = time.monotonic() + _COMMIT_S
            if any(reading.work.done() for reading in self._readings.values()):
                raise RuntimeError("an intake has ended by itself")

    def _pause_and_resume(self, consumer: Any) -> None:
        for reading in self._readings.values():
            if len(reading.open) + _PAGE <= WINDOW:
                reading.full_since = None
                if reading.is_paused:
                    consumer.resume([reading.place()])
                    reading.is_paused = False
            elif reading.full_since is None:
                reading.full_since = time.monotonic()
            elif not reading.is_paused and time.monotonic() - reading.full_since > _PAUSE_AFTER_S:
                consumer.pause([reading.place()])  # the others go on; what was fetched of it is fetched again
                reading.is_paused = True

    def _subscribe(self, consumer: Any, places: Iterable[Place]) -> None:
        topics = [place.queue for place in places]
        self._create(sorted({*topics, *(wire.dead_queue_of(place.app) for place in places)}))
        if topics:
            consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        else:
            self._leave(consumer, list(self._readings.values()))
            consumer.unsubscribe()

    def _create(self, topics: Sequence[str]) -> None:
        """Make the topics that are missing, with the broker's own numbers of partitions and replicas."""
        if not topics:
            return
        admin = AdminClient(self._settings)
        for name, made in admin.create_topics([NewTopic(name) for name in topics]).items():
            try:
                made.result(_CLOSE_S)
            except (KafkaException, TimeoutError) as exc:
                if not (exc.args and isinstance(exc.args[0], KafkaError) and exc.args[0].code() == _EXISTS):
                    log.warning("submit_topic_not_made", "topic %s cannot be made: make it yourself: %s", name, exc)

    def _assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Begin to read these, from where was committed."""
        consumer.assign(partitions)
        consumer.resume(partitions)  # what this server paused before it had lost them
        for each in partitions:
            place = next((place for place in self._wanted if place.queue == each.topic), None)
            if place is not None:  # or it was closed a moment ago
                self._readings[each.topic, each.partition] = self._reading(each, place)

    def _reading(self, partition: Any, place: Place) -> _Reading:
        made: list[_Reading] = []

        def done(settled: Sequence[Settled]) -> None:
            """Take what is done, on the loop."""
            self._finished.append((made[0], settled))
            self._settled.set()

        intake = self._open_intake(place, done)
        work = asyncio.run_coroutine_threadsafe(intake.run(), self._loop)
        made.append(_Reading(topic=partition.topic, partition=partition.partition, intake=intake, work=work))
        return made[0]

    def _arrived(self, records: Sequence[Any]) -> None:
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
            reading = self._readings.get(partition)
            if reading is not None:  # or it was read before another server got it
                reading.open |= dict.fromkeys(letter.number for letter in letters)
                reading.next = letters[-1].number + 1
                self._loop.call_soon_threadsafe(reading.intake.arrived, letters)

    def _finish(self, producer: Any) -> None:
        while self._again and self._again[0][0] <= time.monotonic():
            self._produce(producer, self._again.popleft()[1])
        while self._finished:
            reading, several = self._finished.popleft()
            for settled in several:
                if settled.reply or settled.refusal is not None:
                    self._produce(producer, _Outgoing(reading=reading, settled=settled, is_buried=not settled.reply))
                else:
                    reading.open.pop(settled.letter.number, None)

    def _produce(self, producer: Any, outgoing: _Outgoing) -> None:
        settled, reading = outgoing.settled, outgoing.reading
        letter = settled.letter
        if outgoing.is_buried:
            target, body = f"{reading.topic.rpartition('.')[0]}.{wire.DEAD}", b"" if outgoing.is_cut else letter.body
            attributes = {f"{KAFKA_PREFIX}{name}": value for name, value in letter.attributes.items()}
            own = {} if outgoing.is_cut else {**letter.headers, **attributes, _CONTENT_TYPE: letter.content_type}
            headers = {**own, **settled.notes}
        else:
            target, body = letter.reply_to, settled.reply
            headers = {wire.CORRELATION: letter.correlation_id, _CONTENT_TYPE: JSON}

        def delivered(error: Any, _record: Any) -> None:
            self._delivered(producer, outgoing, error)

        encoded = [(name, text.encode()) for name, text in headers.items() if text]
        while True:
            by = self._alone() if outgoing.is_alone else producer
            try:
                by.produce(target, body, headers=encoded, on_delivery=delivered)
                return
            except BufferError:
                by.poll(_POLL_S)
            except KafkaException as exc:  # the library itself refuses it
                self._delivered(producer, outgoing, exc.args[0])
                return
            except (TypeError, ValueError, SystemError) as exc:  # names and texts that the library cannot take
                self._delivered(producer, outgoing, KafkaError(KafkaError._INVALID_ARG, str(exc)))
                return

    def _alone(self) -> Producer:
        """Return the producer that sends one record at a time: one that is too large takes its whole batch with it."""
        if self._one_by_one is None:
            self._one_by_one = Producer(self._producing | ALONE)
        return self._one_by_one

    def _delivered(self, producer: Any, outgoing: _Outgoing, error: Any) -> None:
        if error is None or (outgoing.settled.refusal is None and not outgoing.is_buried):
            self._is_keeping = self._is_keeping or outgoing.is_buried
            # Of what is stored, only the answer is lost.
            outgoing.reading.open.pop(outgoing.settled.letter.number, None)
        elif outgoing.is_buried and not outgoing.is_cut and error.code() in NEVER | TOO_LARGE:
            self._produce(producer, replace(outgoing, is_alone=True, is_cut=outgoing.is_alone))
        elif outgoing.is_buried:
            if self._is_keeping:
                log.warning("submission_not_kept", "Kafka does not take what was refused: %s", error.str())
            self._is_keeping = False
            self._again.append((time.monotonic() + _TRY_AGAIN_S, outgoing))
        else:
            self._produce(producer, replace(outgoing, is_buried=True))

    def _commit(self, consumer: Any, readings: Iterable[_Reading], at_once: bool = False) -> None:
        # At the end also what was sent for a commit already: nobody would hear that it did not arrive.
        due = [
            (reading, reading.position)
            for reading in readings
            if reading.position > (_UNKNOWN if at_once else reading.committed)
        ]
        if not due:
            return
        try:
            consumer.commit(offsets=[reading.place(position) for reading, position in due], asynchronous=not at_once)
        except KafkaException as exc:
            log.debug("submission_cut", "offsets are not committed: %s", exc)
            return
        for reading, position in due:
            reading.committed = position

    def _committed(self, error: Any, partitions: Sequence[Any]) -> None:
        """Commit again what Kafka did not take."""
        for each in partitions:
            reading = self._readings.get((each.topic, each.partition))
            if reading is not None and (error or each.error):
                log.debug("submission_cut", "offsets are not committed: %s", error or each.error)
                reading.committed = _UNKNOWN

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        self._leave(consumer, self._of(partitions))

    def _lost(self, _consumer: Any, partitions: Sequence[Any]) -> None:
        """Another server has them already."""
        self._forget(self._of(partitions))

    def _of(self, partitions: Sequence[Any]) -> list[_Reading]:
        found = [self._readings.get((each.topic, each.partition)) for each in partitions]
        return [reading for reading in found if reading is not None]

    def _leave(self, consumer: Any, readings: Sequence[_Reading], producer: Any = None) -> None:
        """Finish what is under way there, and commit: another server continues there.

        producer: wait for its confirms too.
        """
        for reading in readings:
            self._loop.call_soon_threadsafe(reading.intake.close)
        unfinished = wait([reading.work for reading in readings], _CLOSE_S).not_done
        if unfinished:
            log.debug("submission_cut", "%d submit topics are left unfinished", len(unfinished))
        if producer is not None:
            self._finish(producer)
            producer.flush(_CLOSE_S)
            if self._one_by_one is not None:
                self._one_by_one.flush(_CLOSE_S)
                self._one_by_one = None
        self._commit(consumer, readings, at_once=True)
        self._forget(readings)

    def _forget(self, readings: Sequence[_Reading]) -> None:
        for reading in readings:
            self._readings.pop((reading.topic, reading.partition), None)
            self._loop.call_soon_threadsafe(reading.intake.close)


def letter_of(record: Any) -> Letter:
    attributes: dict[str, str] = {}
    headers: dict[str, str] = {}
    content_type = ""
    given = headers_of(record)
    is_damaged = given is None
    for name, value in given or ():
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
            headers[name.removeprefix(PREFIX)] = text
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
