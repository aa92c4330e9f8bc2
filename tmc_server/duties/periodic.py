"""The loop around a duty: runs it, sleeps one period or until woken, survives its failures and says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tmc_common.eventlog import EventLog
from tmc_server.errors import Retryable, Unavailable
from tmc_server.metrics import METRICS

log = EventLog("tmc.duties")

_STUCK = 5


class Periodic:
    """One thread. run_once: may return anything; true means there may be more to do at once.

    every_s: the longest sleep.  An outage is logged once when it begins and once when it ends.
    on_stuck: called with every fifth failure in a row that is this server's own fault: no Retryable, such as an outage.
    """

    def __init__(
        self,
        name: str,
        run_once: Callable[[], object],
        every_s: float,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._run_once = run_once
        self._every_s = every_s
        self._on_stuck = on_stuck
        self._own_failures = 0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=f"tmc-{name}", daemon=True)
        self.failures_in_a_row = 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Run now instead of at the end of the period. From any thread."""
        self._wake.set()

    def stop(self) -> None:
        """Finish the run that is under way, then end. Blocks."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if not self.run_now() and not self._stopping:
                self._wake.wait(self._every_s)

    def run_now(self) -> bool:
        """Run once in the caller's thread. Never raises. Returns: whether there may be more to do at once."""
        try:
            more = bool(self._run_once())
        except Exception as exc:
            self.failures_in_a_row += 1
            METRICS.duty_failures.labels(self.name).set(self.failures_in_a_row)
            known = isinstance(exc, Unavailable)
            self._own_failures = 0 if isinstance(exc, Retryable) else self._own_failures + 1
            if self._own_failures == _STUCK:
                self._own_failures = 0
                self._on_stuck()
            if self.failures_in_a_row == 1:
                log.warning(
                    "duty_failing", "%s fails, and tries again: %s", self.name, exc, exc_info=None if known else exc
                )
            return False
        if self.failures_in_a_row:
            log.info("duty_recovered", "%s works again after %d failures", self.name, self.failures_in_a_row)
            self.failures_in_a_row = self._own_failures = 0
            METRICS.duty_failures.labels(self.name).set(0)
        return more
