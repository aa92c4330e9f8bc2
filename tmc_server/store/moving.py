"""Moves a shard from one database to another, of whatever kind, while servers use it.

    record   triggers write the key of each row that changes into a log, in the transaction of the change
    copy     page by page, in the order of the keys, then compared: a row may differ if it is in the log
    follow   what the log names is copied again, until little is left
    freeze   the shard's tables get another name, once no transaction uses them; callers wait (store/group_commit.py)
    switch   the rest of the log is copied; the catalog says where the shard is now; servers follow it

A server that knows nothing of the move, or wakes up in the middle of it, cannot write to where the shard was: the name of
the table is the fence. Each step can be cut short and done over again: copying replaces what is there, and an entry of the
log is deleted after what it names was copied. Both databases are changed over one connection each, which holds a lock, so
that a command that was taken for dead changes nothing. Source: docs/decisions/0047-moving-shards.md.
"""

from __future__ import annotations

import json
import operator
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import MoveStep
from tmc_server.errors import StoreUnavailable
from tmc_server.store.auditing import act, record
from tmc_server.store.dialects.contract import Recording
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database, StoreConflict, repeated
from tmc_server.store.shard_map import place_of
from tmc_server.store.sql import InsertRows
from tmc_server.store.tables import (
    METADATA,
    bulk_item,
    bulk_progress,
    failed,
    lease,
    meta,
    order,
    retention,
    shard_map,
    shard_move,
    shard_tables,
    tombstone,
    waiting,
)

SHARED = (retention, failed, order, waiting, bulk_progress, bulk_item)
"""Tables of a database in which each row is of one shard. Alerts and notices stay, and are sent from where they are."""
_ACTOR = "tmc move-shard"
_PAGE = 500
_CHANGES = 500
_FEW = 300  # changes that are left to the freeze at most
_STATEMENT_BYTES = 1 << 20
_TABLE_TRIES = 20
_TABLE_PAUSES_S = (0.1, 3.0)  # between tries, which hold up others: from, growing to
_NOTE_S = 1.0

Row = Mapping[str, Any]
Key = tuple[Any, ...]


class MoveRefused(Exception):
    """A shard cannot be moved so; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a shard has in one table. group: columns of the key by which rows are copied, all of one key at once.

    shard: the table is shared, and only rows of this one are meant.  log: keys of what changes.
    """

    table: sa.Table
    group: Sequence[str]
    shard: Shard | None
    log: sa.Table

    @property
    def recording(self) -> Recording:
        return Recording(table=self.table.name, log=self.log.name, keys=self.group, shard=self.shard)

    @property
    def order(self) -> Sequence[str]:
        """Columns that no two rows share, the group's first."""
        return [*self.group, *(key.name for key in self.table.primary_key if key.name not in self.group)]

    @cached_property
    def insert(self) -> InsertRows:
        return InsertRows(self.table)

    @cached_property
    def aside(self) -> sa.Table:
        """Return the table under the name that it gets where the shard was."""
        return self.table.to_metadata(sa.MetaData(), name=f"{self.table.name}_moved")

    def of_shard(self, table: sa.Table) -> Sequence[sa.ColumnElement[bool]]:
        return () if self.shard is None else (table.c.shard == self.shard,)

    def among(self, table: sa.Table, keys: Sequence[Key]) -> sa.ColumnElement[bool]:
        """Rows with these keys, of one or more columns."""
        if len(self.group) == 1:
            return table.c[self.group[0]].in_([key[0] for key in keys])
        columns = [table.c[name] for name in self.group]  # not as tuples, for which MariaDB would read the whole table
        return sa.or_(*(sa.and_(*map(operator.eq, columns, key)) for key in keys))

    def key_of(self, row: Row) -> Key:
        return tuple(row[name] for name in self.group)


def _parts(shard: Shard) -> list[_Part]:
    tables = shard_tables(shard)
    wanted: list[tuple[sa.Table, Sequence[str], Shard | None]] = [
        (tables.attempt, ("message_id",), None),
        (tables.consumption, ("message_id",), None),
        *((table, [key.name for key in table.primary_key], shard) for table in SHARED),
        (tombstone, [key.name for key in tombstone.primary_key], None),  # nothing says of which shard one is
        (tables.message, ("id",), None),
    ]
    return [
        _Part(table=table, group=group, shard=only, log=_log_of(shard, table, group)) for table, group, only in wanted
    ]


