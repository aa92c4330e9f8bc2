"""Work on the bulk jobs of operators: a page of each shard in turn, at the job's rate.

The shards of a job are looked after by several servers; each works at the part of the rate that its shards are of all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tmc_server.domain.bulk import BulkJob, BulkProgress
from tmc_server.domain.ports.bulk import BulkDesk, BulkWork
from tmc_server.errors import StoreUnavailable

log = logging.getLogger("tmc.bulk")


class BulkWorking:
    """sleep, monotonic: seconds; tests give others.  page: deliveries in one transaction, at most."""

    def __init__(
        self,
        desk: BulkDesk,
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

    def run_once(self) -> bool:
        """A page of every shard of every job. Returns: there may be more.

        A failure does not stop the others; the first one is raised after all have had their turn.
        """
        more = False
        failure: Exception | None = None
        for job in self._desk.active():
            mine = self._work.unfinished(job)
            if not mine:
                self._end(job)
                continue
            more = True
            rate = job.rate * len(mine) / len(job.selection.shards)
            page = max(1, min(self._page, int(rate / len(mine) / 2)))
            done, began = BulkProgress(), self._monotonic()
            for shard in mine:
                try:
                    done += self._work.step(job, shard, page)
                except StoreUnavailable:
                    raise
                except Exception as exc:  # noqa: BLE001 - raised below
                    failure = failure or exc
            self._sleep(max(0.0, done.processed / rate - (self._monotonic() - began)))
        if failure is not None:
            raise failure
        return more

    def _end(self, job: BulkJob) -> None:
        """Nothing of it is left here."""
        if self._desk.finish(job):
            done = self._desk.progress(job)
            log.info(
                "bulk job %d: %d done, %d unchanged, %d refused", job.number, done.done, done.unchanged, done.refused
            )
