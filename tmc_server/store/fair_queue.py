"""What waits for the shards, shared fairly between apps: in one shard by bytes, among shards by the time of the lanes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from tmc_server.domain.numbers import Shard

_QUANTUM_BYTES = 16_384  # what an app may add to a batch per turn: about 16 small messages or 160 acks
_LONGEST_S = 0.25  # of a batch, as it is charged
_REGULAR_S = 1.0  # who was here so recently will come again


class Queued(Protocol):
    """app: number of the app whose line it waits in.  size: bytes it adds to the queue and to a batch."""

    @property
    def app(self) -> int: ...

    @property
    def size(self) -> int: ...


Entry = TypeVar("Entry", bound=Queued)


class _Line(Generic[Entry]):
    """What one app has waiting. credit: bytes it may still add to batches in this turn."""

    __slots__ = ("bytes", "credit", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Entry] = deque()
        self.bytes = 0
        self.credit = _QUANTUM_BYTES


class FairQueue(Generic[Entry]):
    """A line per app, served in turns by bytes (deficit round robin). Not thread-safe.

    limit, limit_bytes: of all lines together. An app's share is its part of them among the apps that have a line.
    """

    __slots__ = ("bytes", "count", "limit", "limit_bytes", "lines", "turns")

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.lines: dict[int, _Line[Entry]] = {}
        self.turns: deque[int] = deque()  # apps with a line, the one whose turn it is first
        self.count = 0
        self.bytes = 0

    def has_room(self, app: int, count: int) -> bool:
        """Return whether an app may add this many entries: while there is room, and up to its share of a full queue."""
        if self.count + count <= self.limit and self.bytes <= self.limit_bytes:
            return True
        line = self.lines.get(app)
        held, held_bytes = (len(line.waiting), line.bytes) if line is not None else (0, 0)
        apps = len(self.lines) + (line is None)
        return apps > 1 and held + count <= self.limit // apps and held_bytes <= self.limit_bytes // apps

    def add(self, entry: Entry) -> list[Entry]:
        """Add an entry. Returns: those pushed out to make room, the newest entries of apps over their share."""
        line = self.lines.get(entry.app)
        if line is None:
            line = self.lines[entry.app] = _Line()
            self.turns.append(entry.app)
        size = entry.size
        line.waiting.append(entry)
        line.bytes += size
        self.count += 1
        self.bytes += size
        if self.count <= self.limit and self.bytes <= self.limit_bytes:
            return []
        return [] if self._over_share(line) else self._push_out()

    def _over_share(self, line: _Line[Entry]) -> bool:
        apps = len(self.lines)
        return len(line.waiting) > self.limit // apps or line.bytes > self.limit_bytes // apps

    def _push_out(self) -> list[Entry]:
        out: list[Entry] = []
        while self.count > self.limit or self.bytes > self.limit_bytes:
            lines = [line for line in self.lines.values() if self._over_share(line)]
            if not lines:
                break
            by_count = self.count > self.limit
            line = max(lines, key=lambda line: len(line.waiting) if by_count else line.bytes)
            while self._over_share(line) and (self.count > self.limit or self.bytes > self.limit_bytes):
                entry = line.waiting.pop()
                size = entry.size
                line.bytes -= size
                self.count -= 1
                self.bytes -= size
                out.append(entry)
            if not line.waiting:
                self._leave(out[-1].app)
        return out

    def take(self, most: int, most_bytes: int, first: int | None = None) -> list[Entry]:
        """The next batch: apps in turns, each app's entries in their order. What is larger than a batch comes alone.

        first: the app that has the first turn, which waits here; None: the one whose turn it is.
        """
        batch: list[Entry] = []
        if first is not None and self.turns[0] != first:
            self.turns.remove(first)
            self.turns.appendleft(first)
        room = most_bytes
        turns = self.turns
        while turns and len(batch) < most:
            line = self.lines[turns[0]]
            shared = len(turns) > 1
            waiting = line.waiting
            while waiting and len(batch) < most:
                size = waiting[0].size
                if batch and size > room:
                    return batch
                if shared and size > line.credit:
                    break
                line.credit -= size if shared else 0
                line.bytes -= size
                self.bytes -= size
                self.count -= 1
                room -= size
                batch.append(waiting.popleft())
            if not waiting:
                self._leave(turns[0])
            elif len(batch) < most:  # its turn is over; a turn cut off by a full batch continues in the next
                turns.rotate(-1)
                line.credit += _QUANTUM_BYTES
        return batch

    def waits(self, app: int) -> int:
        """Return how many entries of this app wait."""
        line = self.lines.get(app)
        return len(line.waiting) if line is not None else 0

    def waiting(self) -> list[Entry]:
        """Return all of them."""
        return [entry for line in self.lines.values() for entry in line.waiting]

    def _leave(self, app: int) -> None:
        """An app without work keeps no credit: it would come back with a burst."""
        del self.lines[app]
        if self.turns[0] == app:
            self.turns.popleft()
        else:
            self.turns.remove(app)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a lane should do next. app: whom it serves, first.

    is_short: the batch would have much of an app with many entries, while another one has some in it, or was here within the
    last second and waits for nothing: it is likely to come back soon. Its callers would wait for the end of the batch.
    """

    app: int
    shard: Shard
    is_short: bool


