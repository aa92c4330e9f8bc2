"""Starting and suspending a service, the same for all that run as one process of ours."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmc_storm.eventually import eventually


class Service(ABC):
    """Base of a service. home: its folder, with its output in `output`."""

    home: Path
    process: subprocess.Popen[bytes] | None = None

    def _run(self, command: Sequence[str | Path], seconds: float = 60, **options: Any) -> None:
        """Start it, and wait until it answers. options: of Popen."""
        with open(self.home / "output", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
        eventually(self._is_up, seconds=seconds)

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "output").read_text()[-3000:]
        return self._answers()

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether it is ready."""

    def suspend(self) -> None:
        """Stop it where it is, with all its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run on after `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
