"""What stands where, over all shards: undecided messages, deliveries under way and failed ones, and the age of the oldest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tmc_server.domain.catalog import Catalog, Subscription, Topic
from tmc_server.domain.numbers import NO_SUBSCRIPTION, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import Flow, Standing, StandingReader, TrafficReader


@dataclass(frozen=True, kw_only=True)
class TopicOverview:
    """submitted_per_s: messages.

    deliveries: for each of its subscriptions that is active or has open deliveries, in the order of their numbers.
    """

    topic: Topic
    messages: Standing
    submitted_per_s: float
    deliveries: Sequence[DeliveryOverview]


@dataclass(frozen=True, kw_only=True)
class DeliveryOverview:
    """acked_per_s: deliveries."""

    subscription: Subscription
    standing: Standing
    acked_per_s: float


class Overviewing:
    """readers: of each database, with the shards that it holds now."""

    def __init__(
        self,
        catalog: CatalogSource,
        readers: Sequence[tuple[StandingReader, Callable[[], Sequence[Shard]]]],
        traffic: TrafficReader,
    ) -> None:
        self._catalog = catalog
        self._readers = readers
        self._traffic = traffic

    async def overview(self) -> tuple[int, Sequence[TopicOverview]]:
        """Returns: the time by a database's clock, and all topics in the order of their numbers. Raises StoreUnavailable."""
        return await asyncio.to_thread(self._overview)

    def _overview(self) -> tuple[int, Sequence[TopicOverview]]:
        catalog, now = self._catalog.current, 0
        totals: dict[tuple[int, SubscriptionNumber], Standing] = {}
        for reader, shards in self._readers:
            now, found = reader.count(shards())
            for standing in (each for standings in found.values() for each in standings):
                key = (standing.topic, standing.subscription)
                totals[key] = totals[key] + standing if key in totals else standing
        topics = sorted(catalog.topics.values(), key=lambda topic: topic.number)
        rates = self._traffic.per_second()
        return now, [_of_topic(catalog, topic, totals, rates) for topic in topics]


def _of_topic(
    catalog: Catalog,
    topic: Topic,
    totals: Mapping[tuple[int, SubscriptionNumber], Standing],
    rates: Mapping[Flow, float],
) -> TopicOverview:
    def total(subscription: SubscriptionNumber) -> Standing:
        return totals.get((topic.number, subscription), Standing(topic=topic.number, subscription=subscription))

    deliveries = [(each, total(each.number)) for each in catalog.subscriptions_of.get(topic.number, ())]
    return TopicOverview(
        topic=topic,
        messages=total(NO_SUBSCRIPTION),
        submitted_per_s=rates.get(Flow(topic.number, NO_SUBSCRIPTION), 0),
        deliveries=[
            DeliveryOverview(subscription=each, standing=found, acked_per_s=rates.get(Flow(0, each.number), 0))
            for each, found in deliveries
            if found.is_any or not each.is_removed
        ],
    )
