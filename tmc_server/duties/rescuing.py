"""Redeliver what a dead server handed over shortly before it died, since those copies may be lost.

Only attempts from its last moments are affected; older ones were confirmed by the broker or given back. The rows
become due at once, and the attempts do not count. Each server does this for the shards it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.delivery import DueWork
from tmc_server.domain.ports.servers import Members

_AT_ONCE = 200  # runs, in one statement


class Rescuing:
    """uncertain_ms: copies sent within this time before a heartbeat expired are uncertain; None: all are.

    most_s: how long a pass may take, beyond the page that it is at. Its thread also renews the leases: if they expired
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
        self._latest = Shard(0)  # the next pass begins behind it: no shard keeps the others waiting

    def run_once(self) -> int:
        """Returns: how many deliveries are due again. What there was no time for is left to the next pass."""
        until = self._monotonic() + self._most_s
        gone = {run.incarnation: self._since_ms(run.expires_ms) for run in self._members.gone}
        rescued = 0
        for work in self._work:
            held = work.held_shards()
            for shard in sorted(held, key=lambda shard: (shard <= self._latest, shard)):
                self._latest = shard
                while (found := self._page(work, shard, held[shard], gone)) is not None:
                    rescued += found
                    if self._monotonic() >= until:
                        return rescued
        return rescued

    def _page(self, work: DueWork, shard: Shard, epoch: int, gone: Mapping[int, int]) -> int | None:
        """Returns: how many deliveries are due again; None: this shard is done, or no longer ours."""
        known, done = self._done.get(shard, (epoch, frozenset()))
        if known != epoch:
            done = frozenset()
        some = dict(islice(((run, since_ms) for run, since_ms in gone.items() if run not in done), _AT_ONCE))
        found = work.rescue(shard, some) if some else None
        if found == 0:
            self._done[shard] = epoch, (done | some.keys()) & gone.keys()
        return found

    def _since_ms(self, expires_ms: int) -> int:
        return 0 if self._uncertain_ms is None else expires_ms - self._uncertain_ms
