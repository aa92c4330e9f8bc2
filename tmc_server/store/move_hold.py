"""Holds a database during the move of a shard: one command at a time, over one connection that is never replaced silently.

Source: docs/decisions/0047-moving-shards.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from tmc_server.errors import StoreUnavailable
from tmc_server.store.engines import Database, StoreConflict, repeated
from tmc_server.store.migrate import create_missing
from tmc_server.store.shard_map import place_of

_TRIES = 20
_TABLE_PAUSES_S = (0.1, 3.0)  # between tries, which hold up others: from, growing to

Result = TypeVar("Result")


class MoveRefused(Exception):
    """A shard cannot be moved so; the text says why and what to do."""


class Held:
    """A database that no other command moves shards from or to while our connection is open."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._connection: sa.Connection | None = None

    def take(self) -> None:
        """Raises MoveRefused, StoreUnavailable."""
        if not self._takes():
            raise MoveRefused(f"Another shard is being moved from or to {place_of(self.database)}: wait for that.")

    def take_again(self) -> None:
        """Take the lock where it was lost with its connection. Raises StoreUnavailable: the database still holds it."""
        if (self._connection is None or self._connection.invalidated) and not self._takes():
            raise StoreUnavailable(
                f"{place_of(self.database)} has not noticed yet that a connection was lost, and keeps its lock."
            )

    def _takes(self) -> bool:
        self.close()
        connection = self.database.connect()
        try:
            connection.detach()  # no pool keeps it, and with it the lock
            with self.database.writing(connection):
                is_held = self.database.dialect.hold_for_move(connection)
        except BaseException:
            connection.close()
            raise
        if is_held:
            self._connection = connection
        else:
            connection.close()
        return is_held

    def probe(self) -> None:
        """Raises StoreUnavailable: the connection was lost while it rested, or leads to a former primary."""
        self.change(lambda connection: connection.exec_driver_sql("SELECT 1"))
        if self._connection is None or not self.database.hosts.leads(self._connection):
            self.close()
            raise StoreUnavailable(f"{place_of(self.database)} takes no writes any more: repeat the command.")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def change(self, work: Callable[[sa.Connection], Result]) -> Result:
        """Run a transaction, again while it loses against others. Raises StoreUnavailable: the lock may be lost, too."""
        return repeated(lambda: self._changed(work), _TRIES)

    def _changed(self, work: Callable[[sa.Connection], Result]) -> Result:
        connection = self._connection
        if connection is None or connection.invalidated:  # it would connect again, without the lock
            raise StoreUnavailable
        with self.database.writing(connection):
            return work(connection)

    def change_tables(
        self, statements: Callable[[sa.Connection], Sequence[str]], meanwhile: Callable[[], None]
    ) -> float:
        """Run statements that wait until no transaction uses a table; what comes then waits behind them, so not for long.

        meanwhile: done between tries.  Returns: for how many seconds it held up others, in all.  Raises MoveRefused.
        """

        def change(connection: sa.Connection) -> None:
            connection.exec_driver_sql(self.database.dialect.wait_briefly())
            for statement in statements(connection):
                connection.exec_driver_sql(statement)

        pause_s, held_up_s = _TABLE_PAUSES_S[0], 0.0
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                self._changed(change)
                return held_up_s + time.monotonic() - began
            except StoreConflict:
                held_up_s += time.monotonic() - began
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _TABLE_PAUSES_S[1])
                meanwhile()
        raise MoveRefused(
            f"Something keeps using tables in {place_of(self.database)}, such as a backup or a long query: wait for it,"
            " then run this again."
        )

    def rename(self, names: Mapping[sa.Table, sa.Table], meanwhile: Callable[[], None] = lambda: None) -> float:
        """Give tables other names, all at once, but for those that have theirs already. Returns: see change_tables."""

        def statements(connection: sa.Connection) -> Sequence[str]:
            there = set(sa.inspect(connection).get_table_names())
            wanted = {old.name: new.name for old, new in names.items() if old.name in there}
            return self.database.dialect.renaming(wanted) if wanted else ()

        return self.change_tables(statements, meanwhile)

    def execute(self, statement: sa.Executable) -> None:
        self.change(lambda connection: connection.execute(statement))

    def create(self, tables: Sequence[sa.Table]) -> None:
        self.change(lambda connection: create_missing(connection, tables))

    def drop(self, tables: Sequence[sa.Table]) -> None:
        for table in tables:
            self.change(partial(table.drop, checkfirst=True))

    def has(self, table: sa.Table) -> bool:
        return self.change(lambda connection: sa.inspect(connection).has_table(table.name))
