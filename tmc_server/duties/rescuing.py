"""Redeliver what a dead server handed over shortly before it died, since those copies may be lost.

Only attempts from its last moments are affected; older ones were confirmed by the broker or given back. The rows
become due at once, and the attempts do not count. Each server does this for the shards it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from tmc_server.domain.ports.delivery import DueWork
from tmc_server.domain.ports.servers import Members


class Rescuing:
    """uncertain_ms: copies sent within this time before a heartbeat expired are uncertain; None: all are."""

    def __init__(self, work: Sequence[DueWork], members: Members, uncertain_ms: int | None) -> None:
        self._work = work
        self._members = members
        self._uncertain_ms = uncertain_ms
        self._done: set[tuple[int, int, int]] = set()

    def run_once(self) -> int:
        """Returns: how many deliveries are due again."""
        rescued = 0
        gone = list(self._members.gone)
        for work in self._work:
            for shard, epoch in work.held_shards().items():
                for run in gone:
                    if (run.incarnation, shard, epoch) in self._done:
                        continue
                    since_ms = 0 if self._uncertain_ms is None else run.expires_ms - self._uncertain_ms
                    found = work.rescue(shard, run.incarnation, since_ms)
                    if found is not None:
                        rescued += found
                        self._done.add((run.incarnation, shard, epoch))
        known = {run.incarnation for run in gone}
        self._done = {done for done in self._done if done[0] in known}
        return rescued
