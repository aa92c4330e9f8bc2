"""Pools of connections to a database server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

POOL: dict[str, Any] = {
    "max_overflow": 8,
    "pool_use_lifo": True,  # the duties' connection stays warm, the others may rest
    "pool_recycle": 1800,
    "query_cache_size": 2000,
}
"""Options of every engine over a server."""
_REST_S = 1.0  # a connection that was idle for longer is tested before it is used


def transactions_and_reads(make: Callable[..., sa.Engine]) -> tuple[sa.Engine, sa.Engine]:
    """Make the two engines of a database, see Dialect.engines. make: gets options of `create_engine`."""
    return (
        make(isolation_level="READ COMMITTED"),
        # Single statements need no transaction: nothing has to be rolled back when such a connection is put away.
        make(isolation_level="AUTOCOMMIT", pool_reset_on_return=None),
    )


@contextmanager
def reading_transaction(connection: sa.Connection, *begin: str) -> Iterator[None]:
    """Run these statements, which begin a transaction on a connection of the second engine, and commit at the end."""
    for statement in begin:
        connection.exec_driver_sql(statement)
    try:
        yield
    except BaseException:  # a cancelled thread, too: these connections are put away without a rollback
        connection.invalidate()
        raise
    connection.exec_driver_sql("COMMIT")


def test_after_rest(engine: sa.Engine, ping: Callable[[Any], object]) -> None:
    """Find out that the server went away while a connection was idle; the pool then makes a new one.

    ping: raises if the driver's connection is lost.
    """

    def note_use(_connection: Any, record: sa.pool.ConnectionPoolEntry) -> None:
        record.info["used"] = time.monotonic()

    def test(connection: Any, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
        if time.monotonic() - record.info.get("used", time.monotonic()) > _REST_S:
            try:
                ping(connection)
            except Exception as exc:
                raise sa.exc.DisconnectionError from exc

    event.listen(engine, "checkin", note_use)
    event.listen(engine, "checkout", test)
