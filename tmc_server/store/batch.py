"""Runs operations of one shard as one transaction, and hands the copies over after the commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import sqlalchemy as sa

from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import Consume, Decide, Operation, Prepare
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy, Outlet
from tmc_server.errors import StoreUnavailable
from tmc_server.metrics import METRICS
from tmc_server.store.consumptions import consume
from tmc_server.store.engines import Database, StoreConflict, repeated
from tmc_server.store.messages import decide_each, prepare
from tmc_server.store.outcomes import Outcome
from tmc_server.store.statements import statements_of
from tmc_server.store.traffic import Traffic
from tmc_server.store.transaction import Hook, Transaction, no_hook

Kind = TypeVar("Kind", bound=Operation)
Result = TypeVar("Result")
TakeBack = Callable[[Sequence[Copy], int], None]


class ShardWriter:
    """Transactions over the shards of one database.

    incarnation: the number of this server run; None while its heartbeat is over.
    traffic: counts what is submitted and acked.
    take_back: called from any thread with copies whose attempts may have been committed although they were never handed over,
    and the time of their transaction.
    """

    def __init__(
        self,
        database: Database,
        catalog: CatalogSource,
        outlet: Outlet,
        incarnation: Callable[[], int | None],
        hook: Hook = no_hook,
        take_back: TakeBack = lambda _copies, _now: None,
        traffic: Traffic | None = None,
    ) -> None:
        self.database = database
        self._catalog = catalog
        self._outlet = outlet
        self._incarnation = incarnation
        self.hook = hook
        self._take_back = take_back
        self._traffic = traffic or Traffic()

    @contextmanager
    def transaction(self, connection: sa.Connection, shard: Shard) -> Iterator[Transaction]:
        """Commits at the end, then delivers; any exception rolls back and gives the outlet's room back."""
        open_tx: Transaction | None = None
        committing = False
        self.hook("begin")
        try:
            with self.database.writing(connection):
                now = self.database.now(connection)
                # Only now: every operation in this batch was requested before the copy and its age are read.
                catalog, stale = self._catalog.in_use()
                open_tx = Transaction(
                    connection=connection,
                    now=now,
                    sql=statements_of(shard),
                    catalog=catalog,
                    catalog_is_stale=stale,
                    outlet=self._outlet,
                    incarnation=self._incarnation(),
                    reach=self.hook,
                )
                yield open_tx
                committing = True
        except BaseException as exc:
            is_uncertain = committing and isinstance(exc, StoreUnavailable | StoreConflict | sa.exc.DBAPIError)
            if open_tx is not None:
                # The commit may have gone through and counted these attempts, but nothing was handed over.
                uncertain = open_tx.copies if is_uncertain else []
                open_tx.release()
                if uncertain:
                    self._take_back(uncertain, open_tx.now)
            if is_uncertain and not isinstance(exc, StoreUnavailable):
                # Whatever the database says: repeated, the operations find their own work.
                raise StoreUnavailable from exc
            raise
        self.hook("committed")
        self._hand_over(open_tx)

    def _hand_over(self, tx: Transaction) -> None:
        if tx.copies:
            self._outlet.deliver(tx.copies)
            tx.reserved.subtract(copy.subscription for copy in tx.copies)
        if tx.traffic:
            self._traffic.add(tx.traffic)
        for (topic, subscription), count in tx.failed.items():
            catalog = self._catalog.current
            if subscription:
                METRICS.failed.labels(*METRICS.pair(catalog, topic, subscription)).inc(count)
            else:
                METRICS.check_failed.inc(count)
        for subscription, tried_ms in tx.drained_until.items():
            self._outlet.drained_until(subscription, tried_ms)
        for subscription, left in tx.reserved.items():
            if left:
                self._outlet.release(subscription, left)

    def run(
        self,
        connection: sa.Connection,
        shard: Shard,
        operations: Sequence[Operation],
        buried: Collection[Operation] = (),
    ) -> list[Outcome]:
        """Run operations of one shard in one transaction. buried: those whose tombstones are committed.

        Returns: one outcome per operation, in order. Messages before consumptions: the common lock order.
        """
        outcomes: dict[Operation, Outcome] = {}
        with self.transaction(connection, shard) as tx:
            if prepares := _of(Prepare, operations):
                outcomes.update(prepare(tx, prepares))
            if decisions := _of(Decide, operations):
                outcomes.update(decide_each(tx, decisions, buried))
            if consumes := _of(Consume, operations):
                outcomes.update(consume(tx, consumes))
        return [outcomes[operation] for operation in operations]


def _of(kind: type[Kind], operations: Sequence[Operation]) -> list[Kind]:
    return [operation for operation in operations if isinstance(operation, kind)]


def in_transaction(writer: ShardWriter, shard: Shard, change: Callable[[Transaction], Result]) -> Result:
    """Run a change on a connection of its own, again while it loses against others."""

    def run() -> Result:
        with writer.database.connection() as connection, writer.transaction(connection, shard) as tx:
            return change(tx)

    return repeated(run)
