"""Group commit: whatever waits for a shard becomes one transaction of multi-row statements.

A caller on the event loop puts operations into their shard's queue and awaits. A few lane threads, each with its own
connection, take a shard in which the app waits that lanes have worked least for, run up to a batch of operations in one
transaction, and hand all answers to the loop in one call. A shard is worked on by one lane at a time.

- Lanes are shared fairly between apps, by their time: one that is busy in all shards gets no more of it than one in a
  single shard, and its batches are short while another app comes and goes. In a shard, apps are served in turns by the
  bytes of their operations (deficit round robin). Each app's own operations in a shard stay in order.
- A full queue refuses with QueueFull instead of growing. An app may fill it while no other app needs the room; an app
  below its share is not refused: the newest operations of the app that holds the most are pushed out for it.
- A statement error repeats the batch by halves, so that one poisoned operation fails alone.
- A lost connection leaves the outcome of the commit unknown; operations are idempotent, so the batch is run again on
  a new connection before any caller is answered.
- Cancelling a caller is harmless: its operations still complete, and their answers are dropped.
- A shard that is moved to another database is waited for while neither has it, by the lane that met with it; then what
  waits for the shard is handed to the lanes of the other database, in its order.
- A row locked by another transaction is skipped and retried shortly; the rest of the batch does not wait for it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import Answer, Operation
from tmc_server.errors import InternalFault, QueueFull, RowLocked, ShuttingDown, StoreUnavailable, TmcError
from tmc_server.metrics import METRICS
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import Database, RowWaited, ShardMap, StoreConflict
from tmc_server.store.failover import Witness
from tmc_server.store.fair_queue import FairQueue, LaneTime
from tmc_server.store.outcomes import Outcome, Wait

log = EventLog("tmc.group_commit")

_CONFLICT_TRIES = 6
_MANY = 5  # batches that wait
_PARTS = 16  # of a batch: one that others may wait for is so much shorter
_LOCKED_PAUSE_S = 0.02
_LOCKED_TRIES = 100  # x the pause: about two seconds
_FROZEN_PAUSE_S = 0.02
_FROZEN_S = 10.0  # a move takes a second or two
_GIVEN_UP_S = 60.0  # after that it may be another move


BATCH_BYTES = 4 << 20
"""Bodies in one transaction at most, approximately."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """lanes: threads and connections.  queue*: waiting per shard at most.  batch_*: one transaction at most."""

    lanes: int = 3
    queue: int = 20_000
    queue_bytes: int = 64 << 20
    batch_operations: int = 400
    batch_bytes: int = BATCH_BYTES


class _Caller:
    """One call of `perform`: done when all its operations have answers."""

    __slots__ = ("answers", "future", "open")

    def __init__(self, future: asyncio.Future[list[Answer]], count: int) -> None:
        self.future = future
        self.open = count
        self.answers: list[Any] = [None] * count

    def answer(self, place: int, answer: Answer) -> None:
        self.answers[place] = answer
        self.open -= 1
        # A caller that was cancelled has done with its future; an unguarded set_result would kill the hand-over.
        if self.open == 0 and not self.future.done():
            self.future.set_result(self.answers)


class _Waiting:
    """An operation in the queue of its shard. place: of its answer among its caller's.  tries: how often it found its
    row locked.  buried: the tombstone that it wrote is committed.  outcome: of its last batch."""

    __slots__ = ("app", "buried", "caller", "operation", "outcome", "place", "size", "tries")

    def __init__(self, operation: Operation, caller: _Caller, place: int) -> None:
        self.operation = operation
        self.app = operation.app
        self.size = operation.size
        self.caller = caller
        self.place = place
        self.tries = 0
        self.buried = False
        self.outcome: Outcome = Wait.LOCKED

    def finish(self, answer: Answer) -> None:
        """Answer the caller, on the loop."""
        self.caller.answer(self.place, answer)


class Whereabouts(Protocol):
    """Says where a shard is."""

    def look(self, shard: Shard, here: Database) -> Database | None:
        """Return the database that has it now, as the catalog says; None: it is on its way from here. Raises TmcError."""


class GroupCommit:
    """The lanes of one database.

    on_death: called on the loop when a lane thread ends by a fault of its own.
    whereabouts: None: shards stay where they are.  on_moved: called on the loop with what waited for a shard that went.
    """

    def __init__(
        self,
        writer: ShardWriter,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[], None],
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._writer = writer
        self._witness = Witness(writer.database)
        self._whereabouts = whereabouts
        self.on_moved: Callable[[Shard, Sequence[_Waiting]], None] = _nowhere
        self._frozen: dict[
            Shard, float
        ] = {}  # until when to wait for it; only the lane that has a shard uses its entry
        self._limits = limits
        self._loop = loop
        self._on_death = on_death
        self._queues: dict[Shard, FairQueue[_Waiting]] = {}
        self._busy: set[Shard] = set()  # in the line of ready shards, or being worked on
        self._ready: deque[Shard] = deque()  # shards with work and without a lane, longest waiting first
        self._time = LaneTime(_MANY * limits.batch_operations)
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
        """Fail all queued operations, on the loop, since no lane is left to run them."""
        self._closed = True
        with self._condition:
            left = [each for queue in self._queues.values() for each in queue.waiting()]
            self._queues.clear()
            self._ready.clear()
        for each in left:
            each.finish(ShuttingDown())

    @property
    def waiting(self) -> int:
        """Operations in the queues. From any thread."""
        return sum(queue.count for queue in list(self._queues.values()))

    def perform(self, operations: Sequence[Operation]) -> Awaitable[list[Answer]]:
        self.check(operations)
        caller = _Caller(self._loop.create_future(), len(operations))
        if not operations:
            caller.future.set_result([])
        self.enqueue([_Waiting(operation, caller, place) for place, operation in enumerate(operations)])
        return asyncio.shield(caller.future)

    def check(self, operations: Sequence[Operation]) -> None:
        """Check that there is room for all of these. Raises QueueFull, ShuttingDown."""
        if self._stopping:
            raise ShuttingDown
        if not operations:
            return
        app = operations[0].app
        for shard in {operation.shard for operation in operations}:
            queue = self._queues.get(shard)
            if queue is not None and not queue.has_room(app, len(operations)):
                raise QueueFull

    def _surrender(self, shard: Shard) -> list[_Waiting]:
        """Give up a shard, on the loop. Returns: what waits for it, in its order."""
        with self._condition:
            queue = self._queues.pop(shard, None)
            self._busy.discard(shard)
            return queue.waiting() if queue is not None else []

    def enqueue(self, entries: Sequence[_Waiting]) -> None:
        """Have operations run, on the loop. They are answered in any case."""
        if self._closed:
            for each in entries:
                each.finish(ShuttingDown())
            return
        pushed_out: list[_Waiting] = []
        app: int | None = None
        with self._condition:
            for each in entries:
                if each.app != app:
                    app = each.app
                    self._time.arrive(app)
                shard = each.operation.shard
                queue = self._queues.get(shard)
                if queue is None:
                    queue = self._queues[shard] = FairQueue(self._limits.queue, self._limits.queue_bytes)
                pushed_out += queue.add(each)
                if shard not in self._busy:
                    self._busy.add(shard)
                    self._ready.append(shard)
                    self._condition.notify()
        for each in pushed_out:
            each.finish(QueueFull())

    def _lane(self) -> None:
        connection: sa.Connection | None = None
        entries: Sequence[_Waiting] = ()
        try:
            while (work := self._take()) is not None:
                shard, entries = work
                began = time.monotonic()
                connection = self._run(connection, shard, entries)
                seconds = time.monotonic() - began
                METRICS.commit_seconds.observe(seconds)
                METRICS.batch_operations.observe(len(entries))
                self._loop.call_soon_threadsafe(self._hand_over, entries)
                self._put_back(shard, entries, seconds)
        except BaseException:  # `_run` handles the errors of a batch; this is a bug in the lane itself
            log.exception("commit_lane_failed", "a lane died")
            _answer(entries, ShuttingDown())
            self._loop.call_soon_threadsafe(self._hand_over, entries)
            self._loop.call_soon_threadsafe(self._on_death)
        finally:
            if connection is not None:
                connection.close()

    def _take(self) -> tuple[Shard, list[_Waiting]] | None:
        with self._condition:
            while not self._ready:
                if self._stopping:
                    return None
                self._condition.wait()
            turn = self._time.next(self._ready, self._queues)
            self._ready.remove(turn.shard)
            parts = _PARTS if turn.is_short else 1
            operations, size = self._limits.batch_operations // parts, self._limits.batch_bytes // parts
            return turn.shard, self._queues[turn.shard].take(max(operations, 1), size, turn.app)

    def _put_back(self, shard: Shard, done: Sequence[_Waiting], seconds: float) -> None:
        """The lane worked that long on these."""
        with self._condition:
            self._time.charge(done, seconds)
            if any(each.outcome is Wait.MOVED for each in done):
                return  # no lane takes the shard before the loop has given it up
            queue = self._queues[shard]
            if queue.count:
                self._ready.append(shard)
                self._condition.notify()
            else:
                self._busy.discard(shard)

    def _run(self, connection: sa.Connection | None, shard: Shard, entries: Sequence[_Waiting]) -> sa.Connection | None:
        """Give every entry an outcome, whatever happens. Returns: the connection to use next."""
        conflicts = lost = 0
        while True:
            try:
                if connection is not None and not self._writer.database.hosts.leads(connection):
                    _discard(connection)
                    connection = None
                if connection is None:
                    connection = self._connect()
                buried = {each.operation for each in entries if each.buried}
                outcomes = self._writer.run(connection, shard, [each.operation for each in entries], buried)
                self._witness.note(shard, outcomes)
                for each, outcome in zip(entries, outcomes, strict=True):
                    each.outcome = outcome
                if self._frozen:
                    self._frozen.pop(shard, None)
                return connection
            except RowWaited:
                return self._one_by_one(connection, shard, entries)
            except StoreConflict:
                conflicts += 1
                if conflicts == _CONFLICT_TRIES:
                    return self._by_halves(connection, shard, entries, RowLocked())
                time.sleep(random.uniform(0.001, 0.01) * conflicts)
            except StoreUnavailable as exc:
                holder = self._look(shard) if exc.lacks_table else self._writer.database
                if holder is None:
                    if self._may_wait(shard):
                        time.sleep(_FROZEN_PAUSE_S)
                        continue
                    _answer(entries, exc)
                    return connection
                if holder is not self._writer.database:
                    self._frozen.pop(shard, None)
                    for each in entries:
                        each.outcome = Wait.MOVED
                    return connection
                _discard(connection)
                connection = None
                lost += 1
                if lost == 2:
                    log.warning("database_lost", "the database does not answer: %s", exc.__cause__ or exc)
                    _answer(entries, exc)
                    return None
            except Exception as exc:  # whatever broke: a lane answers everybody
                log.exception("batch_failed", "a batch of %d operations failed", len(entries))
                _discard(connection)
                fault = InternalFault("The center failed on this operation; its operators find the reason in the log.")
                fault.__cause__ = exc
                return self._by_halves(None, shard, entries, fault)
            except BaseException:  # the lane dies, and nobody else has this connection
                _discard(connection)
                raise

    def _connect(self) -> sa.Connection:
        """Raises StoreUnavailable, StoreConflict."""
        connection = self._writer.database.connect()
        is_looked_through = False
        try:
            self._witness.look(connection)
            is_looked_through = True
        finally:
            if not is_looked_through:
                _discard(connection)
        return connection

    def _look(self, shard: Shard) -> Database | None:
        """Return the database that has the shard; None: it is on its way, or nobody can say now."""
        if self._whereabouts is None:
            return self._writer.database
        try:
            return self._whereabouts.look(shard, self._writer.database)
        except (TmcError, StoreConflict, sa.exc.SQLAlchemyError):
            return None

    def _may_wait(self, shard: Shard) -> bool:
        """Return whether to wait for a shard on its way: each is waited for once, since the move may have been given up."""
        now = time.monotonic()
        until = self._frozen.get(shard)
        if until is None or now > until + _GIVEN_UP_S:
            until = self._frozen[shard] = now + _FROZEN_S
        return now < until and not self._stopping

    def _by_halves(
        self, connection: sa.Connection | None, shard: Shard, entries: Sequence[_Waiting], error: TmcError
    ) -> sa.Connection | None:
        """Find out which operation spoils the batch; `error` is the answer to the last one left."""
        if len(entries) == 1:
            _answer(entries, error)
            return connection
        middle = len(entries) // 2
        connection = self._run(connection, shard, entries[:middle])
        return self._run(connection, shard, entries[middle:])

    def _one_by_one(
        self, connection: sa.Connection | None, shard: Shard, entries: Sequence[_Waiting]
    ) -> sa.Connection | None:
        """Run entries singly after one waited too long for a row: halving would wait for it again and again."""
        if len(entries) == 1:
            _answer(entries, RowLocked())
            return connection
        for each in entries:
            connection = self._run(connection, shard, [each])
        return connection

    def _hand_over(self, entries: Sequence[_Waiting]) -> None:
        """Give, on the loop, the answers to the callers that still wait."""
        buried: list[_Waiting] = []
        moved: list[_Waiting] = []
        for each in entries:
            outcome = each.outcome
            if outcome is Wait.MOVED:
                moved.append(each)
            elif outcome is Wait.BURIED:
                each.buried = True
                buried.append(each)
            elif outcome is not Wait.LOCKED:
                each.finish(outcome)
            elif each.tries < _LOCKED_TRIES:
                each.tries += 1
                self._loop.call_later(_LOCKED_PAUSE_S, self.enqueue, [each])
            else:
                each.finish(RowLocked())
        if buried:
            self.enqueue(buried)
        if moved:
            shard = moved[0].operation.shard
            self.on_moved(shard, [*moved, *self._surrender(shard)])


def _nowhere(_shard: Shard, entries: Sequence[_Waiting]) -> None:
    _answer(entries, StoreUnavailable())


def _answer(entries: Sequence[_Waiting], error: TmcError) -> None:
    for each in entries:
        each.outcome = error


def _discard(connection: sa.Connection | None) -> None:
    if connection is not None:
        try:
            connection.invalidate()
            connection.close()
        except sa.exc.SQLAlchemyError as exc:
            log.debug("connection_close_failed", "closing a broken connection: %s", exc)


class ShardedGroupCommit:
    """The Performer over all databases: each has its own lanes, so a slow one holds up no other.

    commits: by database.  shards: where they are.
    """

    def __init__(self, commits: Mapping[Database, GroupCommit], shards: ShardMap) -> None:
        self._commits = list(commits.values())
        self._places = list(commits)
        self._shards = shards
        # On the loop only. It follows `shards` once the lanes of the old database have met with the change.
        self._of_shard = [self._places.index(holder) for holder in shards.shards]
        for commit in self._commits:
            commit.on_moved = self._moved

    def _moved(self, shard: Shard, waiting: Sequence[_Waiting]) -> None:
        """Hand over what waited for a shard; what comes from now on is behind it."""
        self._of_shard[shard] = self._places.index(self._shards.holder(shard))
        self._commits[self._of_shard[shard]].enqueue(waiting)

    @property
    def waiting(self) -> int:
        return sum(commit.waiting for commit in self._commits)

    def perform(self, operations: Sequence[Operation]) -> Awaitable[list[Answer]]:
        if len(self._commits) == 1:
            return self._commits[0].perform(operations)
        places: dict[int, list[int]] = {}
        for place, operation in enumerate(operations):
            places.setdefault(self._of_shard[operation.shard], []).append(place)
        parts = {index: [operations[place] for place in of_it] for index, of_it in places.items()}
        for index, part in parts.items():
            self._commits[index].check(part)  # all of them or none
        under_way = [self._commits[index].perform(part) for index, part in parts.items()]
        return self._gathered(under_way, list(places.values()))

    @staticmethod
    async def _gathered(under_way: Sequence[Awaitable[list[Answer]]], places: Sequence[Sequence[int]]) -> list[Answer]:
        """The answers of all databases, in the order of the operations."""
        found: dict[int, Answer] = {}
        for of_database, answers in zip(places, await asyncio.gather(*under_way), strict=True):
            found.update(zip(of_database, answers, strict=True))
        return [found[place] for place in range(len(found))]

    def start(self) -> None:
        for commit in self._commits:
            commit.start()

    def stop(self) -> None:
        for commit in self._commits:
            commit.stop()
