"""Keep an eye on how many messages of each topic are undecided, for the topics' open limits.

Between counts the number is estimated from what this server stored and decided. The tables are counted at the first
sight of a topic, whenever the estimate passes half the limit, and every thirtieth run in any case: an answer that nobody
waited for any more is missing in the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tmc_server.domain.placement import shards_of
from tmc_server.domain.ports import CatalogSource

_COUNT_ALL_EVERY = 30


class OpenCounter(Protocol):
    """Counts in the tables. Blocks."""

    def count(self, shards: Sequence[int], topic: int, limit: int) -> int: ...


class Counting:
    """requests.preparing.OpenGauge and the duty that corrects it. Topics by number."""

    def __init__(self, catalog: CatalogSource, counter: OpenCounter) -> None:
        self._catalog = catalog
        self._counter = counter
        self._open: dict[int, int] = {}
        self._seen: set[int] = set()
        self._runs = 0

    def open(self, topic: int) -> int:
        return self._open.get(topic, 0)

    def moved(self, topic: int, by: int) -> None:
        self._open[topic] = max(0, self._open.get(topic, 0) + by)

    def run_once(self) -> bool:
        """Count what needs counting. Returns False: nothing is left to do."""
        self._runs += 1
        if self._runs % _COUNT_ALL_EVERY == 0:
            self._seen.clear()
        for topic in list(self._catalog.current.topics.values()):
            if topic.number in self._seen and self.open(topic.number) * 2 < topic.open_limit:
                continue
            before = self.open(topic.number)
            shards = shards_of(topic.table_index, topic.spread)
            counted = self._counter.count(shards, topic.number, topic.open_limit + 1)
            # What was stored while we counted may or may not be in the count: keep the larger truth.
            self._open[topic.number] = counted + max(0, self.open(topic.number) - before)
            self._seen.add(topic.number)
        return False
