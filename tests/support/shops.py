"""Business databases of three kinds, each with our tables and one of orders. For fixtures with `params=DATABASES`."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tmc_client.tables import metadata

DATABASES = ("sqlite", "mariadb", "postgresql")


def url_of(request: pytest.FixtureRequest, folder: Path, name: str) -> str:
    """Return the URL of a database of the kind that the fixture's parameter names."""
    if request.param == "sqlite":
        return f"sqlite:///{folder}/{name}.db"
    return str(request.getfixturevalue(request.param).create(f"tmc_{name}"))


def open_shop(engine: sa.Engine) -> sa.Engine:
    """All tables are new, also those of a test before."""
    metadata.drop_all(engine)
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS orders")
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    return engine
