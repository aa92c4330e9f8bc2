"""Databases opened as configured, and what operators do to them: `tmc init`, `tmc doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from tmc_common.extras import extra_of
from tmc_server.app.neighbor_fitness import examine_neighbors
from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable, TmcError
from tmc_server.store.dialects.contract import DatabaseTaken, Finding
from tmc_server.store.engines import Database, ShardMap, wall_clock_ms
from tmc_server.store.fitness import examine, examine_hosts
from tmc_server.store.group_commit import BATCH_BYTES
from tmc_server.store.migrate import CannotMigrate, migrate
from tmc_server.store.operators import OperatorStore
from tmc_server.store.shard_map import ShardsElsewhere, as_ranges, check, identity_of, known_map, refuse_others, settle

_CLOCKS_APART_S = 300


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


def diagnose(config: Config) -> tuple[list[str], bool]:
    """Return what `tmc doctor` says: lines, and whether all is well."""
    shards = open_shards(config)
    lines: list[str] = []
    well = True
    with suppress(StoreUnavailable, ShardsElsewhere):  # said below
        settle(shards)
    need = BATCH_BYTES + config.limits.body_bytes
    for database in shards.databases:
        lines.append(f"{database!r}, shards {as_ranges(shards.shards_in(database)) or 'none'}")
        try:
            findings = [*examine(database, need), _examine_clock(database), *examine_hosts(database)]
        except StoreUnavailable as exc:
            lines.append(f"BAD  {exc}")
            well = False
            continue
        lines += [str(finding) for finding in findings]
        well = well and all(finding.ok for finding in findings)
    if well:
        found = _examine_map(shards)
        lines += [str(finding) for finding in found]
        well = all(finding.ok for finding in found)
    center = None
    with suppress(StoreUnavailable):
        center = identity_of(shards.catalog)
    shards.close()
    others = [*_examine_broker(config), *examine_neighbors(config, center)]
    return lines + [str(finding) for finding in others], well and all(finding.ok for finding in others)


def _examine_clock(database: Database) -> Finding:
    """Compare this machine's clock, which message numbers begin with, with the database's, which everything else goes by."""
    with database.reading() as connection:
        ahead_s = (wall_clock_ms() - database.now(connection)) / 1000
    must = (
        f"be within {_CLOCKS_APART_S} s of the database's: correct it, or the archive and reconciliations miss messages"
    )
    return Finding(
        setting="clock of this machine", value=f"{ahead_s:+.1f} s", must=must, ok=abs(ahead_s) <= _CLOCKS_APART_S
    )


def _examine_broker(config: Config) -> Sequence[Finding]:
    url = config.rabbitmq.url.get_secret_value()
    if not url:
        return []
    try:
        from tmc_server.app.broker_fitness import examine_broker
    except ModuleNotFoundError as exc:
        must = f"be installed with {exc.name}: tmc-center[rabbitmq]"
        return [Finding(setting="RabbitMQ", value="", must=must, ok=False)]
    return examine_broker(url, config.rabbitmq.management.get_secret_value())


def _examine_map(shards: ShardMap) -> list[Finding]:
    """Return where the catalog says the shards are, and whether this configuration agrees."""
    known = known_map(shards)
    where: dict[tuple[str, str], list[int]] = {}
    for each in known:
        where.setdefault((each.identity, each.place), []).append(each.shard)
    places = "; ".join(f"{as_ranges(group)} in {identity[:8]} ({place})" for (identity, place), group in where.items())
    try:
        check(shards)
    except ShardsElsewhere as exc:
        return [Finding(setting="shard map", value=places or "none", must=f"be as configured. {exc}", ok=False)]
    return [Finding(setting="shard map", value=places, must="", ok=True)]
