"""The alert sink that is always there: the server's log."""

from __future__ import annotations

import logging

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports import Alert

log = logging.getLogger("tmc.alert")


class LogSink:
    """One warning per alert, with what an operator needs to look further."""

    def send(self, alert: Alert, catalog: Catalog) -> None:
        topic = catalog.topics.get(alert.topic)
        owner = catalog.apps.get(topic.owner) if topic is not None else None
        log.warning(
            "%s: topic %s, message number %d, subscription %d: %s (owner %s %s)",
            alert.kind,
            topic.name if topic is not None else alert.topic,
            alert.number,
            alert.subscription,
            alert.detail,
            owner.id if owner is not None else "unknown",
            owner.alert_email if owner is not None else "",
        )
