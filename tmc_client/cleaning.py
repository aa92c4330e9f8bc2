"""Deletes old rows of our tables in the users' databases, a page per transaction, so that nobody who writes waits long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tmc_client.local.engines import Source, engine_of
from tmc_client.producing.producer import duration
from tmc_client.tables import inbox, inbox_horizon, inbox_order, ledger, ledger_info, raise_if_lacking

if TYPE_CHECKING:
    from tmc_client.center import Center

MINIMUM_AGE = timedelta(days=7)
_PAGE = 1_000


def clean_ledger(engine: Source, older_than: timedelta, page: int = _PAGE, *, center: Center | None = None) -> int:
    """Delete settled rows older than `older_than`, at least a week; checks of missing older messages become TOO_OLD.

    center: asked first, in pages, about rows that nobody has marked as settled, e.g. of processes that were killed.
    Returns: the number of rows. Raises ValueError for an age at which checks, retries or replays may still come.
    """
    before_ms = _before_ms(older_than, "the ledger", "checks and repeats may come late")
    if center is not None:
        center.resume(engine)
    engine = engine_of(engine, "tmc.clean_ledger()")
    with engine.begin() as connection:  # before the first delete: a check meanwhile must not see it as missing
        connection.execute(
            ledger_info.update().where(ledger_info.c.horizon_ms < before_ms).values(horizon_ms=before_ms)
        )
    old = (ledger.c.settled_ms < before_ms, ledger.c.created_ms < before_ms)
    return delete_pages(engine.begin, ledger.c.message_id, *old, page=page)


def clean_inbox(engine: Source, older_than: timedelta) -> int:
    """Delete rows of effects that happened longer ago than `older_than`, at least a week. Returns: how many.

    Keep them for longer than the center keeps messages: a copy that comes after its row is gone has a second effect.
    Records how far it went, so that a reconciliation does not miss these effects.
    engine: or a function that returns a new connection of a driver. Raises ValueError for an age at which copies still come;
    InvalidRequest: a table is missing.
    """
    before_ms = _before_ms(older_than, "the inbox", "a copy that comes later has a second effect")
    engine = engine_of(engine, "tmc.clean_inbox()")
    with engine.connect() as connection:
        subscribers = connection.execute(sa.select(inbox.c.subscriber).distinct()).scalars().all()
    for subscriber in subscribers:  # before the first delete: nobody may see a row as missing
        _move_horizon(engine, subscriber, before_ms)
    removed = delete_pages(engine.begin, inbox_order.c.line, inbox_order.c.changed_ms < before_ms, walks=True)
    for subscriber in subscribers:
        old, of = inbox.c.received_ms < before_ms, [inbox.c.subscriber == subscriber]
        removed += delete_pages(engine.begin, inbox.c.message_id, old, of=of, walks=True)
    return removed


def _move_horizon(engine: sa.Engine, subscriber: str, before_ms: int) -> None:
    """Two that clean at the same time may both insert the first row: the second one finds it then."""
    mine = inbox_horizon.c.subscriber == subscriber
    move = inbox_horizon.update().where(mine, inbox_horizon.c.horizon_ms < before_ms).values(horizon_ms=before_ms)
    try:
        with engine.begin() as connection:
            if connection.execute(sa.select(inbox_horizon.c.horizon_ms).where(mine)).one_or_none() is None:
                connection.execute(inbox_horizon.insert().values(subscriber=subscriber, horizon_ms=before_ms))
                return
            connection.execute(move)
    except sa.exc.IntegrityError:
        with engine.begin() as connection:
            connection.execute(move)
    except sa.exc.SQLAlchemyError as exc:
        raise_if_lacking(exc, engine, inbox_horizon)
        raise


def delete_pages(
    begin: Callable[[], AbstractContextManager[sa.Connection]],
    key: sa.Column[Any],
    *old: sa.ColumnElement[bool],
    of: Sequence[sa.ColumnElement[bool]] = (),
    page: int = _PAGE,
    walks: bool = False,
) -> int:
    """Delete the rows that are old, each by its key. Returns: how many.

    key, of: a column, and values of others, which together are the primary key.  walks: in the order of the key, since no
    index leads to what is old: each row is looked at once.
    """
    # Row by row: on MariaDB, a DELETE of many keys scans a small table, and would wait for every row that is being written.
    one = sa.delete(key.table).where(*of, key == sa.bindparam("key_of_row"))
    removed, last = 0, None
    while True:
        query = sa.select(key).where(*of, *old).limit(page)
        if walks:
            query = query.order_by(key) if last is None else query.order_by(key).where(key > last)
        with begin() as connection:
            keys = connection.execute(query).scalars().all()
            if keys:
                connection.execute(one, [{"key_of_row": each} for each in keys])
        removed += len(keys)
        if len(keys) < page:
            return removed
        last = keys[-1]


def _before_ms(older_than: timedelta, what: str, why: str) -> int:
    """Raises ValueError: it is too young."""
    if duration("older_than", older_than) < MINIMUM_AGE:
        raise ValueError(f"keep {what} for {MINIMUM_AGE.days} days at least: {why}")
    return time.time_ns() // 1_000_000 - round(older_than.total_seconds() * 1000)
