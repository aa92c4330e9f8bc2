"""Keeps the center from sending a second copy while a first is being worked on: Extend, again and again, by itself.

Copies that were fetched and wait for a free handler count as being worked on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tmc_client import sender
from tmc_client.protocol import consumption_pb2
from tmc_client.received import Message
from tmc_client.sender import Sender

_LEAST_S = 0.25
_TIMEOUT_S = 10.0


@dataclass
class _Work:
    message: Message
    every_s: float
    due: float


class Keeper:
    """Extends by twice the distance between two Extends, so that one that gets lost does no harm."""

    def __init__(self, calls: Sender, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sender = calls
        self._monotonic = monotonic
        self._every_s: dict[str, float] = {}
        self._work: dict[tuple[str, int], _Work] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def expect(self, topic: str, interval_ms: int) -> None:
        """The center waits at least so long between the first two tries of this topic."""
        self._every_s[topic] = max(interval_ms / 2000, _LEAST_S)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tmc-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5)

    def begin(self, message: Message) -> None:
        every_s = self._every_s.get(message.topic, 5.0)
        with self._lock:
            self._work[message.id, message.attempt] = _Work(message, every_s, self._monotonic() + every_s)

    def end(self, message: Message) -> None:
        with self._lock:
            self._work.pop((message.id, message.attempt), None)

    def run_once(self) -> int:
        """Extend what is due. Returns: how many."""
        now = self._monotonic()
        with self._lock:
            due = [work for work in self._work.values() if work.due <= now]
            for work in due:
                work.due = now + work.every_s
        for work in due:
            request = consumption_pb2.ExtendRequest(
                message_id=work.message.id, attempt=work.message.attempt, extend_ms=round(work.every_s * 2000)
            )
            # A refusal says that a newer copy is on its way; an outage, that the next Extend may do better.
            self._sender.send(sender.EXTEND, request, _TIMEOUT_S)
        return len(due)

    def _run(self) -> None:
        while not self._stopping.wait(_LEAST_S / 2):
            self.run_once()