def _log_of(shard: Shard, table: sa.Table, group: Sequence[str]) -> sa.Table:
    kind = table.name.removeprefix("tmc_").removesuffix(f"_{shard:02d}")
    options = {name: value for name, value in table.kwargs.items() if not name.startswith("postgresql")}
    return sa.Table(
        f"tmc_change_{shard:02d}_{kind}",
        sa.MetaData(),
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        *(sa.Column(name, table.c[name].type, nullable=False) for name in group),
        **options,
    )


class ShardMove:
    """The move of one shard. say: gets a sentence about what was done. Everything blocks.

    Raises MoveRefused; StoreUnavailable: run it again, it continues where it was.
    """

    def __init__(
        self, catalog: Database, source: Database, target: Database, shard: Shard, say: Callable[[str], None]
    ) -> None:
        self._catalog = catalog
        self._source = source
        self._target = target
        self._shard = shard
        self._say = say
        self._parts = _parts(shard)
        self._own = [part for part in self._parts if part.table in shard_tables(shard).all]
        self._run = secrets.token_hex(16)
        self._noted = float("-inf")
        self._said = time.monotonic()
        self._is_aside = False
        self.frozen_s = 0.0

    # -- the steps ---------------------------------------------------------------------------------------------------

    def run(self, identities: tuple[str, str]) -> None:
        """Move it, or continue. identities: of source and target."""
        with self._held(self._source) as source, self._held(self._target) as target:
            step, position, copied = self._begin(identities)
            if step < MoveStep.MOVED:
                self._is_aside = self._look_aside(source)
                self._record(source)
                if step == MoveStep.COPYING:
                    self._copy(source, target, position, copied)
                    self._compare()
                    self._set(MoveStep.FOLLOWING)
                self._follow(source, target)
                self._freeze_and_switch(source, target)
            self._forget(source)

    def undo(self) -> None:
        """Leave the shard where it is, and nothing of it in the target. Raises MoveRefused: it was moved."""
        with self._held(self._source) as source, self._held(self._target) as target:
            self._claim()
            self._thaw(source)
            self._record_no_more(source)
            with self._target.writing(target):
                for part in self._own:
                    target.execute(sa.schema.DropTable(part.table, if_exists=True))
            self._clear(self._target, target)
            self._end("undo move of shard")

    def confirm(self) -> None:
        """Drop what was kept where the shard was. Raises MoveRefused: it is not moved yet."""
        with self._held(self._source) as source:
            if self._row().step != MoveStep.MOVED:
                raise MoveRefused(f"Shard {self._shard} is not moved yet: finish that first, with the same command.")
            self._forget(source)
            self._change_tables(source, [f"DROP TABLE IF EXISTS {part.aside.name}" for part in self._own])
            self._end("confirm move of shard")

    # -- the catalog --------------------------------------------------------------------------------------------------

    def _begin(self, identities: tuple[str, str]) -> tuple[MoveStep, dict[str, list[Any]], int]:
        """Write down that the shard moves, or take the move over. Returns: its step, and how far copying is."""
        source, target = identities
        expected = 0
        if self._known() is None:
            self._refuse_rows()
            expected = self._count()

        def begin() -> Any:
            with self._catalog.transaction() as connection:
                now = self._catalog.now(connection)
                connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
                mine = shard_move.c.shard == self._shard
                if connection.execute(sa.select(shard_move).where(mine)).one_or_none() is None:
                    values = {"source": source, "target": target, "position": "{}", "copied": 0, "expected": expected}
                    times = {"started_ms": now, "updated_ms": now}
                    first = {"shard": self._shard, "run": "", "step": int(MoveStep.COPYING)}
                    connection.execute(shard_move.insert().values(**first, **values, **times))
                    record(
                        connection, act(now, _ACTOR, "move shard", f"shard {self._shard} to {place_of(self._target)}")
                    )
                connection.execute(shard_move.update().where(mine).values(run=self._run))
                return connection.execute(sa.select(shard_move).where(mine)).one()

        row = repeated(begin)
        if row.step == MoveStep.COPYING:
            with self._target.transaction() as connection:
                METADATA.create_all(connection, tables=[part.table for part in self._own])
        return MoveStep(row.step), json.loads(row.position), row.copied

    def _known(self) -> Any:
        with self._catalog.reading() as connection:
            return connection.execute(sa.select(shard_move).where(shard_move.c.shard == self._shard)).one_or_none()

    def _row(self) -> Any:
        """Raises MoveRefused: it is not on its way."""
        row = self._known()
        if row is None:
            raise MoveRefused(f"Shard {self._shard} is not on its way anywhere.")
        return row

    def _claim(self) -> None:
        """Take the move over, unless it is done already. Raises MoveRefused."""
        if not self._set(None, run=self._run):
            raise MoveRefused(
                f"Shard {self._shard} is not on its way, or it is moved already. To have it back, confirm the move and"
                " move it back."
            )

    def _set(self, step: MoveStep | None, **values: Any) -> bool:
        """Note progress. Returns: whether this run still has the move, or takes it."""
        if step is not None:
            values["step"] = int(step)
        mine = [shard_move.c.shard == self._shard, shard_move.c.step < MoveStep.MOVED]
        if "run" not in values:
            mine.append(shard_move.c.run == self._run)

        def note() -> bool:
            with self._catalog.transaction() as connection:
                now = self._catalog.now(connection)
                done = connection.execute(shard_move.update().where(*mine).values(updated_ms=now, **values)).rowcount
                return done == 1

        return repeated(note)

    def _keep(self, step: MoveStep | None, **values: Any) -> None:
        if not self._set(step, **values):
            raise MoveRefused(f"Another command works on the move of shard {self._shard}: leave it to that one.")

    def _end(self, action: str) -> None:
        def end() -> None:
            with self._catalog.transaction() as connection:
                now = self._catalog.now(connection)
                connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
                connection.execute(shard_move.delete().where(shard_move.c.shard == self._shard))
                record(connection, act(now, _ACTOR, action, f"shard {self._shard}"))

        repeated(end)

    # -- recording and copying ---------------------------------------------------------------------------------------

    @contextmanager
    def _held(self, database: Database) -> Iterator[sa.Connection]:
        """A connection that keeps other moves away from a database until it is closed. Raises MoveRefused."""
        with database.connection() as connection:
            connection.detach()  # no pool keeps it, and with it the lock
            with database.writing(connection):
                is_held = database.dialect.hold_for_move(connection)
            if not is_held:
                raise MoveRefused(f"Another shard is being moved from or to {place_of(database)}: wait for that.")
            yield connection

    def _refuse_rows(self) -> None:
        """Raises MoveRefused: the target has rows of such a shard already."""
        with self._target.reading() as connection:
            there = set(sa.inspect(connection).get_table_names())
            for part in self._own:
                look = sa.select(sa.literal(1)).select_from(part.table).limit(1)
                if part.table.name in there and connection.execute(look).first() is not None:
                    raise MoveRefused(
                        f"{place_of(self._target)} has a table {part.table.name} with rows in it already: see what they are,"
                        " and drop it."
                    )

    def _record(self, source: sa.Connection) -> None:
        with self._source.writing(source):
            for part in self._parts:
                part.log.create(source, checkfirst=True)
        if not self._is_aside:
            for part in self._parts:
                self._change_tables(source, self._source.dialect.recording(part.recording))

    def _record_no_more(self, source: sa.Connection) -> None:
        for part in self._parts:
            self._change_tables(source, self._source.dialect.recording_no_more(part.recording))
        with self._source.writing(source):
            for part in self._parts:
                source.execute(sa.schema.DropTable(part.log, if_exists=True))

    def _change_tables(self, connection: sa.Connection, statements: Sequence[str]) -> None:
        """Run statements that wait until no transaction uses a table; what comes meanwhile waits behind them."""
        database, pause_s = self._source, _TABLE_PAUSES_S[0]
        for _ in range(_TABLE_TRIES):
            try:
                with database.writing(connection):
                    connection.exec_driver_sql(database.dialect.wait_briefly())
                    for statement in statements:
                        connection.exec_driver_sql(statement)
                return
            except StoreConflict:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _TABLE_PAUSES_S[1])
        raise MoveRefused(
            f"Something keeps using the tables of shard {self._shard} in {place_of(database)}, such as a backup or a long"
            " query: wait for it, then run this again."
        )

    def _count(self) -> int:
        with self._source.reading() as connection:
            count = sa.func.count()
            return sum(connection.execute(sa.select(count).select_from(part.table)).scalar_one() for part in self._own)

    def _copy(self, source: sa.Connection, target: sa.Connection, position: dict[str, list[Any]], copied: int) -> None:
        for part in self._parts:
            is_own = part in self._own
            after = tuple(position.get(part.table.name, ())) or None
            for page in self._pages(self._source, part, part.table, after):
                self._replace(source, target, part, sorted({part.key_of(row) for row in page}), page)
                if is_own:
                    copied += len(page)
                    position[part.table.name] = [page[-1][name] for name in part.order]
                self._note(position, copied)
        self._keep(None, position=json.dumps(position), copied=copied)

    def _note(self, position: Mapping[str, Sequence[Any]], copied: int) -> None:
        now = time.monotonic()
        if now - self._noted >= _NOTE_S:
            self._noted = now
            self._keep(None, position=json.dumps(position), copied=copied)
        if now - self._said >= 5 * _NOTE_S:
            self._said = now
            self._say(f"Shard {self._shard}: {copied:,} of about {self._row().expected:,} rows are copied.")

    def _replace(
        self, source: sa.Connection, target: sa.Connection, part: _Part, keys: Sequence[Key], rows: Sequence[Row]
    ) -> None:
        """Have the target hold these rows, and no others, of these keys.

        A row whose place is taken by one that has changed since is left to the log, which names that one as well.
        """
        try:
            with self._target.writing(target):
                target.execute(part.table.delete().where(part.among(part.table, keys)))
                for several in _statements(rows):
                    part.insert.run(target, several)
        except sa.exc.IntegrityError:
            if len(keys) == 1:
                with self._source.writing(source):
                    source.execute(part.log.insert().values(dict(zip(part.group, keys[0], strict=True))))
                return
            for key in keys:
                self._replace(source, target, part, [key], [row for row in rows if part.key_of(row) == key])

    def _pages(
        self, database: Database, part: _Part, table: sa.Table, after: Key | None = None
    ) -> Iterator[Sequence[Row]]:
        """Yield all rows in order, each key's on one page."""
        columns = [table.c[name] for name in part.order]
        while True:
            query = sa.select(table).where(*part.of_shard(table)).order_by(*columns).limit(_PAGE)
            if after is not None:
                query = query.where(_behind(columns, after))
            with database.reading() as connection:
                page: list[Any] = list(connection.execute(query).mappings().all())
                if len(page) == _PAGE:
                    last = tuple(page[-1][name] for name in part.order)
                    rest = sa.select(table).where(*part.of_shard(table), part.among(table, [part.key_of(page[-1])]))
                    if len(part.order) > len(part.group):
                        page += connection.execute(rest.where(_behind(columns, last)).order_by(*columns)).mappings()
            if page:
                yield page
                after = tuple(page[-1][name] for name in part.order)
            if len(page) < _PAGE:
                return

    def _compare(self) -> None:
        """Raises MoveRefused: something differs that the log does not name."""
        for part in self._parts:
            if part.table is tombstone:
                continue  # the target has those of its own shards as well
            ours = self._groups(self._source, part)
            theirs = self._groups(self._target, part)
            differing: list[Key] = []
            for key, mine, other in _merged(ours, theirs):
                if mine != other:
                    differing.append(key)
            for start in range(0, len(differing), _CHANGES):
                some = differing[start : start + _CHANGES]
                log = sa.select(*(part.log.c[name] for name in part.group)).where(part.among(part.log, some))
                with self._source.reading() as connection:
                    named = {tuple(row) for row in connection.execute(log)}
                if lost := [key for key in some if key not in named]:
                    raise MoveRefused(
                        f"{part.table.name}: the rows of {lost[0]} differ after the copy, and nothing has changed them. Undo"
                        " the move, and see what else writes there."
                    )

    def _groups(self, database: Database, part: _Part) -> Iterator[tuple[Key, list[Key]]]:
        """Yield keys with the values of their rows, as every database can hold them."""
        rows = chain.from_iterable(self._pages(database, part, part.table))
        for key, group in groupby(rows, part.key_of):
            yield key, [tuple(_plain(row[name]) for name in part.insert.columns) for row in group]

    def _follow(self, source: sa.Connection, target: sa.Connection) -> None:
        while not self._is_aside:
            done = sum(self._drain(source, target, part) for part in self._parts)
            self._keep(None)
            if done <= _FEW:
                return

    def _drain(self, source: sa.Connection, target: sa.Connection, part: _Part) -> int:
        """Copy what the first entries of the log name. Returns: how many."""
        table = part.aside if self._is_aside and part in self._own else part.table
        with self._source.reading() as connection:
            log = sa.select(part.log).order_by(part.log.c.seq).limit(_CHANGES)
            changes: list[Any] = list(connection.execute(log).mappings())
            keys = sorted({part.key_of(change) for change in changes})
            if not keys:
                return 0
            columns = [table.c[name] for name in part.order]
            query = sa.select(table).where(*part.of_shard(table), part.among(table, keys)).order_by(*columns)
            rows: list[Any] = list(connection.execute(query).mappings())
        self._replace(source, target, part, keys, rows)
        with self._source.writing(source):
            source.execute(part.log.delete().where(part.log.c.seq.in_([change["seq"] for change in changes])))
        return len(changes)

    # -- freeze and switch -------------------------------------------------------------------------------------------

    def _look_aside(self, source: sa.Connection) -> bool:
        with self._source.writing(source):
            return sa.inspect(source).has_table(self._own[0].aside.name)

    def _freeze_and_switch(self, source: sa.Connection, target: sa.Connection) -> None:
        began = time.monotonic()
        try:
            if not self._is_aside:
                names = {part.table.name: part.aside.name for part in self._own}
                self._change_tables(source, self._source.dialect.renaming(names))
                self._is_aside = True
            while sum(self._drain(source, target, part) for part in self._parts):
                pass
            self._keep(MoveStep.FROZEN)
        except BaseException:
            self._thaw(source)  # traffic goes on where it was
            raise
        self._switch()
        self.frozen_s = time.monotonic() - began
        self._say(f"Shard {self._shard} is in {place_of(self._target)} now; callers waited for {self.frozen_s:.2f} s.")

    def _thaw(self, source: sa.Connection) -> None:
        if self._look_aside(source):
            names = {part.aside.name: part.table.name for part in self._own}
            self._change_tables(source, self._source.dialect.renaming(names))
        self._is_aside = False

    def _switch(self) -> None:
        """Have the catalog say where the shard is. Whether it says so is asked until there is an answer."""
        while True:
            try:
                repeated(self._switch_once)
                return
            except StoreUnavailable as exc:
                self._say(f"The catalog does not answer, and shard {self._shard} is frozen until it does: {exc}")
                time.sleep(_NOTE_S)

    def _switch_once(self) -> None:
        mine = shard_move.c.shard == self._shard
        with self._catalog.transaction() as connection:
            now = self._catalog.now(connection)
            connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
            row = connection.execute(sa.select(shard_move).where(mine)).one_or_none()
            if row is not None and row.step == MoveStep.MOVED:
                return  # an earlier try came through
            if row is None or row.step != MoveStep.FROZEN or row.run != self._run:
                raise MoveRefused(f"Another command works on the move of shard {self._shard}: leave it to that one.")
            here = shard_map.update().where(shard_map.c.shard == self._shard, shard_map.c.identity == row.source)
            if connection.execute(here.values(identity=row.target, place=place_of(self._target)[:255])).rowcount != 1:
                raise MoveRefused(f"The catalog has shard {self._shard} elsewhere: undo the move.")
            connection.execute(shard_move.update().where(mine).values(step=int(MoveStep.MOVED), updated_ms=now))
            record(connection, act(now, _ACTOR, "moved shard", f"shard {self._shard} to {place_of(self._target)}"))

    def _forget(self, source: sa.Connection) -> None:
        """Delete in the source what it has of the shard in tables of all of them."""
        self._record_no_more(source)
        self._clear(self._source, source)
        with self._source.writing(source):
            source.execute(lease.delete().where(lease.c.shard == self._shard))

    def _clear(self, database: Database, connection: sa.Connection) -> None:
        """Delete the shard's rows in shared tables, page by page."""
        for part in self._parts:
            for page in self._pages(database, part, part.table) if part.shard is not None else ():
                with database.writing(connection):
                    connection.execute(part.table.delete().where(part.among(part.table, list(map(part.key_of, page)))))


