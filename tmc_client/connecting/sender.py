"""Threads that turn concurrent single calls into batch calls: one for producers' calls, one for consumers'.

Calls that arrive while a batch is in flight form the next batch: this adds no delay, and under load a batch of
hundreds costs as much as a single call. Each lane has its own batch in flight, so acks and Extends never wait behind
Prepares; the connection chooses the server. A call is retried with the same ids until it is answered or its deadline
has passed, which is safe because every call of the center is idempotent. A thread with blocking stubs survives a fork
of its process (the child simply starts another one); an event loop inside gRPC does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from tmc_client import errors, tracing
from tmc_client.connecting import wire
from tmc_client.connecting.connection import Caller
from tmc_client.forks import notice_fork, watch_forks
from tmc_common.protocol import consumption_pb2, message_pb2

_MAX_ITEMS = 500
_MAX_BYTES = 1 << 20  # every center takes at least this much
_CALL_S = 10.0  # of one batch; a call with a longer deadline is repeated
_REPEATED_REASONS = {
    "ROW_LOCKED",
    "QUEUE_FULL",
    "RATE_LIMITED",
    "STORE_UNAVAILABLE",
    "CATALOG_STALE",
    "SHUTTING_DOWN",
    "NO_IDENTITY",
}
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """One batch method. operation: what one item asks for.  lane: calls of different lanes do not wait for each other."""

    operation: str
    path: str
    request_class: Any
    response_class: Any
    lane: str


def _kind(service: str, messages: Any, lane: str, operation: str) -> Kind:
    name = f"{operation.capitalize()}Many"
    return Kind(
        operation=operation,
        path=f"/tmc.v1.{service}/{name}",
        request_class=getattr(messages, f"{name}Request"),
        response_class=getattr(messages, f"{name}Response"),
        lane=lane,
    )


_producing = partial(_kind, "MessageService", message_pb2, "producer")
_consuming = partial(_kind, "ConsumptionService", consumption_pb2, "consumer")
PREPARE, PUBLISH, SUBMIT, ROLLBACK = map(_producing, ("prepare", "publish", "submit", "rollback"))
ACK, NACK, EXTEND = map(_consuming, ("ack", "nack", "extend"))


class _Call:
    """One queued call. loop: the event loop of an asyncio caller and of its future; None: a thread waits.

    context: of its span, as headers.
    """

    __slots__ = ("context", "deadline", "future", "kind", "loop", "pauses", "request")

    def __init__(self, kind: Kind, request: Any, deadline: float, loop: asyncio.AbstractEventLoop | None) -> None:
        self.kind = kind
        self.request = request
        self.deadline = deadline
        self.pauses = 0
        self.context: Mapping[str, str] = {}
        self.loop = loop
        self.future: Any = Future() if loop is None else loop.create_future()


class _Answers:
    """Results of one batch. Threads are woken one by one; an event loop once for all its callers."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}

    def add(self, call: _Call, answer: Any) -> None:
        """answer: the result, or the error to raise."""
        if call.loop is not None:
            self._by_loop.setdefault(call.loop, []).append((call.future, answer))
        elif not call.future.done() and call.future.set_running_or_notify_cancel():
            _set(call.future, answer)

    def hand_over(self) -> None:
        for loop, answers in self._by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                loop.call_soon_threadsafe(_resolve, answers)
        self._by_loop = {}


