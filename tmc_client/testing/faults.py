"""What a test lets go wrong between a service and the center: calls that fail, and processes that die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Literal

from tmc_client import errors
from tmc_client.connecting import sender
from tmc_client.connecting.connection import Caller

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
_OF_CONSUMERS = {sender.ACK, sender.NACK, sender.EXTEND}
_ANSWER_S = 10.0


class Crashed(BaseException):
    """The process died here, as far as the test is concerned; no `except Exception` keeps it alive."""


class Faults:
    """What goes wrong next, for all centers of one test."""

    def __init__(self) -> None:
        self._failing: dict[str, list[errors.TmcError]] = {}
        self._crash_at: Point | None = None
        self._thread: threading.Thread | None = None  # in which a crash may happen: that of the open `crash_after`

    def fail_next(self, call: Call, error: errors.TmcError | None) -> None:
        """See ManualCenter.fail_next."""
        if call not in _CALLS:
            raise ValueError(f"fail_next({call!r}): give one of {', '.join(_CALLS)}")
        if error is not None and not isinstance(error, errors.TmcError):
            raise ValueError(
                f"error={error!r} is none that the SDK raises: give one of tmc's, as tmc.Unavailable('away')"
            )
        self._failing.setdefault(call, []).append(error or errors.Unavailable("The test let this call fail."))

    def failure_of(self, kind: sender.Kind) -> errors.TmcError | None:
        """The error of this call; None: it goes to the center."""
        for call, waiting in self._failing.items():
            if waiting and _CALLS[call] is kind:
                return waiting.pop(0)
        return None

    @property
    def unused(self) -> list[str]:
        """Calls that were to fail and never came."""
        return [call for call, waiting in self._failing.items() if waiting]

    @property
    def is_crashing(self) -> bool:
        """Return whether a `crash_after` is open in this thread."""
        return self._thread is threading.current_thread()

    def crashes(self, point: Point) -> bool:
        """Return whether the process dies at this point, once."""
        if self._crash_at != point or not self.is_crashing:
            return False
        self._crash_at = None
        return True

    @contextmanager
    def crash_after(self, point: Point) -> Iterator[None]:
        """See ManualCenter.crash_after."""
        if point not in ("prepare", "local_commit", "submit"):
            raise ValueError(f"crash_after({point!r}): give prepare, local_commit or submit")
        if self._thread is not None:
            raise ValueError("crash_after is open already: a process dies once, open the second one after the first")
        self._crash_at, self._thread = point, threading.current_thread()
        try:
            yield
        except Crashed:
            return
        finally:
            unused, self._crash_at, self._thread = self._crash_at is not None, None, None
        if unused:
            raise AssertionError(
                f"Nothing crashed: in this thread, no Center of tmc_center.connect() came to the {point.replace('_', ' ')} of "
                "a center.transaction(). Test clients of web frameworks run handlers in other threads: call the handler itself, "
                "or use httpx.ASGITransport."
            )


class FaultySender(sender.Sender):
    """The sender of one Center, whose process may die: then it sends nothing more."""

    def __init__(self, connection: Caller, faults: Faults) -> None:
        super().__init__(connection)
        self._faults = faults
        self._is_dead = False

    def send(self, kind: sender.Kind, request: Any, timeout: float) -> Future[Any]:
        """See Sender.send. Raises Crashed; Unavailable: it crashed before."""
        future = self._begin(kind, request, timeout)
        if kind is sender.PREPARE:
            wait([future], _ANSWER_S)  # a slow machine is no outage: a block finds its messages answered
        return future

    def send_from_loop(self, kind: sender.Kind, request: Any, timeout: float) -> asyncio.Future[Any]:
        """See Sender.send_from_loop. Raises as `send`."""
        return asyncio.wrap_future(self._begin(kind, request, timeout))

    def _begin(self, kind: sender.Kind, request: Any, timeout: float) -> Future[Any]:
        if self._is_dead:
            return self._answer_of_the_dead(kind)
        if kind is sender.SUBMIT and self._faults.crashes("local_commit"):
            self._die()
        failure = self._faults.failure_of(kind)
        if failure is not None:
            failed: Future[Any] = Future()
            failed.set_exception(failure)
            return failed
        future = super().send(kind, request, max(timeout, _ANSWER_S) if kind is sender.PREPARE else timeout)
        if (kind is sender.PREPARE and self._faults.crashes("prepare")) or (
            kind is sender.SUBMIT and self._faults.crashes("submit")
        ):
            wait([future], _ANSWER_S)
            self._die()
        return future

    def _die(self) -> None:
        self._is_dead = True
        raise Crashed

    def _answer_of_the_dead(self, kind: sender.Kind) -> Future[Any]:
        if kind in _OF_CONSUMERS:
            return Future()  # its handlers may still run in their threads; their answers go nowhere
        if self._faults.is_crashing:
            raise Crashed
        raise errors.Unavailable(
            "This Center crashed in crash_after(): connect again, to be the process that starts next."
        )
