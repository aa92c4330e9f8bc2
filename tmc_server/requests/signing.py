"""Keys that sign copies, shown to the subscription's own app and to operators; and reports of what consumers refused."""

from __future__ import annotations

from collections.abc import Callable

from tmc_server.domain.catalog import Catalog, DeliveryKeys, Subscription
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogEditor, CatalogSource, ChangeEverywhere
from tmc_server.errors import InvalidField, SubscriptionUnknown
from tmc_server.metrics import METRICS
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller

RaiseAlert = Callable[[str, SubscriptionNumber, str, int], None]
"""(kind, subscription, detail, minutes): tell the owner of a subscription, once in that time."""

_MOST_COPIES = 2**53
_MESSAGE_ID_CHARACTERS = 100
_ALERT_MINUTES = 10


class Signing:
    """change: stores a change of the catalog and waits until it counts everywhere. enabled: this center signs copies."""

    def __init__(
        self,
        editor: CatalogEditor,
        catalog: CatalogSource,
        change: ChangeEverywhere,
        raise_alert: RaiseAlert,
        enabled: bool,
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._change = change
        self._raise_alert = raise_alert
        self.enabled = enabled

    @property
    def _current(self) -> Catalog:
        return self._catalog.current

    def own_subscriptions(self, caller: Caller) -> list[Subscription]:
        """The subscriptions of the caller's app and tag."""
        catalog = self._current
        return [
            subscription
            for subscription in catalog.subscriptions.values()
            if subscription.app == caller.app.number
            and subscription.removed_ms is None
            and subscription.forward is None
            and subscription.tag == (caller.tag or catalog.topics[subscription.topic].default_tag)
        ]

    def report(self, caller: Caller, topic: str, count: int, message_id: str) -> None:
        """Count refused copies. No message changes; if the caller does not consume the topic, there is no alert."""
        validation.line(message_id, "message_id", _MESSAGE_ID_CHARACTERS)
        validation.between(count, "count", 1, _MOST_COPIES)
        found = next(
            (each for each in self.own_subscriptions(caller) if self._current.topics[each.topic].name == topic), None
        )
        METRICS.forged.labels(topic if found is not None else "", caller.app.id).inc(count)
        if found is not None:
            detail = f"{count} copies that this center did not sign were refused; one claims to be message {message_id}"
            self._raise_alert("forged copies", found.number, detail, _ALERT_MINUTES)

    async def keys(self, actor: str, topic: str, app: str, tag: str) -> DeliveryKeys:
        """Return the keys of any subscription, forwarding ones too. Audited.

        Raises SubscriptionUnknown, InvalidField: an unsigned topic.
        """
        number = self._number(topic, app, tag)
        await self._change(self._editor.show_delivery_keys, actor, number)
        return self._keys_of(number)

    async def rotate(self, actor: str, topic: str, app: str, tag: str, drop_previous: bool) -> DeliveryKeys:
        """Sign with a new key, once every server announces it: no consumer meets a key that it cannot fetch.

        Raises SubscriptionUnknown, RotationOpen; InvalidField: its topic is unsigned.
        """
        number = self._number(topic, app, tag)
        announced, _ = await self._change(self._editor.announce_delivery_key, actor, topic, app, tag, drop_previous)
        assert announced.keys is not None
        assert announced.keys.other is not None
        await self._change(self._editor.sign_with, actor, announced.number, announced.keys.other)
        return self._keys_of(number)

    def _number(self, topic: str, app: str, tag: str) -> SubscriptionNumber:
        validation.topic(topic)
        validation.app_id(app, "app")
        validation.tag(tag)
        place = self._current.topic_by_name.get(topic)
        found = self._current.subscription_named(place, app, tag) if place is not None else None
        if place is None or found is None or found.is_removed:
            raise SubscriptionUnknown.for_operators()
        if not place.signed:
            raise InvalidField("topic", "be one whose copies are signed: this one was registered as unsigned")
        return found.number

    def _keys_of(self, number: SubscriptionNumber) -> DeliveryKeys:
        keys = self._current.subscriptions[number].keys
        if keys is None:
            raise SubscriptionUnknown("This subscription was removed meanwhile.")
        return keys
