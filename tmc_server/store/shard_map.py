"""Which database holds which shard, stored in the catalog so that servers can never disagree about it.

Each database has its own random identity, in its table `tmc_database`, which stays the same when its address changes.
The catalog says for every shard which identity holds it. The configuration says where shards are put at first, and which
databases there are; a server refuses to start, and stops, if it does not know one that has a shard.
Source: docs/decisions/0014-shard-map.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.servers import ShardPlace
from tmc_server.errors import StoreUnavailable
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.engines import Database, ShardMap, repeated
from tmc_server.store.tables import database_identity, lease, meta, shard_map, shard_tables


class ShardsElsewhere(Exception):
    """The catalog says that shards are in a database that the configuration does not know, or that is not this center's."""


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
    return [ShardPlace(shard=row.shard, identity=row.identity, place=row.place) for row in rows]


def known_map(shards: ShardMap) -> list[ShardPlace]:
    """Return what `stored_map` does; empty as well where there is no catalog yet."""
    with shards.catalog.reading() as connection:
        return stored_map(connection) if sa.inspect(connection).has_table(shard_map.name) else []


def settle(shards: ShardMap, some_are_made: bool = False) -> None:
    """Use the databases in which the catalog says that the shards are; as configured where it says nothing yet.

    some_are_made: databases may be missing, since `tmc init` makes them.  Raises ShardsElsewhere, StoreUnavailable.
    """
    away = [database for database in shards.databases if not _is_there(database, shards, some_are_made)]
    known = known_map(shards) if shards.catalog not in away else []
    unknown = shards.follow(0, {each.shard: each.identity for each in known}, frozen=())
    if unknown:
        places = sorted({f"{each.identity[:8]} ({each.place})" for each in known if each.shard in unknown})
        silent = f" {', '.join(map(place_of, away))} does not answer, or is not made yet." if away else ""
        raise ShardsElsewhere(
            f"Shard {as_ranges(unknown)} is in {', '.join(places)}, and this configuration knows no such database: "
            f"add its URL to [store] spare, or correct [[store.shards]].{silent}"
        )


def _is_there(database: Database, shards: ShardMap, may_be_away: bool) -> bool:
    """Note the identity of a database. Returns False: it does not answer, or is not made yet."""
    try:
        identity = identity_of(database)
    except StoreUnavailable:
        if not may_be_away:
            raise
        return False
    if identity is not None:
        _refuse_twins(database, shards.by_identity.setdefault(identity, database))
    return True


def _refuse_twins(one: Database, other: Database) -> None:
    """Raises ShardsElsewhere: two addresses lead to the same identity, and nothing says which one is meant."""
    if place_of(one) != place_of(other):
        raise ShardsElsewhere(
            f"{place_of(one)} and {place_of(other)} say that they are the same database: one is a copy of the other, or both"
            " addresses lead to one. Name each database by one address, and no copies."
        )


def check(shards: ShardMap) -> None:
    """Do as `settle` does, where there must be a map. Raises ShardsElsewhere, StoreUnavailable."""
    settle(shards)
    if len(known_map(shards)) != len(shards.shards):
        raise ShardsElsewhere("The catalog has no shard map yet: run tmc init.")


class Following:
    """group_commit.Whereabouts by the catalog."""

    def __init__(self, shards: ShardMap, catalog: CatalogWatch) -> None:
        self._shards = shards
        self._catalog = catalog

    def look(self, shard: Shard, here: Database) -> Database | None:
        self._catalog.run_once()
        catalog = self._catalog.current
        self._shards.follow(catalog.version, catalog.shard_map, catalog.frozen)
        holder = self._shards.holder(shard)
        return None if shard in catalog.moving and holder is here else holder


def fill(shards: ShardMap) -> None:
    """Store the map as configured, where there is none. Every database has its tables."""
    if not known_map(shards):
        repeated(lambda: _fill(shards))
        settle(shards)


def _fill(shards: ShardMap) -> None:
    with shards.catalog.transaction() as connection:
        connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))  # its lock, and a sign
        if not stored_map(connection):
            identities = {database: identity_of(database) for database in shards.databases}
            places = [
                {"shard": shard, "identity": identities[holder], "place": place_of(holder)[:255]}
                for shard, holder in enumerate(shards.shards)
            ]
            connection.execute(shard_map.insert(), places)


def refuse_others(shards: ShardMap) -> None:
    """Raises ShardsElsewhere: a database is another center's, by its catalog or its leases."""
    ours = {known.identity for known in known_map(shards)}
    for database in shards.databases:
        if database is shards.catalog or identity_of(database) in (None, *ours):
            continue
        with database.reading() as connection:
            names = set(sa.inspect(connection).get_table_names())
            has_shards = any(shard_tables(Shard(number)).message.name in names for number in range(len(shards.shards)))
            # A lease alone may be of a shard that has just moved away.
            is_served = has_shards and connection.execute(sa.select(lease.c.shard).limit(1)).first() is not None
        if is_served or meta.name in names:
            raise ShardsElsewhere(
                f"The database {place_of(database)} is of another center: give an empty one. Nothing was changed."
            )


def as_ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))
