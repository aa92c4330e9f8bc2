"""Which kind of transaction belongs to what the program gives us."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tmc_client import errors
from tmc_client.local import LocalTransaction
from tmc_client.local.connections import ConnectionTransaction
from tmc_client.local.drivers import driver_of
from tmc_client.local.sessions import CoreTransaction, SessionTransaction


def local_of(source: Any, asked_by: str) -> LocalTransaction:
    """asked_by: a call, for the error message. Raises InvalidRequest."""
    kind: Any = source.__class__  # see drivers.driver_of
    make = _maker(kind, driver_of(source) is not None)
    if make is not None:
        return make(source)
    raise errors.InvalidRequest(
        f"{asked_by} takes a Session, not {type(source).__name__}: {_way_out(source)}. It also takes a connection of SQLAlchemy, "
        "sqlite3, mysqlclient, PyMySQL or psycopg; in Django use tmc_client.django."
    )


def _way_out(source: Any) -> str:
    if isinstance(source, sa.Engine):
        return "write Session(engine), or engine.connect()"
    if driver_of(getattr(source, "connection", None)) is not None:
        return "give the cursor's connection"
    if callable(source) and not isinstance(source, sessionmaker):
        return "call it, and give what it returns"
    return "for an AsyncSession connect with tmc_client.aio.connect(), of a sessionmaker make a session first"


def is_of_asyncio(source: Any) -> bool:
    """Return whether it belongs to SQLAlchemy's asyncio. By name: importing that needs greenlet, which blocking programs lack."""
    return any(parent.__module__.startswith("sqlalchemy.ext.asyncio") for parent in type(source).__mro__)


def is_async_session(source: Any) -> bool:
    return is_of_asyncio(source) and hasattr(source, "sync_session")


@lru_cache
def _maker(kind: Any, is_driver: bool) -> Callable[[Any], LocalTransaction] | None:
    """Choose by the class alone: asking an object whether it follows a protocol takes longer than a statement."""
    if issubclass(kind, scoped_session):
        return lambda source: SessionTransaction(source())
    if issubclass(kind, Session):
        return SessionTransaction
    if issubclass(kind, sa.Connection):
        return CoreTransaction
    if is_driver or issubclass(kind, sa.PoolProxiedConnection):
        return ConnectionTransaction
    if all(hasattr(kind, name) for name in _METHODS):
        return lambda source: source
    return None


_METHODS = [name for name, member in vars(LocalTransaction).items() if inspect.isfunction(member) and name[0] != "_"]
