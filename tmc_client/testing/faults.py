"""What a test lets go wrong between a service and the center: calls that fail, and processes that die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

from tmc_client import errors, sender
from tmc_client.connection import Connection

Call = Literal["prepare", "publish", "submit", "rollback", "ack", "nack"]
Point = Literal["prepare", "local_commit", "submit"]

_CALLS: dict[str, sender.Kind] = {
    "prepare": sender.PREPARE,
    "publish": sender.PUBLISH,
    "submit": sender.SUBMIT,
    "rollback": sender.ROLLBACK,
    "ack": sender.ACK,
    "nack": sender.NACK,
}
_ANSWER_S = 10.0


class Crashed(BaseException):
    """The process died here, as far as the test is concerned; no `except Exception` keeps it alive."""


class Faults:
    """What goes wrong next, for all centers of one test."""

    def __init__(self) -> None:
        self._failing: dict[sender.Kind, list[errors.TmcError]] = {}
        self._crash_at: Point | None = None

    def fail_next(self, call: Call, error: errors.TmcError | None) -> None:
        """Raises ValueError."""
        kind = _CALLS.get(call)
        if kind is None:
            raise ValueError(f"fail_next({call!r}): give one of {', '.join(_CALLS)}")
        unavailable = errors.Unavailable("The test let this call fail.")
        self._failing.setdefault(kind, []).append(error or unavailable)

    def failure_of(self, kind: sender.Kind) -> errors.TmcError | None:
        """The error of this call; None: it goes to the center."""
        waiting = self._failing.get(kind)
        return waiting.pop(0) if waiting else None

    def crashes(self, point: Point) -> bool:
        """Whether the process dies at this point, once."""
        if self._crash_at != point:
            return False
        self._crash_at = None
        return True

    @contextmanager
    def crash_after(self, point: Point) -> Iterator[None]:
        """See ManualCenter.crash_after."""
        if point not in ("prepare", "local_commit", "submit"):
            raise ValueError(f"crash_after({point!r}): give prepare, local_commit or submit")
        self._crash_at = point
        try:
            yield
        except Crashed:
            return
        finally:
            unused, self._crash_at = self._crash_at is not None, None
        if unused:
            raise AssertionError(f"Nothing crashed: no transaction here came to its {point.replace('_', ' ')}.")


class FaultySender(sender.Sender):
    """The sender of one Center, whose process may die: then it sends nothing more."""

    def __init__(self, connection: Connection, faults: Faults) -> None:
        super().__init__(connection)
        self._faults = faults
        self._is_dead = False

    def send(self, kind: sender.Kind, request: Any, timeout: float) -> Future[Any]:
        """See Sender.send. Raises Crashed."""
        if self._is_dead:
            return Future()  # a process that is gone learns of no answer
        if kind is sender.SUBMIT:
            self._crash("local_commit")
        failure = self._faults.failure_of(kind)
        if failure is not None:
            failed: Future[Any] = Future()
            failed.set_exception(failure)
            return failed
        future = super().send(kind, request, timeout)
        if kind is sender.PREPARE and self._faults.crashes("prepare"):
            self._die_after(future)
        if kind is sender.SUBMIT and self._faults.crashes("submit"):
            self._die_after(future)
        return future

    def send_from_loop(self, kind: sender.Kind, request: Any, timeout: float) -> asyncio.Future[Any]:
        """See Sender.send_from_loop. Raises Crashed."""
        return asyncio.wrap_future(self.send(kind, request, timeout))

    def _crash(self, point: Point) -> None:
        if self._faults.crashes(point):
            self._is_dead = True
            raise Crashed

    def _die_after(self, future: Future[Any]) -> None:
        future.exception(_ANSWER_S)
        self._is_dead = True
        raise Crashed
