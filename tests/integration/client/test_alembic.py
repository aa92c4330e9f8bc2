"""Alembic's autogenerate beside our tables: it would drop them, with the messages that are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import tmc_client as tmc
from tests.support.shops import DATABASES, url_of
from tmc_client import tables


@pytest.fixture(params=DATABASES)
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url_of(request, tmp_path, "alembic"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_autogenerate_leaves_our_tables_alone(connection: sa.Connection) -> None:
    shop = sa.MetaData()
    sa.Table("alembic_orders", shop, sa.Column("id", sa.Integer, primary_key=True))
    shop.create_all(connection)
    tables.metadata.create_all(connection)
    connection.commit()
    plain = MigrationContext.configure(connection, opts={"compare_type": True})
    dropped = {step[1].name for step in compare_metadata(plain, shop) if step[0] == "remove_table"}
    assert set(tables.metadata.tables) <= dropped
    ours = {"compare_type": True, "include_object": tables.include_object}
    assert compare_metadata(MigrationContext.configure(connection, opts=ours), shop) == []
    connection.rollback()
    tmc.create_tables(connection.engine)  # and what is there is fit
    both = [shop, tables.metadata]
    assert compare_metadata(MigrationContext.configure(connection, opts=ours), both) == []  # type: ignore[arg-type]
