"""A server's copy of the catalog, kept current by looking for changes.

The watch reads the version every second and, when it has changed, reloads the whole catalog in one snapshot. A copy is
used for submits only until `change_delay_ms` after the last read of the version began, by this process's monotonic
clock: no two clocks are compared. Source: docs/decisions/0013-catalog-activation.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.operators import KnownOperators
from tmc_server.store.catalog import CatalogStore


class CatalogWatch:
    """The server's copy (domain.ports.catalog.CatalogSource). Read and refreshed from any thread.

    run: gives the incarnation of this server run, or None if it has none now, so that its copy cannot become fresh.
    Without `run` there is only one process.
    acknowledge: called with the version of a copy once it is in use, so that changes need not wait for this server.
    """

    def __init__(
        self,
        store: CatalogStore,
        run: Callable[[], int | None] | None = None,
        acknowledge: Callable[[int], object] = lambda _version: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run = run
        self._acknowledge = acknowledge
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # One attribute: a reader must not pair an old copy with the time of a newer look.
        self._seen = (Catalog(), float("-inf"))
        self._operators = KnownOperators()

    @property
    def current(self) -> Catalog:
        return self._seen[0]

    @property
    def operators(self) -> KnownOperators:
        """Return who may call the admin service."""
        return self._operators

    def in_use(self) -> tuple[Catalog, bool]:
        copy, looked = self._seen
        delay_s = self._store.change_delay_ms / 1000
        return copy, delay_s > 0 and self._monotonic() - looked >= delay_s

    @property
    def period_s(self) -> float:
        """Return how often to look for changes, so that a healthy server's copy is never stale."""
        delay = self._store.change_delay_ms
        return min(1.0, delay / 4000) if delay else 1.0

    def run_once(self) -> bool:
        """Load changes. Returns: there were some. Raises CatalogStale, StoreUnavailable: the copy keeps aging."""
        with self._lock:
            looked = self._monotonic()  # before the look: what is stored later may not be in it
            copy = self.current
            changed = self._store.peek(self._incarnation()) != copy.version
            if changed:
                self._operators = self._store.operators_now()
                copy = self._store.load(copy)
            self._seen = (copy, looked)
        if changed:
            self._acknowledge(copy.version)
        return changed

    def _incarnation(self) -> int | None:
        """The incarnation to read with. 0, which may not read: changes would not wait for a run without a row."""
        mine = self._run() if self._run is not None else None
        may_be_stale = self._run is not None and self._store.change_delay_ms > 0
        return 0 if mine is None and may_be_stale else mine
