"""What a metric says, read the way a scraper reads it."""

from __future__ import annotations

from typing import Any


def value(metric: Any, *labels: str) -> float:
    """Of the series with these label values; 0 before it was touched."""
    for family in metric.collect():
        for sample in family.samples:
            if tuple(sample.labels.values()) == labels and not sample.name.endswith("_created"):
                return float(sample.value)
    return 0.0


def series(metric: Any) -> set[tuple[str, ...]]:
    """The label values of all series."""
    return {tuple(sample.labels.values()) for family in metric.collect() for sample in family.samples}
