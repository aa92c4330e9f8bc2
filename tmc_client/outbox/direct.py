"""Send what was just committed, in the background: the usual way out. What fails here is left to the relay."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from tmc_client.forks import notice_fork, watch_forks
from tmc_client.outbox.entries import Draft, Entry, Target
from tmc_client.outbox.store import OutboxStore

log = logging.getLogger("tmc_client.outbox")

PAGE = 500
_ROOM = 10_000  # what comes on top waits for the relay
_ROOM_BYTES = 64 << 20
_PAGE_BYTES = 4 << 20
_PAGE_S = 0.005  # under load, pages form for that long: each costs as much as ten of its messages
_MARK_S = 0.02


class DirectSending:
    """Two threads that start with the first message. Messages that arrive while a page is sent form the next one."""

    def __init__(self, store: OutboxStore, target: Target) -> None:
        self._store = store
        self._target = target
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: the parent sends its own."""
        # Each thread is woken for its own sake only: a program's thread would wait for the interpreter behind the others.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._answered = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._waiting: deque[Draft | Entry] = deque()
        self._bytes = 0
        self._in_flight = 0
        self._sent: list[int] = []
        self._marking = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def send(self, messages: Sequence[Draft] | Sequence[Entry]) -> None:
        """Returns at once. See Outbox.committed."""
        notice_fork()
        with self._lock:
            if self._closed:
                return
            if not self._threads:
                threads = [
                    threading.Thread(target=self._run, name="tmc-outbox", daemon=True),
                    threading.Thread(target=self._run_marks, name="tmc-outbox-marks", daemon=True),
                ]
                for thread in threads:
                    thread.start()
                self._threads = threads
            for message in messages:
                if len(self._waiting) >= _ROOM or self._bytes >= _ROOM_BYTES:
                    break
                self._waiting.append(message)
                self._bytes += _size(message)
            self._arrived.notify()

    def _run(self) -> None:
        while taken := self._take():
            sent: list[int] = []
            try:
                sent = self._send_page(taken)
            except Exception as exc:  # the relay sends them
                log.warning("%d messages are left to the relay: %s", len(taken), exc, exc_info=True)
            with self._lock:
                self._in_flight = 0
                self._sent += sent
                self._answered.notify()
                self._idle.notify_all()
                self._ended.wait_for(lambda: self._closed or self._has_page, _PAGE_S)

    @property
    def _has_page(self) -> bool:
        return len(self._waiting) >= PAGE or self._bytes >= _PAGE_BYTES

    def _run_marks(self) -> None:
        """Mark what was sent while the next page is on its way: in groups, and soon, or a relay would send it again."""
        while sent := self._take_sent():
            try:
                self._store.sent(sent, direct=True)
            except Exception as exc:
                log.warning(
                    "%d messages were sent and not marked: a relay repeats them: %s", len(sent), exc, exc_info=True
                )
            with self._lock:
                self._marking = 0
                self._idle.notify_all()
                self._ended.wait_for(lambda: self._closed, _MARK_S)

    def _take_sent(self) -> list[int]:
        with self._lock:
            self._answered.wait_for(lambda: self._sent or self._closed)
            sent, self._sent = self._sent, []
            self._marking = len(sent)
            return sent

    def _send_page(self, taken: Sequence[Draft | Entry]) -> list[int]:
        """Returns: the ids of those that the target took."""
        page = [message for message in taken if isinstance(message, Entry)]
        # What is not there was not committed after all, whatever the session thought, or is sent already.
        page += self._store.by_drafts([message for message in taken if isinstance(message, Draft)])
        page = [entry for entry in page if not entry.damage]
        failures = self._target.send(page) if page else ()
        return [entry.id for entry, failure in zip(page, failures, strict=True) if failure is None]

    def _take(self) -> list[Draft | Entry]:
        with self._lock:
            self._arrived.wait_for(lambda: self._waiting or self._closed)
            page: list[Draft | Entry] = []
            size = 0
            while self._waiting and len(page) < PAGE and size < _PAGE_BYTES:
                page.append(self._waiting.popleft())
                size += _size(page[-1])
            self._bytes -= size
            self._in_flight = len(page)
            return page

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is on its way. Returns False on timeout."""
        end = time.monotonic() + seconds
        with self._lock:
            return self._idle.wait_for(
                lambda: not (self._waiting or self._in_flight or self._sent or self._marking),
                max(0.0, end - time.monotonic()),
            )

    def close(self, seconds: float = 5.0) -> None:
        """Send what waits, for that long at most."""
        end = time.monotonic() + seconds
        if not self.flush(seconds):
            log.warning("the outbox was closed before all was sent: a relay sends the rest")
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._bytes = 0
            for condition in (self._arrived, self._answered, self._ended):
                condition.notify_all()
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))


def _size(message: Draft | Entry) -> int:
    """Bytes that wait in memory."""
    return len(message.body) if isinstance(message, Entry) else 0