class LaneTime:
    """How long lanes have worked for each app: those they worked least for come first, in whatever shards they are.

    An app that comes back after a pause starts level with the one that is served: nobody saves up a burst. Not thread-safe.

    many: an app with this many waiting entries sends large batches, and its callers do not notice a few milliseconds.
    """

    def __init__(self, many: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._many = many
        self._monotonic = monotonic
        self._had: dict[int, float] = {}  # seconds, by app
        self._seen: dict[int, float] = {}  # when an app came last, monotonic seconds, in this order
        self._level = 0.0  # of the app that was served last

    def arrive(self, app: int) -> None:
        """It puts something into a queue."""
        self._had[app] = max(self._had.get(app, 0.0), self._level)
        self._seen.pop(app, None)
        self._seen[app] = self._monotonic()

    def next(self, ready: Collection[Shard], queues: Mapping[Shard, FairQueue[Entry]]) -> Turn:
        """The app that has had least, and the first shard in which it waits."""
        had, waiting = self._had, {app for shard in ready for app in queues[shard].lines}
        app = min(waiting, key=had.__getitem__)
        self._level = max(self._level, had[app])
        shard = next(shard for shard in ready if app in queues[shard].lines)
        here = queues[shard].lines
        is_short = (len(here) > 1 or self._is_awaited(waiting)) and self._has_many(
            here, [queues[each] for each in ready]
        )
        return Turn(app=app, shard=shard, is_short=is_short)

    def _has_many(self, apps: Collection[int], queues: Sequence[FairQueue[Entry]]) -> bool:
        """Return whether one of these apps does."""
        if sum(queue.count for queue in queues) < self._many:
            return False
        return any(sum(queue.waits(app) for queue in queues) >= self._many for app in apps)

    def _is_awaited(self, waiting: Collection[int]) -> bool:
        """Return whether another app is likely to come."""
        since = self._monotonic() - _REGULAR_S
        recent = takewhile(lambda app: self._seen[app] >= since, reversed(self._seen))
        return any(app not in waiting for app in recent)

    def charge(self, batch: Sequence[Entry], seconds: float) -> None:
        """A lane has worked that long on these: apps share it as they share its bytes.

        A batch that was held up, e.g. by a database that was away, counts no more than one that was merely slow: it is not
        the fault of these apps.
        """
        seconds = min(seconds, _LONGEST_S)
        sizes: Counter[int] = Counter()
        for app, entries in groupby(batch, key=attrgetter("app")):
            sizes[app] += sum(entry.size for entry in entries)
        total = sizes.total()
        for app, size in sizes.items():
            self._had[app] += seconds * size / total
