"""Which deliveries a bulk job acts on, read in pages without locks.

A page reads a bounded number of rows, however few of them match. What FAILED is found in the table of failures; other
deliveries by the numbers of their messages, which carry the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tmc_server.domain.bulk import Place, Selection
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import MessageNumber
from tmc_server.store.sql import by_primary
from tmc_server.store.tables import failed, shard_tables

BEFORE_ALL = MessageNumber(-1)
_LAST = MessageNumber((1 << 63) - 1)
_ROWS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Selected messages, ascending. after: where the next page begins; None: there is none."""

    numbers: Sequence[MessageNumber]
    after: MessageNumber | None

    def cut(self, numbers: Sequence[MessageNumber]) -> Page:
        """Keep only the first of them; the others are in the next page."""
        return self if len(numbers) == len(self.numbers) else Page(numbers=numbers, after=numbers[-1])


def page_of(
    connection: sa.Connection,
    selection: Selection,
    place: Place,
    after: MessageNumber,
    *,
    most: int,
    now: int,
    rows: int = _ROWS,
) -> Page:
    """The next page of one subscription in one shard. most: matches.  rows: that are read for it.  now: milliseconds."""
    after = MessageNumber(max(after, first_number(selection.from_ms) - 1))
    end = first_number(selection.to_ms) - 1 if selection.to_ms else _LAST
    if selection.state is ConsumptionState.FAILED:
        found, last = _failures(connection, selection, place, (after, end), rows)
    else:
        found, last = _deliveries(connection, selection, place, (after, end), rows, now)
    page = Page(numbers=found, after=last)
    return page.cut(found[:most])


_Window = tuple[int, int]
"""Message numbers: greater than the first, up to the second."""


def _failures(
    connection: sa.Connection, selection: Selection, place: Place, window: _Window, rows: int
) -> tuple[list[MessageNumber], MessageNumber | None]:
    query = (
        sa.select(failed.c.message_id, failed.c.failed_ms, failed.c.fingerprint)
        .where(
            failed.c.shard == place.shard,
            failed.c.topic_no == place.topic,
            failed.c.subscription_no == place.subscription,
            failed.c.message_id > window[0],
            failed.c.message_id <= window[1],
        )
        .order_by(failed.c.message_id)
        .limit(rows)
    )
    found = connection.execute(query).fetchall()
    numbers = [
        MessageNumber(row.message_id)
        for row in found
        if row.failed_ms <= selection.as_of_ms and selection.fingerprint in ("", row.fingerprint)
    ]
    return numbers, MessageNumber(found[-1].message_id) if len(found) == rows else None


def _deliveries(
    connection: sa.Connection, selection: Selection, place: Place, window: _Window, rows: int, now: int
) -> tuple[list[MessageNumber], MessageNumber | None]:
    """The table has the rows of all subscriptions of the shard: first the window's end is found, then what is in it."""
    consumption = shard_tables(place.shard).consumption
    number = consumption.c.message_id
    nth = sa.select(number).where(number > window[0], number <= window[1]).order_by(number).offset(rows - 1).limit(1)
    last = connection.execute(by_primary(nth, consumption)).scalar()
    matching = (
        sa.select(number)
        .where(
            number > window[0],
            number <= (window[1] if last is None else last),
            consumption.c.subscription_no == place.subscription,
            consumption.c.state == int(selection.state),
            _is_old_enough(consumption, selection, now),
        )
        .order_by(number)
    )
    found = connection.execute(by_primary(matching, consumption)).scalars()
    return [MessageNumber(each) for each in found], None if last is None else MessageNumber(last)


def _is_old_enough(consumption: sa.Table, selection: Selection, now: int) -> sa.ColumnElement[bool]:
    """Return whether a row has been in its state since the dry run. A delayed one has: its budget begins in the future."""
    match selection.state:
        case ConsumptionState.ACKED:
            return consumption.c.closed_ms <= selection.as_of_ms
        case ConsumptionState.SCHEDULED:
            created = consumption.c.created_ms <= selection.as_of_ms
            since_ms = sa.func.coalesce(consumption.c.since_ms, consumption.c.created_ms)
            return sa.and_(created, sa.or_(since_ms <= selection.as_of_ms, since_ms > now))
        case _:
            return consumption.c.created_ms <= selection.as_of_ms
