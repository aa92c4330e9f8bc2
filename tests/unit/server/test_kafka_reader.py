"""Offsets that Kafka does not take are committed again. The consumer of the library is a stand-in: no broker refuses at will."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from tmc_server.submission.answers import Settled
from tmc_server.submission.kafka import KafkaReader
from tmc_server.submission.letters import Letter, Place
from tmc_storm.eventually import eventually

PLACE = Place(app="orders", tag="default")
_LOST = SimpleNamespace(topic=PLACE.queue, partition=0, error="the coordinator moved")


class Consumer:
    """One partition with one record. commits: offset, and whether the caller waits for the answer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._on_commit = settings["on_commit"]
        self._records = [_record()]
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


def _record() -> Any:
    return SimpleNamespace(
        error=lambda: None,
        topic=lambda: PLACE.queue,
        partition=lambda: 0,
        offset=lambda: 7,
        headers=list,
        value=lambda: b"{}",
    )


class Taken:
    """Settles every letter at once."""

    def __init__(self, _place: Place, done: Callable[[Sequence[Settled]], None]) -> None:
        self._done = done
        self._closed = asyncio.Event()

    async def run(self) -> None:
        await self._closed.wait()

    def arrived(self, letters: Sequence[Letter]) -> None:
        self._done([Settled(letter=letter, reply=b"", refusal=None) for letter in letters])

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
    producer = SimpleNamespace(poll=lambda _seconds: 0, flush=lambda _seconds: 0)
    monkeypatch.setattr("tmc_server.submission.kafka.Producer", lambda _settings: producer)
    monkeypatch.setattr(
        "tmc_server.submission.kafka.AdminClient", lambda _settings: SimpleNamespace(create_topics=lambda _new: {})
    )
    return made


def test_an_offset_that_was_not_taken_is_committed_again_and_at_the_end_in_any_case(consumer: list[Consumer]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    open_intake: Any = Taken
    reader = KafkaReader({}, loop, open_intake)
    try:
        reader.want([PLACE])
        eventually(lambda: consumer and consumer[0].commits.count((8, False)) == 2)
    finally:
        reader.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert consumer[0].commits[-2:] == [(8, False), (8, True)]
