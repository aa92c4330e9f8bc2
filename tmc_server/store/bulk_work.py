"""The steps of bulk jobs in the shards of one database: changes, outcomes and progress in one transaction.

A server that dies leaves whole steps only, and the next one continues behind the last. A job acts on each delivery once,
because its progress never goes back; two jobs never act twice on one failure, because each acts only on what failed
before its dry run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.bulk import BulkAction, BulkJob, BulkProgress, ItemOutcome, Place
from tmc_server.domain.ids import IdGenerator
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.operations import THE_CENTER, ByOperator, Cancel, DeliverNow, Done, Reactivate, Selected, Stored
from tmc_server.errors import CatalogStale, ConsumptionClosed, MessageGone, SubscriptionUnknown, TmcError
from tmc_server.store.batch import ShardWriter, in_transaction
from tmc_server.store.consumptions import consume
from tmc_server.store.engines import StoreConflict
from tmc_server.store.leases import ShardLeases
from tmc_server.store.outcomes import Outcome, Wait
from tmc_server.store.replays import Replays
from tmc_server.store.selecting import BEFORE_ALL, page_of
from tmc_server.store.sql import InsertRows
from tmc_server.store.tables import bulk_item, bulk_progress
from tmc_server.store.transaction import Transaction

_INSERT_ITEMS = InsertRows(bulk_item)
_OPERATIONS: Mapping[BulkAction, type[ByOperator]] = {
    BulkAction.REACTIVATE: Reactivate,
    BulkAction.CANCEL: Cancel,
    BulkAction.DELIVER_NOW: DeliverNow,
}
_DETAIL = 200
_REPLAY_BYTES = 4 << 20  # bodies of one page; statements have them as hexadecimal text, and databases limit that


class SqlBulkWork:
    """domain.ports.bulk.BulkWork over the shards of one database, as far as this server holds their leases."""

    def __init__(self, writer: ShardWriter, leases: ShardLeases, ids: IdGenerator) -> None:
        self._writer = writer
        self._leases = leases
        self._ids = ids

    def unfinished(self, job: BulkJob) -> Sequence[Shard]:
        held = [shard for shard in job.selection.shards if shard in self._leases.held()]
        if not held:
            return []
        query = sa.select(bulk_progress.c.shard).where(
            bulk_progress.c.job_id == job.number, bulk_progress.c.shard.in_(held), bulk_progress.c.finished > 0
        )
        with self._writer.database.reading() as connection:
            finished = set(connection.execute(query).scalars())
        return [shard for shard in held if shard not in finished]

    def step(self, job: BulkJob, shard: Shard, limit: int) -> BulkProgress:
        return in_transaction(self._writer, shard, lambda tx: self._step(tx, job, limit))

    def _step(self, tx: Transaction, job: BulkJob, limit: int) -> BulkProgress:
        tx.rows(tx.sql.fence)
        known = self._lock(tx, job)
        if known.finished:
            return BulkProgress()
        places = [place for place in job.selection.places if place.shard == tx.sql.shard]
        place = next((each for each in places if each.subscription >= known.subscription_no), places[-1])
        after = MessageNumber(known.message_id)
        page = page_of(tx.connection, job.selection, place, after, most=limit, now=tx.now)
        if job.action is BulkAction.REPLAY:
            page = page.cut(self._replays(tx, job, place).within(page.numbers, _REPLAY_BYTES))
        tx.reach("read")
        outcomes = {number: _summary(outcome) for number, outcome in self._act(tx, job, place, page.numbers).items()}
        self._record(tx, job, place, outcomes)
        step = BulkProgress(
            done=sum(1 for outcome, _ in outcomes.values() if outcome is ItemOutcome.DONE),
            unchanged=sum(1 for outcome, _ in outcomes.values() if outcome is ItemOutcome.UNCHANGED),
            refused=sum(1 for outcome, _ in outcomes.values() if outcome is ItemOutcome.REFUSED),
            finished=int(page.after is None and place == places[-1]),
        )
        if page.after is not None:
            at = (place.subscription, page.after)
        else:
            at = (SubscriptionNumber(place.subscription + 1), BEFORE_ALL)
        self._move(tx, job, at, step)
        return step

    def _lock(self, tx: Transaction, job: BulkJob) -> Any:
        """The progress of this shard, made at its first step. Two servers that both believe to hold the shard take turns."""
        mine = (bulk_progress.c.job_id == job.number, bulk_progress.c.shard == tx.sql.shard)
        query = sa.select(bulk_progress).where(*mine).with_for_update()
        found = tx.rows(query)
        if not found:
            first = {"subscription_no": 0, "message_id": BEFORE_ALL, "done": 0, "unchanged": 0, "refused": 0}
            values = {"job_id": job.number, "shard": tx.sql.shard, **first, "finished": 0, "updated_ms": tx.now}
            try:
                tx.execute(bulk_progress.insert().values(values))
            except sa.exc.IntegrityError as exc:
                raise StoreConflict("another server began with this shard at the same moment") from exc
            found = tx.rows(query)
        return found[0]

    def _move(
        self, tx: Transaction, job: BulkJob, at: tuple[SubscriptionNumber, MessageNumber], step: BulkProgress
    ) -> None:
        progress = bulk_progress.c
        tx.change(
            bulk_progress.update()
            .where(progress.job_id == job.number, progress.shard == tx.sql.shard, progress.finished == 0)
            .values(
                subscription_no=at[0],
                message_id=at[1],
                done=progress.done + step.done,
                unchanged=progress.unchanged + step.unchanged,
                refused=progress.refused + step.refused,
                finished=step.finished,
                updated_ms=tx.now,
            ),
            1,
        )

    def _act(
        self, tx: Transaction, job: BulkJob, place: Place, numbers: Sequence[MessageNumber]
    ) -> Mapping[MessageNumber, Outcome]:
        """Raises StoreConflict: a row is locked. Raises CatalogStale: try again when it is not."""
        if not numbers:
            return {}
        if tx.catalog.subscriptions[place.subscription].is_removed and job.action is not BulkAction.CANCEL:
            return dict.fromkeys(numbers, SubscriptionUnknown("The subscription was removed."))
        if job.action is BulkAction.REPLAY:
            sent = self._replays(tx, job, place).publish(numbers)
            outcomes: dict[MessageNumber, Outcome] = {**dict.fromkeys(numbers, MessageGone()), **sent}
        else:
            operations = {number: _operation(job, place, number) for number in numbers}
            found = consume(tx, list(operations.values()))
            outcomes = {number: found[operation] for number, operation in operations.items()}
        for outcome in outcomes.values():
            if isinstance(outcome, Wait):
                raise StoreConflict("a delivery of the page is locked")
            if isinstance(outcome, CatalogStale):
                raise outcome
        return outcomes

    def _replays(self, tx: Transaction, job: BulkJob, place: Place) -> Replays:
        return Replays(tx=tx, ids=self._ids, subscription=place.subscription, job=job.number)

    def _record(
        self,
        tx: Transaction,
        job: BulkJob,
        place: Place,
        outcomes: Mapping[MessageNumber, tuple[ItemOutcome, str]],
    ) -> None:
        tx.insert(
            _INSERT_ITEMS,
            [
                {
                    "job_id": job.number,
                    "shard": place.shard,
                    "message_id": number,
                    "subscription_no": place.subscription,
                    "outcome": int(outcome),
                    "detail": detail[:_DETAIL],
                    "at_ms": tx.now,
                }
                for number, (outcome, detail) in sorted(outcomes.items())
            ],
        )


def _operation(job: BulkJob, place: Place, number: MessageNumber) -> ByOperator:
    return _OPERATIONS[job.action](
        shard=place.shard,
        app=THE_CENTER,
        number=number,
        subscription=place.subscription,
        actor=job.actor,
        reason=job.reason,
        selected=Selected(state=job.selection.state, as_of_ms=job.selection.as_of_ms),
    )


def _summary(outcome: Outcome) -> tuple[ItemOutcome, str]:
    match outcome:
        case Done():
            return ItemOutcome.DONE, ""
        case Stored():
            return ItemOutcome.DONE, str(outcome.message_id)
        case ConsumptionClosed():
            return ItemOutcome.UNCHANGED, str(outcome)
        case TmcError():
            return ItemOutcome.REFUSED, str(outcome)
        case Wait():
            raise AssertionError("a step with locked rows is repeated")
