"""Which database holds which shard, stored in the catalog so that servers can never disagree about it.

Each database has its own random identity, in its table `tmc_database`, which stays the same when its address changes.
The catalog says for every shard which identity holds it. A server whose configuration differs refuses to start, and
stops if the map changes while it runs. Source: docs/decisions/0014-shard-map.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import groupby

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.servers import ShardPlace
from tmc_server.store.auditing import act, record
from tmc_server.store.engines import Database, ShardMap, repeated
from tmc_server.store.tables import database_identity, lease, meta, node_slot, server, shard_map, shard_tables

HOW_TO_MOVE = (
    "Correct [store] in the configuration. Or, to move shards: stop all servers, then run tmc init --copy-from URL with the"
    " address of the database that has them (docs/operating.md, Moving a shard)."
)


class ShardsElsewhere(Exception):
    """The configuration puts shards elsewhere than the catalog says."""


def place_of(database: Database) -> str:
    """The address of a database without credentials."""
    url = database.url
    return f"{url.host}:{url.port or database.dialect.port}/{url.database}" if url.host else str(url.database)


def identify(connection: sa.Connection, serves_from: str) -> None:
    """Give a database its identity, unless it has one, and say which programs its tables serve.

    The caller ensures that no one else does so now.
    """
    if connection.execute(sa.select(database_identity.c.id)).one_or_none() is None:
        connection.execute(database_identity.insert().values(id=1, identity=secrets.token_hex(16)))
    connection.execute(database_identity.update().values(serves_from=serves_from))


def identity_of(database: Database) -> str | None:
    """Return its identity; None if it has none yet: tmc init gives it one."""
    with database.reading() as connection:
        if not sa.inspect(connection).has_table(database_identity.name):
            return None
        return connection.execute(sa.select(database_identity.c.identity)).scalar_one_or_none()


def stored_map(connection: sa.Connection) -> list[ShardPlace]:
    """Return what the catalog says, by shard. Empty: nothing was stored yet."""
    rows = connection.execute(sa.select(shard_map).order_by(shard_map.c.shard))
    return [ShardPlace(row.shard, row.identity, row.place) for row in rows]


def configured_map(shards: ShardMap) -> dict[Shard, str | None]:
    """Identities by shard, as this configuration puts them."""
    identities = {database: identity_of(database) for database in shards.databases}
    return {Shard(shard): identities[holder] for shard, holder in enumerate(shards.shards)}


def known_map(shards: ShardMap) -> list[ShardPlace]:
    """Return what `stored_map` does; empty as well where there is no catalog yet."""
    with shards.catalog.reading() as connection:
        return stored_map(connection) if sa.inspect(connection).has_table(shard_map.name) else []


def differences(shards: ShardMap) -> list[str]:
    """One sentence for each run of shards that this configuration puts elsewhere than the catalog."""
    here = configured_map(shards)
    moved = [known for known in known_map(shards) if here[known.shard] != known.identity]
    found = []
    for (place, identity, holder), group in groupby(
        moved, key=lambda known: (known.place, known.identity, shards.shards[known.shard])
    ):
        which = as_ranges([known.shard for known in group])
        found.append(
            f"Shard {which} is in database {identity[:8]} ({place}), but this configuration puts it into"
            f" {_short(identity_of(holder))} ({place_of(holder)})."
        )
    return found


def _short(identity: str | None) -> str:
    return identity[:8] if identity else "a new one"


def check(shards: ShardMap) -> dict[Shard, str]:
    """Compare the configuration with the catalog. Returns: identities by shard. Raises ShardsElsewhere."""
    if len(known_map(shards)) != len(shards.shards):
        raise ShardsElsewhere("The catalog has no shard map yet: run tmc init.")
    found = differences(shards)
    if found:
        raise ShardsElsewhere(" ".join([*found, HOW_TO_MOVE]))
    return {known.shard: known.identity for known in known_map(shards)}


def fill(shards: ShardMap) -> None:
    """Store the map as configured, where there is none. Every database has its tables."""
    if not known_map(shards):
        repeated(lambda: _store(shards, only_first=True))


def to_copy(shards: ShardMap, source: Database) -> list[Shard]:
    """Return the shards that the catalog has in this database and the configuration elsewhere.

    Raises ShardsElsewhere: there are none, or others are moved too, or a server runs.
    """
    with shards.catalog.reading() as connection:
        _refuse_beside_servers(connection, shards.catalog.now(connection))
    identity, here = identity_of(source), configured_map(shards)
    moved = [known for known in known_map(shards) if here[known.shard] != known.identity]
    if not moved:
        raise ShardsElsewhere(
            "This configuration has every shard where the catalog has it, so nothing is copied: change [[store.shards]] first."
        )
    others = [known for known in moved if known.identity != identity]
    if others:
        places = sorted({known.place for known in others})
        raise ShardsElsewhere(
            f"Shard {as_ranges([known.shard for known in others])} is in {', '.join(places)}, not in {place_of(source)}: "
            "give the URL of the database that has what is moved, and move from one database at a time. Nothing was changed."
        )
    return [known.shard for known in moved]


def refuse_others(shards: ShardMap) -> None:
    """Raises ShardsElsewhere: a database is another center's, by its catalog or its leases."""
    ours = {known.identity for known in known_map(shards)}
    for database in shards.databases:
        if database is shards.catalog or identity_of(database) in (None, *ours):
            continue
        with database.reading() as connection:
            names = set(sa.inspect(connection).get_table_names())
            is_served = (
                lease.name in names and connection.execute(sa.select(lease.c.shard).limit(1)).first() is not None
            )
        if is_served or meta.name in names:
            raise ShardsElsewhere(
                f"The database {place_of(database)} is of another center: give an empty one. Nothing was changed."
            )


