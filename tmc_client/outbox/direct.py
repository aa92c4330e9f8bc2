"""Send what was just committed, in the background: the usual way out. What fails here is left to the relay."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from tmc_client.connection import watch_forks
from tmc_client.outbox.entries import Target
from tmc_client.outbox.store import OutboxStore

log = logging.getLogger("tmc_client.outbox")

_PAGE = 500
_ROOM = 10_000  # what comes on top waits for the relay


class DirectSending:
    """A thread that starts with the first message. Messages that arrive while a page is sent form the next one."""

    def __init__(self, store: OutboxStore, target: Target) -> None:
        self._store = store
        self._target = target
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[int] = deque()
        self._in_flight = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def after_fork(self) -> None:
        """See connection.ForkAware: the parent sends its own."""
        self._reset()

    def send(self, ids: Sequence[int]) -> None:
        """Returns at once."""
        with self._condition:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tmc-outbox", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.extend(ids[: max(0, _ROOM - len(self._waiting))])
            self._condition.notify_all()

    def _run(self) -> None:
        while ids := self._take():
            try:
                # What is not there was not committed after all, whatever the session thought, or is sent already.
                page = self._store.by_ids(ids)
                failures = self._target.send(page) if page else ()
                taken = [entry.id for entry, failure in zip(page, failures, strict=True) if failure is None]
                if taken:
                    self._store.sent(taken, direct=True)
            except Exception as exc:  # the relay sends them
                log.warning("%d messages are left to the relay: %s", len(ids), exc, exc_info=True)
            finally:
                with self._condition:
                    self._in_flight = 0
                    self._condition.notify_all()

    def _take(self) -> list[int]:
        with self._condition:
            while not self._waiting and not self._closed:
                self._condition.wait()
            ids = [self._waiting.popleft() for _ in range(min(_PAGE, len(self._waiting)))]
            self._in_flight = len(ids)
            return ids

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is on its way. Returns False on timeout."""
        end = time.monotonic() + seconds
        with self._condition:
            return self._condition.wait_for(
                lambda: not (self._waiting or self._in_flight), max(0.0, end - time.monotonic())
            )

    def close(self, seconds: float = 5.0) -> None:
        """Send what waits, for that long at most."""
        self.flush(seconds)
        with self._condition:
            self._closed = True
            self._waiting.clear()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
