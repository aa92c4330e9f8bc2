"""Creates and upgrades the schema of one database: repeatable, and safe when two start at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tmc_server.errors import StoreUnavailable
from tmc_server.store import shard_map
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.tables import meta

VERSION_TABLE = "tmc_schema_version"
_LOCK_WAIT_S = 120


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def head_revision() -> str:
    """The revision this code needs."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def revision_of(database: Database) -> str | None:
    """The revision a database has."""
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        return context.get_current_revision()


@contextmanager
def _alone(database: Database, connection: sa.Connection) -> Iterator[None]:
    """Hold the schema lock of a database. SQLite: the one server of the file holds its lock already."""
    if database.is_sqlite:
        yield
        return
    name = f"tmc_init_{database.url.database}"
    if connection.exec_driver_sql(f"SELECT GET_LOCK('{name}', {_LOCK_WAIT_S})").scalar_one() != 1:
        raise StoreUnavailable("Another tmc init is still at work: wait for it, then repeat.")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"DO RELEASE_LOCK('{name}')")


def migrate(shards: ShardMap) -> None:
    """Bring every database to the newest revision; create databases that are missing (MariaDB, MySQL).

    The first time, the catalog keeps which database holds which shard.
    """
    for database in shards.databases:
        _create_database(database)
        with database.connection() as connection:
            connection = (
                connection.execution_options(isolation_level="AUTOCOMMIT") if not database.is_sqlite else connection
            )
            with _alone(database, connection):
                config = _config()
                config.attributes["connection"] = connection
                config.attributes["is_catalog"] = database is shards.catalog
                config.attributes["shards"] = shards.shards_in(database)
                command.upgrade(config, "head")
                if database is shards.catalog:
                    _first_version(connection)
                shard_map.identify(connection)
                if connection.in_transaction():
                    connection.commit()
    shard_map.fill(shards)


def _first_version(connection: sa.Connection) -> None:
    if connection.execute(sa.select(meta)).one_or_none() is None:
        connection.execute(meta.insert().values(id=1, catalog_version=1))


def _create_database(database: Database) -> None:
    if database.is_sqlite:
        return
    name = database.url.database
    server = sa.create_engine(database.url._replace(database=None), poolclass=sa.pool.NullPool)
    try:
        with server.connect() as connection:
            known = connection.exec_driver_sql("SHOW DATABASES").scalars().all()
            if name not in known:
                quoted = connection.dialect.identifier_preparer.quote_identifier(str(name))
                connection.exec_driver_sql(f"CREATE DATABASE IF NOT EXISTS {quoted} CHARACTER SET utf8mb4")
    except sa.exc.OperationalError as exc:
        raise StoreUnavailable(f"Cannot reach {database!r}: check address, user and rights.") from exc
    finally:
        server.dispose()
