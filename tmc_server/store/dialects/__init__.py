"""Kinds of databases behind one protocol. docs/decisions/0019-the-house.md says what a further one needs."""

from __future__ import annotations

from tmc_server.store.dialects.contract import Dialect
from tmc_server.store.dialects.mysql import MySQL
from tmc_server.store.dialects.sqlite import SQLite

_MYSQL = MySQL()
_DIALECTS: dict[str, Dialect] = {"mysql": _MYSQL, "mariadb": _MYSQL, "sqlite": SQLite()}


def dialect_of(name: str) -> Dialect:
    """name: of the backend in SQLAlchemy's URLs and dialects. Raises ValueError for databases that we do not serve."""
    try:
        return _DIALECTS[name]
    except KeyError:
        raise ValueError(f"{name!r} is no database of ours: give {', '.join(sorted(_DIALECTS))}.") from None
