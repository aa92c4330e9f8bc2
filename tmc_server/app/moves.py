"""`tmc move-shard`: moves shards to another database while servers run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from tmc_server.app.maintenance import CannotStart, open_shards, said_by_database
from tmc_server.config import Config
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import SHARDS
from tmc_server.errors import RowLocked, StoreUnavailable, TmcError
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.engines import Database, ShardMap, StoreConflict
from tmc_server.store.fitness import examine
from tmc_server.store.group_commit import BATCH_BYTES
from tmc_server.store.migrate import head_revision, revision_of
from tmc_server.store.move_hold import MoveRefused
from tmc_server.store.moving import ShardMove
from tmc_server.store.shard_map import ShardsElsewhere, check, place_of
from tmc_server.store.tables import shard_move

Say = Callable[[str], None]


def move_shards(config: Config, which: str, to: str, say: Say) -> None:
    """Move shards one after another, or continue. Raises CannotStart.

    which: such as "7" or "0-3,7".  to: part of the address of a database, or of its identity.
    """
    with _opened(config) as shards:
        wanted = _shards_of(which)
        target = _named(shards, to)
        bad = [str(each) for each in examine(target, BATCH_BYTES + config.limits.body_bytes) if not each.ok]
        if bad:
            raise MoveRefused(f"{place_of(target)} is not ready to keep messages: " + "; ".join(bad))
        for shard in wanted:
            source, on_its_way = _on_its_way(shards, shard)
            if on_its_way is not None and on_its_way is not target:
                raise MoveRefused(
                    f"Shard {shard} is on its way to {place_of(on_its_way)}: finish that move, confirm it or undo it first."
                )
            if on_its_way is None and source is target:
                say(f"Shard {shard} is in {place_of(target)} already.")
                continue
            _move(shards, source, target, shard, say).run()


def undo_moves(config: Config, which: str, say: Say) -> None:
    """Leave shards that are on their way where they are. Raises CannotStart."""
    with _opened(config) as shards:
        for shard in _shards_of(which):
            _move_of(shards, shard, say).undo()
            say(f"Shard {shard} stays in {place_of(shards.holder(shard))}.")


def confirm_moves(config: Config, which: str, say: Say) -> None:
    """Drop what is kept of moved shards where they were. Raises CannotStart."""
    with _opened(config) as shards:
        for shard in _shards_of(which):
            _move_of(shards, shard, say).confirm()
            say(f"Shard {shard} is in {place_of(shards.holder(shard))} only.")


def _shards_of(text: str) -> list[Shard]:
    """Raises MoveRefused."""
    found: list[Shard] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,2})(?:-([0-9]{1,2}))?", part.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) >= SHARDS:
            raise MoveRefused(f"{part!r} is no shard, and no range of them: they are 0 to {SHARDS - 1}.")
        found += [Shard(number) for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return list(dict.fromkeys(found))


@contextmanager
def _opened(config: Config) -> Iterator[ShardMap]:
    shards = open_shards(config, patient=True)
    try:
        for database in shards.databases:
            if database.dialect.has_one_writer:
                database.hold_exclusively()
        check(shards)
        _demand_this_revision(shards)
        yield shards
    except (StoreUnavailable, RowLocked, StoreConflict, sa.exc.SQLAlchemyError) as exc:
        raise CannotStart(f"{said_by_database(exc)} Then run this again: it continues where it was.") from exc
    except (TmcError, DatabaseTaken, ShardsElsewhere, MoveRefused) as exc:
        raise CannotStart(str(exc)) from exc
    finally:
        shards.close()


def _demand_this_revision(shards: ShardMap) -> None:
    """Raises MoveRefused: tables may differ between the databases."""
    for database in shards.databases:
        if database in [shards.catalog, *shards.by_identity.values()] and revision_of(database) != head_revision():
            raise MoveRefused(
                f"The tables in {place_of(database)} are not of this program's version: run tmc init of the version that the"
                " servers have, and move shards with that one."
            )


def _named(shards: ShardMap, to: str) -> Database:
    """Raises MoveRefused."""
    identities = {database: identity for identity, database in shards.by_identity.items()}
    known = [f"{identities.get(each, 'without tables')[:8]} ({place_of(each)})" for each in shards.homes]
    found = [each for each in shards.homes if to in place_of(each) or identities.get(each, "").startswith(to)]
    found = [
        each for each in found if to in (place_of(each), place_of(each).rpartition("/")[2])
    ] or found  # an exact name wins
    if len(found) != 1:
        raise MoveRefused(
            f"--to {to!r} names {len(found)} of the databases: give a part of one's address or identity. There are"
            f" {', '.join(known)}; add further ones to [store] spare, and run tmc init."
        )
    if found[0] not in identities:
        raise MoveRefused(f"{place_of(found[0])} has no tables yet: run tmc init.")
    return found[0]


def _on_its_way(shards: ShardMap, shard: Shard) -> tuple[Database, Database | None]:
    """Return where a shard is, or was, and where it is going, or has just gone. Raises MoveRefused."""
    with shards.catalog.reading() as connection:
        row = connection.execute(sa.select(shard_move).where(shard_move.c.shard == shard)).one_or_none()
    if row is None:
        return shards.holder(shard), None
    places = [shards.by_identity.get(identity) for identity in (row.source, row.target)]
    if places[0] is None or places[1] is None:
        raise MoveRefused(f"Shard {shard} is on its way between databases of which this configuration knows one only.")
    return places[0], places[1]


def _move_of(shards: ShardMap, shard: Shard, say: Say) -> ShardMove:
    """Raises MoveRefused: it is not on its way."""
    source, target = _on_its_way(shards, shard)
    if target is None:
        raise MoveRefused(f"Shard {shard} is in {place_of(source)}, and not on its way anywhere.")
    return _move(shards, source, target, shard, say)


def _move(shards: ShardMap, source: Database, target: Database, shard: Shard, say: Say) -> ShardMove:
    identities = {database: identity for identity, database in shards.by_identity.items()}
    return ShardMove(
        catalog=shards.catalog,
        source=source,
        target=target,
        identities=(identities[source], identities[target]),
        shard=shard,
        say=say,
    )
