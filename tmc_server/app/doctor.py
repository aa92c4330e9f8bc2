"""`tmc doctor`: looks at databases, broker and neighbors, and says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tmc_server.app.maintenance import open_shards
from tmc_server.app.neighbor_fitness import examine_neighbors, not_installed
from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable
from tmc_server.store.dialects.contract import Finding
from tmc_server.store.engines import Database, ShardMap, wall_clock_ms
from tmc_server.store.fitness import examine, examine_hosts
from tmc_server.store.group_commit import BATCH_BYTES
from tmc_server.store.shard_map import ShardsElsewhere, as_ranges, check, identity_of, known_map, settle

_CLOCKS_APART_S = 300


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
        return [not_installed("RabbitMQ", exc)]
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
