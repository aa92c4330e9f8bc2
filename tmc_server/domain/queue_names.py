"""Names of the queues, in one place: consumers name topics, everything else follows from the catalog."""

from __future__ import annotations

from tmc_server.domain.catalog import Catalog, QueueMode, Subscription

PREFIX = "tmc.sub"
LONGEST = 255  # bytes; AMQP allows no more


def queue_name(app: str, tag: str, topic: str, mode: QueueMode) -> str:
    """App and tag have no dots, so a dotted topic at the end leaves no doubt about the parts.

    >>> queue_name("coupons", "prod", "order.paid", QueueMode.MULTI)
    'tmc.sub.coupons.prod.order.paid'
    >>> queue_name("coupons", "prod", "order.paid", QueueMode.SINGLE)
    'tmc.sub.coupons.prod'
    """
    name = f"{PREFIX}.{app}.{tag}"
    return name if mode is QueueMode.SINGLE else f"{name}.{topic}"


def queue_of(subscription: Subscription, catalog: Catalog) -> str:
    """The queue of one subscription."""
    topic = catalog.topics[subscription.topic]
    return queue_name(catalog.apps[subscription.app].id, subscription.tag, topic.name, topic.queue_mode)
