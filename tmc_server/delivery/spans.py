"""A span for each copy that left the center, in the trace of its message, if the server uses OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterable

from tmc_common import tracing
from tmc_server.domain.ids import MessageId
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy


class PublishSpans:
    """From any thread."""

    def __init__(self, catalog: CatalogSource) -> None:
        self._catalog = catalog

    def published(self, copies: Iterable[Copy], lasted_s: float, where: str, error: str = "") -> None:
        """Record that these were handed over, or not: then `error` says why. lasted_s: until now.

        where: queue, exchange or stream.
        """
        if not tracing.is_on():
            return
        topics = self._catalog.current.topics
        for copy in copies:
            topic = topics[copy.topic].name if copy.topic in topics else ""
            message_id = str(MessageId(copy.topic, copy.producer, copy.shard, copy.number))
            more = {"messaging.destination.subscription.name": where, "tmc.attempt": int(copy.attempt)}
            attributes = tracing.messaging("publish", "send", topic, message_id, more)
            span = tracing.begin(
                f"publish {topic}", "PRODUCER", attributes, parent=dict(copy.headers), lasted_s=lasted_s
            )
            tracing.end(span, error)
