"""Engines for what is not written in a block: checks, resume, relays, cleaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.local.drivers import driver_of, plain

Source = sa.Engine | Callable[[], Any]
"""An engine, or a function that returns a new connection of a driver."""

_MADE: WeakSet[sa.Engine] = WeakSet()


def engine_of(source: Any, asked_by: str, *, pooled: bool = False) -> sa.Engine:
    """The blocking engine of this database. asked_by: a call, for the error message. Raises InvalidRequest.

    pooled: one that is made here keeps its connections until it is disposed of.
    """
    if isinstance(source, sa.Engine) and not source.dialect.is_async:
        return source
    if not callable(source) or isinstance(source, type) or driver_of(source) is not None:
        raise errors.InvalidRequest(
            f"{asked_by} takes a blocking engine of the business database, not {type(source).__name__}; or a function that "
            "returns a new connection of sqlite3, mysqlclient, PyMySQL or psycopg."
        )
    connection = source()
    driver = driver_of(connection)
    if driver is not None:
        connection.close()
    else:
        raise errors.InvalidRequest(
            f"{asked_by} takes a function that returns a new connection of sqlite3, mysqlclient, PyMySQL or psycopg: this one "
            f"returns {type(connection).__name__}."
        )
    # A connection of sqlite3 stays in its thread.
    pool = sa.QueuePool if pooled and driver.name != "sqlite3" else sa.NullPool
    engine = driver.engine(lambda: plain(source()), poolclass=pool)
    _MADE.add(engine)
    return engine


def is_in_memory(engine: sa.Engine) -> bool:
    """Whether this is an SQLite database without a file: it has one connection."""
    if engine.dialect.name != "sqlite":
        return False
    if engine not in _MADE:
        return engine.url.database in (None, "", ":memory:")
    with engine.connect() as connection:
        return not connection.exec_driver_sql("PRAGMA database_list").all()[0][2]
