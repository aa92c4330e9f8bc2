"""A submit queue moves from one server to another while its producer publishes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pika
import pytest

from tmc_common.submission import queue_of
from tmc_server.submission.answers import OpenIntake
from tmc_server.submission.letters import Letter, Place
from tmc_server.submission.rabbitmq import RabbitReader
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services
_PLACE = Place(app="handover", tag="default")
_QUEUE = queue_of("handover", "default")
_HELD = 300


class _Stuck:
    """An intake that notes what arrives and finishes nothing."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._closed = asyncio.Event()

    def arrived(self, letters: Sequence[Letter]) -> None:
        self.numbers += [int(letter.body) for letter in letters]

    async def run(self) -> None:
        await self._closed.wait()

    def close(self) -> None:
        self._closed.set()


@contextmanager
def _reader(rabbitmq: RabbitMQ, kind: str) -> Iterator[tuple[RabbitReader, _Stuck]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    intake = _Stuck()
    opening = cast("OpenIntake", lambda _place, _done: intake)
    reader = RabbitReader(rabbitmq.url, kind, loop, opening)
    try:
        yield reader, intake
    finally:
        reader.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _publishing(rabbitmq: RabbitMQ) -> Iterator[None]:
    """Numbers, one after the other, until the end of the block."""
    ending = threading.Event()

    def publish() -> None:
        with rabbitmq.connect() as connection, connection.channel() as channel:
            channel.confirm_delivery()
            number = 0
            while not ending.is_set():
                channel.basic_publish("", _QUEUE, b"%d" % number, pika.BasicProperties(delivery_mode=2))
                number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@pytest.mark.parametrize("leave", [lambda reader: reader.want([]), RabbitReader.stop], ids=["moved", "stopped"])
@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_the_order_holds_while_a_queue_moves(
    rabbitmq: RabbitMQ, kind: str, leave: Callable[[RabbitReader], None]
) -> None:
    with rabbitmq.connect() as connection, connection.channel() as channel:
        channel.queue_delete(_QUEUE)
        with _reader(rabbitmq, kind) as (first, held), _reader(rabbitmq, kind) as (second, got):
            first.want([_PLACE])
            eventually(lambda: _consumers(rabbitmq) == 1)
            with _publishing(rabbitmq):
                eventually(lambda: len(held.numbers) >= _HELD)
                second.want([_PLACE])
                eventually(lambda: _consumers(rabbitmq) == 2)
                leave(first)
                eventually(lambda: len(got.numbers) >= 2 * _HELD)
            assert got.numbers == list(range(len(got.numbers)))
        channel.queue_delete(_QUEUE)


def _consumers(rabbitmq: RabbitMQ) -> int:
    return rabbitmq.control("list_consumers", "queue_name", "--quiet", "--no-table-headers").split().count(_QUEUE)
