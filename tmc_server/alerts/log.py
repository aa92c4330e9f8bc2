"""The alert sink that is always there: the server's log."""

from __future__ import annotations

from tmc_common.eventlog import EventLog
from tmc_server.alerts.facts import facts
from tmc_server.domain.alerts import NoticeEvent
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import Alert

log = EventLog("tmc.alert")

_LINE = "%s: %stopic %s%s, %s%s; its owner is %s"


class LogSink:
    """One line per notice, with what an operator needs to look further: a warning, or that it is over."""

    def send(self, alert: Alert, catalog: Catalog) -> None:
        for each in (alert, *alert.alike):
            self._log(each, catalog)

    @staticmethod
    def _log(alert: Alert, catalog: Catalog) -> None:
        values = facts(alert, catalog)
        said = (
            alert.kind,
            f"message {values['message_id']} of " if values["message_id"] else "",
            values["topic"],
            f" for {values['subscriber']} ({values['tag']})" if values["subscriber"] else "",
            alert.detail,
            f" ({alert.count} times in {(alert.last_ms - alert.first_ms) / 1000:.0f} s)" if alert.count > 1 else "",
            " ".join(str(values[name]) for name in ("owner", "owner_email", "owner_phone") if values[name])
            or "unknown",
        )
        if alert.event is NoticeEvent.RESOLVED:
            log.info("alert_resolved", f"resolved: {_LINE}", *said)
        else:
            log.warning("alert_raised", _LINE, *said)
