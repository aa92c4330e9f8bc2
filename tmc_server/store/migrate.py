"""Creates and upgrades the schema of one database: repeatable, and safe when two start at once.

A database without a revision gets the declared tables at once, as far as they are missing; any other one is upgraded revision
by revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tmc_server.domain.placement import MoveStep
from tmc_server.store import shard_map
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.tables import CATALOG_TABLES, DATABASE_TABLES, database_identity, meta, shard_move, shard_tables

VERSION_TABLE = "tmc_schema_version"
SERVES_FROM = "0001"
"""Programs of this revision and later work with the tables of this one: migrations only add, until this is raised."""


class CannotMigrate(Exception):
    """The tables cannot be upgraded now; the text says why and what to do."""


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


@cache
def head_revision() -> str:
    """The revision this code needs."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def revision_of(database: Database) -> str | None:
    """The revision a database has."""
    with database.reading() as connection:
        return _revision(connection)


def serves_this_program(database: Database) -> bool:
    """Return whether a database of a later revision works with this program, so that servers can be upgraded one by
    one, and back.
    """
    with database.reading() as connection:
        if not _is_later(_revision(connection)):
            return False
        return str(connection.execute(sa.select(database_identity.c.serves_from)).scalar_one()) <= head_revision()


def _is_later(revision: str | None) -> bool:
    return revision is not None and revision > head_revision()


def _revision(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def migrate(shards: ShardMap) -> None:
    """Bring every database to the newest revision; create databases that are missing (MariaDB, MySQL).

    The first time, the catalog keeps which database holds which shard. Raises CannotMigrate.
    """
    for database in shards.databases:
        dialect = database.dialect
        dialect.create_database(database.url)
        with database.connection() as own, dialect.migrating(database.url, own) as connection:
            if _is_later(_revision(connection)):
                continue  # a later program prepared it; whether it serves this one is examined at the start of a server
            if _revision(connection) != head_revision():
                _upgrade(connection, shards, database)
            if database in shards.homes:  # a catalog of its own may have become one
                create_missing(connection, DATABASE_TABLES)
            if database is shards.catalog:
                _first_version(connection)
            shard_map.identify(connection, SERVES_FROM)
            if connection.in_transaction():
                connection.commit()
    shard_map.fill(shards)


def _upgrade(connection: sa.Connection, shards: ShardMap, database: Database) -> None:
    config = _config()
    config.attributes["connection"] = connection
    config.attributes["is_catalog"] = database is shards.catalog
    config.attributes["shards"] = shards.shards_in(database)
    if _revision(connection) is None:
        _create(connection, shards, database)
        command.stamp(config, "head")
    else:
        _refuse_beside_a_move(shards.catalog)
        command.upgrade(config, "head")


def _refuse_beside_a_move(catalog: Database) -> None:
    """Raises CannotMigrate: an upgrade would change a shard's tables where it is, and not its copy."""
    with catalog.reading() as connection:
        if not sa.inspect(connection).has_table(shard_move.name):
            return
        moving = sa.select(shard_move.c.shard).where(shard_move.c.step < MoveStep.MOVED)
        shards = list(connection.execute(moving).scalars())
    if shards:
        raise CannotMigrate(
            f"Shard {shard_map.as_ranges(shards)} is being moved: finish that with tmc move-shard --to, or undo it, and"
            " upgrade then."
        )


def _create(connection: sa.Connection, shards: ShardMap, database: Database) -> None:
    """Create what is missing: a creation may have been cut short. Raises CannotMigrate."""
    held = shards.shards_in(database)
    tables = [
        *(CATALOG_TABLES if database is shards.catalog else ()),
        *(DATABASE_TABLES if database in shards.homes else ()),
        *(table for shard in held for table in shard_tables(shard).all),
    ]
    look = sa.inspect(connection)
    names = set(look.get_table_names())
    existing = [table for table in tables if table.name in names]
    for table in existing:
        lacking = set(table.c.keys()) - {column["name"] for column in look.get_columns(table.name)}
        if lacking:
            raise CannotMigrate(
                f"{table.name} lacks {', '.join(sorted(lacking))}, and {VERSION_TABLE}, which says what to upgrade, is "
                "missing or empty: restore it from a backup, or drop these tables if nothing was stored yet."
            )
    create_missing(connection, list(dict.fromkeys(tables)))


def create_missing(connection: sa.Connection, tables: Sequence[sa.Table]) -> None:
    """Create what is missing of these tables and their indexes: a creation may have been cut short in between."""
    there = set(sa.inspect(connection).get_table_names())
    for table in tables:
        if table.name not in there:
            table.create(connection)
            continue
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _first_version(connection: sa.Connection) -> None:
    if connection.execute(sa.select(meta)).one_or_none() is None:
        connection.execute(meta.insert().values(id=1, catalog_version=1))
