"""The queue progress each server saw, in a table that all servers read (domain.ports.delivery.SharedProgress)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from tmc_server.domain.ports.delivery import QueueProgress
from tmc_server.store.engines import Database, repeating
from tmc_server.store.tables import queue_progress as table

_FORGET_MS = 86_400_000


class SqlQueueProgress:
    """incarnation: of this server run; None: its heartbeat is over, and it publishes nothing."""

    def __init__(self, database: Database, incarnation: Callable[[], int | None]) -> None:
        self._database = database
        self._incarnation = incarnation
        self._cleaned = False

    def share(self, seen: Sequence[QueueProgress]) -> bool:
        me = self._incarnation()
        if me is None:
            return False
        self._write(me, seen)
        return True

    @repeating
    def _write(self, me: int, seen: Sequence[QueueProgress]) -> None:
        """One row per queue and server run, so that no two servers write the same one."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            if not self._cleaned:
                connection.execute(table.delete().where(table.c.updated_ms < now - _FORGET_MS))
            known = sa.select(table.c.queue).where(table.c.incarnation == me)
            mine = set(connection.execute(known.where(table.c.queue.in_([each.queue for each in seen]))).scalars())
            for each in seen:
                values = {"passed_ms": each.passed_ms, "moves": each.moves, "updated_ms": now}
                if each.queue in mine:
                    row = table.update().where(table.c.queue == each.queue, table.c.incarnation == me)
                    connection.execute(row.values(**values))
                else:
                    connection.execute(table.insert().values(queue=each.queue, incarnation=me, **values))
        self._cleaned = True

    def of(self, queue: str) -> Mapping[int, QueueProgress]:
        me = self._incarnation()
        with self._database.reading() as connection:
            return {
                row.incarnation: QueueProgress(queue=row.queue, passed_ms=row.passed_ms, moves=row.moves)
                for row in connection.execute(sa.select(table).where(table.c.queue == queue))
                if row.incarnation != me
            }
