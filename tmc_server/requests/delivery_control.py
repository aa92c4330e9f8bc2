"""What operators do about deliveries: reactivate, hurry and cancel one, pause and resume many, repair order. All audited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tmc_server.domain.catalog import Subscription, Topic
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import OrderHash, Shard
from tmc_server.domain.operations import THE_CENTER, ByOperator, Cancel, Done, Stored
from tmc_server.domain.placement import shards_of
from tmc_server.domain.ports.catalog import CatalogEditor, CatalogSource, ChangeEverywhere
from tmc_server.domain.ports.delivery import Replaying
from tmc_server.domain.ports.ordering import FIRST_LINE, LineWork, Repaired
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.ports.work import Performer
from tmc_server.domain.views import ConsumptionView, MessageView
from tmc_server.errors import ConsumptionClosed, InvalidField, MessageGone, SubscriptionUnknown, TmcError
from tmc_server.origin import ORIGIN
from tmc_server.requests import validation

_LINES = 500


class DeliveryControl:
    """change: runs a change of the catalog and makes this server's copy current.  lines: of a shard now."""

    def __init__(
        self,
        editor: CatalogEditor,
        catalog: CatalogSource,
        reader: RowReader,
        performer: Performer,
        lines: Callable[[Shard], LineWork],
        change: ChangeEverywhere,
        replaying: Replaying,
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._reader = reader
        self._performer = performer
        self._lines = lines
        self._change = change
        self._replaying = replaying

    async def replay(self, actor: str, message_id: str, app: str, tag: str, reason: str) -> MessageView:
        """Send an acked message again to one subscriber. Returns: the replay. Raises ConsumptionClosed: it is not ACKED."""
        parsed = validation.message_id(message_id)
        receiver = self._receiver(parsed, app, tag)
        if receiver.is_removed:
            raise ConsumptionClosed("The subscription was removed, so nothing is sent to it again.")
        where = (parsed.shard, parsed.number, receiver.number)
        answer = await asyncio.to_thread(self._replaying.replay, actor, *where, validation.reason(reason))
        if isinstance(answer, TmcError):
            raise answer
        assert isinstance(answer, Stored)
        assert answer.message_id is not None
        found = await asyncio.to_thread(self._reader.message, parsed.shard, answer.message_id.number)
        if found is None:
            raise MessageGone
        return found

    async def act(
        self, kind: type[ByOperator], actor: str, message_id: str, app: str, tag: str, reason: str
    ) -> ConsumptionView:
        """Perform what an operator may do with one delivery.

        Raises ConsumptionClosed: to reactivate, it must be FAILED; to be delivered now, SCHEDULED with no attempt under way;
        to be cancelled, not ACKED.
        """
        parsed = validation.message_id(message_id)
        receiver = self._receiver(parsed, app, tag)
        if kind is not Cancel and receiver.is_removed:
            raise ConsumptionClosed("The subscription was removed: nothing is delivered to it any more.")
        operation = kind(
            shard=parsed.shard,
            app=THE_CENTER,
            number=parsed.number,
            subscription=receiver.number,
            actor=actor,
            reason=validation.reason(reason),
            origin=ORIGIN.get(),
        )
        (answer,) = await self._performer.perform([operation])
        if isinstance(answer, SubscriptionUnknown):
            raise SubscriptionUnknown(
                "There is no such delivery: `tmc admin get-message` shows the deliveries of a message."
            )
        if isinstance(answer, TmcError):
            raise answer
        assert isinstance(answer, Done)
        found = await asyncio.to_thread(self._reader.consumption, parsed.shard, parsed.number, answer.subscription)
        assert found is not None
        return found

    async def pause_topic(self, actor: str, name: str, paused: bool, reason: str) -> Topic:
        """Deliver nothing of it, or deliver again. Raises TopicUnknown."""
        topic = validation.topic(name, "name")
        made, effective_ms = await self._change(
            self._editor.pause_topic, actor, topic, paused, validation.reason(reason)
        )
        return replace(made, effective_ms=effective_ms)

    async def pause_subscription(
        self, actor: str, topic: str, app: str, tag: str, paused: bool, reason: str
    ) -> Subscription:
        """Deliver nothing to it, or deliver again. Raises TopicUnknown, AppUnknown, SubscriptionUnknown."""
        name = (validation.topic(topic), validation.app_id(app, "app"), validation.tag(tag))
        made, effective_ms = await self._change(
            self._editor.pause_subscription, actor, *name, paused, validation.reason(reason)
        )
        return replace(made, effective_ms=effective_ms)

    async def repair_order(self, actor: str, topic: str, app: str, tag: str, reason: str) -> Repaired:
        """Examine all lines of a subscription. Raises TopicUnknown, SubscriptionUnknown."""
        place = self._catalog.current.topic_named(validation.topic(topic))
        if not place.ordered:
            raise InvalidField("topic", f"be an ordered one: the messages of {topic} have no order keys")
        subscription = self._named(place, app, tag)
        subject = f"{topic} {app} {subscription.tag}"
        return await asyncio.to_thread(self._repair, place, subscription, actor, subject, validation.reason(reason))

    def _repair(self, topic: Topic, subscription: Subscription, actor: str, subject: str, reason: str) -> Repaired:
        total = Repaired(after=None)
        for shard in shards_of(topic.table_index, topic.spread):
            self._lines(shard).note(shard, actor, subject, reason)
            after: OrderHash | None = FIRST_LINE
            while after is not None:
                page = self._lines(shard).repair(shard, subscription.number, after, _LINES, wait=True)
                total, after = total + page, page.after
        return total

    def _receiver(self, message: MessageId, app: str, tag: str) -> Subscription:
        topic = self._catalog.current.topics.get(message.topic)
        if topic is None:
            raise SubscriptionUnknown.for_operators()
        return self._named(topic, app, tag)

    def _named(self, topic: Topic, app: str, tag: str) -> Subscription:
        named = validation.app_id(app, "app"), validation.tag(tag)
        return self._catalog.current.subscription_named(topic, *named)
