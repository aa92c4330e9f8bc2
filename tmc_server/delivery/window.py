"""Limit the copies in flight to a broker: in total, per destination, and to a destination that refuses.

Copies count from `reserve` until they are answered, or for CONFIRM_TIMEOUT_S: then they leave the window to others, but
stay `unconfirmed`, because they may still arrive, and no second copy is sent meanwhile. A destination that refuses gets
its own pause, 1 s doubling to 60 s, during which nothing is sent to it; then a few copies probe it, and the first success
reopens it. So a bad queue delays only its own messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.ports.delivery import QueueProgress

CONFIRM_TIMEOUT_S = 10.0
# The confirm timeout plus time to act on it: what a dead server handed over before that was confirmed, or is unconfirmed
# and comes again as a lost copy.
UNCERTAIN_MS = 15_000
LONGEST_PAUSE_S = 60.0
ALERT_AFTER = 3
_PROBE = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """The pause after a refusal. pause_s: time until the next attempt.  pauses: in a row, including this one.

    begins_a_pause: False if an earlier copy had already begun this pause.
    """

    pause_s: float
    pauses: int
    begins_a_pause: bool


class Destination:
    """One queue, or one place that a subscription forwards to. Guarded by its window's lock."""

    __slots__ = (
        "failures",
        "heard",
        "in_flight",
        "moved_at",
        "name",
        "passed_ms",
        "paused_until",
        "seen",
        "shared",
        "unconfirmed",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_flight = 0
        self.unconfirmed: set[tuple[Shard, MessageNumber]] = (
            set()
        )  # handed over and not answered; changed without the lock
        self.failures = 0  # pauses in a row
        self.paused_until = 0.0
        self.passed_ms = 0  # time of the newest attempt whose copy left the queue, as seen by any server
        self.moved_at = 0.0  # when something last came out, or a first consumer was seen
        self.seen = QueueProgress(queue=name, passed_ms=0, moves=0)  # by this server
        self.shared = self.seen  # what the other servers were given of it
        self.heard: Mapping[int, QueueProgress] = {}  # from other servers, by incarnation


class Window:
    """size: copies in flight at most; a single destination gets half.  size_bytes: bodies in flight, about.

    on_room: called when there is much room again after a reservation was cut short.
    """

    def __init__(
        self,
        size: int,
        size_bytes: int,
        on_room: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._size_bytes = size_bytes
        self._on_room = on_room
        self._monotonic = monotonic
        self._lock = threading.Condition()
        self._refused = False
        self.in_flight = 0
        self.bytes = 0

    def reserve(self, destination: Destination, wanted: int, most: int | None = None) -> int:
        """Return how many copies may be handed over now. most: in flight to this destination; None: half of all."""
        with self._lock:
            if self._monotonic() < destination.paused_until:
                return 0
            most = self._size // 2 if most is None else most
            most = min(most, _PROBE) if destination.failures else most
            room = max(0, min(self._size - self.in_flight, most - destination.in_flight, wanted))
            if self.bytes >= self._size_bytes:
                room = 0
            if room < wanted:
                self._refused = True
            if room < min(wanted, most // 4):  # a claim of many rows is for many: claims of what trickles in cost more
                room = 0
            self.in_flight += room
            destination.in_flight += room
            return room

    def release(self, destination: Destination, count: int) -> None:
        """Reserved and not used, or answered."""
        with self._lock:
            self.in_flight -= count
            destination.in_flight -= count
            if not self.in_flight:
                self._lock.notify_all()
            wake = self._refused and self.in_flight * 4 <= self._size
            if wake:
                self._refused = False
        if wake:
            self._on_room()

    def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way. Returns False when the time is over."""
        with self._lock:
            return self._lock.wait_for(lambda: self.in_flight == 0, timeout_s)

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def succeeded(self, destination: Destination) -> bool:
        """Note a success. Returns: whether it ended a run of failures. A success during a pause does not count."""
        if not destination.failures or self._monotonic() < destination.paused_until:
            return False
        with self._lock:
            destination.failures = 0
            destination.paused_until = 0.0
        return True

    def failed(self, destination: Destination, at_least_s: float = 0.0) -> Failure:
        """Note a refusal: begin a pause, unless one is running. at_least_s: from now on."""
        with self._lock:
            now = self._monotonic()
            if now < destination.paused_until:
                destination.paused_until = max(destination.paused_until, now + at_least_s)
                return Failure(destination.paused_until - now, destination.failures, False)
            destination.failures += 1
            pause_s = max(at_least_s, min(LONGEST_PAUSE_S, 2.0 ** (destination.failures - 1)))
            destination.paused_until = now + pause_s
            return Failure(pause_s, destination.failures, True)

    def rests(self, destination: Destination) -> bool:
        """Return whether its pause is not over."""
        return self._monotonic() < destination.paused_until

    def passed(self, destination: Destination, tried_ms: int) -> None:
        """This server saw a copy of an attempt made then come out."""
        with self._lock:
            destination.moved_at = self._monotonic()
            destination.passed_ms = max(destination.passed_ms, tried_ms)
            destination.seen = replace(
                destination.seen,
                passed_ms=max(destination.seen.passed_ms, tried_ms),
                moves=destination.seen.moves + 1,
            )

    def hear(self, destination: Destination, progress: Mapping[int, QueueProgress]) -> None:
        """Take in the other servers' progress; a change since the last call means that a copy left the queue."""
        with self._lock:
            news = [seen for run, seen in progress.items() if destination.heard.get(run) != seen]
            destination.heard = progress
            if news:
                destination.moved_at = self._monotonic()
                destination.passed_ms = max(destination.passed_ms, *(seen.passed_ms for seen in news))

    def unshared(self, destinations: Iterable[Destination]) -> list[QueueProgress]:
        """This server's progress that is not published yet."""
        with self._lock:
            return [each.seen for each in destinations if each.seen is not each.shared]

    def was_shared(self, destinations: Mapping[str, Destination], progress: Iterable[QueueProgress]) -> None:
        """Mark progress as published to the other servers."""
        with self._lock:
            for seen in progress:
                destinations[seen.queue].shared = seen

    def looked(self, destination: Destination, consumers: int) -> int:
        """Note a look at the queue. Returns: milliseconds since a copy left it or the first consumer was seen."""
        with self._lock:
            now = self._monotonic()
            if not consumers or not destination.moved_at:
                destination.moved_at = now
            return round((now - destination.moved_at) * 1000)
