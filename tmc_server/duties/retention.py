"""Keep the hot tables small: remove closed messages once they are archived or, without an archive, by age.

FAILED and CHECK_FAILED messages are not closed, so they stay whatever their age. Nothing in the replay window is
removed. The store removes only messages closed before the archive run's cutoff; any that changed since then stay.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from tmc_common.eventlog import EventLog
from tmc_server.domain.manifest import Removal
from tmc_server.domain.numbers import NO_MESSAGE, MessageNumber, Shard
from tmc_server.domain.ports.retention import ClosedWork, ListUnreadable, Position, RemovalLists
from tmc_server.metrics import METRICS

log = EventLog("tmc.retention")

_BATCH = 500  # messages of one transaction
_LOOK = 10_000  # of one query: what failed stays, and there may be millions of it before anything can go
_FORGET = 2000
_CLOCKS_APART_MS = 3_600_000

_DONE = MessageNumber(-1)  # the position behind a run whose list is worked off


class Retention:
    """lists: what was archived; None: age alone decides.  keep_ms: the replay window.  rate: messages per second at most."""

    def __init__(
        self,
        work: Sequence[ClosedWork],
        lists: RemovalLists | None,
        keep_ms: int,
        rate: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._work = work
        self._lists = lists
        self._keep_ms = keep_ms
        self._rate = rate
        self._sleep = sleep
        self._after: dict[Shard, MessageNumber] = {}  # by shard: how far this sweep has come, where age decides
        self._swept: set[Shard] = set()  # it has come to their ends
        self._batch = max(1, min(_BATCH, rate // 2))
        self._busy = False
        self._wrong = ""
        self._future: set[str] = set()  # runs whose manifests end in the future
        self._open: Shard | None = None  # the shard whose list is half worked off
        self._cached: tuple[tuple[str, int], Sequence[MessageNumber]] = (("", 0), ())

    def run_once(self) -> bool:
        """Remove some batches. Returns: there may be more."""
        runs = self._runs()
        more = False
        for work in self._work:
            before_ms = work.now() - self._keep_ms
            if not self._busy:
                work.forget(before_ms, _FORGET)
            for shard in self._turns(work.held_shards()):
                more |= self._turn(work, shard, before_ms, runs)
        self._busy = more
        if not more:
            self._swept.clear()
        return more

    def _runs(self) -> Sequence[Removal]:
        if self._lists is None:
            return ()
        try:
            runs, wrong = self._lists.removals(), ""
        except ListUnreadable as exc:
            runs, wrong = (), str(exc)
        if wrong and wrong != self._wrong:  # said once
            log.error("retention_stopped", "nothing is removed: %s", wrong)
        self._wrong = wrong
        return runs

    def _warn_of_the_future(self, run: Removal, now_ms: int) -> None:
        """Log, once, that the cutoff of a run is in the future, which holds up all later runs."""
        if run.before_ms > now_ms + _CLOCKS_APART_MS and run.run not in self._future:
            self._future.add(run.run)
            log.error(
                "archive_run_in_future",
                "run %s ends in the future: nothing is removed before that; is its manifest damaged?",
                run.run,
            )

    def _turns(self, held: Sequence[Shard]) -> Sequence[Shard]:
        """Finish the list that was read before reading another one."""
        return [self._open] if self._open is not None and self._open in held else held

    def _turn(self, work: ClosedWork, shard: Shard, before_ms: int, runs: Sequence[Removal]) -> bool:
        self._open = None  # unless this turn leaves it half worked off: another server may have finished it meanwhile
        if self._lists is None:
            return self._by_age(work, shard, before_ms)
        at = work.position(shard)
        for run in runs:
            if run.run < at.run or (run.run == at.run and at.number == _DONE):
                continue
            if run.before_ms > before_ms:  # in their order: a later run would make this one look done
                self._warn_of_the_future(run, before_ms + self._keep_ms)
                return False
            try:
                return self._by_list(work, shard, run, at.number if run.run == at.run else 0)
            except ListUnreadable as exc:
                log.error("retention_waiting", "shard %d waits: %s", shard, exc)
                return False
        return False

    def _by_age(self, work: ClosedWork, shard: Shard, before_ms: int) -> bool:
        if shard in self._swept:
            return False
        numbers, end = work.old(shard, self._after.pop(shard, NO_MESSAGE), before_ms, self._batch, _LOOK)
        if end is None:
            self._swept.add(shard)
        else:
            self._after[shard] = end
        if numbers:
            self._count(work.remove(shard, numbers, before_ms))
        return end is not None

    def _by_list(self, work: ClosedWork, shard: Shard, run: Removal, after: int) -> bool:
        """Removes one batch of a run's list."""
        if shard not in run.counts:
            work.remove(shard, (), 0, Position(run.run, _DONE))
            return True
        listed = self._listed(run.run, shard)
        start = bisect_right(listed, after)
        numbers = listed[start : start + self._batch]
        end = start + len(numbers) >= len(listed)
        removed = work.remove(shard, numbers, run.before_ms, Position(run.run, _DONE if end else numbers[-1]))
        self._open = None if end else shard
        self._count(removed)
        if removed < len(numbers):
            log.warning(
                "messages_kept",
                "%d of %d messages of shard %d stay: they moved after run %s had archived them, or were gone before",
                len(numbers) - removed,
                len(numbers),
                shard,
                run.run,
            )
        return True

    def _listed(self, run: str, shard: Shard) -> Sequence[MessageNumber]:
        if self._cached[0] != (run, shard):
            assert self._lists is not None
            self._cached = ((run, shard), self._lists.numbers(run, shard))
        return self._cached[1]

    def _count(self, removed: int) -> None:
        METRICS.removed.inc(removed)
        self._sleep(removed / self._rate)
