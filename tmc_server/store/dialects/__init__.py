"""Kinds of databases behind one protocol. docs/decisions/0019-the-house.md says what a further one needs."""

from __future__ import annotations

import sqlalchemy as sa

from tmc_server.store.dialects.contract import Dialect
from tmc_server.store.dialects.mysql import MySQL
from tmc_server.store.dialects.postgresql import PostgreSQL
from tmc_server.store.dialects.sqlite import SQLite

_MYSQL = MySQL()
_DIALECTS: dict[str, Dialect] = {"mysql": _MYSQL, "mariadb": _MYSQL, "postgresql": PostgreSQL(), "sqlite": SQLite()}


def dialect_of(name: str) -> Dialect:
    """name: of the backend in SQLAlchemy's URLs and dialects. Raises ValueError for databases that we do not serve."""
    try:
        return _DIALECTS[name]
    except KeyError:
        raise ValueError(f"{name!r} is no database of ours: give {', '.join(sorted(_DIALECTS))}.") from None


def url_of(text: str) -> sa.URL:
    """Parse the URL of a database. Without a driver, PostgreSQL is used over psycopg. Raises ArgumentError."""
    url = sa.make_url(text)
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
