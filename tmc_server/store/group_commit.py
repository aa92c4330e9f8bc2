"""Group commit: whatever waits for a shard becomes one transaction of multi-row statements.

A caller on the event loop puts operations into their shard's queue and awaits. A few lane threads, each with its own
connection, take the shard whose oldest operation waits longest, run up to a batch of operations in one transaction, and
hand all answers to the loop in one call. A shard is worked on by one lane at a time.

- A shard's queue is shared fairly between apps: a lane serves them in turns by the bytes of their operations (deficit
  round robin), each app's own operations stay in order.
- A full queue refuses, it does not grow: QueueFull. An app may fill it as long as nobody else needs the room; an app that
  holds less than its share is not refused, the newest operations of the app that holds most make room for it.
- A statement error repeats the batch by halves, so that one poisoned operation fails alone.
- A lost connection leaves the commit's outcome open; operations are idempotent, so the batch is simply run again on a
  new connection, and finds its own work or does it. Only then is anybody answered.
- A cancelled caller hurts nobody: its operations run to their end and find nobody waiting.
- A row that somebody else holds is skipped and tried again shortly; its neighbors do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import AGAIN, LOCKED, Operation
from tmc_server.errors import InternalFault, QueueFull, RowLocked, ShuttingDown, StoreUnavailable, TmcError
from tmc_server.metrics import METRICS
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import RowWaited, StoreConflict

log = logging.getLogger("tmc.group_commit")

_CONFLICT_TRIES = 6
_LOCKED_PAUSE_S = 0.02
_LOCKED_TRIES = 100  # x the pause: about two seconds
_QUANTUM_BYTES = 16_384  # what an app may add to a batch per turn: about 16 small messages or 160 acks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """lanes: threads and connections.  queue*: waiting per shard at most.  batch_*: one transaction at most."""

    lanes: int = 3
    queue: int = 20_000
    queue_bytes: int = 64 << 20
    batch_operations: int = 400
    batch_bytes: int = 4 << 20


class _Ticket:
    """One caller: done when all its operations have answers."""

    __slots__ = ("future", "open")

    def __init__(self, future: asyncio.Future[None], count: int) -> None:
        self.future = future
        self.open = count


class _Line:
    """What one app has waiting for a shard. credit: bytes it may still add to batches in this turn."""

    __slots__ = ("bytes", "credit", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Operation] = deque()
        self.bytes = 0
        self.credit = _QUANTUM_BYTES


class FairQueue:
    """What waits for one shard, an own line per app. Guarded by the lock of the group commit.

    limit, limit_bytes: of all lines together. An app's share is its part of them among the apps that have a line.
    """

    __slots__ = ("busy", "bytes", "count", "limit", "limit_bytes", "lines", "turns")

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.lines: dict[int, _Line] = {}
        self.turns: deque[int] = deque()  # apps with a line, the one whose turn it is first
        self.count = 0
        self.bytes = 0
        self.busy = False  # in the line of ready shards, or being worked on

    def has_room(self, app: int, count: int) -> bool:
        """May this app add so many? It may take what nobody uses, and its share even of a full queue."""
        if self.count + count <= self.limit and self.bytes <= self.limit_bytes:
            return True
        line = self.lines.get(app)
        held, held_bytes = (len(line.waiting), line.bytes) if line is not None else (0, 0)
        apps = len(self.lines) + (line is None)
        return apps > 1 and held + count <= self.limit // apps and held_bytes <= self.limit_bytes // apps

    def add(self, operation: Operation) -> list[Operation]:
        """Returns: what had to leave for it, the newest operations of the apps that hold more than their share."""
        line = self.lines.get(operation.app)
        if line is None:
            line = self.lines[operation.app] = _Line()
            self.turns.append(operation.app)
        size = operation.size
        line.waiting.append(operation)
        line.bytes += size
        self.count += 1
        self.bytes += size
        if self.count <= self.limit and self.bytes <= self.limit_bytes:
            return []
        return [] if self._over_share(line) else self._push_out()

    def _over_share(self, line: _Line) -> bool:
        apps = len(self.lines)
        return len(line.waiting) > self.limit // apps or line.bytes > self.limit_bytes // apps

    def _push_out(self) -> list[Operation]:
        out: list[Operation] = []
        while self.count > self.limit or self.bytes > self.limit_bytes:
            lines = [line for line in self.lines.values() if self._over_share(line)]
            if not lines:
                break
            by_count = self.count > self.limit
            line = max(lines, key=lambda line: len(line.waiting) if by_count else line.bytes)
            while self._over_share(line) and (self.count > self.limit or self.bytes > self.limit_bytes):
                operation = line.waiting.pop()
                size = operation.size
                line.bytes -= size
                self.count -= 1
                self.bytes -= size
                out.append(operation)
            if not line.waiting:
                self._leave(out[-1].app)
        return out

    def take(self, most: int, most_bytes: int) -> list[Operation]:
        """The next batch: apps in turns, each app's operations in their order. What is larger than a batch comes alone."""
        batch: list[Operation] = []
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
            elif len(batch) < most:  # its turn is over; one that the end of the batch cut off goes on in the next
                turns.rotate(-1)
                line.credit += _QUANTUM_BYTES
        return batch

    def waiting(self) -> list[Operation]:
        """All of them."""
        return [operation for line in self.lines.values() for operation in line.waiting]

    def _leave(self, app: int) -> None:
        """An app without work keeps no credit: it would come back with a burst."""
        del self.lines[app]
        if self.turns[0] == app:
            self.turns.popleft()
        else:
            self.turns.remove(app)


