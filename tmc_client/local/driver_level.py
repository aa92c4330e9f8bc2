"""Our statements as text through an SQLAlchemy connection: its expressions take longer to run than the database needs.

Its events, its log and its errors are those of any statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_client.local.drivers import Driver, driver_of

_SEVERAL = "tmc_several"  # an execution option: the text has two statements, and the second one's result counts
_ON_THE_WAY = "tmc_on_the_way"  # on a context: the second result was asked for
_LEAVES = "tmc_leaves_statements"


def leaves_statements(listener: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a listener to before_execute that text need not pass."""
    setattr(listener, _LEAVES, True)
    return listener


def driver_behind(connection: sa.Connection) -> Driver | None:
    """Return the driver;
    None if our statements have to be expressions, because the program changes those, or the driver is not known.
    """
    if connection.get_execution_options().get("schema_translate_map"):
        return None
    if not all(getattr(listener, _LEAVES, False) for listener in connection.dispatch.before_execute):
        return None
    return driver_of(connection.connection.dbapi_connection)


def execute(
    connection: sa.Connection, driver: Driver, text: str, values: Sequence[Any], *, first: str = ""
) -> sa.CursorResult[Any]:
    """first: a statement that is sent before it, with it if the driver can. Raises sqlalchemy.exc.DBAPIError."""
    if not first:
        return connection.exec_driver_sql(text, tuple(values))
    if driver.takes_several(connection.connection.dbapi_connection):
        return connection.exec_driver_sql(f"{first}; {text}", tuple(values), {_SEVERAL: True})
    connection.exec_driver_sql(first)
    return connection.exec_driver_sql(text, tuple(values))


def go_to_the_second(cursor: Any, context: Any) -> None:
    """Go to the result of the second of two statements, where SQLAlchemy still handles errors: its error is raised here.

    Called twice if the engine was made from one that is watched too.
    """
    if context.execution_options.get(_SEVERAL) and not hasattr(context, _ON_THE_WAY):
        setattr(context, _ON_THE_WAY, True)
        cursor.nextset()
