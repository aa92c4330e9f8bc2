"""Suspending a service, the same for all that run as one process of ours."""

from __future__ import annotations

import signal
import subprocess


class Suspendable:
    """Base of a service that can be stopped where it is, with all its connections open."""

    process: subprocess.Popen[bytes] | None

    def suspend(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run on after `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
