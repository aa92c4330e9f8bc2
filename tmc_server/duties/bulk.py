"""Work on the bulk jobs of operators: a page of each shard in turn, at the job's rate.

The shards of a job are looked after by several servers; each works at the part of the rate that its shards are of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tmc_common.eventlog import EventLog
from tmc_server.domain.bulk import BulkJob
from tmc_server.domain.numbers import BulkJobNumber, Shard
from tmc_server.domain.ports.bulk import BulkStore, BulkWork
from tmc_server.errors import RowLocked

log = EventLog("tmc.bulk")

_LONGEST_NAP_S = 0.5


@dataclass(slots=True, kw_only=True)
class _Pace:
    """Of one job. next_s: when its next turn comes, monotonic.  pages: by shard, halved while rows are locked."""

    next_s: float = 0.0
    pages: dict[Shard, int] = field(default_factory=dict)


class BulkWorking:
    """sleep, monotonic: seconds; tests give others.  page: deliveries in one transaction, at most."""

    def __init__(
        self,
        desk: BulkStore,
        work: BulkWork,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        page: int = 500,
    ) -> None:
        self._desk = desk
        self._work = work
        self._sleep = sleep
        self._monotonic = monotonic
        self._page = page
        self._paces: dict[BulkJobNumber, _Pace] = {}

    def run_once(self) -> bool:
        """A page of every shard of every job whose turn has come. Returns: there is more.

        A failure does not stop the others; the first one is raised after all have had their turn.
        """
        jobs = self._desk.active()
        self._paces = {job.number: self._paces.get(job.number, _Pace()) for job in jobs}
        at_work: list[_Pace] = []
        failure: Exception | None = None
        for job in jobs:
            pace = self._paces[job.number]
            try:
                if pace.next_s > self._monotonic() or self._turn(job, pace):
                    at_work.append(pace)
            except Exception as exc:  # noqa: BLE001 - raised below
                failure = failure or exc
        if failure is not None:
            raise failure
        if at_work:
            self._sleep(min(_LONGEST_NAP_S, max(0.0, min(pace.next_s for pace in at_work) - self._monotonic())))
        return bool(at_work)

    def _turn(self, job: BulkJob, pace: _Pace) -> bool:
        """Returns: something of it is left here."""
        mine = self._work.unfinished(job)
        if not mine:
            self._end(job)
            return False
        began, processed = self._monotonic(), 0
        rate = job.rate * len(mine) / len(job.selection.shards)
        most = max(1, min(self._page, int(rate / len(mine) / 2)))
        locked: RowLocked | None = None
        for shard in mine:
            page = min(most, pace.pages.get(shard, most))
            try:
                processed += self._work.step(job, shard, page).processed
                pace.pages[shard] = page * 2
            except RowLocked as exc:
                pace.pages[shard] = max(1, page // 2)
                locked = exc
        pace.next_s = began + processed / rate
        if locked is not None:
            raise locked
        return True

    def _end(self, job: BulkJob) -> None:
        """Nothing of it is left here."""
        if self._desk.finish(job):
            done = self._desk.progress(job)
            log.info(
                "bulk_job_finished",
                "bulk job %d: %d done, %d unchanged, %d refused",
                job.number,
                done.done,
                done.unchanged,
                done.refused,
            )
