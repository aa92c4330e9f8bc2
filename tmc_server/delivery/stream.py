"""Built-in delivery: send copies directly over the consumers' Subscribe streams, as far as their credit allows.

For a center with one process: a stream lives in the memory of its server. While no consumer of a subscription has
credit, no attempt is made and the rows wait in the table. Copies handed to a stream that ends before they are written
are given back, and the attempt does not count.

A consumer that grants much credit but does not read must not fill the server's memory: a stream's unwritten copies
are limited in number and in bytes, a message with an unwritten copy gets no second one, and a stream whose reader
stalls is closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from tmc_common.eventlog import EventLog
from tmc_server.delivery.spans import PublishSpans
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.delivery import Copy
from tmc_server.errors import ShuttingDown
from tmc_server.metrics import METRICS

log = EventLog("tmc.delivery")

GiveBackAll = Callable[[Sequence[Copy]], None]


_FIRST_GUESS_BYTES = 65_536  # size of a copy, before a stream has seen any


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Limits of one stream. copies, bytes: maximum credit and unwritten bodies.  patience_s: longest write."""

    copies: int = 10_000
    bytes: int = 16 << 20
    patience_s: float = 30.0


class ConsumerStream:
    """One connected consumer. Numbers are guarded by the outlet's lock; the queue belongs to the loop.

    credit: copies it asked for and nobody promised yet.  promised: reserved, not handed over yet.
    unwritten, unwritten_bytes: handed over and not yet taken by the connection.
    """

    def __init__(self, outlet: StreamOutlet, subscriptions: Iterable[SubscriptionNumber], limits: StreamLimits) -> None:
        self._outlet = outlet
        self._limits = limits
        self.subscriptions = frozenset(subscriptions)
        self.credit = self.promised = 0
        self.unwritten = self.unwritten_bytes = 0
        self.open = True
        self._guess_bytes = _FIRST_GUESS_BYTES
        self._finished = False
        self._waiting: deque[Copy] = deque()
        self._writing: Sequence[Copy] = ()
        self._writing_since = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._arrived = asyncio.Event()

    @property
    def room(self) -> int:
        """Copies that may be promised now. Under the lock."""
        left = self._limits.bytes - self.unwritten_bytes - self.promised * self._guess_bytes
        return min(self.credit, -(-left // self._guess_bytes)) if left > 0 else 0

    def grant(self, credit: int) -> None:
        """Add credit, dropping any beyond the limit; the consumer grants more as it works. Under the lock."""
        self.credit = min(self.credit + credit, self._limits.copies - self.promised - self.unwritten)

    def takes(self, copy: Copy) -> bool:
        """Count a reserved copy as unwritten if its body fits; a single copy always fits. Under the lock."""
        size = len(copy.body)
        self.promised -= 1
        self._guess_bytes = max(1024, size, (self._guess_bytes * 7 + size) // 8)
        if self.unwritten and self.unwritten_bytes + size > self._limits.bytes:
            self.credit += 1
            return False
        self.unwritten += 1
        self.unwritten_bytes += size
        return True

    def push(self, copies: Sequence[Copy]) -> None:
        """Push copies, on the loop."""
        self._waiting.extend(copies)
        self._arrived.set()

    async def next_batch(self, most: int, most_bytes: int) -> list[Copy]:
        self._wrote()
        while not self._waiting:
            if not self.open:
                raise ShuttingDown("Nothing was read from this stream for too long: open another one, and read it.")
            if self._finished:
                raise ShuttingDown
            self._arrived.clear()
            await self._arrived.wait()
        batch = [self._waiting.popleft()]
        room = most_bytes - len(batch[0].body)
        while self._waiting and len(batch) < most and len(self._waiting[0].body) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1].body)
        self._writing = batch
        self._writing_since = time.monotonic()
        self._watch = asyncio.get_running_loop().call_later(self._limits.patience_s, self._cut)
        return batch

    def _wrote(self) -> None:
        """The caller came back: the connection took what it was given last."""
        self._stop_watching()
        written, self._writing = self._writing, ()
        if written:
            self._outlet.wrote(self, written, time.monotonic() - self._writing_since)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _cut(self) -> None:
        """Close the stream of a stalled reader, so that its copies go to other consumers or wait in the tables.

        gRPC cannot reset a call during a write. It keeps that one response, and the call ends once the reader takes
        it or its connection closes.
        """
        log.warning("stream_cut", "a consumer has read nothing for %g s: its stream is cut", self._limits.patience_s)
        METRICS.streams_cut.inc()
        METRICS.given_back.labels("slow reader").inc(len(self._writing) + len(self._waiting))
        self.put_back(self._writing)
        self.close()

    def put_back(self, copies: Sequence[Copy]) -> None:
        self._stop_watching()
        self._waiting.extendleft(reversed(copies))
        self._writing = ()

    def add_credit(self, credit: int) -> None:
        self._outlet.add_credit(self, credit)

    def close(self) -> None:
        self._wrote()
        self._outlet.close(self)

    def finish(self) -> None:
        """End the stream once it is empty, so that the consumer reconnects. On the loop."""
        self._finished = True
        self._arrived.set()

    def unsent(self) -> list[Copy]:
        """Take out what was never written."""
        copies = list(self._waiting)
        self._waiting.clear()
        return copies


class StreamOutlet:
    """domain.ports.delivery.Outlet. give_back: gets undelivered copies, on the loop.  wake: called on new room.

    on_copies: called with the copies of each delivery, before they are handed over.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        give_back: GiveBackAll,
        wake: Callable[[], None],
        limits: StreamLimits = StreamLimits(),
        on_copies: Callable[[Sequence[Copy]], None] | None = None,
        spans: PublishSpans | None = None,
    ) -> None:
        self._spans = spans
        self._loop = loop
        self._give_back = give_back
        self._wake = wake
        self._limits = limits
        self._on_copies = on_copies
        self._lock = threading.Lock()
        self._streams: dict[SubscriptionNumber, deque[ConsumerStream]] = {}
        self._granted: dict[SubscriptionNumber, deque[ConsumerStream]] = {}  # one entry per reserved copy
        self._unwritten: dict[
            SubscriptionNumber, set[tuple[Shard, MessageNumber]]
        ] = {}  # by subscription: shard, number

    def open(self, subscriptions: Iterable[SubscriptionNumber]) -> ConsumerStream:
        """A consumer connected. It gets nothing before it gives credit."""
        stream = ConsumerStream(self, subscriptions, self._limits)
        with self._lock:
            for number in stream.subscriptions:
                self._streams.setdefault(number, deque()).append(stream)
        return stream

    def add_credit(self, stream: ConsumerStream, credit: int) -> None:
        with self._lock:
            starved = stream.room == 0
            stream.grant(credit)
            woken = starved and stream.room > 0
        if woken:
            self._wake()

    def wrote(self, stream: ConsumerStream, copies: Sequence[Copy], lasted_s: float) -> None:
        """The connection took these. lasted_s: how long that took."""
        if self._spans is not None:
            self._spans.published(copies, lasted_s, "stream")
        with self._lock:
            full = stream.credit > 0 and stream.room == 0
            self._forget(stream, copies)
            woken = full and stream.room > 0
        if woken:
            self._wake()

    def _forget(self, stream: ConsumerStream, copies: Iterable[Copy]) -> None:
        """They are unwritten no longer. Under the lock."""
        for copy in copies:
            stream.unwritten -= 1
            stream.unwritten_bytes -= len(copy.body)
            self._unwritten[copy.subscription].discard((copy.shard, copy.number))

    def close(self, stream: ConsumerStream) -> None:
        """Close a stream and give its unsent copies back. On the loop; idempotent."""
        unsent = stream.unsent()
        with self._lock:
            if stream.open:
                stream.open = False
                for number in stream.subscriptions:
                    self._streams[number].remove(stream)
            self._forget(stream, unsent)
        if unsent:
            self._give_back(unsent)

    def finish(self, subscriptions: Collection[SubscriptionNumber] | None = None) -> None:
        """End all streams, or those that read one of these subscriptions. On the loop."""
        with self._lock:
            groups = self._streams if subscriptions is None else self._streams.keys() & set(subscriptions)
            streams = {stream for number in groups for stream in self._streams[number]}
        for stream in streams:
            stream.finish()

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
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
                take = min(stream.room, fair_share)
                stream.credit -= take
                stream.promised += take
                granted.extend([stream] * take)
                count += take
            return count

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        with self._lock:
            for _ in range(count):
                stream = self._granted[subscription].popleft()
                stream.promised -= 1
                stream.credit += 1

    def has_readers(self, subscription: SubscriptionNumber) -> bool:
        """Return whether a consumer is connected."""
        with self._lock:
            return bool(self._streams.get(subscription))

    def room(self, subscription: SubscriptionNumber) -> int:
        """Return how many copies its consumers would take now."""
        with self._lock:
            return sum(stream.room for stream in self._streams.get(subscription, ()))

    def deliver(self, copies: Sequence[Copy]) -> None:
        if self._on_copies is not None:
            self._on_copies(copies)
        batches: dict[ConsumerStream, list[Copy]] = {}
        too_many: list[Copy] = []
        with self._lock:
            for copy in copies:
                stream = self._granted[copy.subscription].popleft()
                if stream.takes(copy):
                    batches.setdefault(stream, []).append(copy)
                    self._unwritten.setdefault(copy.subscription, set()).add((copy.shard, copy.number))
                else:
                    too_many.append(copy)
        self._loop.call_soon_threadsafe(self._push, batches, too_many)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        """Do nothing: `look` says which messages have an unwritten copy."""

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        """Return how many consumers are connected, and which messages have an unwritten copy."""
        with self._lock:
            return QueueLook(
                consumers=len(self._streams.get(subscription, ())),
                unwritten=frozenset(self._unwritten.get(subscription, ())),
            )

    def _push(self, batches: dict[ConsumerStream, list[Copy]], too_many: Sequence[Copy]) -> None:
        for stream, copies in batches.items():
            if stream.open:
                stream.push(copies)
            else:
                with self._lock:
                    self._forget(stream, copies)
                self._give_back(copies)
        if too_many:
            self._give_back(too_many)
