"""Wait until a stored catalog change is in effect on every server.

A server submits with its copy of the catalog only until `stale_ms` after it last began to read the version, by its
own monotonic clock. So once that time has passed by our clock since the change was committed, no server can submit
with a copy that lacks the change, whatever happened to that server. Servers acknowledge the version they use in their
heartbeat rows, so usually one query is enough and nothing has to wait.

A dead server never acknowledges. The first change after its death bars it from reading the catalog (silenced = 1) and
waits; then it can never submit again under that incarnation (silenced = 2), and later changes do not wait for it.
Source: docs/decisions/0013-catalog-activation.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from tmc_server.errors import Retryable, StoreUnavailable
from tmc_server.store.engines import Database, over, repeating
from tmc_server.store.tables import meta, server

LONGEST_STALE_MS = 60_000  # what [store] change_delay_ms may be at most
_RATE = 1.01  # two monotonic clocks run apart by less
_PAUSE_S = 0.05
_NOT_KNOWN = (
    "The change is stored, but the catalog's database does not say whether every server knows it:"
    " repeat the same call, which changes nothing more and waits again."
)


class CatalogActivation:
    """domain.ports.catalog.Activation. refresh: makes this server's copy current and acknowledges it.

    mine: incarnation of this server run.  alone: no other server can be there, so none is waited for.
    patience_s: how long to go on without an answer of the database before the call fails.
    """

    def __init__(
        self,
        database: Database,
        refresh: Callable[[], object],
        mine: Callable[[], int | None],
        *,
        alone: bool = False,
        patience_s: float = 15.0,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._database = database
        self._refresh = refresh
        self._mine = mine
        self._alone = alone
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._pause = pause
        self._stopped = threading.Event()

    def wait(self) -> int:
        began = self._monotonic()  # the change is committed: every look from now on sees it
        while True:
            try:
                return self._wait(began)
            except Retryable as exc:
                if self._monotonic() - began >= self._patience_s:
                    raise StoreUnavailable(_NOT_KNOWN) from exc
            self._rest()

    def stop(self) -> None:
        self._stopped.set()

    def _rest(self) -> None:
        if self._stopped.is_set():
            raise StoreUnavailable(_NOT_KNOWN)
        self._pause(_PAUSE_S)

    def _wait(self, began: float) -> int:
        self._refresh()
        version, silenced = self._begin()
        silent_since = self._monotonic()
        while True:
            now, behind = self._behind(version)
            # The same start as in `_prove`; otherwise the wait could end just before a dead server can be marked.
            if all(self._is_over(row, silent_since if row.incarnation in silenced else began) for row in behind):
                self._prove(silenced, silent_since, behind)
                return now
            self._rest()

    @repeating
    def _begin(self) -> tuple[int, set[int]]:
        """Returns: the version to wait for, and the server runs that may no longer read the catalog."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            ended = server.update().where(
                over(server.c.expires_ms, now), server.c.silenced == 0, server.c.incarnation != (self._mine() or 0)
            )
            connection.execute(ended.values(silenced=1))
            ones = connection.execute(sa.select(server.c.incarnation).where(server.c.silenced == 1)).scalars()
            return int(connection.execute(sa.select(meta.c.catalog_version)).scalar_one()), set(ones)

    def _behind(self, version: int) -> tuple[int, list[Any]]:
        """The time, and the server runs that may submit with an older copy as far as their rows tell."""
        query = sa.select(server.c.incarnation, server.c.stale_ms).where(
            server.c.catalog_version < version, server.c.silenced < 2
        )
        if self._alone:
            query = query.where(server.c.incarnation == (self._mine() or 0))
        with self._database.reading() as connection:
            rows = list(connection.execute(query))
            return self._database.now(connection), rows

    def _is_over(self, row: Any, since: float) -> bool:
        """Return whether every copy that this run read before `since` is stale by its own clock."""
        stale_ms: int = min(row.stale_ms, LONGEST_STALE_MS)
        waited_ms = (self._monotonic() - since) * 1000
        return waited_ms >= stale_ms * _RATE

    def _prove(self, silenced: set[int], since: float, behind: list[Any]) -> None:
        """Mark runs that have been barred long enough that they cannot submit: they are never waited for again."""
        proven = [row.incarnation for row in behind if row.incarnation in silenced and self._is_over(row, since)]
        if proven:
            with self._database.transaction() as connection:
                done = server.update().where(server.c.incarnation.in_(proven), server.c.silenced == 1)
                connection.execute(done.values(silenced=2))
