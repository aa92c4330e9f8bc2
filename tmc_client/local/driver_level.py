"""Our statements on the driver's connection behind one of SQLAlchemy, which needs longer for a statement than the database.

Errors are SQLAlchemy's all the same, and a lost connection is invalidated. Its events and its log do not see these statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tmc_client.local.drivers import Driver, driver_of
from tmc_client.local.statements import Found


def driver_behind(connection: sa.Connection) -> Driver | None:
    """None: SQLAlchemy has to run our statements: it changes their schema, or only it knows the driver."""
    if connection.get_execution_options().get("schema_translate_map"):
        return None
    return driver_of(connection.connection.dbapi_connection)


def execute(connection: sa.Connection, text: str, values: Sequence[Any] = (), *, first: str = "") -> Found:
    """first: a statement that is sent before it, with it if the driver can. Raises sqlalchemy.exc.DBAPIError."""
    module: Any = connection.dialect.loaded_dbapi
    raw: Any = connection.connection
    if first and not _takes_several(connection):
        execute(connection, first)
        first = ""
    try:
        cursor = raw.cursor()
        try:
            if first:
                cursor.execute(f"{first}; {text}", values)
                cursor.nextset()
            else:
                cursor.execute(text, values)
            return Found(cursor)
        except BaseException:
            cursor.close()
            raise
    except module.Error as exc:
        lost = connection.dialect.is_disconnect(exc, raw.dbapi_connection, None)
        if lost:
            connection.invalidate(exc)
        raise sa.exc.DBAPIError.instance(
            text,
            list(values),
            exc,
            module.Error,
            hide_parameters=connection.engine.hide_parameters,
            connection_invalidated=lost,
            dialect=connection.dialect,
        ) from exc


def _takes_several(connection: sa.Connection) -> bool:
    raw = connection.connection.dbapi_connection
    driver = driver_of(raw)
    return driver is not None and driver.takes_several(raw)
