"""Why a message is where it is, from rows, catalog and queues as they are now. Nothing here changes a row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.views import ConsumptionView, MessageDetail, MessageView
from tmc_server.requests.explanations import Delivery, Explanation, explain_delivery, explain_message
from tmc_server.requests.lookup import Lookup


class Explaining:
    """look: at a subscription's queue, as this server sees it.  alerted: the detail of an open alert of this kind, or "".

    Both block.
    """

    def __init__(
        self,
        catalog: CatalogSource,
        lookup: Lookup,
        reader: RowReader,
        look: Callable[[SubscriptionNumber], QueueLook | None],
        alerted: Callable[[str, SubscriptionNumber], str] = lambda _kind, _subscription: "",
    ) -> None:
        self._catalog = catalog
        self._lookup = lookup
        self._reader = reader
        self._look = look
        self._alerted = alerted

    async def explain(self, message_id: str, topic: str, key: str) -> tuple[MessageView, Sequence[Explanation]]:
        """Explain a message by id, or the newest one of topic and key. Raises MessageUnknown, MessageGone, TopicUnknown."""
        return await asyncio.to_thread(self._explain, message_id, topic, key)

    def _explain(self, message_id: str, topic: str, key: str) -> tuple[MessageView, Sequence[Explanation]]:
        message = self._lookup.find(message_id, topic, key)
        catalog = self._catalog.current
        detail = self._reader.detail(message)
        now = self._reader.now(message.shard)
        itself = explain_message(message, catalog.topics[message.topic], len(detail.consumptions), now)
        if itself is not None:
            return message, [itself]
        known = [view for view in detail.consumptions if view.subscription in catalog.subscriptions]
        return message, [explain_delivery(self._delivery(catalog, message, detail, view), now) for view in known]

    def _delivery(
        self, catalog: Catalog, message: MessageView, detail: MessageDetail, view: ConsumptionView
    ) -> Delivery:
        subscription = catalog.subscriptions[view.subscription]
        answered = [each for each in detail.failed_attempts if not each.unanswered]
        errors = [each for each in answered if each.subscription == view.subscription]
        is_due = view.state is ConsumptionState.SCHEDULED and not catalog.is_paused(subscription.number)
        return Delivery(
            view=view,
            topic=catalog.topics[subscription.topic],
            subscription=subscription,
            look=self._look(subscription.number) if is_due else None,
            error=errors[-1] if errors else None,
            waits_for=str(MessageId(message.topic, message.producer, view.shard, view.waits_for))
            if view.waits_for
            else "",
            head=self._head(catalog, view),
            unforwardable=self._alerted("no forwarder", subscription.number)
            if is_due and subscription.forward is not None
            else "",
        )

    def _head(self, catalog: Catalog, view: ConsumptionView) -> Delivery | None:
        """The delivery that this one waits for."""
        head = self._reader.message(view.shard, view.waits_for) if view.waits_for else None
        if head is None:
            return None
        detail = self._reader.detail(head)
        found = next((each for each in detail.consumptions if each.subscription == view.subscription), None)
        return self._delivery(catalog, head, detail, found) if found is not None else None
