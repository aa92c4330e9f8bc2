"""Records and offsets that go wrong. The library's consumer and producer are stand-ins: no broker refuses at will."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from tmc_server.errors import InvalidField
from tmc_server.submission.answers import Settled
from tmc_server.submission.kafka import KafkaReader
from tmc_server.submission.letters import Letter, Place
from tmc_storm.eventually import eventually

RECORDS: list[Any] = []
PLACE = Place(app="orders", tag="default")
_LOST = SimpleNamespace(topic=PLACE.queue, partition=0, error="the coordinator moved")


class Producer:
    """takes: what it says of a record, by its topic and value; raised if it is an exception."""

    def __init__(self, takes: Callable[[str, bytes], Any]) -> None:
        self._takes = takes
        self._answers: list[tuple[Any, Any]] = []
        self.taken: list[tuple[str, bytes]] = []

    def produce(self, topic: str, value: bytes, *, headers: Any, on_delivery: Any) -> None:
        answer = self._takes(topic, value)
        if isinstance(answer, Exception):
            raise answer
        self._answers.append((on_delivery, answer))
        if answer is None:
            self.taken.append((topic, value))

    def poll(self, _seconds: float) -> None:
        """Serve what was answered. Also by `flush`."""
        answers, self._answers = self._answers, []
        for on_delivery, answer in answers:
            on_delivery(answer, None)

    flush = poll


class Consumer:
    """One partition with one record. commits: offset, and whether the caller waits for the answer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._on_commit = settings["on_commit"]
        self._records = list(RECORDS)
        self._refused: list[Any] = []
        self.commits: list[tuple[int, bool]] = []

    def subscribe(self, _topics: Sequence[str], on_assign: Callable[[Any, Any], None], **_others: Any) -> None:
        on_assign(self, [TopicPartition(PLACE.queue, 0)])

    def consume(self, _most: int, _seconds: float) -> list[Any]:
        if self._refused:
            self._on_commit(None, [self._refused.pop()])
        records, self._records = self._records, []
        return records

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        self.commits += [(each.offset, not asynchronous) for each in offsets]
        if self.commits.count((8, False)) == 1:
            self._refused.append(_LOST)

    def assign(self, _partitions: Any) -> None: ...
    def resume(self, _partitions: Any) -> None: ...
    def close(self) -> None: ...


def _record(offset: int = 7, headers: Callable[[], Any] = list) -> Any:
    return SimpleNamespace(
        error=lambda: None,
        topic=lambda: PLACE.queue,
        partition=lambda: 0,
        offset=lambda: offset,
        headers=headers,
        value=lambda: b"{}",
    )


def _unreadable() -> Any:
    raise SystemError("headers() returned a result with an exception set")


class Taken:
    """Settles every letter at once."""

    def __init__(self, _place: Place, done: Callable[[Sequence[Settled]], None]) -> None:
        self.done = done
        self._closed = asyncio.Event()

    async def run(self) -> None:
        await self._closed.wait()

    def arrived(self, letters: Sequence[Letter]) -> None:
        self.done([Settled(letter=letter, reply=b"", refusal=None) for letter in letters])

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> list[Consumer]:
    made: list[Consumer] = []

    def make(settings: dict[str, Any]) -> Consumer:
        made.append(Consumer(settings))
        return made[-1]

    monkeypatch.setattr("tmc_server.submission.kafka.Consumer", make)
    monkeypatch.setattr("tmc_server.submission.kafka._COMMIT_S", 0.01)
    monkeypatch.setattr("tmc_server.submission.kafka.Producer", lambda _settings: Producer(lambda *_: None))
    monkeypatch.setattr(
        "tmc_server.submission.kafka.AdminClient", lambda _settings: SimpleNamespace(create_topics=lambda _new: {})
    )
    return made


@contextmanager
def _reading(open_intake: Any, records: Sequence[Any]) -> Iterator[None]:
    RECORDS[:] = records
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    reader = KafkaReader({}, loop, open_intake)
    try:
        reader.want([PLACE])
        yield
    finally:
        reader.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_offset_that_was_not_taken_is_committed_again_and_at_the_end_in_any_case(consumer: list[Consumer]) -> None:
    with _reading(Taken, [_record()]):
        eventually(lambda: consumer and consumer[0].commits.count((8, False)) == 2)
    assert consumer[0].commits[-2:] == [(8, False), (8, True)]


def test_a_record_that_the_library_cannot_read_is_damaged_and_holds_up_no_other(consumer: list[Consumer]) -> None:
    seen: list[tuple[int, bool]] = []

    class Noting(Taken):
        def arrived(self, letters: Sequence[Letter]) -> None:
            seen.extend((letter.number, letter.is_damaged) for letter in letters)
            super().arrived(letters)

    with _reading(Noting, [_record(7, _unreadable), _record(8)]):
        eventually(lambda: consumer and (9, False) in consumer[0].commits)
    assert seen == [(7, True), (8, False)]


TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)


def _in_a_batch() -> Callable[[str, bytes], Any]:
    answers = [TOO_LARGE]
    return lambda _topic, _value: answers.pop() if answers else None


@pytest.mark.parametrize(
    ("reply_to", "takes", "taken"),
    [
        # It was in a batch with one that is too large: alone, it is taken whole.
        ("", _in_a_batch(), [("tmc.submit.orders.dead", b"{}")]),
        # Kafka never takes it whole: its place is kept without the body.
        ("", lambda _topic, value: TOO_LARGE if value else None, [("tmc.submit.orders.dead", b"")]),
        # The library cannot take the name: of what is refused, it goes to the dead ones.
        (
            "tmc.reply.orders.a",
            lambda topic, _value: ValueError("embedded null character") if "reply" in topic else None,
            [("tmc.submit.orders.dead", b"{}")],
        ),
    ],
)
def test_what_is_refused_finds_a_place(
    consumer: list[Consumer], monkeypatch: pytest.MonkeyPatch, reply_to: str, takes: Any, taken: list[tuple[str, bytes]]
) -> None:
    producer = Producer(takes)
    monkeypatch.setattr("tmc_server.submission.kafka.Producer", lambda _settings: producer)

    class Refused(Taken):
        def arrived(self, letters: Sequence[Letter]) -> None:
            (letter,) = letters
            reply = b"no" if reply_to else b""
            self.done(
                [
                    Settled(
                        letter=replace(letter, reply_to=reply_to), reply=reply, refusal=InvalidField("body", "be less")
                    )
                ]
            )

    with _reading(Refused, [_record()]):
        eventually(lambda: consumer and (8, False) in consumer[0].commits)
    assert producer.taken == taken
