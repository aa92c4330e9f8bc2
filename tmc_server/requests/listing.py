"""Long answers, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tmc_server.domain.catalog import Catalog, Topic
from tmc_server.errors import InvalidField, TopicUnknown
from tmc_server.requests import validation

Row = TypeVar("Row")
_AFTER = ">"
_AT_ONCE = 200  # rows of which many may be left out


Covers = Callable[[str], bool]
"""Whether an operator may see a topic, by its name."""


def topics_seen(catalog: Catalog, name: str, covers: Covers) -> Sequence[Topic]:
    """The topic of this name, or all; without those that the operator may not see. Raises TopicUnknown, InvalidField."""
    if not name:
        return [each for each in catalog.topics.values() if covers(each.name)]
    found = catalog.topic_by_name.get(validation.topic(name))
    if found is None or not covers(name):
        raise TopicUnknown.for_operators(name)
    return [found]


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Row]):
    """One page of rows. next_token "": the last one."""

    rows: Sequence[Row]
    next_token: str


def listed(rows: Iterable[Row], key: Callable[[Row], str], page_size: int, page_token: str) -> Listing[Row]:
    """A page of what is in memory, in the order of its keys. Rows that come and go between two pages move no others.

    Raises InvalidField.
    """
    limit = validation.page_size(page_size)
    after = page_token.removeprefix(_AFTER)
    if page_token and (after == page_token or not after):
        raise InvalidField("page_token", "be one that the center gave you")
    ordered = sorted((row for row in rows if not after or key(row) > after), key=key)
    more = len(ordered) > limit
    return Listing(rows=ordered[:limit], next_token=f"{_AFTER}{key(ordered[limit - 1])}" if more else "")


def filled(read: Callable[[Row | None, int], Sequence[Row]], keep: Callable[[Row], bool], limit: int) -> Sequence[Row]:
    """Return the first `limit` rows that are kept. read: the next rows after a row, up to a limit; None: the first rows."""
    kept: list[Row] = []
    last: Row | None = None
    at_once = max(limit, _AT_ONCE)
    while len(kept) < limit:
        rows = read(last, at_once)
        kept += filter(keep, rows)
        if len(rows) < at_once:
            break
        last = rows[-1]
    return kept[:limit]


def in_order(number: int) -> str:
    """A key that sorts as the number does."""
    return f"{number:020d}"
