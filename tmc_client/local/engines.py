"""Engines for what is not written in a block: checks, resume, relays, cleaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event

from tmc_client import errors
from tmc_client.local.drivers import driver_of, plain

Source = sa.Engine | Callable[[], Any]
"""An engine, or a function that returns a new connection of a driver."""

_BUSY_MS = 1_000
_OF_TRANSACTIONS = ("isolation_level", "postgresql_readonly", "postgresql_deferrable")
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


def schemas_of(bind: sa.Engine | sa.Connection) -> Mapping[str | None, str | None] | None:
    """Return its `schema_translate_map`."""
    return bind.get_execution_options().get("schema_translate_map")


def in_schemas(engine: sa.Engine, schemas: Mapping[str | None, str | None] | None) -> sa.Engine:
    """The same engine with these schemas, for a second connection: programs give them to engines or to connections."""
    if not schemas or schemas == schemas_of(engine):
        return engine
    return _in_schemas(engine, frozenset(schemas.items()))


@lru_cache(maxsize=1_000)  # the same one for all transactions of a tenant: what is done in batches is so by engine
def _in_schemas(engine: sa.Engine, schemas: frozenset[tuple[str | None, str | None]]) -> sa.Engine:
    return engine.execution_options(schema_translate_map=dict(schemas))


def engine_beside(engine: sa.Engine, made: dict[sa.Pool, sa.Engine] | None = None) -> sa.Engine:
    """Return another engine of the same database, past its pool, in READ COMMITTED. The program's is unchanged.

    It has the program's options, e.g. its `schema_translate_map`, and what listens to its pool, but not what listens to it.
    made: those made so far, by the program's pool: engines of tenants that share a pool share the one beside it, too.
    """
    made = {} if made is None else made
    if engine.pool not in made:
        made[engine.pool] = _past_its_pool(engine)
    kept = {name: value for name, value in engine.get_execution_options().items() if name not in _OF_TRANSACTIONS}
    return made[engine.pool].execution_options(**kept) if kept else made[engine.pool]


def _past_its_pool(engine: sa.Engine) -> sa.Engine:
    is_sqlite = engine.dialect.name == "sqlite"
    isolation: dict[str, Any] = {} if is_sqlite else {"isolation_level": "READ COMMITTED"}
    own = _create(engine, pool=engine.pool.recreate(), **isolation)
    if is_sqlite:
        event.listen(own, "connect", _set_up_sqlite)
    return own


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # each statement is a transaction
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    cursor.close()


def _create(engine: sa.Engine, **options: Any) -> sa.Engine:
    """An address alone does not say which kind: psycopg is blocking and asyncio under one name."""
    if not engine.dialect.is_async:
        return sa.create_engine(engine.url, **options)
    from sqlalchemy.ext.asyncio import create_async_engine

    return create_async_engine(engine.url, **options).sync_engine


def shares_connections(engine: sa.Engine) -> bool:
    """Return whether all of this program's threads work with one connection: a second transaction would be the first one."""
    return isinstance(engine.pool, sa.StaticPool | sa.AssertionPool)


def is_in_memory(engine: sa.Engine) -> bool:
    """Return whether this is an SQLite database without a file: it has one connection."""
    if engine.dialect.name != "sqlite":
        return False
    if engine not in _MADE:
        return engine.url.database in (None, "", ":memory:")
    with engine.connect() as connection:
        return not connection.exec_driver_sql("PRAGMA database_list").all()[0][2]
