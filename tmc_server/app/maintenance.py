"""Databases opened as configured, and prepared: `tmc init`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from tmc_common.extras import extra_of
from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable, TmcError
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.migrate import CannotMigrate, migrate
from tmc_server.store.operators import OperatorStore
from tmc_server.store.shard_map import ShardsElsewhere, check, refuse_others, settle


class CannotStart(RuntimeError):
    """The server refuses to start; the text says why and what to do."""


class CannotStartYet(CannotStart):
    """The server cannot start now, because of its surroundings; it can when they are mended."""


def said_by_database(exc: Exception) -> str:
    """One sentence for operators: what the database itself said, without the statement, or our own words."""
    cause = exc.__cause__ if isinstance(exc, StoreUnavailable) else exc
    if cause is None or (isinstance(exc, StoreUnavailable) and str(exc) != str(StoreUnavailable())):
        return str(exc)
    return f"The database cannot be used: {getattr(cause, 'orig', None) or cause}. Check its state, and the rights of the user."


def driver_missing(exc: ModuleNotFoundError) -> CannotStart:
    return CannotStart(f"[store] needs the database driver {exc.name}: install {extra_of(exc)}.")


def open_shards(config: Config, patient: bool = False, clock: Callable[[], int] | None = None) -> ShardMap:
    """One Database per URL of the configuration.

    patient: statements may take long, as those of `tmc init`.  clock: replaces the databases' own.
    """
    opened: dict[str, Database] = {}

    def database(url: str) -> Database:
        if url not in opened:
            opened[url] = _opened(url, clock=clock, pool_size=config.limits.lanes + 5, patient=patient)
        return opened[url]

    catalog = database(config.store.catalog.get_secret_value())
    ranges = config.store.shards
    by_shard = {
        shard: database(part.url.get_secret_value()) for part in ranges for shard in range(part.first, part.last + 1)
    }
    spare = [database(url.get_secret_value()) for url in config.store.spare]
    return ShardMap(catalog, [by_shard.get(shard, catalog) for shard in range(32)], spare)


def _opened(url: str, **options: Any) -> Database:
    """Raises CannotStart."""
    try:
        return Database(url, **options)
    except ModuleNotFoundError as exc:
        raise driver_missing(exc) from exc
    except (ArgumentError, ValueError) as exc:
        raise CannotStart(f"No database of the center has such a URL: {exc}") from exc


def initialize(config: Config, new_token: bool = False) -> str | None:
    """Create or upgrade the schema. Returns: the admin token, the first time or when asked for. Raises CannotStart."""
    shards = open_shards(config, patient=True)
    try:
        if shards.catalog.dialect.has_one_writer:
            shards.catalog.hold_exclusively()
        settle(shards, some_are_made=True)
        with suppress(StoreUnavailable):  # a database that is not there yet is made by the migration, and holds nothing
            refuse_others(shards)
        migrate(shards)
        check(shards)
        return OperatorStore(shards.catalog, 0).make_first(replace=new_token)
    except (StoreUnavailable, SQLAlchemyError) as exc:
        raise CannotStart(said_by_database(exc)) from exc
    except (TmcError, DatabaseTaken, CannotMigrate, ShardsElsewhere) as exc:
        raise CannotStart(str(exc)) from exc
    finally:
        shards.close()
