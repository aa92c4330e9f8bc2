"""A program that is started, killed and started again, as a supervisor of services would do it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_RESTART_S = 0.5


class Program:
    """One process and its children. It is started again when it ends by itself, and `ends` has the exit codes.

    bad_stops: how it ended after `stop`, if not with code 0 or by that signal.
    log: where its output goes.  environment: beside that of this process, of whose settings of a center it gets none.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = list(command)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("TMC_")}
        self.environment = ours | dict(environment)
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self.ends: list[int] = []
        self.bad_stops: list[str] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; returns at once."""
        with self._lock:
            self._wanted = True
            self._spawn()

    def _spawn(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def watch(self) -> None:
        """Start it again if it ended by itself. Call this every now and then."""
        with self._lock:
            if self._wanted and self._process is not None and (code := self._process.poll()) is not None:
                self.ends.append(code)
                self._spawn()

    def kill(self) -> None:
        """Kill it and its children with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self, seconds: float = 30.0) -> None:
        """End it with SIGTERM, and with SIGKILL if it is still there after this time."""
        code = self._end(signal.SIGTERM, seconds)
        if code not in (None, 0, -signal.SIGTERM):
            self.bad_stops.append(
                f"was not done {seconds:g} s after SIGTERM"
                if code == -signal.SIGKILL
                else f"exit code {code} after SIGTERM"
            )

    def _end(self, number: signal.Signals, seconds: float = 30.0) -> int | None:
        """Returns: its exit code; None: it has never been started."""
        with self._lock:
            self._wanted = False
            if self._process is None:
                return None
            self._signal(number)  # to its children, too, if it has ended by itself
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
            return self._process.wait()

    def suspend(self) -> None:
        """Stop it where it is, with all its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run on after `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # all of them have ended


class Supervisor:
    """Starts programs again that ended by themselves, in a thread of its own."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_RESTART_S):
            for program in self._programs:
                program.watch()
