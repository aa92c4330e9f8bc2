"""Runs several processes of one program: fresh interpreters, never forks; restarts those that end, passes signals on.

One that ends well without our asking was stopped by somebody else, for example with SIGTERM: it is replaced, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from tmc_common.eventlog import EventLog

log = EventLog("tmc_common.supervisor")

_STEADY_S = 30.0  # a process that ran this long is restarted with the shortest pause
_LONGEST_PAUSE_S = 10.0
_SAME_SIGNAL_S = 1.0  # a terminal sends the same stop signal to every process


@dataclass(kw_only=True)
class _Child:
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    again_at: float = 0.0
    done: bool = field(default=False)
    signaled: bool = field(default=False)

    def start(self) -> None:
        self.started = time.monotonic()
        self.signaled = False
        self.process = subprocess.Popen(self.command, env=dict(self.environment))  # noqa: S603 - our own interpreter

    def tell(self, number: int) -> None:
        if self.process is not None:
            self.signaled = True
            self.process.send_signal(number)


class Supervisor:
    """commands: (arguments after the interpreter, environment) of each process. run() in the main thread."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self._children = [
            _Child(command=[sys.executable, *arguments], environment=environment) for arguments, environment in commands
        ]
        self._stopping = False
        self._since = 0.0

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; a second one kills. Returns: 2 if a process refused its settings, else 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for child in self._children:
            child.start()
        refused = False
        while not all(child.done for child in self._children):
            time.sleep(0.1)
            for child in self._children:
                refused = self._look_after(child) or refused
            if refused and not self._stopping:
                self._stop(signal.SIGTERM)
        return 2 if refused else 0

    def _look_after(self, child: _Child) -> bool:
        """Start a process again if it ended. Returns: it ended because of its configuration."""
        if child.done:
            return False
        if child.process is None:
            if self._stopping:
                child.done = True
            elif time.monotonic() >= child.again_at:
                child.start()
            return False
        code = child.process.poll()
        if code is None:
            if self._stopping and not child.signaled:
                child.tell(signal.SIGTERM)  # it was being started when the signal came
            return False
        child.process = None
        if self._stopping:
            child.done = True
            return False
        if code == 2:
            child.done = True
            return True
        lived = time.monotonic() - child.started
        child.failures = 0 if lived > _STEADY_S else child.failures + 1
        pause = min(_LONGEST_PAUSE_S, 0.2 * 2**child.failures)
        log.warning("process_restarted", "a process ended with %d and is started again in %.1f s", code, pause)
        child.again_at = time.monotonic() + pause
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopping:
            self._since = time.monotonic()
            self._stop(signal.SIGTERM)
        elif time.monotonic() - self._since > _SAME_SIGNAL_S:
            self._stop(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        self._stopping = True
        for child in self._children:
            child.tell(number)
