"""Hand over again what a server that is gone had handed over just before: its copies may have died with it.

Only tries within its last moments are meant; older ones were confirmed by the broker or given back. They are due at
once and not counted. Whoever holds a shard does this for that shard.
"""

from __future__ import annotations

from collections.abc import Sequence

from tmc_server.domain.ports.delivery import DueWork
from tmc_server.domain.ports.servers import Members


class Rescuing:
    """uncertain_ms: so long before its last sign of life a server's copies are uncertain; None: all of them always are."""

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