def _merged(
    ours: Iterator[tuple[Key, list[Key]]], theirs: Iterator[tuple[Key, list[Key]]]
) -> Iterator[tuple[Key, list[Key], list[Key]]]:
    """Yield each key with the rows of both sides; both are in order."""
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None or other is not None:
        if other is None or (mine is not None and mine[0] < other[0]):
            assert mine is not None
            yield mine[0], mine[1], []
            mine = next(ours, None)
        elif mine is None or other[0] < mine[0]:
            yield other[0], [], other[1]
            other = next(theirs, None)
        else:
            yield mine[0], mine[1], other[1]
            mine, other = next(ours, None), next(theirs, None)


def _plain(value: Any) -> Any:
    """Text as every database can hold it."""
    return without_nul(value) if isinstance(value, str) else value


def _behind(columns: Sequence[sa.ColumnElement[Any]], after: Key) -> sa.ColumnElement[bool]:
    """Rows behind these values, in the order of the columns."""
    first = columns[0]
    further: sa.ColumnElement[bool] = first > after[0]
    if len(columns) == 1:
        return further
    # The first condition says no more than the second, in a way that every database takes to an index.
    return sa.and_(first >= after[0], sa.or_(further, _behind(columns[1:], after[1:])))


def _statements(rows: Sequence[Row]) -> Iterator[list[Row]]:
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
