"""Send what stands in the alert outboxes. Each sink gets each alert at least once; one that fails does not hold up the others."""

from __future__ import annotations

from collections.abc import Sequence

from tmc_server.domain.ports import Alert, AlertOutbox, AlertSink, CatalogSource


class Alerting:
    """page: alerts per outbox and run."""

    def __init__(
        self, outboxes: Sequence[AlertOutbox], sinks: Sequence[AlertSink], catalog: CatalogSource, page: int = 1_000
    ) -> None:
        self._outboxes = outboxes
        self._sinks = sinks
        self._catalog = catalog
        self._page = page
        self._told: set[tuple[AlertOutbox, int, AlertSink]] = set()  # of alerts that another sink has still to take

    def run_once(self) -> int:
        """Returns: how many alerts every sink has. Raises the first failure, after everybody had a turn."""
        sent = 0
        failures: dict[AlertSink, Exception] = {}
        for outbox in self._outboxes:
            alerts = outbox.unsent(self._page)
            done = [alert for alert in alerts if self._tell(outbox, alert, failures)]
            if done:
                outbox.mark_sent(done)
                sent += len(done)
            open_ = {alert.id for alert in alerts} - {alert.id for alert in done}
            self._told = {told for told in self._told if told[0] is not outbox or told[1] in open_}
        for failure in failures.values():
            raise failure
        return sent

    def _tell(self, outbox: AlertOutbox, alert: Alert, failures: dict[AlertSink, Exception]) -> bool:
        """Returns: every sink has it. One that failed in this run is left alone until the next."""
        everybody = True
        for sink in self._sinks:
            if (outbox, alert.id, sink) in self._told:
                continue
            if sink in failures:
                everybody = False
                continue
            try:
                sink.send(alert, self._catalog.current)
                self._told.add((outbox, alert.id, sink))
            except Exception as exc:  # noqa: BLE001 - raised by run_once
                failures[sink] = exc
                everybody = False
        return everybody
