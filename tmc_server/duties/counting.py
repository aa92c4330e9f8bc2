"""Count undecided messages and unacked deliveries of each topic, for their limits; and open and failed rows, for the gauges.

Between counts the number is estimated from what this server stored and decided. The tables are counted when a topic
is first seen, whenever the estimate reaches half the limit, and on every thirtieth run in any case, since the
estimate misses answers whose caller had given up. Deliveries are not estimated: they are counted on every fifth run, and on
each from half the limit on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import Gauge

from tmc_server.domain.catalog import Catalog, Subscription, Topic
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.placement import shards_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import Standing, StandingReader
from tmc_server.metrics import METRICS

_COUNT_ALL_EVERY = 30
_COUNT_UNACKED_EVERY = 5
_ALERT_PERCENT = 80


class OpenCounter(Protocol):
    """Counts in the tables. Blocks."""

    def count(self, shards: Sequence[Shard], topic: int, limit: int) -> int:
        """Undecided messages."""

    def unacked(self, shards: Sequence[Shard], subscription: Subscription, limit: int) -> int:
        """Deliveries that are not acked, counted no further than the limit."""


class Counting:
    """requests.preparing.OpenGauge and the duty that corrects it. Topics by number.

    alert: called with a subscription of a topic that is near its limit of unacked deliveries, and a sentence.
    """

    def __init__(
        self, catalog: CatalogSource, counter: OpenCounter, alert: Callable[[SubscriptionNumber, str], None]
    ) -> None:
        self._catalog = catalog
        self._counter = counter
        self._alert = alert
        self._open: dict[int, int] = {}
        self._unacked: dict[int, int] = {}
        self._seen: set[int] = set()
        self._runs = 0

    def open(self, topic: int) -> int:
        return self._open.get(topic, 0)

    def unacked(self, topic: int) -> int:
        return self._unacked.get(topic, 0)

    def moved(self, topic: int, by: int) -> None:
        self._open[topic] = max(0, self._open.get(topic, 0) + by)

    def run_once(self) -> bool:
        """Count what needs counting. Returns False: nothing is left to do."""
        self._runs += 1
        if self._runs % _COUNT_ALL_EVERY == 0:
            self._seen.clear()
        catalog = self._catalog.current
        failure: Exception | None = None
        for topic in list(catalog.topics.values()):
            try:
                self._count_unacked(topic, catalog)
                self._count_open(topic)
            except Exception as exc:  # noqa: BLE001 - the topics in other databases first, then raised
                failure = failure or exc
        if failure is not None:
            raise failure
        return False

    def _count_open(self, topic: Topic) -> None:
        if topic.number in self._seen and self.open(topic.number) * 2 < topic.open_limit:
            return
        before = self.open(topic.number)
        shards = shards_of(topic.table_index, topic.spread)
        counted = self._counter.count(shards, topic.number, topic.open_limit + 1)
        # What was stored during the count may or may not be included: use the larger number.
        self._open[topic.number] = counted + max(0, self.open(topic.number) - before)
        self._seen.add(topic.number)

    def _count_unacked(self, topic: Topic, catalog: Catalog) -> None:
        limit, before = topic.unacked_limit, self.unacked(topic.number)
        if not limit:
            self._unacked.pop(topic.number, None)
            return
        is_known = topic.number in self._unacked
        if is_known and before * 2 < limit and self._runs % _COUNT_UNACKED_EVERY:
            return
        shards, total, is_told = shards_of(topic.table_index, topic.spread), 0, False
        for each in catalog.subscribers(topic.number):
            counted = self._counter.unacked(shards, each, limit - total)
            total += counted
            if total * 100 >= limit * _ALERT_PERCENT and not is_told:
                is_told = True
                of = "the limit of" if total >= limit else f"{total} of"
                self._alert(
                    each.number,
                    f"{of} {limit} deliveries of {topic.name} are not acked: scheduled, waiting, or failed, {counted} of those "
                    "counted to this subscription; at the limit, its producers are refused (unacked_limit)",
                )
            if total >= limit:
                break
        self._unacked[topic.number] = total


class Gauging:
    """Sets the gauges of states, ages and backlogs for the shards that this server holds; sum them over all servers.

    Shards that were empty last time are counted together, in about one statement; the others one by one until
    `budget_s` is used up. The next run continues from there.
    """

    def __init__(
        self,
        readers: Sequence[StandingReader],
        catalog: CatalogSource,
        budget_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = readers
        self._catalog = catalog
        self._budget_s = budget_s
        self._monotonic = monotonic
        self._found: dict[Shard, tuple[int, Sequence[Standing]]] = {}  # by shard: when, what
        self._shown: dict[tuple[Gauge, tuple[str, ...]], float] = {}

    def run_once(self) -> bool:
        """Count, and show. Returns False: nothing is left to do."""
        until = self._monotonic() + self._budget_s
        held: set[Shard] = set()
        failure: Exception | None = None
        for reader in self._readers:
            shards = reader.shards()
            held |= set(shards)
            try:
                self._count(reader, shards, until)
            except Exception as exc:  # noqa: BLE001 - the other databases first, then raised
                failure = failure or exc
        self._found = {shard: found for shard, found in self._found.items() if shard in held}
        self._show()
        if failure is not None:
            raise failure
        return False

    def _count(self, reader: StandingReader, shards: Sequence[Shard], until: float) -> None:
        empty = [
            shard for shard in shards if shard in self._found and not any(each.is_any for each in self._found[shard][1])
        ]
        others = sorted(set(shards) - set(empty), key=lambda shard: self._found.get(shard, (0,))[0])
        for turn in [empty, *([shard] for shard in others)]:
            if turn and self._monotonic() < until:
                now, found = reader.count(turn)
                self._found |= {shard: (now, found[shard]) for shard in turn}

    def _show(self) -> None:
        catalog = self._catalog.current
        shown: dict[tuple[Gauge, tuple[str, ...]], float] = {}

        def add(gauge: Gauge, labels: tuple[str, ...], value: float) -> None:
            shown[gauge, labels] = shown.get((gauge, labels), 0) + value

        for now, standings in self._found.values():
            for each in standings:
                topic, app = labels = METRICS.pair(catalog, each.topic, each.subscription)
                if each.subscription:
                    add(METRICS.deliveries_scheduled, labels, each.open)
                    add(METRICS.backlog, labels, each.late)
                    add(METRICS.deliveries_failed, labels, each.failed)
                    add(METRICS.deliveries_waiting, labels, each.waiting)
                else:
                    add(METRICS.messages_prepared, (topic,), each.open)
                    add(METRICS.messages_undecided, (topic,), each.late)
                    add(METRICS.messages_check_failed, (topic,), each.failed)
                for state, oldest_ms in zip(_states(each), _oldest(each), strict=True):
                    if oldest_ms is not None:
                        key = (METRICS.oldest_seconds, (state, topic, app))
                        shown[key] = max(shown.get(key, 0), (now - oldest_ms) / 1000)
        for (gauge, values), value in shown.items():
            gauge.labels(*values).set(value)
        for gauge, values in self._shown.keys() - shown.keys():
            gauge.remove(*values)
        self._shown = shown


def _states(standing: Standing) -> tuple[str, str, str]:
    if standing.subscription:
        return "scheduled", "backlog", "failed"
    return "prepared", "undecided", "check_failed"


def _oldest(standing: Standing) -> tuple[int | None, int | None, int | None]:
    return standing.oldest_open_ms, standing.oldest_late_ms, standing.oldest_failed_ms