def _resolve(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results and errors of asyncio futures. Runs on their loop."""
    for future, answer in answers:
        if not future.done():
            _set(future, answer)


def _set(future: Any, answer: Any) -> None:
    if isinstance(answer, errors.TmcError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Sender:
    """Thread-safe; a lane's thread starts at its first call, in a forked child as well."""

    def __init__(self, connection: Caller, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lanes = {name: _Lane(connection, name, monotonic) for name in ("producer", "consumer")}
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        for lane in self._lanes.values():
            lane.reset()

    def send(self, kind: Kind, request: Any, timeout: float) -> Future[Any]:
        """Queue one call. timeout: seconds until it is given up. Returns: a future of the item's result or TmcError."""
        call = _Call(kind, request, self._monotonic() + timeout, None)
        future: Future[Any] = self._send(call)
        return future

    def send_from_loop(self, kind: Kind, request: Any, timeout: float) -> asyncio.Future[Any]:
        """The same for asyncio: call it on the event loop, await what it returns."""
        call = _Call(kind, request, self._monotonic() + timeout, asyncio.get_running_loop())
        future: asyncio.Future[Any] = self._send(call)
        return future

    def _send(self, call: _Call) -> Any:
        notice_fork()
        lane = self._lanes[call.kind.lane]
        with tracing.traced(call.kind.operation, call.request, call.future) as call.context:
            return lane.send(call)

    def close(self, grace: float = 5.0) -> None:
        """Finish what is queued, at most `grace` seconds, then stop the threads."""
        end = self._monotonic() + grace
        for lane in self._lanes.values():
            lane.refuse()
        for lane in self._lanes.values():
            lane.join(max(0.0, end - self._monotonic()))

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight. Returns False on timeout."""
        end = self._monotonic() + timeout
        return all(lane.flush(max(0.0, end - self._monotonic())) for lane in self._lanes.values())


class _Lane:
    """One thread with one call in flight at a time."""

    def __init__(self, connection: Caller, name: str, monotonic: Callable[[], float]) -> None:
        self._connection = connection
        self._name = name
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Forget everything: a forked child starts with nothing."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._asleep = False  # only then somebody has to wake the thread
        self._waiting: dict[Kind, deque[_Call]] = {}
        self._order: deque[Kind] = deque()  # kinds with waiting calls, longest waiting first
        self._later: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._in_flight = 0

    def send(self, call: _Call) -> Any:
        """Queue it. Returns: its future."""
        with self._lock:
            if self._closed:
                raise errors.Unavailable("This connection was closed: connect again.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tmc-{self._name}-calls", daemon=True)
                self._thread.start()
            self._enqueue(call)
            if self._asleep:
                self._work.notify()
        return call.future

    def _enqueue(self, call: _Call) -> None:
        waiting = self._waiting.get(call.kind)
        if waiting is None:
            waiting = self._waiting[call.kind] = deque()
        if not waiting:
            self._order.append(call.kind)
        waiting.append(call)

    def refuse(self) -> None:
        """Accept no more calls; queued ones are still sent."""
        with self._lock:
            self._closed = True
            self._work.notify()

    def join(self, grace: float) -> None:
        """Wait for queued calls, then fail the remaining ones."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(grace)
        with self._lock:
            left = [call for calls in self._waiting.values() for call in calls]
            left += [call for _, _, call in self._later]
            self._waiting.clear()
            self._order.clear()
            self._later.clear()
        answers = _Answers()
        for call in left:
            answers.add(call, errors.Unavailable("The connection was closed before the center answered."))
        answers.hand_over()

    def flush(self, timeout: float) -> bool:
        """See Sender.flush."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self._order or self._later or self._in_flight), timeout)

    def _run(self) -> None:
        while (calls := self._take()) is not None:
            try:
                self._transmit(calls)
            except BaseException as exc:  # a fault of ours must not leave callers waiting
                answers = _Answers()
                for call in calls:
                    answers.add(call, errors.CenterFault(f"The SDK failed on this call: {exc!r}"))
                answers.hand_over()
                if not isinstance(exc, Exception):
                    raise
            finally:
                with self._lock:
                    self._in_flight = 0
                    self._idle.notify_all()
            self._gather()

    def _gather(self) -> None:
        """Let the callers that were just answered run: their next calls then go together in one batch.

        This delays nobody: it ends as soon as letting the other threads run has brought no new call.
        """
        before = -1
        while before < (waiting := sum(map(len, list(self._waiting.values())))):
            before = waiting
            time.sleep(0)

    def _take(self) -> list[_Call] | None:
        with self._lock:
            while True:
                now = self._monotonic()
                while self._later and self._later[0][0] <= now:
                    self._enqueue(heapq.heappop(self._later)[2])
                if self._order:
                    break
                if self._closed and not self._later:
                    return None
                self._asleep = True
                self._work.wait(max(0.0, self._later[0][0] - now) if self._later else None)
                self._asleep = False
            kind = self._order.popleft()
            waiting = self._waiting[kind]
            calls: list[_Call] = []
            room = _MAX_BYTES
            while waiting and len(calls) < _MAX_ITEMS:
                size = waiting[0].request.ByteSize() + 8
                if calls and size > room:
                    break
                calls.append(waiting.popleft())
                room -= size
            if waiting:
                self._order.append(kind)
            self._in_flight = len(calls)
            return calls

    def _transmit(self, calls: Sequence[_Call]) -> None:
        answers = _Answers()
        try:
            self._call(calls, answers)
        finally:
            answers.hand_over()

    def _call(self, calls: Sequence[_Call], answers: _Answers) -> None:
        now = self._monotonic()
        alive = [call for call in calls if call.deadline > now and not call.future.cancelled()]
        for call in calls:
            if call.deadline <= now:
                answers.add(call, _too_late())
        if not alive:
            return
        kind = alive[0].kind
        request = kind.request_class(items=[call.request for call in alive])
        try:
            method = self._connection.unary(kind.path, kind.response_class)
            timeout = min(max(call.deadline for call in alive) - now, _CALL_S)
            with tracing.calling(kind.path, [call.context for call in alive]) as metadata:
                results = method(request, timeout=timeout, metadata=metadata).results
        except errors.Unavailable as exc:  # no server is known
            self._all_failed(alive, exc, answers)
            return
        except grpc.RpcError as exc:
            if len(alive) > 1 and wire.is_too_large(exc):
                self._call(alive[: len(alive) // 2], answers)
                self._call(alive[len(alive) // 2 :], answers)
                return
            self._all_failed(alive, wire.from_rpc(exc), answers)
            return
        for call, result in zip(alive, results, strict=True):
            if result.HasField("error"):
                self._failed(call, wire.from_item(result.error), answers)
            else:
                answers.add(call, result)

    def _all_failed(self, calls: Sequence[_Call], error: errors.TmcError, answers: _Answers) -> None:
        """Handle failures as `_failed` does; the calls keep their order among themselves."""
        share = random.uniform(0.5, 1)
        for call in calls:
            self._failed(call, error, answers, share)

    def _failed(self, call: _Call, error: errors.TmcError, answers: _Answers, share: float | None = None) -> None:
        """Schedule a retry if the error is transient and the deadline allows it; otherwise fail the call.

        share: part of the full pause; None: a random one.
        """
        transient = error.reason in _REPEATED_REASONS or (error.reason not in errors.BY_REASON and error.retryable)
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**call.pauses)
        pause *= random.uniform(0.5, 1) if share is None else share
        pause = max(pause, error.retry_after.total_seconds())
        again = self._monotonic() + pause
        if not transient or self._closed:
            answers.add(call, error)
        elif again >= call.deadline:
            answers.add(call, _too_late(error) if isinstance(error, errors.Unavailable) else error)
        else:
            call.pauses += 1
            with self._lock:
                heapq.heappush(self._later, (again, next(self._numbers), call))


def _too_late(last: errors.TmcError | None = None) -> errors.DeadlineExceeded:
    because = f" (last attempt: {last})" if last is not None else ""
    return errors.DeadlineExceeded(
        f"No answer in time{because}. If the center received the call, its outcome is unknown; a retry is safe.",
        reason=last.reason if last is not None else "",
    )
