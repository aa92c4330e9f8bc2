"""The claim of due rows: attempt again, hold, give up, or cancel; each by one guarded UPDATE before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tmc_server.domain import consumption
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import Budget, ConsumptionState, QueueLook, Row
from tmc_server.domain.numbers import ANSWERED, MessageNumber, OrderHash, OrderSequence
from tmc_server.domain.ordering import releases_next
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.store.consumptions import UNDER_WAY, new_values, note_failures, row_of
from tmc_server.store.copies import load_copies
from tmc_server.store.journal import DIED, LOST, JournalRow, last_errors, write_journal
from tmc_server.store.lines import LineName, Lines
from tmc_server.store.transaction import Transaction


def claim_due(
    tx: Transaction, subscription: Subscription, due: Sequence[Any], look: QueueLook, lease: Mapping[str, int]
) -> Claimed:
    """Process due rows: attempt again, hold, or mark them FAILED (at the limit) or CANCELLED (no subscription).

    due: rows as read without locks. Each is claimed by a guarded UPDATE before anything is sent; rows that somebody
    else moved meanwhile are left alone. Copies of what was claimed go to the outlet after the commit.
    lease: owner and epoch that the shard's lease must still have.
    """
    subscribed = not subscription.is_removed  # final, since numbers are never reused: even an old copy is right
    groups: dict[tuple[Row, Row], list[MessageNumber]] = {}
    waiting: dict[Row, list[Any]] = {}
    for found in due:
        old = row_of(found)
        if old.state is not ConsumptionState.SCHEDULED:
            continue
        # Rows of one group get the same values, so their due time as read does not tell them apart.
        same = replace(old, due_ms=None)
        waits = found.tried_ms is not None and (tx.sql.shard, found.message_id) in look.unwritten
        if subscribed and (waits or look.may_hold_copy(found.tried_ms, tx.now)):
            waiting.setdefault(same, []).append(found)
        else:
            budget = Budget(number=found.message_id, since_ms=found.since_ms)
            lost_ms = _lost_ms(found, tx.now)
            new = consumption.decide_due(old, subscription.policy, subscribed, tx.now, budget, lost_ms=lost_ms)
            if new.state is ConsumptionState.FAILED and tx.catalog_is_stale:
                continue  # its policy may have been changed: it is looked at again
            groups.setdefault((same, new), []).append(found.message_id)
    ordered = {each.message_id: each for each in due if each.order_hash is not None}
    closing = [number for (_, new), numbers in groups.items() if not _is_under_way(new) for number in numbers]
    names = {number: _line_of(subscription, ordered[number]) for number in closing if number in ordered}
    claimed = Claimed()
    with Lines(tx, set(names.values())) as lines:
        claims = _Claims(tx, subscription, lease, ordered, lines)
        unanswered = {each.message_id: each for each in due if _is_unanswered(each)}
        for row, held in waiting.items():
            claimed += claims.hold(row, held, look)
        for (old, new), numbers in sorted(groups.items(), key=lambda group: min(group[1])):
            # Rows whose line is locked are retried in the next pass.
            free = [number for number in numbers if names.get(number) not in lines.busy]
            if free:
                claimed += claims.take(old, new, sorted(free), unanswered)
    tx.reach("written")
    return claimed


_VANISHED = (
    "copies were handed over a while ago, and no handler is known to have begun them: a policy of the broker (TTL, length,"
    " delivery limit; tmc doctor names them), a purge, or consumers that lose what they fetch; they come again, uncounted"
)


def _is_unanswered(row: Any) -> bool:
    """Return whether its last copy was handed over and nobody answered, but for asking for more time."""
    return row.begun != ANSWERED and (row.tried_ms is not None or bool(row.extended))


def _lost_ms(row: Any, now: int) -> int | None:
    """See `decide_due`. A copy that was extended came out of its queue: when it was handed over is not known any more."""
    if row.begun or not _is_unanswered(row):
        return None
    return now - row.tried_ms if row.tried_ms is not None else 0


def _line_of(subscription: Subscription, row: Any) -> LineName:
    return (subscription.number, OrderHash(row.order_hash))


def _is_under_way(row: Row) -> bool:
    return row.state in UNDER_WAY


class _Claims:
    """Guarded changes of due rows of one subscription. ordered: those with an order key, by number."""

    def __init__(
        self,
        tx: Transaction,
        subscription: Subscription,
        lease: Mapping[str, int],
        ordered: Mapping[MessageNumber, Any],
        lines: Lines,
    ) -> None:
        self._tx = tx
        self._subscription = subscription
        self._ordered = ordered
        self._lines = lines
        self._guard = {"subscription": subscription.number, "now": tx.now, **lease}

    def hold(self, row: Row, found: Sequence[Any], look: QueueLook) -> Claimed:
        tx = self._tx
        held = consumption.decide_held(
            row, self._subscription.policy, min(each.tried_ms for each in found), look, tx.now
        )
        ids = sorted(each.message_id for each in found)
        values = {"ids": ids, "old_attempt": row.attempt, "new_due_ms": held.due_ms}
        return Claimed(held=tx.connection.execute(tx.sql.hold, {**self._guard, **values}).rowcount)

    def take(
        self, old: Row, new: Row, numbers: list[MessageNumber], unanswered: Mapping[MessageNumber, Any]
    ) -> Claimed:
        """unanswered: rows whose last attempt is on its way or with a consumer, by number."""
        mine = self._claim(old, new, numbers)
        self._journal(old, [unanswered[number] for number in mine if number in unanswered])
        if new.state is ConsumptionState.SCHEDULED:
            sequences = {n: OrderSequence(row.sequence) for n, row in self._ordered.items() if row.sequence is not None}
            again = {number for number in mine if number in unanswered}
            load_copies(self._tx, self._subscription.number, mine, new.attempt, sequences, again)
            self._alert_vanished(new, [unanswered[number] for number in mine if number in unanswered])
            return Claimed(delivered=len(mine))
        heads = [number for number in mine if self._is_head(number)]
        if releases_next(new.state, self._subscription.order):
            closed = {OrderHash(self._ordered[n].order_hash): self._ordered[n].sequence for n in heads}
            self._lines.advance(self._subscription, closed)
        if new.state is ConsumptionState.FAILED:
            pairs = [(self._subscription.number, number) for number in mine]
            of_heads = [(self._subscription.number, number) for number in heads]
            said = last_errors(self._tx, self._subscription.number, mine)
            errors = {(self._subscription.number, number): error for number, error in said.items()}
            before, after = dict.fromkeys(pairs, old), dict.fromkeys(pairs, new)
            note_failures(self._tx, before, after, errors, of_heads, unanswered=old.begun <= 0)
            return Claimed(failed=len(mine))
        return Claimed(cancelled=len(mine))

    def _journal(self, old: Row, unanswered: Sequence[Any]) -> None:
        write_journal(
            self._tx,
            [
                JournalRow(
                    number=row.message_id,
                    subscription=self._subscription.number,
                    attempt=old.attempt,
                    error=DIED if row.begun > 0 else LOST,
                    tried_ms=row.tried_ms,
                    tried_by=row.incarnation,
                    unanswered=row.begun <= 0,
                )
                for row in unanswered
            ],
        )

    def _alert_vanished(self, new: Row, again: Sequence[Any]) -> None:
        """Alert the owner once for all of these: they have the same cause."""
        vanished = [row for row in again if (_lost_ms(row, self._tx.now) or 0) >= consumption.VANISHED_MS]
        for row in vanished[:1]:
            self._tx.alert_once(
                [
                    {
                        "kind": "copies vanish",
                        "topic_no": self._subscription.topic,
                        "message_id": row.message_id,
                        "subscription_no": self._subscription.number,
                        "attempt": new.attempt,
                        "detail": _VANISHED,
                    }
                ]
            )

    def _is_head(self, number: MessageNumber) -> bool:
        row = self._ordered.get(number)
        return row is not None and self._lines.is_head(_line_of(self._subscription, row), number)

    def _claim(self, old: Row, new: Row, numbers: list[MessageNumber]) -> list[MessageNumber]:
        tx = self._tx
        goes_out = new.state is ConsumptionState.SCHEDULED
        values = new_values(new, tx.now) | {
            "new_incarnation": tx.incarnation if goes_out else None,
            "new_tried_ms": tx.now if goes_out else None,
            "old_attempt": old.attempt,
            "old_tried": old.tried,
            "old_begun": old.begun,
            "ids": numbers,
        }
        won = tx.connection.execute(tx.sql.claim, {**self._guard, **values}).rowcount
        if won == len(numbers):
            return numbers
        if won == 0:
            return []
        rows = tx.rows(tx.sql.lock_consumptions, ids={self._subscription.number: numbers})
        return [row.message_id for row in rows if row_of(row) == new]
