"""Sends Extends repeatedly, so that the center sends no second copy while the first is being handled.

Copies that were fetched and wait for a free handler are extended too. Once a handler has begun, its Extends say so: if it
never answers, the attempt counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tmc_client import errors
from tmc_client.connecting import sender
from tmc_client.connecting.sender import Sender
from tmc_client.consuming.received import Message
from tmc_client.consuming.runs import Run
from tmc_common.protocol import consumption_pb2

log = logging.getLogger("tmc_client.keeping")

_LEAST_S = 0.05
_FIRST_S = 1.0  # a copy may have waited in a queue for most of its interval
_LEAST_EXTENSION_S = 1.0
_UNKNOWN_S = 5.0  # a center that does not say the interval
_IDLE_S = 0.5
_TIMEOUT_S = 10.0


@dataclass(kw_only=True, slots=True)
class _Work:
    run: Run
    every_s: float
    due: float


class Keeper:
    """Extends by twice the interval between two Extends, so that losing one does no harm.

    watch: called periodically in the keeper's thread; must not block.
    """

    def __init__(
        self,
        calls: Sender,
        monotonic: Callable[[], float] = time.monotonic,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self._sender = calls
        self._monotonic = monotonic
        self._watch = watch
        self._every_s: dict[str, float] = {}
        self._work: dict[str, _Work] = {}
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._wakes_at = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def expect(self, topic: str, interval_ms: int) -> None:
        """Set the shortest delay between two attempts of this topic, for copies that do not carry it."""
        self._every_s[topic] = interval_ms / 2000

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tmc-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(5)

    def begin(self, run: Run) -> None:
        """Start extending this message, or continue with its newest copy."""
        message = run.message
        every_s = self._every(message)
        with self._lock:
            due = self._monotonic() + min(every_s, _FIRST_S)
            self._work[message.id] = _Work(run=run, every_s=every_s, due=due)
            if due < self._wakes_at:
                self._condition.notify()

    def begun(self, run: Run) -> None:
        """Note that its handler begins: the next Extend names the run within a second, if it still runs then."""
        work = self._work.get(run.message.id)  # needs no lock: at worst the next Extend comes at its usual time
        if work is not None:
            work.due = min(work.due, self._monotonic() + _FIRST_S)

    def end(self, message: Message) -> None:
        with self._lock:
            self._work.pop(message.id, None)

    def kept(self, message_id: str) -> Message | None:
        """The newest copy of a message that is kept."""
        with self._lock:
            work = self._work.get(message_id)
        return work.run.message if work is not None else None

    def hurry(self) -> None:
        """Extend everything at once: its copies may come to other consumers, which ask the center who handles them."""
        with self._condition:
            for work in self._work.values():
                work.due = 0.0
            self._wakes_at = 0.0
            self._condition.notify()

    def run_once(self) -> int:
        """Extend what is due. Returns: how many."""
        now = self._monotonic()
        with self._condition:
            due = [work for work in self._work.values() if work.due <= now]
            for work in due:
                work.due = now + work.every_s
        for work in due:
            # Ignore errors: after a refusal a newer copy is on its way, after an outage the next Extend may work.
            self._extend(work.run, work.every_s, work.run.begun)
        return len(due)

    def ask(self, run: Run) -> Future[Any]:
        """Tell the center that the handler of this run begins. Returns: the answer; errors.Decided: it must not."""
        return self._extend(run, self._every(run.message), run.number)

    def _extend(self, run: Run, every_s: float, begun: int) -> Future[Any]:
        request = consumption_pb2.ExtendRequest(
            message_id=run.message.id,
            attempt=run.message.attempt,
            extend_ms=round(max(2 * every_s, _LEAST_EXTENSION_S) * 1000),
            run=begun,
        )
        return self._sender.send(sender.EXTEND, request, _TIMEOUT_S)

    def _every(self, message: Message) -> float:
        known_s = message.interval_ms / 2000 or self._every_s.get(message.topic, _UNKNOWN_S)
        return max(known_s, _LEAST_S)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._stopping:
                    return
                now = self._monotonic()
                earliest = min((work.due for work in self._work.values()), default=now + _IDLE_S)
                self._wakes_at = min(max(earliest, now + _LEAST_S / 2), now + _IDLE_S)
                self._condition.wait(self._wakes_at - now)
            try:
                self.run_once()
                self._watch()
            except errors.Unavailable:
                return  # the connection was closed: no answer of ours reaches the center any more
            except Exception:
                log.exception("extending messages failed and is retried")
