"""The relay: sends what is committed and was not sent directly. Several may run; one of them works.

It holds a lease in the database. One that stops, or fails several times in a row, leaves the work to another: nobody
who fails keeps it. A relay that loses its lease while it sends may send what its successor sends too; the center stores
such a message once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tmc_client import errors
from tmc_client.outbox.bell import Listener
from tmc_client.outbox.entries import Entry, Failure, Target, Trouble
from tmc_client.outbox.store import OutboxStore

log = logging.getLogger("tmc_client.outbox")

PAGE = 500
LEASE = timedelta(seconds=10)
IDLE_S = 1.0
REST_S = 60.0
MOST_FAILURES = 5  # passes in a row
_FIRST_PAUSE_MS = 3_000
_LONGEST_PAUSE_MS = 60_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a message is given up: refused so often, or not sent at this age."""

    max_tries: int = 10
    max_age: timedelta = timedelta(days=7)


@dataclass(kw_only=True)
class RelayCounts:
    """Since the start. passes: that did something or failed.  later: attempts that are repeated."""

    passes: int = 0
    failed_passes: int = 0
    sent: int = 0
    later: int = 0
    given_up: int = 0


class Relay:
    """One of several. lease: how long another one waits for it if it dies.  on_given_up: see Outbox."""

    def __init__(
        self,
        store: OutboxStore,
        target: Target,
        limits: Limits,
        lease: timedelta = LEASE,
        on_given_up: Callable[[Sequence[Entry], str], None] = lambda _entries, _error: None,
    ) -> None:
        self._store = store
        self._target = target
        self._limits = limits
        self._lease_ms = _ms(lease)
        self._on_given_up = on_given_up
        self.name: str = f"{socket.gethostname()[:20]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.counts: RelayCounts = RelayCounts()
        self._failures = 0
        self._holds = False
        self._woken = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Relay until `stop`."""
        listener = Listener(self._store.engine, self.wake)
        listener.start()
        while not self._stopping.is_set():
            pause_s = self.run_once()
            if pause_s == REST_S:
                self._stopping.wait(pause_s)
            elif pause_s:
                self._woken.wait(pause_s)
            self._woken.clear()
        listener.stop()
        self._leave()

    def stop(self) -> None:
        """End `run` after the pass it is in."""
        self._stopping.set()
        self._woken.set()

    def wake(self) -> bool:
        """There is something to do. Returns: this is the relay that works."""
        if self._holds:
            self._woken.set()
        return self._holds

    def run_once(self) -> float:
        """One pass. Returns: seconds until the next one."""
        try:
            now = self._store.hold(self.name, self._lease_ms)
            self._holds = now is not None and not self._failures
            if now is None:
                return IDLE_S
            moved = self._one_pass(now)
        except (errors.TmcError, TargetAway) as exc:
            log.warning("the outbox could not be sent: %s", exc)
            return self._failed()
        except Exception:  # of a target: nobody dies with the duty
            log.warning("the outbox could not be sent", exc_info=True)
            return self._failed()
        self._failures = 0
        self.counts.passes += int(moved)
        return 0.0 if moved else IDLE_S

    def _failed(self) -> float:
        """Count a failed pass; after several in a row, let another relay work. Returns: the pause, seconds."""
        self._failures += 1
        self.counts.passes += 1
        self.counts.failed_passes += 1
        if self._failures < MOST_FAILURES:
            return IDLE_S
        self._failures = 0
        self._leave()
        return REST_S

    def _leave(self) -> None:
        self._holds = False
        try:
            self._store.let_go(self.name)
        except Exception:  # also of what makes connections for the engine; the lease ends by itself
            log.warning("the lease of the outbox could not be returned", exc_info=True)

    def _one_pass(self, now: int) -> bool:
        """A page of due messages, in rounds: of an order key, each round has one message. Returns: something moved."""
        page, began = self._store.due(now, PAGE), time.monotonic()
        moved = len(page) == PAGE  # there may be more behind those that cannot be sent
        while page and (ready := self._in_turn(page, now)):
            moved |= self._send(ready, now)
            if time.monotonic() - began > self._lease_ms / 3_000:
                break  # the lease is renewed before the next pass
            sent = {entry.id for entry in ready}
            page = [entry for entry in page if entry.line and entry.id not in sent]
        return moved

    def _send(self, ready: Sequence[Entry], now: int) -> bool:
        """Returns: something was sent or given up."""
        damaged = [entry for entry in ready if entry.damage]
        for entry in damaged:
            self._give_up(entry, entry.damage)
        if damaged:
            return self._send([entry for entry in ready if not entry.damage], now) or True
        failures = self._answers(ready) if ready else ()
        outcomes = list(zip(ready, failures, strict=True))
        taken = [entry for entry, failure in outcomes if failure is None]
        if taken:
            self._store.sent([entry.id for entry in taken], direct=False)
            self.counts.sent += len(taken)
        away = next((failure for failure in failures if failure is not None and failure.trouble is Trouble.AWAY), None)
        if away is not None and not taken:
            raise TargetAway(away.error)
        moved = bool(taken)
        for entry, failure in outcomes:
            if failure is not None:
                moved |= self._not_taken(entry, failure, now)
        return moved

    def _answers(self, ready: Sequence[Entry]) -> Sequence[Failure | None]:
        """A target that breaks on a page gets its messages one by one, so that only those are refused that it breaks on."""
        try:
            answers = self._target.send(ready)
            if len(answers) == len(ready):
                return answers
            log.error("the target answered %d of %d messages: they are repeated", len(answers), len(ready))
        except Exception:
            log.warning("the target broke on a page of %d messages", len(ready), exc_info=True)
        return [self._answer(entry) for entry in ready]

    def _answer(self, entry: Entry) -> Failure | None:
        try:
            (answer,) = self._target.send([entry])
        except Exception as exc:
            log.warning("the target broke on message %s of %s", entry.key, entry.topic, exc_info=True)
            return Failure(trouble=Trouble.REFUSED, error=f"The target broke on it: {exc!r}")
        return answer

    def _in_turn(self, page: Sequence[Entry], now: int) -> list[Entry]:
        """Return those that need not wait for an earlier message of their order key. The others come after that one's time."""
        heads = self._store.heads(page)
        ready: list[Entry] = []
        blocked: dict[str, int | None] = {}
        for entry in page:
            head = heads.get(entry.line)
            if not entry.line or (head is not None and head.id == entry.id):
                ready.append(entry)
            elif head is not None and (head.due_ms is None or head.due_ms > now):
                blocked[entry.line] = head.due_ms
        for line, due_ms in sorted(blocked.items()):
            self._store.postpone(line, due_ms)
        there = {entry.id for entry in page}
        beyond = [head.id for head in heads.values() if head.id not in there and 0 < (head.due_ms or 0) <= now]
        return ready + self._store.by_ids(beyond)

    def _not_taken(self, entry: Entry, failure: Failure, now: int) -> bool:
        """Returns: it was given up."""
        refused = failure.trouble is Trouble.REFUSED
        age_ms = now - entry.created_ms
        if (refused and entry.tries + 1 >= self._limits.max_tries) or age_ms >= _ms(self._limits.max_age):
            self._give_up(entry, failure.error)
            return True
        pause_ms = _FIRST_PAUSE_MS << min(entry.tries, 10) if refused else age_ms // 4
        due_ms = now + min(_LONGEST_PAUSE_MS, max(_FIRST_PAUSE_MS, pause_ms))
        self._store.later([entry], due_ms, failure.error, tries=int(refused))
        self.counts.later += 1
        return False

    def _give_up(self, entry: Entry, error: str) -> None:
        self._store.failed([entry], error)
        self.counts.given_up += 1
        log.error("message %s of %s is given up: %s", entry.key, entry.topic, error)
        try:
            self._on_given_up([entry], error)
        except Exception:
            log.warning("on_given_up failed", exc_info=True)


class TargetAway(Exception):
    """The target took nothing."""


def _ms(value: timedelta) -> int:
    return round(value.total_seconds() * 1000)
