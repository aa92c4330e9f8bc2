"""Group commit: whatever waits for a shard becomes one transaction of multi-row statements.

A caller on the event loop puts operations into their shard's queue and awaits. A few lane threads, each with its own
connection, take the shard whose oldest operation waits longest, run up to a batch of operations in one transaction, and
hand all answers to the loop in one call. A shard is worked on by one lane at a time.

- A full queue refuses, it does not grow: QueueFull.
- A statement error repeats the batch by halves, so that one poisoned operation fails alone.
- A lost connection leaves the commit's outcome open; operations are idempotent, so the batch is simply run again on a
  new connection, and finds its own work or does it. Only then is anybody answered.
- A cancelled caller hurts nobody: its operations run to their end and find nobody waiting.
- A row that somebody else holds is skipped and tried again shortly; its neighbours do not wait for it.
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

from tmc_server.domain.operations import AGAIN, LOCKED, Operation
from tmc_server.errors import InternalFault, QueueFull, RowLocked, ShuttingDown, StoreUnavailable, TmcError
from tmc_server.metrics import METRICS
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import RowWaited, StoreConflict

log = logging.getLogger("tmc.group_commit")

_CONFLICT_TRIES = 6
_LOCKED_PAUSE_S = 0.02
_LOCKED_TRIES = 100  # x the pause: about two seconds


@dataclass(frozen=True)
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


class _Queue:
    __slots__ = ("busy", "bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Operation] = deque()
        self.bytes = 0
        self.busy = False  # in the line of ready shards, or being worked on


class GroupCommit:
    """The lanes of one database. `on_death`: called on the loop when a lane thread ends by a fault of its own."""

    def __init__(
        self, writer: ShardWriter, limits: Limits, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._limits = limits
        self._loop = loop
        self._on_death = on_death
        self._queues: dict[int, _Queue] = {}
        self._ready: deque[int] = deque()  # shards with work and without a lane, longest waiting first
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
            left = [operation for queue in self._queues.values() for operation in queue.waiting]
            self._queues.clear()
            self._ready.clear()
        for operation in left:
            operation.answer = ShuttingDown()
            self._finish(operation.ticket)

    def perform(self, operations: Sequence[tuple[int, Operation]]) -> Awaitable[object]:
        """See domain.ports.Performer."""
        self.check(operations)
        ticket = _Ticket(self._loop.create_future(), len(operations))
        for _, operation in operations:
            operation.ticket = ticket
        if not operations:
            ticket.future.set_result(None)
        self._enqueue(operations)
        return asyncio.shield(ticket.future)

    def check(self, operations: Sequence[tuple[int, Operation]]) -> None:
        """Is there room for all of these? Raises QueueFull, ShuttingDown."""
        if self._stopping:
            raise ShuttingDown
        for shard in {shard for shard, _ in operations}:
            queue = self._queues.get(shard)
            if queue is not None and (
                len(queue.waiting) + len(operations) > self._limits.queue or queue.bytes > self._limits.queue_bytes
            ):
                raise QueueFull

    def _enqueue(self, operations: Sequence[tuple[int, Operation]]) -> None:
        if self._closed:
            for _, operation in operations:
                operation.answer = ShuttingDown()
                self._finish(operation.ticket)
            return
        with self._condition:
            for shard, operation in operations:
                queue = self._queues.get(shard)
                if queue is None:
                    queue = self._queues[shard] = _Queue()
                queue.waiting.append(operation)
                queue.bytes += operation.size
                if not queue.busy:
                    queue.busy = True
                    self._ready.append(shard)
                    self._condition.notify()

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
            self._loop.call_soon_threadsafe(self._hand_over, 0, operations)
            self._loop.call_soon_threadsafe(self._on_death)
        finally:
            if connection is not None:
                connection.close()

    def _take(self) -> tuple[int, list[Operation]] | None:
        with self._condition:
            while not self._ready:
                if self._stopping:
                    return None
                self._condition.wait()
            shard = self._ready.popleft()
            queue = self._queues[shard]
            operations: list[Operation] = []
            room = self._limits.batch_bytes
            while queue.waiting and len(operations) < self._limits.batch_operations:
                if operations and queue.waiting[0].size > room:
                    break
                operation = queue.waiting.popleft()
                queue.bytes -= operation.size
                room -= operation.size
                operations.append(operation)
            return shard, operations

    def _put_back(self, shard: int) -> None:
        with self._condition:
            queue = self._queues[shard]
            if queue.waiting:
                self._ready.append(shard)
                self._condition.notify()
            else:
                queue.busy = False

    def _run(
        self, connection: sa.Connection | None, shard: int, operations: Sequence[Operation]
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
        self, connection: sa.Connection | None, shard: int, operations: Sequence[Operation], error: TmcError
    ) -> sa.Connection | None:
        """Find out which operation spoils the batch; `error` is the answer to the last one left."""
        if len(operations) == 1:
            _answer(operations, error)
            return connection
        middle = len(operations) // 2
        connection = self._run(connection, shard, operations[:middle])
        return self._run(connection, shard, operations[middle:])

    def _one_by_one(
        self, connection: sa.Connection | None, shard: int, operations: Sequence[Operation]
    ) -> sa.Connection | None:
        """Somebody holds a row that one of these has to wait for: by halves each would wait again and again."""
        if len(operations) == 1:
            _answer(operations, RowLocked())
            return connection
        for operation in operations:
            connection = self._run(connection, shard, [operation])
        return connection

    def _hand_over(self, shard: int, operations: Sequence[Operation]) -> None:
        """On the loop: give the answers to whoever still waits."""
        again: list[tuple[int, Operation]] = []
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
                self._finish(operation.ticket)
        if again:
            self._enqueue(again)

    @staticmethod
    def _finish(ticket: _Ticket) -> None:
        ticket.open -= 1
        # Whoever cancelled has done with its future; an unguarded set_result would kill this hand-over.
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

    def perform(self, operations: Sequence[tuple[int, Operation]]) -> Awaitable[object]:
        """See domain.ports.Performer."""
        if len(self._commits) == 1:
            return self._commits[0].perform(operations)
        parts: dict[int, list[tuple[int, Operation]]] = {}
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
