"""Bulk jobs as operators see them: dry runs, and the stored jobs with their outcomes over all databases."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.bulk import (
    BulkItem,
    BulkJob,
    BulkProgress,
    ItemOutcome,
    Place,
    Selection,
)
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.numbers import BulkJobNumber, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.bulk import Match, NewBulkJob
from tmc_server.errors import InvalidField
from tmc_server.store.auditing import act, record
from tmc_server.store.descriptions import Described, descriptions
from tmc_server.store.engines import Database, ShardMap, StoreConflict, repeated, repeating
from tmc_server.store.records import record_of
from tmc_server.store.selecting import BEFORE_ALL, page_of
from tmc_server.store.sql import number_of
from tmc_server.store.tables import bulk_item, bulk_job, bulk_progress

_ROWS = 5_000  # matches of one page
_LONGEST_S = 60.0


class SqlBulkStore:
    """domain.ports.bulk.BulkStore."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards

    def now(self) -> int:
        with self._shards.catalog.reading() as connection:
            return self._shards.catalog.now(connection)

    def dry_run(self, selection: Selection, most: int, samples: int) -> tuple[int, Sequence[Match]]:
        is_failed = selection.state is ConsumptionState.FAILED
        total, some, deadline = 0, list[Match](), time.monotonic() + _LONGEST_S
        for place in selection.places:
            after: MessageNumber | None = BEFORE_ALL
            with self._shards.shards[place.shard].reading() as connection:
                while after is not None and total <= most:
                    if time.monotonic() > deadline:
                        raise InvalidField("filter", f"match less: counting took longer than {_LONGEST_S:.0f} s")
                    page = page_of(connection, selection, place, after, most=_ROWS, now=selection.as_of_ms)
                    total, after = total + len(page.numbers), page.after
                    wanted = page.numbers[: samples - len(some)]
                    some += [_match(connection, place, number, is_failed) for number in wanted]
        return total, some

    @repeating
    def start(self, new: NewBulkJob) -> BulkJob:
        catalog = self._shards.catalog
        with catalog.transaction() as connection:
            known = connection.execute(sa.select(bulk_job).where(bulk_job.c.dry_run == new.dry_run)).one_or_none()
            if known is not None:
                return _job(known)
            now = catalog.now(connection)
            values = {
                "dry_run": new.dry_run,
                "action": int(new.action),
                "selection": _text(new.selection),
                "agreed": new.count,
                "rate": new.rate,
                "actor": new.actor,
                "reason": new.reason,
                "created_ms": now,
                "start_ms": now + new.hold_ms,
            }
            try:
                number = BulkJobNumber(number_of(connection.execute(bulk_job.insert().values(values))))
            except sa.exc.IntegrityError as exc:
                raise StoreConflict("the same job was started at the same moment") from exc
            subject = f"job {number}: {new.action.name.lower()} {new.count} deliveries"
            record(connection, act(now, new.actor, "start bulk job", subject, reason=new.reason))
            return _job(connection.execute(_one(number)).one())

    @repeating
    def stop(self, actor: str, number: BulkJobNumber, reason: str) -> BulkJob | None:
        catalog = self._shards.catalog
        with catalog.transaction() as connection:
            now = catalog.now(connection)
            running = (bulk_job.c.id == number, bulk_job.c.stopped_ms.is_(None), bulk_job.c.finished_ms.is_(None))
            if connection.execute(bulk_job.update().where(*running).values(stopped_ms=now)).rowcount:
                record(connection, act(now, actor, "stop bulk job", f"job {number}", reason=reason))
            row = connection.execute(_one(number)).one_or_none()
            return None if row is None else _job(row)

    def job(self, number: BulkJobNumber) -> BulkJob | None:
        with self._shards.catalog.reading() as connection:
            row = connection.execute(_one(number)).one_or_none()
        return None if row is None else _job(row)

    def jobs(self, before: BulkJobNumber | None, limit: int) -> Sequence[BulkJob]:
        query = sa.select(bulk_job).order_by(bulk_job.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(bulk_job.c.id < before)
        with self._shards.catalog.reading() as connection:
            return [_job(row) for row in connection.execute(query)]

    def active(self) -> Sequence[BulkJob]:
        catalog = self._shards.catalog
        query = sa.select(bulk_job).where(bulk_job.c.finished_ms.is_(None), bulk_job.c.stopped_ms.is_(None))
        with catalog.reading() as connection:
            now = catalog.now(connection)
            rows = connection.execute(query.where(bulk_job.c.start_ms <= now).order_by(bulk_job.c.id)).fetchall()
        return [_job(row) for row in rows]

    def progress(self, job: BulkJob) -> BulkProgress:
        total = BulkProgress()
        query = sa.select(bulk_progress).where(bulk_progress.c.job_id == job.number)
        for database in self._databases(job):
            held = self._shards.shards_in(database)  # what a move left behind, or has copied already, is not counted
            with database.reading() as connection:
                for row in connection.execute(query.where(bulk_progress.c.shard.in_(held))):
                    total += BulkProgress(
                        done=row.done, unchanged=row.unchanged, refused=row.refused, finished=int(row.finished > 0)
                    )
        return total

    def items(
        self, job: BulkJob, after: tuple[Shard, MessageNumber], limit: int, failures_only: bool
    ) -> Sequence[BulkItem]:
        found: list[BulkItem] = []
        for shard in job.selection.shards:
            if shard < after[0] or len(found) >= limit:
                continue
            mine = (bulk_item.c.job_id == job.number, bulk_item.c.shard == shard)
            query = sa.select(bulk_item).where(*mine).order_by(bulk_item.c.message_id, bulk_item.c.subscription_no)
            if failures_only:
                query = query.where(bulk_item.c.outcome != int(ItemOutcome.DONE))
            page = query.where(bulk_item.c.message_id > (after[1] if shard == after[0] else BEFORE_ALL))
            with self._shards.shards[shard].reading() as connection:
                rows = connection.execute(page.limit(limit - len(found))).fetchall()
                if len(rows) == limit - len(found):  # the rows of one message stay together
                    last = rows[-1]
                    same = bulk_item.c.message_id == last.message_id
                    rest = query.where(same, bulk_item.c.subscription_no > last.subscription_no)
                    rows = [*rows, *connection.execute(rest).fetchall()]
            places = {place.subscription: place for place in job.selection.places if place.shard == shard}
            found += [
                record_of(
                    BulkItem,
                    row,
                    place=places[SubscriptionNumber(row.subscription_no)],
                    number=MessageNumber(row.message_id),
                )
                for row in rows
            ]
        return found

    def finish(self, job: BulkJob) -> bool:
        if self.progress(job).finished < len(job.selection.shards):
            return False

        def write() -> None:
            catalog = self._shards.catalog
            with catalog.transaction() as connection:
                running = (bulk_job.c.id == job.number, bulk_job.c.finished_ms.is_(None))
                now = catalog.now(connection)
                connection.execute(bulk_job.update().where(*running).values(finished_ms=now))

        repeated(write)
        return True

    def _databases(self, job: BulkJob) -> Sequence[Database]:
        return list(dict.fromkeys(self._shards.shards[shard] for shard in job.selection.shards))


def _one(number: BulkJobNumber) -> sa.Select[Any]:
    return sa.select(bulk_job).where(bulk_job.c.id == number)


def _match(connection: sa.Connection, place: Place, number: MessageNumber, is_failed: bool) -> Match:
    delivery = Described(number=number, subscription=place.subscription, topic=place.topic, failed=is_failed)
    (said,) = descriptions(connection, place.shard, [delivery]).values()
    return Match(place=place, number=number, error=said.error, fingerprint=said.fingerprint)


def _text(selection: Selection) -> str:
    return json.dumps(
        {
            "places": [[place.shard, place.topic, place.subscription] for place in selection.places],
            "state": int(selection.state),
            "from_ms": selection.from_ms,
            "to_ms": selection.to_ms,
            "fingerprint": selection.fingerprint,
            "as_of_ms": selection.as_of_ms,
        }
    )


def _selection(text: str) -> Selection:
    stored = json.loads(text)
    return Selection(
        places=tuple(
            Place(shard=Shard(shard), topic=topic, subscription=SubscriptionNumber(subscription))
            for shard, topic, subscription in stored["places"]
        ),
        state=ConsumptionState(stored["state"]),
        from_ms=stored["from_ms"],
        to_ms=stored["to_ms"],
        fingerprint=stored["fingerprint"],
        as_of_ms=stored["as_of_ms"],
    )


def _job(row: Any) -> BulkJob:
    selection = _selection(row.selection)
    return record_of(BulkJob, row, number=BulkJobNumber(row.id), selection=selection, count=row.agreed)
