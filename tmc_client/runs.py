"""The messages that are being worked on in this process: each runs once at a time, whatever copies of it arrive."""

from __future__ import annotations

import threading
import time
from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tmc_client.received import Message, Receipt


@dataclass(eq=False, kw_only=True, slots=True)
class Run:
    """One message from its first copy here to its stored answer.

    message: the newest copy, whose attempt number answers and Extends name.  limit_s: how long its handler may take.
    task: the coroutine of an `async def` handler.
    """

    message: Message
    limit_s: float
    receipts: list[Receipt] = field(default_factory=list)
    late: list[tuple[Message, Receipt]] = field(default_factory=list)
    deadline: float | None = None
    thread: threading.Thread | None = None
    task: Task[Any] | None = None
    given_up: bool = False
    handled: bool = False
    came_back: bool = False


class Runs:
    """Thread-safe. keep: the center is to wait for this message from now on.  release: not any more.

    Both are called under the lock of the runs: an answer and an Extend never overtake each other.
    """

    def __init__(
        self,
        keep: Callable[[Message], None],
        release: Callable[[Message], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep
        self._release = release
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._runs: dict[str, Run] = {}
        self._active = 0
        self._hanging: set[Run] = set()

    def arrive(self, message: Message, receipt: Receipt, limit_s: float) -> Run | None:
        """A copy came. Returns: a new run; None: its message is here already, and this copy shares its fate."""
        with self._lock:
            run = self._runs.get(message.id)
            if run is None:
                run = self._runs[message.id] = Run(message=message, limit_s=limit_s, receipts=[receipt])
                self._active += 1
                self._keep(message)
                return run
            if run.handled:
                run.late.append((message, receipt))
            else:
                self._keep(message)
                run.receipts.append(receipt)
                if message.attempt > run.message.attempt:
                    run.message = message
            return None

    def begin(self, run: Run) -> None:
        """Its handler starts, in this thread."""
        run.thread = threading.current_thread()
        run.deadline = self._monotonic() + run.limit_s  # without the lock: it counts from when it is seen

    def end(self, run: Run) -> bool:
        """Its handler ended, or was never begun. Returns False: it was given up meanwhile and answered for."""
        with self._lock:
            if run.given_up:
                return False
            run.handled = True
            self._release(run.message)
            return True

    def answered(self, run: Run) -> None:
        """Its answer, if there is one, is on its way: stopping the consumer need not wait for it here."""
        with self._lock:
            self._less()

    def forget(self, run: Run) -> list[tuple[Message, Receipt]]:
        """Its answer is stored or given up. Returns: copies that came after the handler ended."""
        with self._lock:
            if self._runs.get(run.message.id) is run:
                del self._runs[run.message.id]
            late, run.late = run.late, []
            return late

    def overdue(self) -> list[Run]:
        """Give up what has run longer than it may; its message may run again from now on."""
        with self._lock:
            now = self._monotonic()
            found = [
                run
                for run in self._runs.values()
                if run.deadline is not None and run.deadline <= now and not run.handled
            ]
            for run in found:
                run.given_up = True
                self._release(run.message)
                del self._runs[run.message.id]
                if not run.came_back:
                    self._hanging.add(run)
                self._less()
            return found

    def came_back(self, run: Run) -> None:
        """A handler ended, perhaps after it was given up."""
        with self._lock:
            run.came_back = True
            self._hanging.discard(run)

    @property
    def hanging(self) -> int:
        """Number of handlers that were given up and still run."""
        with self._lock:
            return len(self._hanging)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no handler runs or waits, those given up aside."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._active, seconds)

    def _less(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.notify_all()
