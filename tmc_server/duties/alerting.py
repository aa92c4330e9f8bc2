"""Send what stands in the alert outboxes. Sent at least once: a sink that fails gets the alert again."""

from __future__ import annotations

from collections.abc import Sequence

from tmc_server.domain.ports import AlertOutbox, AlertSink, CatalogSource


class Alerting:
    """page: alerts per outbox and run."""

    def __init__(
        self, outboxes: Sequence[AlertOutbox], sinks: Sequence[AlertSink], catalog: CatalogSource, page: int = 100
    ) -> None:
        self._outboxes = outboxes
        self._sinks = sinks
        self._catalog = catalog
        self._page = page

    def run_once(self) -> int:
        """Returns: how many alerts were sent."""
        sent = 0
        for outbox in self._outboxes:
            alerts = outbox.unsent(self._page)
            for alert in alerts:
                for sink in self._sinks:
                    sink.send(alert, self._catalog.current)
            if alerts:
                outbox.mark_sent(alerts)
                sent += len(alerts)
        return sent
