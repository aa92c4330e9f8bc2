"""Copies shards from one database to another, of whatever kind, while no server runs; and compares them afterwards.

Copying begins with emptying: what was cut short is done over again. Nothing changes in the source until the catalog says that
the shards are elsewhere (store/shard_map.py); then the rows that it shares with other shards are deleted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database
from tmc_server.store.migrate import create_missing
from tmc_server.store.sql import InsertRows
from tmc_server.store.tables import (
    alert,
    bulk_item,
    bulk_progress,
    failed,
    lease,
    order,
    retention,
    shard_tables,
    tombstone,
    waiting,
)

SHARED = (retention, failed, order, waiting, bulk_progress, bulk_item, alert)
"""Tables of a database in which each row is of one shard. Notices stay, and are sent from where they are."""
_REPEAT = "Repeat, with all servers stopped."
_PAGE = 500
_STATEMENT_BYTES = 1 << 20

Row = Mapping[str, Any]


class CopyDiffers(Exception):
    """The copy is not what is in the source: something wrote meanwhile, or a database loses rows."""


def copy_shard(source: Database, target: Database, shard: Shard) -> int:
    """Copy what belongs to this shard. Returns: how many messages. Raises CopyDiffers, StoreUnavailable."""
    tables = shard_tables(shard)
    with target.transaction() as connection:
        create_missing(connection, tables.all)
    for table in (tables.consumption, tables.attempt):
        _copy(source, target, table)
    for table in SHARED:
        _copy(source, target, table, table.c.shard == shard)
    return _copy(source, target, tables.message)


def forget(source: Database, copied: Sequence[Shard]) -> None:
    """Delete in the source what it has of copied shards in tables of all of them. The shards' own tables stay, until
    somebody drops them.
    """
    with source.transaction() as connection:
        for table in (*SHARED, lease):
            connection.execute(table.delete().where(table.c.shard.in_(copied)))


def _copy(source: Database, target: Database, table: sa.Table, *which: sa.ColumnElement[bool]) -> int:
    """Replace the rows of the target by those of the source. Returns: how many."""
    insert = InsertRows(table)
    with target.transaction() as connection:
        connection.execute(table.delete().where(*which))
    for rows in _statements(_rows(source, table, *which)):
        with target.transaction() as connection:
            insert.run(connection, rows)
    count = 0
    for ours, theirs in _beside(_rows(source, table, *which), _rows(target, table, *which)):
        count += 1
        if ours is None or theirs is None:
            raise CopyDiffers(f"{table.name}: row {count} is on one side only after the copy. {_REPEAT}")
        differing = [name for name in insert.columns if _plain(ours[name]) != _plain(theirs[name])]
        if differing:
            raise CopyDiffers(f"{table.name}: row {count} differs in {', '.join(differing)} after the copy. {_REPEAT}")
    return count


def _plain(value: Any) -> Any:
    """Text as every database can hold it."""
    return without_nul(value) if isinstance(value, str) else value


def _beside(ours: Iterator[Row], theirs: Iterator[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    while True:
        pair = next(ours, None), next(theirs, None)
        if pair == (None, None):
            return
        yield pair


def _rows(database: Database, table: sa.Table, *which: sa.ColumnElement[bool]) -> Iterator[Row]:
    """Yield all of them in the order of the primary key, a page at a time."""
    keys = list(table.primary_key)
    after: tuple[Any, ...] | None = None
    while True:
        query = sa.select(table).where(*which).order_by(*keys).limit(_PAGE)
        if after is not None:
            query = query.where(_behind(keys, after))
        with database.reading() as connection:
            page: Sequence[Any] = connection.execute(query).mappings().all()
        yield from page
        if len(page) < _PAGE:
            return
        after = tuple(page[-1][key.name] for key in keys)


def _behind(keys: Sequence[sa.Column[Any]], after: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Rows behind these values of the primary key, in its order."""
    further: sa.ColumnElement[bool] = keys[0] > after[0]
    if len(keys) == 1:
        return further
    return sa.or_(further, sa.and_(keys[0] == after[0], _behind(keys[1:], after[1:])))


def _statements(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Group rows so that a statement stays small, whatever their bodies are."""
    group: list[Row] = []
    size = 0
    for row in rows:
        group.append(row)
        size += 200 + sum(2 * len(value) for value in row.values() if isinstance(value, bytes | str))
        if size > _STATEMENT_BYTES or len(group) == _PAGE:
            yield group
            group, size = [], 0
    if group:
        yield group


def copy_tombstones(source: Database, target: Database) -> None:
    """Add the tombstones that the target lacks: nothing says of which shard one is."""
    insert = InsertRows(tombstone)
    keys = [column.name for column in tombstone.primary_key]
    for rows in _statements(_rows(source, tombstone)):
        known = sa.select(*tombstone.primary_key).where(tombstone.c.attempt_id.in_([row["attempt_id"] for row in rows]))
        with target.transaction() as connection:
            there = {tuple(row) for row in connection.execute(known)}
            fresh = [row for row in rows if tuple(row[name] for name in keys) not in there]
            if fresh:
                insert.run(connection, fresh)
