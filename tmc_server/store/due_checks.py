"""Messages of one database whose checks are due, and what operators do with undecided messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tmc_server.domain.ids import first_number
from tmc_server.domain.message import MessageEvent, MessageState, decide
from tmc_server.domain.numbers import NO_SUBSCRIPTION, MessageNumber, Shard
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.checks import Checked, Pending, Recorded
from tmc_server.errors import CatalogStale, MessageUnknown, TmcError
from tmc_server.store.batch import ShardWriter, in_transaction
from tmc_server.store.checking import claim, hold, pending_of, record
from tmc_server.store.leases import ShardLeases
from tmc_server.store.messages import write_decisions
from tmc_server.store.scanning import DueIndex, earliest_check
from tmc_server.store.statements import statements_of
from tmc_server.store.transaction import Transaction

Result = TypeVar("Result")


class SqlDueChecks:
    """domain.ports.checks.DueChecks over the shards of one database, as far as this server holds their leases."""

    def __init__(self, writer: ShardWriter, leases: ShardLeases, catalog: CatalogSource) -> None:
        self._writer = writer
        self._leases = leases
        self._look = DueIndex(writer.database, leases, catalog, earliest_check)

    def due(self) -> list[tuple[Shard, int]]:
        return self._look.due()

    def read(self, shard: Shard, topic: int, limit: int) -> list[Pending]:
        database, sql = self._writer.database, statements_of(shard)
        with database.reading() as connection:
            which = {"topic": topic, "now": database.now(connection), "limit": limit}
            return [pending_of(shard, row) for row in connection.execute(sql.due_checks, which)]

    def claim(self, shard: Shard, pending: Sequence[Pending], until_ms: int) -> list[Pending]:
        return self._leased(shard, [], lambda tx, lease: claim(tx, pending, until_ms, lease))

    def hold(self, shard: Shard, pending: Sequence[Pending], pause_ms: int, detail: str) -> int:
        return self._leased(shard, 0, lambda tx, lease: hold(tx, pending, pause_ms, detail, lease))

    def record(self, shard: Shard, answers: Sequence[Checked], tell_overdue: bool) -> Recorded:
        return in_transaction(self._writer, shard, lambda tx: record(tx, answers, tell_overdue))

    def _leased(
        self, shard: Shard, nothing: Result, change: Callable[[Transaction, Mapping[str, int]], Result]
    ) -> Result:
        lease = self._leases.held().get(shard)
        if lease is None:
            return nothing
        guard = lease.guard
        return in_transaction(self._writer, shard, lambda tx: change(tx, guard))


class SqlCheckStore:
    """domain.ports.checks.CheckStore over all databases. writer: that of a shard now."""

    def __init__(self, writer: Callable[[Shard], ShardWriter]) -> None:
        self._writer = writer

    def begin(self, actor: str, shard: Shard, number: MessageNumber, until_ms: int) -> Pending | None:
        def change(tx: Transaction) -> Pending | None:
            if not tx.execute(tx.sql.begin_check, ids=[number], until=tx.now + until_ms).rowcount:
                return None
            tx.note(actor, "check now", f"message {number}", "")
            return pending_of(shard, tx.rows(tx.sql.asked_messages, ids=[number])[0])

        return in_transaction(self._writer(shard), shard, change)

    def begin_trial(self, actor: str, shard: Shard, number: MessageNumber, target: str) -> tuple[Pending, bool] | None:
        def change(tx: Transaction) -> tuple[Pending, bool] | None:
            row = next(iter(tx.rows(tx.sql.asked_messages, ids=[number])), None)
            if row is None:
                return None
            found = pending_of(shard, row)
            is_new = MessageState(row.state) is MessageState.PREPARED and not found.state.attempt
            may_run = is_new and (found.state.due_ms or 0) > tx.now
            if not may_run:
                tx.note(actor, "try check", f"message {number}", target)
            return found, may_run

        return in_transaction(self._writer(shard), shard, change)

    def record(self, shard: Shard, answers: Sequence[Checked]) -> Recorded:
        return in_transaction(self._writer(shard), shard, lambda tx: record(tx, answers, tell_overdue=False))

    def reactivate(self, actor: str, shard: Shard, numbers: Sequence[MessageNumber], reason: str) -> int:
        def change(tx: Transaction) -> int:
            done: int = tx.execute(tx.sql.reactivate_checks, ids=sorted(numbers), now=tx.now).rowcount
            if done:
                asked = [row for row in tx.rows(tx.sql.asked_messages, ids=sorted(numbers)) if row.due_ms is not None]
                for topic in sorted({row.topic_no for row in asked}):
                    tx.note_recovered(topic, NO_SUBSCRIPTION, [row.id for row in asked if row.topic_no == topic])
                subject = f"message {numbers[0]}" if len(numbers) == 1 else f"{done} messages of shard {shard}"
                tx.note(actor, "reactivate check", subject, reason)
            return done

        return in_transaction(self._writer(shard), shard, change)

    def failed_checks(
        self, shards: Sequence[Shard], topic: int, from_ms: int, to_ms: int, limit: int
    ) -> list[tuple[Shard, MessageNumber]]:
        found: list[tuple[Shard, MessageNumber]] = []
        which = {"topic": topic, "first": first_number(from_ms), "last": first_number(to_ms) if to_ms else 1 << 62}
        for shard in shards:
            if len(found) < limit:
                sql = statements_of(shard)
                with self._writer(shard).database.reading() as connection:
                    rows = connection.execute(sql.failed_checks, {**which, "limit": limit - len(found)})
                    found += [(shard, row.message_id) for row in rows]
        return found

    def decide(self, actor: str, shard: Shard, number: MessageNumber, commit: bool, reason: str) -> None:
        def change(tx: Transaction) -> TmcError | None:
            rows = {row.id: row for row in tx.rows(tx.sql.lock_message_waiting, ids=[number])}
            if number not in rows:
                return MessageUnknown("There is no such message: check the id.")
            if commit and tx.catalog_is_stale:
                return CatalogStale()
            event = MessageEvent.SUBMIT if commit else MessageEvent.ROLLBACK
            outcome = decide(MessageState(rows[number].state), event)
            if isinstance(outcome, TmcError):
                return outcome
            if outcome.changes:
                others: dict[MessageEvent, list[MessageNumber]] = {MessageEvent.SUBMIT: [], MessageEvent.ROLLBACK: []}
                write_decisions(tx, rows, others | {event: [number]}, decided_by=f"decided by {actor}")
                tx.note(actor, f"decide {event.value.lower()}", f"message {number}", reason)
            return None

        refused = in_transaction(self._writer(shard), shard, change)
        if refused is not None:
            raise refused
