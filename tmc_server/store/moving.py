"""Moves a shard from one database to another, of whatever kind, while servers use it.

    record   triggers write the key of each row that changes into a log, in the transaction of the change
    copy     page by page, in the order of the keys, into tables with names that no server knows
    follow   what the log names is copied again, until little is left; then both sides are compared
    freeze   the shard's tables get another name, once no transaction uses them; callers wait (store/group_commit.py)
    open     the rest of the log is copied, and the copies get the names that servers know: from here on there is no way back
    switch   the catalog says where the shard is now; servers follow it

A server that knows nothing of the move, or is resumed in the middle of it, can write neither to where the shard was nor into
an unfinished copy: the name of the table is the fence. Each step can be cut short and done over again: copying replaces what
is there, and an entry of the log is deleted after what it names was copied. Both databases are changed over one connection
each, which holds a lock, so that a command that was taken for dead changes nothing.
Source: docs/decisions/0047-moving-shards.md.
"""

from __future__ import annotations

import json
import operator
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, groupby
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import MoveStep
from tmc_server.errors import RowLocked, StoreUnavailable, TmcError
from tmc_server.store.auditing import act, record
from tmc_server.store.dialects.contract import Recording
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database, over, repeated, repeating
from tmc_server.store.move_hold import Held, MoveRefused
from tmc_server.store.shard_map import place_of
from tmc_server.store.sql import InsertRows
from tmc_server.store.tables import (
    bulk_item,
    bulk_progress,
    failed,
    lease,
    meta,
    order,
    retention,
    server,
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
_PAGE_BYTES = 4 << 20  # of bodies
_CHANGES = 500
_FEW = 300  # changes that are left to the freeze at most
_STATEMENT_BYTES = 1 << 20
_TRIES = 20  # to give a shard back
_NOTE_S = 1.0

Row = Mapping[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of a shard in one table. group: columns of the key by which rows are copied, all of one key at once.

    shard: the table is shared, and only rows of this one are meant.  log: keys of what changes.
    copy: where it is copied to.  aside: what the freeze makes of the table.  Both are the table itself, if it is shared.
    """

    table: sa.Table
    group: Sequence[str]
    shard: Shard | None
    log: sa.Table
    copy: sa.Table
    aside: sa.Table

    @property
    def recording(self) -> Recording:
        return Recording(table=self.table.name, log=self.log.name, keys=self.group, shard=self.shard)

    @property
    def order(self) -> Sequence[str]:
        """Columns that no two rows share, the group's first."""
        return [*self.group, *(key.name for key in self.table.primary_key if key.name not in self.group)]

    @cached_property
    def insert(self) -> InsertRows:
        return InsertRows(self.copy)

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


def _own(table: sa.Table, group: Sequence[str]) -> _Part:
    copy, aside = (table.to_metadata(sa.MetaData(), name=f"{table.name}_{end}") for end in ("copy", "moved"))
    return _Part(table=table, group=group, shard=None, log=_log_of(table, group), copy=copy, aside=aside)


def _shared(table: sa.Table, shard: Shard, of_all: bool = False) -> _Part:
    """of_all: nothing says of which shard a row is."""
    group = [key.name for key in table.primary_key]
    log = _log_of(table, group, f"_{shard:02d}")
    return _Part(table=table, group=group, shard=None if of_all else shard, log=log, copy=table, aside=table)


def _log_of(table: sa.Table, group: Sequence[str], end: str = "") -> sa.Table:
    name = f"tmc_change_{table.name.removeprefix('tmc_')}{end}"
    options = {option: value for option, value in table.kwargs.items() if not option.startswith("postgresql")}
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        *(sa.Column(key, table.c[key].type, nullable=False) for key in group),
        sa.Index(f"ix_{name}", *group),
        **options,
    )


class ShardMove:
    """The move of one shard. identities: of source and target.  say: gets a sentence about what was done. Everything blocks.

    Raises MoveRefused; StoreUnavailable, RowLocked: run it again, it continues where it was.
    """

    def __init__(
        self,
        *,
        catalog: Database,
        source: Database,
        target: Database,
        identities: tuple[str, str],
        shard: Shard,
        say: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._source = Held(source)
        self._target = Held(target)
        self._identities = identities
        self._shard = shard
        self._say = say
        tables = shard_tables(shard)
        self._own = [
            _own(tables.message, ("id",)),  # in the order in which servers lock
            _own(tables.consumption, ("message_id",)),
            _own(tables.attempt, ("message_id",)),
        ]
        self._parts = [*self._own, *(_shared(table, shard) for table in SHARED), _shared(tombstone, shard, of_all=True)]
        self._run = secrets.token_hex(16)
        self._noted = float("-inf")
        self._said = time.monotonic()
        self._expected = 0
        self._is_aside = False
        self._frozen_at: float | None = None

    # -- the steps ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Move it, or continue."""
        with self._held():
            row = self._begin()
            if row.step < MoveStep.MOVED:
                if not self._is_open():
                    self._is_aside = self._source.has(self._own[0].aside)
                    self._record()
                    if not self._is_aside:
                        if row.step == MoveStep.COPYING:
                            self._copy(json.loads(row.position), row.copied)
                        self._keep(MoveStep.FOLLOWING)
                        self._follow()
                        self._compare()  # also what an earlier run has: the old database may have lost changes in a crash
                        self._follow()
                    self._freeze()
                self._switch()
            self._forget()
            if row.step == MoveStep.MOVED:
                self._say(
                    f"Shard {self._shard} is in {place_of(self._target.database)} already: confirm that with --confirm."
                )

    def undo(self) -> None:
        """Leave the shard where it is, and nothing of it in the target. Raises MoveRefused: it was moved."""
        with self._held():
            row = self._row()
            if row.step == MoveStep.MOVED or self._is_open():
                raise MoveRefused(
                    f"Shard {self._shard} is moved already: finish that with --to. To have it back, confirm the move and move it"
                    " back."
                )
            self._take_over(row, MoveStep(row.step))
            self._thaw()
            self._keep(MoveStep.UNDOING)
            self._record_no_more()
            self._target.drop([part.copy for part in self._own])
            self._clear(self._target)
            self._end("undo move of shard")

    def confirm(self) -> None:
        """Drop what was kept where the shard was. Raises MoveRefused: it is not moved yet."""
        with self._held():
            row = self._row()
            if row.step != MoveStep.MOVED:
                raise MoveRefused(f"Shard {self._shard} is not moved yet: finish that first, with the same command.")
            self._take_over(row, MoveStep.MOVED)
            self._forget()
            self._source.drop([part.aside for part in self._own])
            self._end("confirm move of shard")

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            self._source.take()
            self._target.take()
            yield
        finally:
            self._source.close()
            self._target.close()

    def _is_open(self) -> bool:
        """Return whether the copies have the names that servers know, and nothing else has."""
        return self._target.has(self._own[0].table) and not self._source.has(self._own[0].table)

    # -- the catalog --------------------------------------------------------------------------------------------------

    def _begin(self) -> Any:
        """Write down that the shard moves, or take the move over. Returns: its row."""
        source, target = self._identities
        expected, is_open = 0, self._is_open()
        if self._known() is None:
            self._refuse_tables()
            expected = self._count()

        def begin() -> Any:
            with self._catalog.transaction() as connection:
                now = self._catalog.now(connection)
                connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
                mine = shard_move.c.shard == self._shard
                row = connection.execute(sa.select(shard_move).where(mine)).one_or_none()
                if not is_open:  # else there is no way but on
                    self._demand_known(connection)
                holder = connection.execute(sa.select(shard_map.c.identity).filter_by(shard=self._shard)).scalar_one()
                if row is None and holder == source:
                    values = {"source": source, "target": target, "position": "{}", "copied": 0, "expected": expected}
                    times = {"started_ms": now, "updated_ms": now}
                    first = {"shard": self._shard, "run": "", "step": int(MoveStep.COPYING)}
                    connection.execute(shard_move.insert().values(**first, **values, **times))
                    subject = f"shard {self._shard} to {place_of(self._target.database)}"
                    record(connection, act(now, _ACTOR, "move shard", subject))
                elif row is None or (row.source, row.target) != self._identities:
                    raise self._elsewhere
                elif row.step == MoveStep.UNDOING and not is_open:
                    raise MoveRefused(f"The move of shard {self._shard} is being undone: finish that with --undo.")
                connection.execute(shard_move.update().where(mine).values(run=self._run))
                return connection.execute(sa.select(shard_move).where(mine)).one()

        row = repeated(begin)
        self._expected = row.expected
        if row.step == MoveStep.COPYING:
            self._target.create([part.copy for part in self._own])
        return row

    def _demand_known(self, connection: sa.Connection) -> None:
        """Raises MoveRefused: a server would stop when the shard arrives, since its configuration lacks the target."""
        now = self._catalog.now(connection)
        alive = sa.select(server.c.name, server.c.known_databases).where(sa.not_(over(server.c.expires_ms, now)))
        ignorant = [
            row.name for row in connection.execute(alive) if self._identities[1] not in (row.known_databases or "")
        ]
        if ignorant:
            place = place_of(self._target.database)
            raise MoveRefused(
                f"{', '.join(ignorant)} would stop when the shard arrives: [store] does not name {place} there, or the program is"
                " too old. Add the URL to [store] spare of every server, and restart them, one after another; or undo the move."
            )

    def _known(self) -> Any:
        with self._catalog.reading() as connection:
            return connection.execute(sa.select(shard_move).where(shard_move.c.shard == self._shard)).one_or_none()

    def _row(self) -> Any:
        """Raises MoveRefused: it is not on its way, or on another way meanwhile."""
        row = self._known()
        if row is None or (row.source, row.target) != self._identities:
            raise self._elsewhere
        return row

    @property
    def _elsewhere(self) -> MoveRefused:
        return MoveRefused(f"Another command has moved shard {self._shard} meanwhile: see tmc admin shard-map.")

    def _take_over(self, row: Any, step: MoveStep) -> None:
        """Have this run work on the move from here on. Raises MoveRefused: another one does since we looked."""
        as_seen = (shard_move.c.run == row.run, shard_move.c.step == row.step)
        if not self._set(as_seen, run=self._run, step=int(step)):
            raise self._taken

    def _keep(self, step: MoveStep | None, **values: Any) -> None:
        """Note progress. Raises MoveRefused: another run has the move."""
        if step is not None:
            values["step"] = int(step)
        if not self._set((shard_move.c.run == self._run, shard_move.c.step < MoveStep.MOVED), **values):
            raise self._taken

    @repeating
    def _set(self, which: Sequence[sa.ColumnElement[bool]], **values: Any) -> bool:
        """Returns: whether there was such a row. A step raises the catalog's version, so that servers hear of it."""
        with self._catalog.transaction() as connection:
            if "step" in values:
                connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
            mine = shard_move.update().where(shard_move.c.shard == self._shard, *which)
            now = self._catalog.now(connection)
            return connection.execute(mine.values(updated_ms=now, **values)).rowcount == 1

    @property
    def _taken(self) -> MoveRefused:
        return MoveRefused(f"Another command works on the move of shard {self._shard}: leave it to that one.")

    @repeating
    def _end(self, action: str) -> None:
        with self._catalog.transaction() as connection:
            now = self._catalog.now(connection)
            connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
            mine = shard_move.delete().where(shard_move.c.shard == self._shard, shard_move.c.run == self._run)
            if connection.execute(mine).rowcount != 1:
                raise self._taken
            record(connection, act(now, _ACTOR, action, f"shard {self._shard}"))

    # -- recording and copying ---------------------------------------------------------------------------------------

    def _refuse_tables(self) -> None:
        """Raises MoveRefused: the target has tables of such a shard already."""
        with self._target.database.reading() as connection:
            there = set(sa.inspect(connection).get_table_names())
        for table in chain.from_iterable((part.table, part.copy, part.aside) for part in self._own):
            if table.name in there:
                raise MoveRefused(
                    f"{place_of(self._target.database)} has a table {table.name} already: see what it is, and drop it."
                )

    def _record(self) -> None:
        self._source.create([part.log for part in self._parts])
        if not self._is_aside:  # else nothing changes them any more, and the triggers are there
            for part in self._parts:
                self._source.change_tables(partial(self._recording, part.recording), self._waited)

    def _recording(self, recording: Recording, connection: sa.Connection) -> Sequence[str]:
        return self._source.database.dialect.recording(connection, recording)

    def _record_no_more(self) -> None:
        for part in self._parts:
            self._source.change_tables(partial(self._recording_no_more, part.recording), self._waited)
        self._source.drop([part.log for part in self._parts])

    def _recording_no_more(self, recording: Recording, _connection: sa.Connection) -> Sequence[str]:
        return self._source.database.dialect.recording_no_more(recording)

    def _waited(self) -> None:
        self._sometimes("waiting until no transaction uses a table in the old database.")

    def _sometimes(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= 5 * _NOTE_S:
            self._said = now
            self._say(f"Shard {self._shard}: {what}")

    def _count(self) -> int:
        with self._source.database.reading() as connection:
            count = sa.func.count()
            return sum(connection.execute(sa.select(count).select_from(part.table)).scalar_one() for part in self._own)

    def _copy(self, position: dict[str, list[Any]], copied: int) -> None:
        for part in self._parts:
            is_own = part in self._own
            after = tuple(position.get(part.table.name, ())) or None
            for page in self._pages(self._source.database, part, part.table, after):
                self._replace(part, sorted({part.key_of(row) for row in page}), page)
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
        self._sometimes(f"{copied:,} of about {self._expected:,} rows are copied.")

    def _replace(self, part: _Part, keys: Sequence[Key], rows: Sequence[Row]) -> None:
        """Have the target hold these rows, and no others, of these keys.

        A row whose place is taken by one that has changed since is left to the log, which names that one as well.
        """

        def replace(connection: sa.Connection) -> None:
            connection.execute(part.copy.delete().where(part.among(part.copy, keys)))
            for several in _statements(rows):
                part.insert.run(connection, several)

        try:
            self._target.change(replace)
        except sa.exc.IntegrityError:
            if len(keys) > 1:
                for key in keys:
                    self._replace(part, [key], [row for row in rows if part.key_of(row) == key])
                return
            again = part.log.insert().values(dict(zip(part.group, keys[0], strict=True)))
            self._source.execute(again)

    def _pages(
        self, database: Database, part: _Part, table: sa.Table, after: Key | None = None
    ) -> Iterator[Sequence[Row]]:
        """Yield all rows in order, each key's on one page."""
        columns = [table.c[name] for name in part.order]
        ordered = sa.select(table).where(*part.of_shard(table)).order_by(*columns)
        while True:
            behind = ordered if after is None else ordered.where(_behind(columns, after))
            with database.reading() as connection:
                most = _page_rows(connection, behind, table)
                page: list[Any] = list(connection.execute(behind.limit(most)).mappings().all())
                if len(page) == most and len(part.order) > len(part.group):
                    last = tuple(page[-1][name] for name in part.order)
                    rest = ordered.where(part.among(table, [part.key_of(page[-1])]), _behind(columns, last))
                    page += connection.execute(rest).mappings()
            if page:
                yield page
                after = tuple(page[-1][name] for name in part.order)
            if len(page) < most:
                return

    def _compare(self) -> None:
        """Raises MoveRefused: something differs that the log does not name."""
        for part in self._parts:
            if part.table is tombstone:
                continue  # the target has those of its own shards as well
            ours = self._groups(self._source.database, part, part.table)
            theirs = self._groups(self._target.database, part, part.copy)
            differing = [
                key for key, mine, other in _merged(ours, theirs) if mine != other and _plain(mine) != _plain(other)
            ]
            for start in range(0, len(differing), _CHANGES):
                some = differing[start : start + _CHANGES]
                log = sa.select(*(part.log.c[name] for name in part.group)).where(part.among(part.log, some))
                with self._source.database.reading() as connection:
                    named = {tuple(row) for row in connection.execute(log)}
                if lost := [key for key in some if key not in named]:
                    raise MoveRefused(
                        f"{part.table.name}: the rows of {lost[0]} differ after the copy, and nothing has changed them. Undo"
                        " the move, and see what else writes there."
                    )

    def _groups(self, database: Database, part: _Part, table: sa.Table) -> Iterator[tuple[Key, list[Key]]]:
        """Yield keys with the values of their rows."""
        rows = chain.from_iterable(self._pages(database, part, table))
        values = operator.itemgetter(*part.insert.columns)
        for key, group in groupby(rows, part.key_of):
            yield key, [values(row) for row in group]

    def _follow(self) -> None:
        while (done := sum(self._drain(part) for part in self._parts)) > _FEW:
            self._keep(None)
            self._sometimes(f"{done} changes were copied, and more follow.")

    def _drain(self, part: _Part, last: int | None = None) -> int:
        """Copy what the first entries of the log name. last: the last of them.  Returns: how many were seen."""
        table = part.aside if self._is_aside else part.table
        entries = sa.select(part.log).order_by(part.log.c.seq).limit(_CHANGES)
        if last is not None:
            entries = entries.where(part.log.c.seq <= last)
        with self._source.database.reading() as connection:
            seen: list[Any] = list(connection.execute(entries).mappings())
            if not seen:
                return 0
            changes = seen[: self._fitting(connection, part, table, seen)]
            keys = sorted({part.key_of(change) for change in changes})
            columns = [table.c[name] for name in part.order]
            query = sa.select(table).where(*part.of_shard(table), part.among(table, keys)).order_by(*columns)
            rows: list[Any] = list(connection.execute(query).mappings())
        self._replace(part, keys, rows)
        done = part.log.delete().where(part.log.c.seq.in_([change["seq"] for change in changes]))
        self._source.execute(done)
        return len(seen)

    def _fitting(self, connection: sa.Connection, part: _Part, table: sa.Table, changes: Sequence[Row]) -> int:
        """Return how many of the first changes have rows that fit on a page, one at least."""
        if "body" not in table.c:
            return len(changes)
        keys = sorted({part.key_of(change) for change in changes})
        lengths = sa.select(table.c[part.group[0]], sa.func.length(table.c.body)).where(part.among(table, keys))
        sizes = {row[0]: row[1] for row in connection.execute(lengths)}
        return _first_fitting([sizes.get(change[part.group[0]], 0) for change in changes])

    # -- freeze, open, switch ----------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        """Have nobody write to the shard where it is, and copy what is left to copy."""
        try:
            self._target.probe()
            with self._catalog.reading() as connection:
                self._demand_known(connection)
            self._keep(MoveStep.FROZEN)
            was_aside = self._is_aside
            held_up_s = self._source.rename({part.table: part.aside for part in self._own}, self._follow)
            self._is_aside = True
            if not was_aside:
                self._frozen_at = time.monotonic() - held_up_s
            # Who writes to the shard has committed. Tombstones of other shards follow, and need not be waited for.
            ends = [self._last(part) for part in self._parts]
            for part, last in zip(self._parts, ends, strict=True):
                while last is not None and self._drain(part, last):
                    pass
            left = [
                part.table.name for part in self._parts if part.table is not tombstone and self._last(part) is not None
            ]
            if left:
                raise MoveRefused(
                    f"Rows of {', '.join(left)} clash with others in the copy. Undo the move, and see what else writes there."
                )
        except BaseException:
            self._give_back()
            raise

    def _last(self, part: _Part) -> int | None:
        """Return the last entry of a log. None: it has none."""
        with self._source.database.reading() as connection:
            return connection.execute(sa.select(sa.func.max(part.log.c.seq))).scalar()

    def _give_back(self) -> None:
        """Let traffic go on where the shard was, unless somebody else works on the move by now."""
        for _ in range(_TRIES):
            try:
                self._source.take_again()
                self._keep(None)
                self._thaw()
                self._keep(MoveStep.FOLLOWING)
                return
            except (StoreUnavailable, RowLocked):
                time.sleep(_NOTE_S)
            except (MoveRefused, TmcError, sa.exc.SQLAlchemyError) as exc:
                self._say(str(exc))
                break
        self._say(f"Shard {self._shard} may be frozen, and callers refused: run this again, or with --undo.")

    def _thaw(self) -> None:
        self._source.rename({part.aside: part.table for part in self._own})
        self._is_aside = False

    def _switch(self) -> None:
        """Give the copies the names that servers know, and have the catalog say so: again, until both have answered."""
        while True:
            try:
                row = self._row()
                if row.run != self._run:
                    raise self._taken
                if row.step < MoveStep.MOVED:  # else an earlier try came through
                    self._target.take_again()
                    self._keep(None)  # again: nobody else can take the move over from here on
                    self._open()
                    repeated(self._switch_once)
                break
            except (StoreUnavailable, RowLocked) as exc:
                self._say(f"A database does not answer, and shard {self._shard} is frozen until it does: {exc}")
                time.sleep(_NOTE_S)
        waited = "" if self._frozen_at is None else f"; callers waited for {time.monotonic() - self._frozen_at:.2f} s"
        self._say(f"Shard {self._shard} is in {place_of(self._target.database)} now{waited}.")

    def _open(self) -> None:
        try:
            self._target.rename({part.copy: part.table for part in self._own})
        except (MoveRefused, sa.exc.SQLAlchemyError):
            if not self._target.has(self._own[0].table):
                self._give_back()
            raise

    def _switch_once(self) -> None:
        mine = shard_move.c.shard == self._shard
        place = place_of(self._target.database)
        with self._catalog.transaction() as connection:
            now = self._catalog.now(connection)
            connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
            step = shard_move.update().where(mine, shard_move.c.run == self._run)
            here = shard_map.update().where(shard_map.c.shard == self._shard)
            if connection.execute(step.values(step=int(MoveStep.MOVED), updated_ms=now)).rowcount != 1:
                raise self._taken
            connection.execute(here.values(identity=self._identities[1], place=place[:255]))
            record(connection, act(now, _ACTOR, "moved shard", f"shard {self._shard} to {place}"))

    def _forget(self) -> None:
        """Delete in the source what it has of the shard in tables of all of them."""
        self._record_no_more()
        self._clear(self._source)
        self._source.execute(lease.delete().where(lease.c.shard == self._shard))

    def _clear(self, held: Held) -> None:
        """Delete the shard's rows in shared tables, page by page."""
        for part in (each for each in self._parts if each.shard is not None):
            for page in self._pages(held.database, part, part.table):
                held.execute(part.table.delete().where(part.among(part.table, list(map(part.key_of, page)))))


def _page_rows(connection: sa.Connection, query: sa.Select[Any], table: sa.Table) -> int:
    """Return how many of the next rows make a page."""
    if "body" not in table.c:
        return _PAGE
    sizes = connection.execute(query.with_only_columns(sa.func.length(table.c.body)).limit(_PAGE)).scalars().all()
    fitting = _first_fitting(sizes)
    return fitting if fitting < len(sizes) else _PAGE


def _first_fitting(sizes: Sequence[int]) -> int:
    """Return how many of the first bodies fit on a page, one at least."""
    return max(1, sum(1 for total in accumulate(sizes) if total <= _PAGE_BYTES))


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


def _plain(rows: Sequence[Key]) -> list[Key]:
    """Return rows with their texts as every database can hold them."""
    return [tuple(without_nul(value) if isinstance(value, str) else value for value in row) for row in rows]


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
