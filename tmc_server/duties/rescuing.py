"""Redeliver what a dead server handed over shortly before it died, since those copies may be lost.

Only attempts from its last moments are affected; older ones were confirmed by the broker or given back. The rows
become due at once, and the attempts do not count. Each server does this for the shards it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.delivery import DueWork
from tmc_server.domain.ports.servers import Members


class Rescuing:
    """uncertain_ms: copies sent within this time before a heartbeat expired are uncertain; None: all are.

    most_s: how long one run may take, beyond the page that it is at. Its thread also renews the leases: if they expired
    meanwhile, each shard would have another owner, with everything to look through again.
    """

    def __init__(
        self,
        work: Sequence[DueWork],
        members: Members,
        uncertain_ms: int | None,
        most_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._members = members
        self._uncertain_ms = uncertain_ms
        self._most_s = most_s
        self._monotonic = monotonic
        self._done: dict[Shard, tuple[int, frozenset[int]]] = {}  # epoch of the lease, and the runs that are dealt with

    def run_once(self) -> int:
        """Returns: how many deliveries are due again. What there was no time for is left to the next run."""
        until = self._monotonic() + self._most_s
        gone = {run.incarnation: self._since_ms(run.expires_ms) for run in self._members.gone}
        rescued = 0
        for work in self._work:
            for shard, epoch in work.held_shards().items():
                while True:
                    found = self._page(work, shard, epoch, gone)
                    rescued += found
                    if self._monotonic() >= until:
                        return rescued
                    if not found:
                        break
        return rescued

    def _page(self, work: DueWork, shard: Shard, epoch: int, gone: Mapping[int, int]) -> int:
        """Returns: how many deliveries are due again; 0: this shard is done."""
        known, done = self._done.get(shard, (epoch, frozenset()))
        left = {run: since_ms for run, since_ms in gone.items() if known != epoch or run not in done}
        found = work.rescue(shard, left) if left else 0
        if found == 0:
            self._done[shard] = epoch, frozenset(gone)
        return found or 0

    def _since_ms(self, expires_ms: int) -> int:
        return 0 if self._uncertain_ms is None else expires_ms - self._uncertain_ms
