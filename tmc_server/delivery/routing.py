"""One outlet made of several: consumers' copies go to the queues or streams, forwarded ones to their forwarder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy, Outlet


class RoutingOutlet:
    """domain.ports.delivery.Outlet. forwarders: by kind. A kind that this server cannot do gets no room: its rows wait.

    So do those of paused topics and subscriptions.

    on_missing: called with a subscription whose rows are due, and the kind of forwarder that is missing.
    unstored: messages whose last copy has an outcome that is not stored yet.
    """

    def __init__(
        self,
        catalog: CatalogSource,
        consumers: Outlet,
        forwarders: Mapping[str, Outlet],
        on_missing: Callable[[SubscriptionNumber, str], None],
        unstored: Callable[[SubscriptionNumber], frozenset[tuple[Shard, MessageNumber]]] = lambda _: frozenset(),
    ) -> None:
        self._catalog = catalog
        self._consumers = consumers
        self._forwarders = forwarders
        self._on_missing = on_missing
        self._unstored = unstored

    def _outlet(self, subscription: SubscriptionNumber) -> Outlet | None:
        forward = self._catalog.current.subscriptions[subscription].forward
        return self._consumers if forward is None else self._forwarders.get(forward.kind)

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        if self._catalog.current.is_paused(subscription):
            return 0
        outlet = self._outlet(subscription)
        return outlet.reserve(subscription, wanted) if outlet is not None else 0

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        outlet = self._outlet(subscription)
        if outlet is not None:
            outlet.release(subscription, count)

    def deliver(self, copies: Sequence[Copy]) -> None:
        by_outlet: dict[int, tuple[Outlet, list[Copy]]] = {}
        for copy in copies:
            outlet = self._outlet(copy.subscription)
            assert outlet is not None, "only what had room is delivered"
            by_outlet.setdefault(id(outlet), (outlet, []))[1].append(copy)
        for outlet, part in by_outlet.values():
            outlet.deliver(part)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        outlet = self._outlet(subscription)
        if outlet is not None:
            outlet.drained_until(subscription, tried_ms)

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        """Look on behalf of the duty that holds the shard, and report a forwarder that is missing.

        Nothing goes to a subscription that was removed: its rows are cancelled, whatever its outlet says.
        """
        if self._catalog.current.subscriptions[subscription].is_removed:
            return QueueLook()
        if self._outlet(subscription) is None and not self._catalog.current.is_paused(subscription):
            forward = self._catalog.current.subscriptions[subscription].forward
            assert forward is not None, "only forwarders can be missing"
            self._on_missing(subscription, forward.kind)
        return self.look_only(subscription)

    def look_only(self, subscription: SubscriptionNumber) -> QueueLook | None:
        """Look without reporting anything."""
        if self._catalog.current.is_paused(subscription):
            return None
        outlet = self._outlet(subscription)
        look = outlet.look(subscription) if outlet is not None else None
        # Looked at in this order: a copy that is answered in between is in one of them.
        unstored = self._unstored(subscription)
        return look if look is None or not unstored else replace(look, unwritten=look.unwritten | unstored)