def runs_of_servers(shards: ShardMap) -> int:
    """Return how often servers have started: each raises the epoch of a node slot."""
    with shards.catalog.reading() as connection:
        return int(connection.execute(sa.select(sa.func.sum(node_slot.c.epoch))).scalar_one() or 0)


def _refuse_beside_servers(connection: sa.Connection, now: int) -> None:
    """Raises ShardsElsewhere while a server runs."""
    alive = connection.execute(sa.select(server.c.name).where(server.c.expires_ms > now)).scalars().all()
    if alive:
        raise ShardsElsewhere(
            "Stop all servers before a shard is moved (after a kill, wait for server.lease_seconds); "
            f"alive are {', '.join(alive)}."
        )


def accept(shards: ShardMap, runs: int | None = None) -> None:
    """Store the map as configured: the shards were moved. runs: what `runs_of_servers` said before they were copied.

    Raises ShardsElsewhere: a server runs, or has run meanwhile.
    """
    repeated(lambda: _store(shards, only_first=False, runs=runs))


def _store(shards: ShardMap, only_first: bool, runs: int | None = None) -> None:
    here = configured_map(shards)
    catalog = shards.catalog
    with catalog.transaction() as connection:
        connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))  # its lock, and a sign
        if only_first and stored_map(connection):
            return
        now = catalog.now(connection)
        if not only_first:
            _refuse_beside_servers(connection, now)
        if runs is not None and runs != runs_of_servers(shards):
            raise ShardsElsewhere(
                "A server ran while the shards were copied, and may have written: repeat, and see that nothing starts one "
                "meanwhile."
            )
        connection.execute(shard_map.delete())
        places = [
            {"shard": shard, "identity": here[Shard(shard)], "place": place_of(holder)[:255]}
            for shard, holder in enumerate(shards.shards)
        ]
        connection.execute(shard_map.insert(), places)
        if not only_first:
            record(connection, act(now, "tmc init", "accept shard map", "shards 0-31"))


def not_copied(shards: ShardMap) -> list[Shard]:
    """Shards whose tables are not in the database that this configuration puts them into."""
    missing = []
    for database in shards.databases:
        with database.reading() as connection:
            present = set(sa.inspect(connection).get_table_names())
        for shard in shards.shards_in(database):
            if any(table.name not in present for table in shard_tables(shard).all):
                missing.append(shard)
    return sorted(missing)


def as_ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))
