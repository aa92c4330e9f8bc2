"""Closed messages of one database, as the retention duty removes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import NO_MESSAGE, MessageNumber, Shard
from tmc_server.domain.ports.retention import Position
from tmc_server.store.engines import Database, StoreConflict, repeating
from tmc_server.store.leases import ShardLeases
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import alert, bulk_item, bulk_progress, episode, notice, tombstone

_OLD_TOMBSTONES = sa.select(tombstone.c.attempt_id).where(tombstone.c.created_ms < sa.bindparam("before"))
_OLD_ALERTS = sa.select(alert.c.id).where(alert.c.sent_ms < sa.bindparam("before"))
_FINISHED, _FORGOTTEN = 1, 2  # see tmc_bulk_progress
_HAS_ITEMS = (
    sa.exists().where(bulk_item.c.job_id == bulk_progress.c.job_id, bulk_item.c.shard == bulk_progress.c.shard)
).correlate(bulk_progress)
_OLD_PROGRESS = sa.select(bulk_progress.c.job_id, bulk_progress.c.shard).where(
    bulk_progress.c.updated_ms < sa.bindparam("before"),
    (bulk_progress.c.finished == _FINISHED) | ((bulk_progress.c.finished == _FORGOTTEN) & _HAS_ITEMS),
)
_ITEMS = sa.select(bulk_item.c.message_id).where(
    bulk_item.c.job_id == sa.bindparam("job_id"), bulk_item.c.shard == sa.bindparam("shard")
)
_OLD_JOBS = 10
_OLD_EPISODES = sa.select(episode.c.id).where(episode.c.resolved_ms < sa.bindparam("before"))
_OLD_NOTICES = sa.select(notice.c.id).where(
    notice.c.sent_ms < sa.bindparam("before"),
    sa.not_(sa.exists().where(episode.c.id == notice.c.episode_id, episode.c.open == 1)),  # who knows of it
)


class ClosedMessages:
    """domain.ports.retention.ClosedWork over the shards of one database, as far as this server holds their leases."""

    def __init__(self, database: Database, leases: ShardLeases) -> None:
        self._database = database
        self._leases = leases

    def held_shards(self) -> Sequence[Shard]:
        return sorted(self._leases.held())

    def now(self) -> int:
        with self._database.reading() as connection:
            return self._database.now(connection)

    def position(self, shard: Shard) -> Position:
        with self._database.reading() as connection:
            row = connection.execute(statements_of(shard).retained).one_or_none()
            return Position(row.run, row.position) if row is not None else Position("", NO_MESSAGE)

    def old(
        self, shard: Shard, after: MessageNumber, before_ms: int, limit: int, rows: int
    ) -> tuple[Sequence[MessageNumber], MessageNumber | None]:
        sql, span = statements_of(shard), {"after": after, "last": first_number(before_ms)}
        with self._database.reading() as connection:
            end = connection.execute(sql.end_of_window, {**span, "passed": rows - 1}).scalar()
            if end is not None:
                span["last"] = end + 1
            found = list(connection.execute(sql.removable, {**span, "before": before_ms, "limit": limit}).scalars())
            return found, found[-1] if len(found) == limit else end

    @repeating
    def remove(
        self, shard: Shard, numbers: Sequence[MessageNumber], before_ms: int, then: Position | None = None
    ) -> int:
        sql = statements_of(shard)
        with self._database.transaction() as connection:
            removed = 0
            connection.execute(sql.fence)
            known = self._lock(connection, shard)
            at = then or Position(known.run, known.position)
            horizon = max(known.horizon_ms, before_ms)
            connection.execute(sql.note_retention, {"horizon": horizon, "new_run": at.run, "new_position": at.number})
            if numbers:
                removed = sql.remove_messages.run(connection, sorted(numbers), before=before_ms).rowcount
                for belongings in sql.remove_belongings:
                    belongings.run(connection, sorted(numbers))
            return removed

    def _lock(self, connection: sa.Connection, shard: Shard) -> Any:
        """The shard's row, made at its first use."""
        sql = statements_of(shard)
        found = connection.execute(sql.lock_retention).one_or_none()
        if found is None:
            try:
                connection.execute(sql.first_retention)
            except sa.exc.IntegrityError as exc:
                raise StoreConflict("another server began with this shard at the same moment") from exc
            found = connection.execute(sql.lock_retention).one()
        return found

    def forget(self, before_ms: int, limit: int) -> int:
        """Delete tombstones, sent alerts and notices, resolved episodes, and outcomes of bulk jobs, older than `before_ms`.

        Returns: how many.
        """
        total = 0
        forgotten = (
            (_OLD_TOMBSTONES, tombstone.c.attempt_id),
            (_OLD_ALERTS, alert.c.id),
            (_OLD_NOTICES, notice.c.id),
            (_OLD_EPISODES, episode.c.id),
        )
        for query, column in forgotten:
            with self._database.reading() as connection:
                found = list(connection.execute(query.limit(limit), {"before": before_ms}).scalars())
            if found:
                total += self._delete(column, sorted(found))
        return total + self._forget_bulk_jobs(before_ms, limit)

    def _forget_bulk_jobs(self, before_ms: int, limit: int) -> int:
        """Delete outcomes in shards that a bulk job finished before `before_ms`. That it finished them stays known."""
        total = 0
        with self._database.reading() as connection:
            mine = _OLD_PROGRESS.where(
                bulk_progress.c.shard.in_(self.held_shards())
            )  # a move may have left others behind
            old = connection.execute(mine.limit(_OLD_JOBS), {"before": before_ms}).fetchall()
            items = [
                (row.job_id, row.shard, list(connection.execute(_ITEMS.limit(limit), dict(row._mapping)).scalars()))
                for row in old
            ]
        for job, shard, numbers in items:
            total += self._forget_items(job, shard, sorted(set(numbers)))
        return total

    @repeating
    def _forget_items(self, job: int, shard: Shard, numbers: Sequence[MessageNumber]) -> int:
        """Forget them from the first page on: a reconciliation must not take what is left for all there was."""
        with self._database.transaction() as connection:
            connection.execute(statements_of(shard).fence)
            done = bulk_progress.update().where(bulk_progress.c.job_id == job, bulk_progress.c.shard == shard)
            connection.execute(done.values(finished=_FORGOTTEN))
            some = (bulk_item.c.job_id == job, bulk_item.c.shard == shard, bulk_item.c.message_id.in_(numbers))
            return connection.execute(bulk_item.delete().where(*some)).rowcount

    @repeating
    def _delete(self, column: sa.Column[Any], values: Sequence[Any]) -> int:
        with self._database.transaction() as connection:
            return connection.execute(column.table.delete().where(column.in_(values))).rowcount
