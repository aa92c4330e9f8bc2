"""Whose turn it is: which messages a free handler takes next.

Listeners take turns, each within its own limit, so that a busy topic does not hold up the others. A batch is taken when it
is full or its first message has waited long enough. A message whose last consumer may have died over it is a suspect: one
suspect is handled at a time, and never in a batch, so that it can harm no other suspect. A listener that cannot work, for
example because the database of its inbox is down, is paused; then one message tries whether it can again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tmc_client.consuming.runs import Run

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """max_messages: a batch is handled when it has this many messages, or when its first message has waited max_wait_s."""

    max_messages: int
    max_wait_s: float


@dataclass(eq=False, kw_only=True, slots=True)
class _Line:
    """The messages of one topic that wait. limit: handlers at once.  pauses: in a row; 0: it works."""

    limit: int
    batch: BatchSize | None
    fresh: deque[tuple[float, Run]] = field(default_factory=deque)
    suspects: deque[Run] = field(default_factory=deque)
    running: int = 0
    pauses: int = 0
    paused_until: float = 0.0
    is_probed: bool = False


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """Messages for one call of a handler. probes: it shows whether a paused listener works again."""

    runs: Sequence[Run]
    line: _Line
    suspect: bool = False
    probes: bool = False
    over: bool = False

    @property
    def is_paused_again(self) -> bool:
        """Return whether it is not the first pause in a row."""
        return self.line.pauses > 1


class Turns:
    """Thread-safe: transports add, the threads of handlers take. concurrency: the limit of topics without their own."""

    def __init__(self, concurrency: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._concurrency = concurrency
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._waiting: deque[_Line] = deque()  # lines with messages; the next one to have its turn first
        self._idle = 0  # threads that wait for a turn
        self._suspect_runs = False
        self._stopped = False

    def open(self, topic: str, limit: int | None, batch: BatchSize | None) -> None:
        """Set how a topic's messages are handled. Topics that are not opened are handled one message at a time."""
        self._lines[topic] = _Line(limit=limit or self._concurrency, batch=batch)

    def add(self, run: Run) -> bool:
        """Let a message wait for its turn. Returns False: no turn will come, `stop` was called."""
        with self._changed:
            if self._stopped:
                return False
            line = self._line(run.message.topic)
            if not line.fresh and not line.suspects:
                self._waiting.append(line)
            if run.is_suspect:
                line.suspects.append(run)
            else:
                line.fresh.append((self._monotonic(), run))
            if self._idle:
                self._changed.notify()
            return True

    def take(self) -> Turn | None:
        """Wait for a turn; `end` it. Returns None: there will be none. Blocks."""
        with self._changed:
            while not self._stopped:
                turn, wait_s = self.poll()
                if turn is not None:
                    return turn
                self._idle += 1
                self._changed.wait(wait_s)
                self._idle -= 1
            return None

    def end(self, turn: Turn) -> None:
        """End a turn whose handler has ended or was given up; a second call changes nothing."""
        with self._changed:
            if turn.over:
                return
            turn.over = True
            turn.line.running -= 1
            if turn.suspect:
                self._suspect_runs = False
            if turn.probes:
                turn.line.is_probed = False
            if self._waiting and self._idle:
                self._changed.notify()

    def pause(self, turn: Turn) -> float:
        """The listener of this turn cannot work. Returns: for how many seconds it is paused."""
        with self._changed:
            line, now = turn.line, self._monotonic()
            if now >= line.paused_until:  # else another of its handlers has found out before
                line.pauses += 1
                line.paused_until = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (line.pauses - 1))
            return line.paused_until - now

    def resume(self, turn: Turn) -> None:
        """The listener of this turn works again."""
        with self._changed:
            turn.line.pauses, turn.line.paused_until, turn.line.is_probed = 0, 0.0, False
            self._changed.notify_all()

    @property
    def paused(self) -> Sequence[str]:
        """Topics whose listeners are paused."""
        with self._changed:
            return sorted(topic for topic, line in self._lines.items() if line.pauses)

    def stop(self) -> None:
        """Give no more turns: threads that wait for one end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def left(self) -> list[Run]:
        """Take out, after `stop`, the messages that never had a turn."""
        with self._changed:
            found = [run for line in self._waiting for run in (*line.suspects, *(run for _, run in line.fresh))]
            for line in self._waiting:
                line.suspects.clear()
                line.fresh.clear()
            self._waiting.clear()
            return found

    def _line(self, topic: str) -> _Line:
        line = self._lines.get(topic)
        if line is None:
            line = self._lines[topic] = _Line(limit=self._concurrency, batch=None)
        return line

    def poll(self) -> tuple[Turn | None, float | None]:
        """The next turn; if there is none now, in how many seconds there may be one even if nothing happens until then."""
        with self._changed:
            now, wait_s = self._monotonic(), None
            for _ in range(len(self._waiting)):
                line = self._waiting[0]
                self._waiting.rotate(-1)
                turn, soon_s = self._turn(line, now)
                if turn is not None:
                    line.running += 1
                    turn.probes = line.is_probed = line.pauses > 0
                    if not line.fresh and not line.suspects:
                        self._waiting.remove(line)
                    return turn, None
                if soon_s is not None:
                    wait_s = soon_s if wait_s is None else min(wait_s, soon_s)
            return None, wait_s

    def _turn(self, line: _Line, now: float) -> tuple[Turn | None, float | None]:
        if line.running >= line.limit or line.is_probed:
            return None, None
        if now < line.paused_until:
            return None, line.paused_until - now
        if line.suspects and not self._suspect_runs:
            self._suspect_runs = True
            return Turn(runs=(line.suspects.popleft(),), line=line, suspect=True), None
        if not line.fresh:
            return None, None
        if line.batch is None:
            return Turn(runs=(line.fresh.popleft()[1],), line=line), None
        wait_s = line.fresh[0][0] + line.batch.max_wait_s - now
        if len(line.fresh) < line.batch.max_messages and wait_s > 0:
            return None, wait_s
        count = min(len(line.fresh), line.batch.max_messages)
        return Turn(runs=[line.fresh.popleft()[1] for _ in range(count)], line=line), None
