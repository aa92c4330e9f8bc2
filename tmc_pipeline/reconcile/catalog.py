"""The center's catalog for a comparison: names and subscriptions as small tables, and whose notes are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tmc_pipeline.archive.contents import subscriber_names
from tmc_pipeline.center import Names
from tmc_pipeline.frames import small_table
from tmc_pipeline.reconcile.verdicts import Audited
from tmc_server.domain.manifest import Chain

_SWITCH_MS = 60_000  # this close to the start or end of a subscription, a server may have used either state
_NEVER_MS = (1 << 63) - 1
_BITS = 62  # of a positive bigint

TOPICS = (
    "topic_no int, topic string, subscriptions array<struct<subscription_no: int, subscriber: string, from_ms: bigint,"
    " to_ms: bigint, complete_ms: bigint, bit: bigint>>"
)
APPS = "producer_no int, producer string, complete_ms bigint, sdk boolean, noted_app string"
SUBSCRIBERS = (
    "subscription_no int, subscriber string, subscribed string, live_ms bigint, not_after_ms bigint,"
    " cancel_spans array<struct<shard: int, from_ms: bigint, to_ms: bigint>>, in_order boolean"
)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Small tables, one row per topic, app and subscription.

    topics: TOPICS. from_ms, to_ms: a message of the topic that is decided in between is due to the subscription; complete_ms:
    since when its subscriber's notes are complete, null: they are not read; bit: the subscriber's own in this topic, 0: none.
    apps: APPS. complete_ms: as above; sdk: its notes are the SDK's ledger; noted_app: what its notes name as their app, or null.
    subscribers: SUBSCRIBERS. subscribed: the topic's name; live_ms: in effect since then and never removed, null: removed;
    not_after_ms: a message that is decided later is not due to it, null: it was not removed;
    cancel_spans: of Cancellations; in_order: of Names.
    names, bits: of topics and of their subscribers, by the topic's number.
    """

    topics: DataFrame
    apps: DataFrame
    subscribers: DataFrame
    names: Mapping[int, str]
    bits: Mapping[int, Sequence[str]]

    def matching(self, rows: Iterable[Any]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
        """Return how many messages match, by topic, and how many noted deliveries they have, by topic and subscriber.

        rows: of matching.matched.  A subscriber whose deliveries are all older than its notes has 0.
        """
        messages: Counter[str] = Counter()
        deliveries: Counter[tuple[str, str]] = Counter()
        for row in rows:
            topic = self.names[row.topic_no]
            messages[topic] += row.messages
            for place, subscriber in enumerate(self.bits[row.topic_no]):
                if row.audited >> place & 1:
                    deliveries[topic, subscriber] += row.messages * (row.noting >> place & 1)
        return messages, deliveries


def catalog_of(
    spark: SparkSession,
    names: Names,
    archived: Chain,
    audited: Audited,
    noted_apps: Mapping[str, str | None],
    cancel_spans: Mapping[int, Sequence[Mapping[str, int]]],
    clocks_apart_ms: int = 0,
) -> Catalog:
    """archived: its names are used where the catalog no longer has them.  noted_apps: by producer whose notes are read.

    clocks_apart_ms: of the databases: that of the catalog dates subscriptions, those of the shards what is submitted.
    """
    switch_ms = _SWITCH_MS + clocks_apart_ms
    topics: dict[int, list[dict[str, Any]]] = {number: [] for number in names.topics}
    bits: dict[int, list[str]] = {number: [] for number in names.topics}
    live: dict[int, int] = {}
    live_first = sorted(names.lives.items(), key=lambda each: each[1].to_ms is not None)  # so they get the bits
    for number, life in live_first:
        topic, subscriber, _ = names.subscriptions[number]
        known = bits.setdefault(life.topic_no, [])
        if subscriber not in known and len(known) < _BITS:
            known.append(subscriber)
        topics.setdefault(life.topic_no, []).append(
            {
                "subscription_no": number,
                "subscriber": subscriber,
                "from_ms": life.from_ms + (switch_ms if life.from_ms else 0),
                "to_ms": _NEVER_MS if life.to_ms is None else life.to_ms - switch_ms,
                "complete_ms": audited.noted_since_ms(topic, subscriber),
                "bit": 1 << known.index(subscriber) if subscriber in known else 0,
            }
        )
        if life.to_ms is None:
            live[number] = life.from_ms
    subscribers = {number: (subscriber, topic) for number, (topic, subscriber) in subscriber_names(archived).items()}
    subscribers |= {number: (subscriber, topic) for number, (topic, subscriber, _) in names.subscriptions.items()}
    apps = [
        (number, name, audited.producers.get(name), name in audited.sdk_ledgers, noted_apps.get(name))
        for number, name in names.apps.items()
    ]
    named = {number: names.topics.get(number, f"topic-{number}") for number in topics}
    return Catalog(
        topics=small_table(spark, [(number, named[number], each) for number, each in topics.items()], TOPICS),
        apps=small_table(spark, apps, APPS),
        subscribers=small_table(
            spark,
            [
                (
                    number,
                    *each,
                    live.get(number),
                    _not_after_ms(names, number, switch_ms),
                    cancel_spans.get(number, ()),
                    number in names.in_order,
                )
                for number, each in subscribers.items()
            ],
            SUBSCRIBERS,
        ),
        names=named,
        bits=bits,
    )


def _not_after_ms(names: Names, subscription: int, switch_ms: int) -> int | None:
    """Return when it was removed, with what servers may differ by."""
    life = names.lives.get(subscription)
    return None if life is None or life.to_ms is None else life.to_ms + switch_ms
