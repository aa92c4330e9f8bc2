"""The content of an alert, names instead of numbers: the same for every sink. Documented in docs/alerts.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.ports.alerts import Alert

Facts = Mapping[str, Any]


def facts(alert: Alert, catalog: Catalog) -> Facts:
    """Empty texts: it is not about one message, or not about one subscriber."""
    topic = catalog.topics.get(alert.topic)
    subscription = catalog.subscriptions.get(alert.subscription)
    owner = catalog.apps.get(topic.owner) if topic is not None else None
    producer = topic.owner if topic is not None else 0
    samples = alert.samples or ([(alert.shard, alert.number)] if alert.number else [])
    return {
        "event": alert.event.name.lower(),
        "alert_id": alert.episode,
        "kind": alert.kind,
        "topic": topic.name if topic is not None else str(alert.topic),
        "message_id": str(MessageId(alert.topic, producer, alert.shard, alert.number)) if alert.number else "",
        "subscriber": catalog.apps[subscription.app].id if subscription is not None else "",
        "tag": subscription.tag if subscription is not None else "",
        "attempt": alert.attempt,
        "detail": alert.detail,
        "created_ms": alert.created_ms,
        "count": alert.count,
        "first_ms": alert.first_ms or alert.created_ms,
        "last_ms": alert.last_ms or alert.created_ms,
        "total": max(alert.total, alert.count),
        "since_ms": alert.since_ms or alert.first_ms or alert.created_ms,
        "fingerprint": alert.fingerprint,
        "message_ids": [str(MessageId(alert.topic, producer, shard, number)) for shard, number in samples],
        "owner": owner.id if owner is not None else "",
        "owner_email": owner.alert_email if owner is not None else "",
        "owner_phone": owner.alert_phone if owner is not None else "",
        "also": [facts(each, catalog) for each in alert.alike],
    }
