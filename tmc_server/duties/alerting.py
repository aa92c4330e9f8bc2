"""Group the alerts in the outboxes into notices, send each notice to its sink, and end episodes whose cause is gone.

All servers share the outbox; only one of them can claim a notice at a time. A sink gets each notice once, or twice
if a server dies or loses its database between sending and marking. A failing sink delays only its own notices, and a
refused notice delays no other: it is retried with an increasing back-off. Notices that are due at once and have one cause
(a broker is away, and sixty subscriptions with it) are sent as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import Alert, AlertOutbox, AlertSink
from tmc_server.domain.ports.catalog import CatalogSource

log = EventLog("tmc.duties")

CLAIM_MS = 120_000
_AGAIN_MS = 5_000
_LONGEST_AGAIN_MS = 60_000
_AWAY = 3  # failures in a row: it is the sink, not these notices
_ONE_CAUSE = 4  # as many notices alike are sent as one
_REMEMBERED = 1_000  # refused notices; others of this sink may have sent them since


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


class Resolving:
    """Ends episodes whose cause is gone. on_resolved: called when there is something to send."""

    def __init__(self, outbox: AlertOutbox, on_resolved: Callable[[], None] = lambda: None) -> None:
        self._outbox = outbox
        self._on_resolved = on_resolved

    def run_once(self) -> bool:
        """Returns False: nothing is left to do."""
        if self._outbox.resolve():
            self._on_resolved()
        return False


class Alerting:
    """One sink of one outbox. page: notices claimed at once, few enough to be sent within their claim."""

    def __init__(
        self,
        outbox: AlertOutbox,
        name: str,
        sink: AlertSink,
        catalog: CatalogSource,
        page: int = 100,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._name = name
        self._sink = sink
        self._catalog = catalog
        self._page = page
        self._monotonic = monotonic
        self._refused: dict[int, int] = {}  # by notice: how often

    def run_once(self) -> bool:
        """Send due notices. Returns: there may be more. Raises the sink's last error; failed notices are retried."""
        claimed_until = self._monotonic() + CLAIM_MS / 2000  # half of it, so that marking comes in time
        claimed = self._outbox.claim(self._name, self._page, CLAIM_MS)
        more = len(claimed) == self._page
        waiting = self._by_cause(claimed)
        failure: Exception | None = None
        in_a_row = 0
        try:
            while waiting and in_a_row < _AWAY and self._monotonic() < claimed_until:
                first, *alike = waiting[0]
                try:
                    self._sink.send(replace(first, alike=alike) if alike else first, self._catalog.current)
                except Exception as exc:
                    failure, in_a_row = exc, in_a_row + 1
                    log.debug("alert_not_sent", "%s does not take notice %d", self._name, first.id, exc_info=exc)
                    self._outbox.put_back(waiting.pop(0), self._again_ms(first.id))
                else:
                    in_a_row = 0
                    self._refused.pop(first.id, None)
                    self._outbox.mark_sent(waiting.pop(0))
        finally:
            if waiting:
                self._outbox.put_back([each for together in waiting for each in together], _AGAIN_MS)
        if failure is not None:
            raise failure
        return more

    def _by_cause(self, notices: Iterable[Alert]) -> list[Sequence[Alert]]:
        """Return what is sent together. A notice that was refused, alone or before others, is sent alone: it may be the cause."""
        catalog = self._catalog.current
        alike: dict[object, list[Alert]] = {}
        for notice in notices:
            cause = notice.id if notice.id in self._refused else _cause(notice, catalog)
            alike.setdefault(cause, []).append(notice)
        return [
            part
            for together in alike.values()
            for part in ([together] if len(together) >= _ONE_CAUSE else [[each] for each in together])
        ]

    def _again_ms(self, notice: int) -> int:
        """Return how long a notice waits that was refused once more: 5 s, 10 s, 20 s, 40 s, then 60 s."""
        times = self._refused.pop(notice, 0) + 1
        self._refused[notice] = times
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return min(_LONGEST_AGAIN_MS, _AGAIN_MS << min(times - 1, 4))


def _cause(notice: Alert, catalog: Catalog) -> object:
    """Equal for what belongs together: also the owner, who gets mail about the own topics only."""
    topic = catalog.topics.get(notice.topic)
    return notice.kind, notice.event, notice.fingerprint, topic.owner if topic is not None else 0
