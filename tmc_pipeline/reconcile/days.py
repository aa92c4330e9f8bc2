"""Sums over the notes of settled messages, by source and by the day of the Prepare: whether any of them changed since.

A run keeps them. The next one has the databases make the same sums, which reads no row into Spark, and compares again from the
first day that differs: a row that was added, deleted or changed is found whatever its own time says. The sums are of hashes,
so they can be added and subtracted: messages that were open have their notes taken out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.reconcile.outlines import made_ms, noted_number
from tmc_server.domain.ids import EPOCH_MS

DAY_MS = 86_400_000
Sum = tuple[int, int]  # rows, and the sum of their marks
_NONE: Sum = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Days:
    """sums: by source (a key of ledgers.key_of), and day. from_ms: messages prepared earlier were never compared."""

    sums: Mapping[str, Mapping[int, Sum]] = field(default_factory=dict)
    from_ms: int = EPOCH_MS

    def plus(self, other: Mapping[str, Mapping[int, Sum]], sign: int = 1) -> Days:
        """Add sums, or take them away."""
        merged: dict[str, dict[int, Sum]] = {source: dict(days) for source, days in self.sums.items()}
        for source, days in other.items():
            mine = merged.setdefault(source, {})
            for day, (rows, marks) in days.items():
                before = mine.get(day, _NONE)
                mine[day] = (before[0] + sign * rows, before[1] + sign * marks)
        return Days(sums=merged, from_ms=self.from_ms)

    def before(self, ms: int) -> Days:
        """Return those of days that ended by then."""
        kept = {
            source: {day: each for day, each in days.items() if (day + 1) * DAY_MS <= ms}
            for source, days in self.sums.items()
        }
        return Days(sums=kept, from_ms=self.from_ms)

    def news(self, now: Days, cleaned_ms: Mapping[str, int]) -> int | None:
        """Return when the first day begins on which a source has other notes than it had; None: all are as they were.

        cleaned_ms: by source: fewer rows about messages that were prepared earlier are no news.
        """
        changed = []
        for source, days in now.sums.items():
            known = self.sums.get(source, {})
            for day in days.keys() | known.keys():
                here, then = days.get(day, _NONE), known.get(day, _NONE)
                was_cleaned = day * DAY_MS <= cleaned_ms.get(source, 0) and here[0] < then[0]
                if here != then and not was_cleaned and (day + 1) * DAY_MS > self.from_ms:
                    changed.append(day * DAY_MS)
        return min(changed, default=None)

    def to_json(self) -> str:
        return json.dumps({"from_ms": self.from_ms, "sums": self.sums})

    @classmethod
    def from_json(cls, text: str) -> Days:
        found = json.loads(text)
        sums = {
            source: {int(day): (int(each[0]), int(each[1])) for day, each in days.items()}
            for source, days in found["sums"].items()
        }
        return cls(sums=sums, from_ms=int(found["from_ms"]))


def days_of(noted: DataFrame) -> Mapping[str, Mapping[int, Sum]]:
    """NOTED -> sums of its marks; rows without a message id are left out."""
    day = f.floor(made_ms(noted_number("message_id")) / DAY_MS)
    rows = (
        noted.where(f.col("message_id").isNotNull())
        .groupBy("source_key", day.alias("day"))
        .agg(f.count(f.lit(1)).alias("rows"), f.sum("mark").alias("marks"))
        .collect()
    )
    found: dict[str, dict[int, Sum]] = defaultdict(dict)
    for row in rows:
        found[row.source_key][int(row.day)] = (int(row["rows"]), int(row.marks))
    return found
