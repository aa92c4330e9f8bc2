"""Which deliveries a bulk job acts on, read in pages without locks. A page's size is a bound on the rows that are read.

What FAILED is found in the table of failures; other deliveries by the numbers of their messages, which carry the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.bulk import Place, Selection
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import MessageNumber
from tmc_server.store.tables import failed, shard_tables

BEFORE_ALL = MessageNumber(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Selected messages, ascending. after: where the next page begins; None: there is none."""

    numbers: list[MessageNumber]
    after: MessageNumber | None


def page_of(connection: sa.Connection, selection: Selection, place: Place, after: MessageNumber, rows: int) -> Page:
    """The next page of one subscription in one shard. rows: that are read at most."""
    is_failed = selection.state is ConsumptionState.FAILED
    query = _failures(selection, place) if is_failed else _deliveries(selection, place)
    number = query.selected_columns[0]
    query = query.where(number > after, number >= first_number(selection.from_ms))
    if selection.to_ms:
        query = query.where(number < first_number(selection.to_ms))
    found = connection.execute(query.order_by(number).limit(rows)).fetchall()
    last = MessageNumber(found[-1][0]) if len(found) == rows else None
    return Page(numbers=[MessageNumber(row[0]) for row in found if row[1]], after=last)


def _failures(selection: Selection, place: Place) -> sa.Select[Any]:
    matches = failed.c.failed_ms <= selection.as_of_ms
    if selection.fingerprint:
        matches = sa.and_(matches, failed.c.fingerprint == selection.fingerprint)
    return sa.select(failed.c.message_id, matches).where(
        failed.c.shard == place.shard,
        failed.c.topic_no == place.topic,
        failed.c.subscription_no == place.subscription,
    )


def _deliveries(selection: Selection, place: Place) -> sa.Select[Any]:
    consumption = shard_tables(place.shard).consumption
    since_ms = consumption.c.closed_ms if selection.state is ConsumptionState.ACKED else consumption.c.created_ms
    matches = sa.and_(consumption.c.state == int(selection.state), since_ms <= selection.as_of_ms)
    return sa.select(consumption.c.message_id, matches).where(consumption.c.subscription_no == place.subscription)