class GroupCommit:
    """The lanes of one database. `on_death`: called on the loop when a lane thread ends by a fault of its own."""

    def __init__(
        self, writer: ShardWriter, limits: Limits, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._limits = limits
        self._loop = loop
        self._on_death = on_death
        self._queues: dict[Shard, FairQueue] = {}
        self._ready: deque[Shard] = deque()  # shards with work and without a lane, longest waiting first
        self._condition = threading.Condition()
        self._stopping = False
        self._closed = False
        self._lanes = [
            threading.Thread(target=self._lane, name=f"tmc-lane-{i}", daemon=True) for i in range(limits.lanes)
        ]

    def start(self) -> None:
        for lane in self._lanes:
            lane.start()

    def stop(self) -> None:
        """Refuse new work, finish what waits, end the lanes. Blocks; not on the loop."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for lane in self._lanes:
            if lane.is_alive():
                lane.join(30)
        self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        """On the loop: no lane will come any more, so nobody may go on waiting for one."""
        self._closed = True
        with self._condition:
            left = [operation for queue in self._queues.values() for operation in queue.waiting()]
            self._queues.clear()
            self._ready.clear()
        for operation in left:
            operation.answer = ShuttingDown()
            self._finish(operation)

    def perform(self, operations: Sequence[tuple[Shard, Operation]]) -> Awaitable[object]:
        """See domain.ports.work.Performer."""
        self.check(operations)
        ticket = _Ticket(self._loop.create_future(), len(operations))
        for _, operation in operations:
            operation.ticket = ticket
        if not operations:
            ticket.future.set_result(None)
        self._enqueue(operations)
        return asyncio.shield(ticket.future)

    def check(self, operations: Sequence[tuple[Shard, Operation]]) -> None:
        """Is there room for all of these? Raises QueueFull, ShuttingDown."""
        if self._stopping:
            raise ShuttingDown
        if not operations:
            return
        app = operations[0][1].app
        for shard in {shard for shard, _ in operations}:
            queue = self._queues.get(shard)
            if queue is not None and not queue.has_room(app, len(operations)):
                raise QueueFull

    def _enqueue(self, operations: Sequence[tuple[Shard, Operation]]) -> None:
        if self._closed:
            for _, operation in operations:
                operation.answer = ShuttingDown()
                self._finish(operation)
            return
        pushed_out: list[Operation] = []
        with self._condition:
            for shard, operation in operations:
                queue = self._queues.get(shard)
                if queue is None:
                    queue = self._queues[shard] = FairQueue(self._limits.queue, self._limits.queue_bytes)
                pushed_out += queue.add(operation)
                if not queue.busy:
                    queue.busy = True
                    self._ready.append(shard)
                    self._condition.notify()
        for operation in pushed_out:
            operation.answer = QueueFull()
            self._finish(operation)

    def _lane(self) -> None:
        connection: sa.Connection | None = None
        operations: Sequence[Operation] = ()
        try:
            while (work := self._take()) is not None:
                shard, operations = work
                began = time.monotonic()
                connection = self._run(connection, shard, operations)
                METRICS.commit_seconds.observe(time.monotonic() - began)
                METRICS.batch_operations.observe(len(operations))
                self._loop.call_soon_threadsafe(self._hand_over, shard, operations)
                self._put_back(shard)
        except BaseException:  # a lane answers whatever its work throws; this is a fault of the lane itself
            log.exception("a lane died")
            _answer(operations, ShuttingDown())
            self._loop.call_soon_threadsafe(self._hand_over, Shard(0), operations)
            self._loop.call_soon_threadsafe(self._on_death)
        finally:
            if connection is not None:
                connection.close()

    def _take(self) -> tuple[Shard, list[Operation]] | None:
        with self._condition:
            while not self._ready:
                if self._stopping:
                    return None
                self._condition.wait()
            shard = self._ready.popleft()
            limits = self._limits
            return shard, self._queues[shard].take(limits.batch_operations, limits.batch_bytes)

    def _put_back(self, shard: Shard) -> None:
        with self._condition:
            queue = self._queues[shard]
            if queue.count:
                self._ready.append(shard)
                self._condition.notify()
            else:
                queue.busy = False

    def _run(
        self, connection: sa.Connection | None, shard: Shard, operations: Sequence[Operation]
    ) -> sa.Connection | None:
        """Answer all operations, whatever happens. Returns the connection to go on with."""
        conflicts = lost = 0
        while True:
            try:
                if connection is None:
                    connection = self._writer.database.connect()
                self._writer.run(connection, shard, operations)
                return connection
            except RowWaited:
                return self._one_by_one(connection, shard, operations)
            except StoreConflict:
                conflicts += 1
                if conflicts == _CONFLICT_TRIES:
                    return self._by_halves(connection, shard, operations, RowLocked())
                time.sleep(random.uniform(0.001, 0.01) * conflicts)
            except StoreUnavailable as exc:
                _discard(connection)
                connection = None
                lost += 1
                if lost == 2:
                    log.warning("the database does not answer: %s", exc.__cause__ or exc)
                    _answer(operations, exc)
                    return None
            except Exception as exc:  # whatever broke: a lane answers everybody
                log.exception("a batch of %d operations failed", len(operations))
                _discard(connection)
                fault = InternalFault("The center failed on this operation; its operators find the reason in the log.")
                fault.__cause__ = exc
                return self._by_halves(None, shard, operations, fault)

    def _by_halves(
        self, connection: sa.Connection | None, shard: Shard, operations: Sequence[Operation], error: TmcError
    ) -> sa.Connection | None:
        """Find out which operation spoils the batch; `error` is the answer to the last one left."""
        if len(operations) == 1:
            _answer(operations, error)
            return connection
        middle = len(operations) // 2
        connection = self._run(connection, shard, operations[:middle])
        return self._run(connection, shard, operations[middle:])

    def _one_by_one(
        self, connection: sa.Connection | None, shard: Shard, operations: Sequence[Operation]
    ) -> sa.Connection | None:
        """Somebody holds a row that one of these has to wait for: by halves each would wait again and again."""
        if len(operations) == 1:
            _answer(operations, RowLocked())
            return connection
        for operation in operations:
            connection = self._run(connection, shard, [operation])
        return connection

    def _hand_over(self, shard: Shard, operations: Sequence[Operation]) -> None:
        """On the loop: give the answers to the callers that still wait."""
        again: list[tuple[Shard, Operation]] = []
        for operation in operations:
            if operation.answer is AGAIN:
                operation.again = True  # what it wrote is committed: now it may look
                again.append((shard, operation))
            elif operation.answer is LOCKED and operation.tries < _LOCKED_TRIES:
                operation.tries += 1
                self._loop.call_later(_LOCKED_PAUSE_S, self._enqueue, [(shard, operation)])
            else:
                if operation.answer is LOCKED:
                    operation.answer = RowLocked()
                self._finish(operation)
        if again:
            self._enqueue(again)

    @staticmethod
    def _finish(operation: Operation) -> None:
        ticket = operation.ticket
        assert isinstance(ticket, _Ticket)
        ticket.open -= 1
        # A caller that was cancelled has done with its future; an unguarded set_result would kill this hand-over.
        if ticket.open == 0 and not ticket.future.done():
            ticket.future.set_result(None)


def _answer(operations: Sequence[Operation], error: TmcError) -> None:
    for operation in operations:
        operation.answer = error


def _discard(connection: sa.Connection | None) -> None:
    if connection is not None:
        try:
            connection.invalidate()
            connection.close()
        except sa.exc.SQLAlchemyError as exc:
            log.debug("closing a broken connection: %s", exc)


class ShardedGroupCommit:
    """The Performer over all databases: each has its own lanes, so a slow one holds up no other."""

    def __init__(self, commits: Sequence[GroupCommit], of_shard: Sequence[int]) -> None:
        self._commits = commits
        self._of_shard = of_shard

    def perform(self, operations: Sequence[tuple[Shard, Operation]]) -> Awaitable[object]:
        """See domain.ports.work.Performer."""
        if len(self._commits) == 1:
            return self._commits[0].perform(operations)
        parts: dict[int, list[tuple[Shard, Operation]]] = {}
        for shard, operation in operations:
            parts.setdefault(self._of_shard[shard], []).append((shard, operation))
        for index, part in parts.items():
            self._commits[index].check(part)  # all of them or none
        return asyncio.gather(*(self._commits[index].perform(part) for index, part in parts.items()))

    def start(self) -> None:
        for commit in self._commits:
            commit.start()

    def stop(self) -> None:
        for commit in self._commits:
            commit.stop()
