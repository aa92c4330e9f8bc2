"""Databases opened as configured, and what operators do to them: `tmc init`, `tmc doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import ArgumentError

from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable, TmcError
from tmc_server.store.catalog import FIRST_OPERATOR, CatalogStore
from tmc_server.store.engines import Database, DatabaseTaken, ShardMap
from tmc_server.store.fitness import examine
from tmc_server.store.migrate import migrate


class CannotStart(Exception):
    """The server refuses to start; the text says why and what to do."""


def open_shards(config: Config, patient: bool = False) -> ShardMap:
    """One Database per URL of the configuration. patient: statements may take long, as those of `tmc init`."""
    opened: dict[str, Database] = {}

    def database(url: str) -> Database:
        if url not in opened:
            try:
                opened[url] = Database(url, pool_size=config.limits.lanes + 5, patient=patient)
            except ModuleNotFoundError as exc:
                raise CannotStart(f"[store] needs the database driver {exc.name}: install tmc-center[mysql].") from exc
            except ArgumentError as exc:
                raise CannotStart(f"[store] has no database URL that SQLAlchemy understands: {exc}.") from exc
        return opened[url]

    catalog = database(config.store.catalog.get_secret_value())
    ranges = config.store.shards
    by_shard = {
        shard: database(part.url.get_secret_value()) for part in ranges for shard in range(part.first, part.last + 1)
    }
    return ShardMap(catalog, [by_shard.get(shard, catalog) for shard in range(32)])


def initialise(config: Config, new_token: bool = False) -> str | None:
    """Create or upgrade the schema. Returns: the admin token, the first time or when asked for. Raises CannotStart."""
    shards = open_shards(config, patient=True)
    try:
        if shards.catalog.is_sqlite:
            shards.catalog.lock_alone()
        migrate(shards)
        return CatalogStore(shards.catalog, 0).make_operator(FIRST_OPERATOR, replace=new_token)
    except (TmcError, DatabaseTaken) as exc:
        raise CannotStart(str(exc)) from exc
    finally:
        shards.close()


def _as_ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def diagnose(config: Config) -> tuple[list[str], bool]:
    """What `tmc doctor` says: lines, and whether all is well."""
    shards = open_shards(config)
    lines: list[str] = []
    well = True
    need = config.limits.batch_bytes + config.limits.body_bytes
    for database in shards.databases:
        lines.append(f"{database!r}, shards {_as_ranges(shards.shards_in(database)) or 'none'}")
        try:
            findings = examine(database, need)
        except StoreUnavailable as exc:
            lines.append(f"BAD  {exc}")
            well = False
            continue
        lines += [str(finding) for finding in findings]
        well = well and all(finding.ok for finding in findings)
    shards.close()
    return lines, well
