"""The messages being handled in this process: one run per message, however many copies of it arrive."""

from __future__ import annotations

import random
import threading
import time
from asyncio import Task
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tmc_client.consuming.received import Message, Receipt


@dataclass(eq=False, kw_only=True, slots=True)
class Run:
    """One message from its first copy here to its stored answer.

    message: the newest copy; answers and Extends carry its attempt number.  limit_s: how long its handler may take.
    arrived: monotonic seconds.
    number: identifies this run at the center.
    task: the coroutine of an `async def` handler.
    """

    message: Message
    limit_s: float
    arrived: float = field(default_factory=time.monotonic)
    receipts: list[Receipt] = field(default_factory=list)
    late: list[tuple[Message, Receipt]] = field(default_factory=list)
    number: int = field(default_factory=lambda: random.getrandbits(62) + 1)
    deadline: float | None = None
    thread: threading.Thread | None = None
    task: Task[Any] | None = None
    given_up: bool = False
    handled: bool = False
    came_back: bool = False

    @property
    def begun(self) -> int:
        """Return its number once its handler has begun; 0 before."""
        return self.number if self.deadline is not None else 0

    @property
    def is_suspect(self) -> bool:
        """Return whether its message may have killed a consumer, or may be handled by another one: the center is asked first."""
        return self.message.redelivered or all(receipt.lost for receipt in self.receipts)


class Runs:
    """Thread-safe. keep: start extending this run's message at the center.  release: stop extending it.

    Both are called with the lock held, so that an answer and an Extend never overtake each other.
    """

    def __init__(
        self,
        keep: Callable[[Run], None],
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
        """Register a copy. Returns: a new run; None: its message already has one, whose outcome this copy shares."""
        with self._lock:
            run = self._runs.get(message.id)
            if run is None:
                run = self._runs[message.id] = Run(message=message, limit_s=limit_s, receipts=[receipt])
                self._active += 1
                self._keep(run)
                return run
            if run.handled:
                run.late.append((message, receipt))
            else:
                run.receipts.append(receipt)
                # A handler that runs already is not asked about any more; one that waits may be another's meanwhile.
                redelivered = run.message.redelivered or (message.redelivered and run.deadline is None)
                newest = message if message.attempt > run.message.attempt else run.message
                if newest is not run.message or redelivered != run.message.redelivered:
                    run.message = replace(newest, redelivered=redelivered)
                self._keep(run)
            return None

    def begin(self, run: Run) -> None:
        """Record that the handler starts in this thread."""
        run.thread = threading.current_thread()
        run.deadline = self._monotonic() + run.limit_s  # needs no lock: it takes effect when `overdue` sees it

    def end(self, run: Run) -> bool:
        """Record that the handler ended or never started. Returns False: it was given up and answered meanwhile."""
        with self._lock:
            if run.given_up:
                return False
            run.handled = True
            self._release(run.message)
            return True

    def answered(self, run: Run) -> None:
        """Record that the answer, if any, is on its way: `wait_idle` no longer waits for this run."""
        with self._lock:
            self._less()

    def forget(self, run: Run) -> list[tuple[Message, Receipt]]:
        """Remove a run whose answer is stored or given up. Returns: copies that came after the handler ended."""
        with self._lock:
            if self._runs.get(run.message.id) is run:
                del self._runs[run.message.id]
            late, run.late = run.late, []
            return late

    def overdue(self) -> list[Run]:
        """Give up the runs that have exceeded their limit; from now on their messages may run again."""
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
        """Record that a handler ended, possibly after it was given up."""
        with self._lock:
            run.came_back = True
            self._hanging.discard(run)

    @property
    def active(self) -> Sequence[str]:
        """Ids of the messages that are not handled yet."""
        with self._lock:
            return [number for number, run in self._runs.items() if not run.handled]

    @property
    def hanging(self) -> int:
        """Number of handlers that were given up and still run."""
        with self._lock:
            return len({run.thread for run in self._hanging})  # a batch is one handler

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no handler runs or waits, except those that were given up."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._active, seconds)

    def _less(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.notify_all()
