"""Group what stands in the alert outboxes into notices, and send each notice to its sink.

The outbox is shared by all servers and hands a notice to one of them at a time. Each sink gets each notice once; twice
only when a server dies, or loses its database, between sending and marking. A sink that fails holds up only its own notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tmc_server.domain.ports import AlertOutbox, AlertSink, CatalogSource

CLAIM_MS = 120_000
_AGAIN_MS = 5_000


class Grouping:
    """sinks: names of all.  on_grouped: called when there is something to send.  page: alerts of one transaction."""

    def __init__(
        self,
        outbox: AlertOutbox,
        sinks: Sequence[str],
        on_grouped: Callable[[], None] = lambda: None,
        page: int = 5_000,
    ) -> None:
        self._outbox = outbox
        self._sinks = sinks
        self._on_grouped = on_grouped
        self._page = page

    def run_once(self) -> bool:
        """Returns: there may be more."""
        grouped = self._outbox.group(self._sinks, self._page)
        if grouped:
            self._on_grouped()
        return grouped == self._page


class Alerting:
    """One sink of one outbox. page: notices claimed at once, few enough to be sent within their claim."""

    def __init__(
        self,
        outbox: AlertOutbox,
        name: str,
        sink: AlertSink,
        catalog: CatalogSource,
        page: int = 10,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._name = name
        self._sink = sink
        self._catalog = catalog
        self._page = page
        self._monotonic = monotonic

    def run_once(self) -> bool:
        """Returns: there may be more. Raises what the sink raised; the notice comes again."""
        claimed_until = self._monotonic() + CLAIM_MS / 2000  # half of it, so that marking comes in time
        waiting = list(self._outbox.claim(self._name, self._page, CLAIM_MS))
        more = len(waiting) == self._page
        try:
            while waiting and self._monotonic() < claimed_until:
                self._sink.send(waiting[0], self._catalog.current)
                self._outbox.mark_sent([waiting.pop(0)])
        finally:
            if waiting:
                self._outbox.put_back(waiting, _AGAIN_MS)
        return more
