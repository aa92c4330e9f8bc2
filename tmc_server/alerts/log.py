"""The alert sink that is always there: the server's log."""

from __future__ import annotations

import logging

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.ports import Alert

log = logging.getLogger("tmc.alert")


class LogSink:
    """One warning per alert, with what an operator needs to look further."""

    def send(self, alert: Alert, catalog: Catalog) -> None:
        topic = catalog.topics.get(alert.topic)
        subscription = catalog.subscriptions.get(alert.subscription)
        owner = catalog.apps.get(topic.owner) if topic is not None else None
        log.warning(
            "%s: message %s of topic %s%s, %s; its owner is %s",
            alert.kind,
            MessageId(alert.topic, topic.owner if topic is not None else 0, alert.shard, alert.number),
            topic.name if topic is not None else alert.topic,
            f" for {catalog.apps[subscription.app].id} ({subscription.tag})" if subscription is not None else "",
            alert.detail,
            " ".join(filter(None, (owner.id, owner.alert_email))) if owner is not None else "unknown",
        )
