"""Built-in delivery: copies go straight down the consumers' Subscribe streams, as far as their credit reaches.

For a center of one process: a stream lives in the memory of the server it is connected to. A subscription without a
consumer that has credit is not tried; its rows wait in the table and count nothing. What was handed to a stream that
ended before it was written is given back uncounted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ports import Copy
from tmc_server.errors import ShuttingDown

GiveBackAll = Callable[[Sequence[Copy]], None]


class ConsumerStream:
    """One connected consumer. `credit`: copies it can take. Guarded by the outlet's lock; the queue by the loop."""

    def __init__(self, outlet: StreamOutlet, subscriptions: Iterable[int]) -> None:
        self._outlet = outlet
        self.subscriptions = frozenset(subscriptions)
        self.credit = 0
        self.open = True
        self._finished = False
        self._waiting: deque[Copy] = deque()
        self._arrived = asyncio.Event()

    def push(self, copies: Sequence[Copy]) -> None:
        """On the loop."""
        self._waiting.extend(copies)
        self._arrived.set()

    async def next_batch(self, most: int, most_bytes: int) -> list[Copy]:
        """See domain.ports.DeliveryStream."""
        while not self._waiting:
            if self._finished:
                raise ShuttingDown
            self._arrived.clear()
            await self._arrived.wait()
        batch = [self._waiting.popleft()]
        room = most_bytes - len(batch[0].body)
        while self._waiting and len(batch) < most and len(self._waiting[0].body) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1].body)
        return batch

    def put_back(self, copies: Sequence[Copy]) -> None:
        """See domain.ports.DeliveryStream."""
        self._waiting.extendleft(reversed(copies))

    def add_credit(self, credit: int) -> None:
        """See domain.ports.DeliveryStream."""
        self._outlet.add_credit(self, credit)

    def close(self) -> None:
        """See domain.ports.DeliveryStream."""
        self._outlet.close(self)

    def finish(self) -> None:
        """On the loop: the server stops, send the consumer to another one."""
        self._finished = True
        self._arrived.set()

    def unsent(self) -> list[Copy]:
        """Take out what was never written."""
        copies = list(self._waiting)
        self._waiting.clear()
        return copies


class StreamOutlet:
    """domain.ports.Outlet. give_back: called on the loop with copies that reached nobody.  wake: new room came up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_back: GiveBackAll, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._give_back = give_back
        self._wake = wake
        self._lock = threading.Lock()
        self._streams: dict[int, deque[ConsumerStream]] = {}
        self._granted: dict[int, deque[ConsumerStream]] = {}  # one entry per reserved copy

    def open(self, subscriptions: Iterable[int]) -> ConsumerStream:
        """A consumer connected. It gets nothing before it gives credit."""
        stream = ConsumerStream(self, subscriptions)
        with self._lock:
            for number in stream.subscriptions:
                self._streams.setdefault(number, deque()).append(stream)
        return stream

    def add_credit(self, stream: ConsumerStream, credit: int) -> None:
        with self._lock:
            starved = stream.credit == 0
            stream.credit += credit
        if starved and credit:
            self._wake()

    def close(self, stream: ConsumerStream) -> None:
        """The consumer is gone. On the loop."""
        with self._lock:
            stream.open = False
            for number in stream.subscriptions:
                self._streams[number].remove(stream)
        unsent = stream.unsent()
        if unsent:
            self._give_back(unsent)

    def finish(self) -> None:
        """End all streams. On the loop."""
        with self._lock:
            streams = {stream for group in self._streams.values() for stream in group}
        for stream in streams:
            stream.finish()

    def reserve(self, subscription: int, wanted: int) -> int:
        with self._lock:
            streams = self._streams.get(subscription)
            if not streams:
                return 0
            granted = self._granted.setdefault(subscription, deque())
            count = 0
            for left in range(len(streams), 0, -1):
                streams.rotate(-1)  # consumers take turns
                stream = streams[0]
                fair_share = -(-(wanted - count) // left)
                take = min(stream.credit, fair_share)
                stream.credit -= take
                granted.extend([stream] * take)
                count += take
            return count

    def release(self, subscription: int, count: int) -> None:
        with self._lock:
            for _ in range(count):
                self._granted[subscription].popleft().credit += 1

    def deliver(self, copies: Sequence[Copy]) -> None:
        batches: dict[ConsumerStream, list[Copy]] = {}
        with self._lock:
            for copy in copies:
                batches.setdefault(self._granted[copy.subscription].popleft(), []).append(copy)
        self._loop.call_soon_threadsafe(self._push, batches)

    def came_out(self, subscription: int, tried_ms: int) -> None:
        """Nothing waits here: copies go to consumers that have credit."""

    def look(self, subscription: int) -> QueueLook | None:
        """No queue holds a copy that a consumer has not asked for."""
        return QueueLook()

    def _push(self, batches: dict[ConsumerStream, list[Copy]]) -> None:
        for stream, copies in batches.items():
            if stream.open:
                stream.push(copies)
            else:
                self._give_back(copies)
