"""Ack, nack, extend, give back, reactivate: the consumption half of a batch, and the claim of due rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tmc_server.domain import consumption
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import ConsumptionState, Decision, QueueLook, Row
from tmc_server.domain.numbers import Attempt, MessageNumber, SubscriptionNumber
from tmc_server.domain.operations import (
    Ack,
    Consume,
    Done,
    Extend,
    GiveBack,
    Nack,
    Operation,
    Reactivate,
    SignAgain,
)
from tmc_server.domain.ports.delivery import Claimed, Copy
from tmc_server.errors import CatalogStale, MessageGone, SubscriptionUnknown, TmcError
from tmc_server.store.messages import parse_headers
from tmc_server.store.outcomes import Outcome, Wait
from tmc_server.store.transaction import Transaction

_Pair = tuple[SubscriptionNumber, MessageNumber]
_Accepted = tuple[_Pair, Consume]


def consume(tx: Transaction, operations: Sequence[Consume]) -> dict[Operation, Outcome]:
    """Decide each operation in the order of arrival on the locked rows, then write what changed."""
    outcomes: dict[Operation, Outcome] = {}
    locked = _lock(tx, _pairs(operations))
    owned = _any_life(tx, operations, locked)
    before, after = dict(locked.rows), dict(locked.rows)
    accepted: list[_Accepted] = []
    for operation in operations:
        pair = owned.get(operation, (operation.subscription, operation.number))
        row = after.get(pair)
        if row is None:
            outcomes[operation] = Wait.LOCKED if pair in locked.held else _missing(tx, operation.number)
            continue
        decision = _decide(operation, row, locked.tried_ms[pair], tx.now)
        if isinstance(decision, Row) and decision.state is ConsumptionState.FAILED and _may_be_spared(tx, operation):
            decision = CatalogStale()
        if isinstance(decision, TmcError):
            outcomes[operation] = decision
            continue
        outcomes[operation] = Done(pair[0])
        if isinstance(operation, Ack | Nack | Extend) and (operation.attempt or 1) == row.attempt:
            tx.drained_until[pair[0]] = max(tx.drained_until[pair[0]], locked.tried_ms[pair])
        if decision is not None:
            after[pair] = decision
            accepted.append((pair, operation))
    answered = {pair for pair, operation in accepted if isinstance(operation, Nack | Extend)}
    _write(tx, before, after, answered)
    _journal(tx, accepted)
    errors = {pair: operation.error for pair, operation in accepted if isinstance(operation, Nack)}
    _note_failures(tx, before, after, errors)
    _alert_hanging(tx, accepted)
    return outcomes


def _missing(tx: Transaction, number: MessageNumber) -> TmcError:
    if tx.catalog_is_stale:  # it may have got the message by a subscription that this copy lacks
        return CatalogStale()
    return MessageGone() if tx.is_gone(number) else SubscriptionUnknown()


def _may_be_spared(tx: Transaction, operation: Consume) -> bool:
    """Whether to delay giving up: the catalog copy is stale, so the retry policy may have changed."""
    return tx.catalog_is_stale and not (isinstance(operation, Nack) and operation.reject)


@dataclass(frozen=True, slots=True)
class _Locked:
    """rows: those we hold.  tried_ms: when their last copies were handed over.  held: rows that somebody else holds."""

    rows: dict[_Pair, Row] = field(default_factory=dict)
    tried_ms: dict[_Pair, int] = field(default_factory=dict)
    held: set[_Pair] = field(default_factory=set)

    def has(self, pair: _Pair) -> bool:
        return pair in self.rows or pair in self.held


def _pairs(operations: Sequence[Consume]) -> list[_Pair]:
    return [(operation.subscription, operation.number) for operation in operations]


def _any_life(tx: Transaction, operations: Sequence[Consume], locked: _Locked) -> dict[Consume, _Pair]:
    """Find rows that belong to an earlier registration of the same subscription, and add them to `locked`.

    A caller names topic, app and tag; only the rows tell which registration of that name received the message.
    """
    found: dict[Consume, _Pair] = {}
    others = tx.catalog.other_lives
    for operation in operations if others else ():
        pair = (operation.subscription, operation.number)
        if locked.has(pair):
            continue
        for life in others.get(operation.subscription, ()):
            pair = (life, operation.number)
            if not locked.has(pair):
                _lock(tx, [pair], locked)
            if locked.has(pair):
                found[operation] = pair
                break
    return found


def _lock(tx: Transaction, pairs: Sequence[_Pair], into: _Locked | None = None) -> _Locked:
    """Lock the rows that nobody else holds."""
    locked = _Locked() if into is None else into
    wanted: dict[SubscriptionNumber, set[MessageNumber]] = {}
    for subscription, number in pairs:
        wanted.setdefault(subscription, set()).add(number)
    for subscription, numbers in sorted(wanted.items()):
        for row in tx.rows(tx.sql.lock_consumptions, subscription=subscription, ids=sorted(numbers)):
            locked.rows[subscription, row.message_id] = _row(row)
            locked.tried_ms[subscription, row.message_id] = row.tried_ms or 0
        missing = sorted(number for number in numbers if (subscription, number) not in locked.rows)
        if missing:
            found = tx.rows(tx.sql.existing_consumptions, subscription=subscription, ids=missing)
            locked.held.update((subscription, row.message_id) for row in found)
    tx.reach("locked")
    return locked


def _row(row: Any) -> Row:
    return Row(ConsumptionState(row.state), row.attempt, row.tried, row.due_ms)


def _decide(operation: Consume, row: Row, tried_ms: int, now: int) -> Decision:
    match operation:
        case Ack():
            return consumption.decide_ack(row, now)
        case Nack():
            return consumption.decide_nack(
                row, operation.attempt, operation.policy, now, operation.retry_after_ms, operation.reject
            )
        case Extend():
            return consumption.decide_extend(row, operation.attempt, operation.extend_ms, now)
        case GiveBack():
            return consumption.decide_give_back(row, operation.attempt, operation.after_ms, now)
        case SignAgain():
            return consumption.decide_sign_again(row, operation.attempt, tried_ms, operation.since_ms, now)
        case Reactivate():
            return consumption.decide_reactivate(row, now)
    raise TypeError(f"{type(operation).__name__} is no operation on a consumption")


def _write(tx: Transaction, before: dict[_Pair, Row], after: dict[_Pair, Row], answered: set[_Pair]) -> None:
    """answered: written even if unchanged, because their copies are known to have left the queue."""
    acked: dict[SubscriptionNumber, list[MessageNumber]] = {}
    changed: list[dict[str, Any]] = []
    for (subscription, number), row in after.items():
        old = before[subscription, number]
        if row == old and (subscription, number) not in answered:
            continue
        if row.state is ConsumptionState.ACKED:
            acked.setdefault(subscription, []).append(number)
        else:
            changed.append(
                {"id": number, "subscription": subscription, "old_state": int(old.state), "old_attempt": old.attempt}
                | _new_values(row, tx.now)
            )
    for subscription, numbers in sorted(acked.items()):
        tx.change(tx.sql.ack, len(numbers), subscription=subscription, ids=sorted(numbers), now=tx.now)
    tx.change_each(tx.sql.change_consumption, changed)
    tx.reach("written")


def _new_values(row: Row, now: int) -> dict[str, Any]:
    return {
        "new_state": int(row.state),
        "new_attempt": row.attempt,
        "new_tried": row.tried,
        "new_due_ms": row.due_ms,
        "new_closed_ms": None if row.state is ConsumptionState.SCHEDULED else now,
    }


def _journal(tx: Transaction, accepted: Sequence[_Accepted]) -> None:
    tx.insert(
        tx.sql.insert_attempts,
        [
            {
                "message_id": number,
                "subscription_no": subscription,
                "attempt": nack.attempt,
                "at_ms": tx.now,
                "incarnation": tx.incarnation or 0,
                "error": nack.error,
            }
            for (subscription, number), nack in accepted
            if isinstance(nack, Nack)
        ],
    )
    tx.insert(
        tx.sql.insert_audit,
        [
            {
                "at_ms": tx.now,
                "actor": change.actor,
                "action": "reactivate consumption",
                "subject": f"message {number} subscription {subscription}",
                "reason": change.reason,
            }
            for (subscription, number), change in accepted
            if isinstance(change, Reactivate)
        ],
    )


def _note_failures(
    tx: Transaction, before: dict[_Pair, Row], after: dict[_Pair, Row], errors: Mapping[_Pair, str]
) -> None:
    failed: dict[SubscriptionNumber, list[MessageNumber]] = {}
    recovered: dict[SubscriptionNumber, list[MessageNumber]] = {}
    for (subscription, number), row in after.items():
        was_failed = before[subscription, number].state is ConsumptionState.FAILED
        is_failed = row.state is ConsumptionState.FAILED
        if is_failed and not was_failed:
            failed.setdefault(subscription, []).append(number)
        elif was_failed and not is_failed:
            recovered.setdefault(subscription, []).append(number)
    for subscription, numbers in sorted(recovered.items()):
        tx.note_recovered(_topic_of(tx, subscription), subscription, numbers)
    for subscription, numbers in sorted(failed.items()):
        tx.note_failed(_topic_of(tx, subscription), subscription, numbers)
    tx.alert_once(
        {
            "kind": "delivery failed",
            "topic_no": _topic_of(tx, subscription),
            "message_id": number,
            "subscription_no": subscription,
            "attempt": after[subscription, number].attempt,
            "detail": _given_up(after[subscription, number], errors.get((subscription, number), "no ack")),
        }
        for subscription, numbers in failed.items()
        for number in numbers
    )


def _alert_hanging(tx: Transaction, accepted: Sequence[_Accepted]) -> None:
    tx.alert_once(
        {
            "kind": "handler hangs",
            "topic_no": _topic_of(tx, subscription),
            "message_id": number,
            "subscription_no": subscription,
            "attempt": nack.attempt,
            "detail": nack.error[:500],
        }
        for (subscription, number), nack in accepted
        if isinstance(nack, Nack) and nack.hangs
    )


def _given_up(row: Row, error: str) -> str:
    return f"given up after attempt {row.attempt}: {error}"[:500]


def _topic_of(tx: Transaction, subscription: SubscriptionNumber) -> int:
    known = tx.catalog.subscriptions.get(subscription)
    return known.topic if known is not None else 0


def claim_due(
    tx: Transaction, subscription: Subscription, due: Sequence[Any], look: QueueLook, lease: Mapping[str, int]
) -> Claimed:
    """Process due rows: attempt again, hold, or mark them FAILED (at the limit) or CANCELLED (no subscription).

    due: rows as read without locks. Each is claimed by a guarded UPDATE before anything is sent; rows that somebody
    else moved meanwhile are left alone. Copies of what was claimed go to the outlet after the commit.
    lease: owner and epoch that the shard's lease must still have.
    """
    claims = _Claims(tx, subscription, lease)
    subscribed = not subscription.is_removed  # final, since numbers are never reused: even an old copy is right
    groups: dict[tuple[Row, Row], list[MessageNumber]] = {}
    waiting: dict[Row, list[Any]] = {}
    for found in due:
        old = _row(found)
        if old.state is not ConsumptionState.SCHEDULED:
            continue
        # Rows of one group get the same values, so their due time as read does not tell them apart.
        same = Row(old.state, old.attempt, old.tried, None)
        waits = found.tried_ms is not None and (tx.sql.shard, found.message_id) in look.unwritten
        if subscribed and (waits or look.may_hold_copy(found.tried_ms, tx.now)):
            waiting.setdefault(same, []).append(found)
        else:
            new = consumption.decide_due(old, subscription.policy, subscribed, tx.now)
            if new.state is ConsumptionState.FAILED and tx.catalog_is_stale:
                continue  # its policy may have been changed: it is looked at again
            groups.setdefault((same, new), []).append(found.message_id)
    claimed = Claimed()
    for row, held in waiting.items():
        claimed += claims.hold(row, held, look)
    for (old, new), numbers in sorted(groups.items(), key=lambda group: min(group[1])):
        claimed += claims.take(old, new, sorted(numbers))
    tx.reach("written")
    return claimed


class _Claims:
    """Guarded changes of due rows of one subscription."""

    def __init__(self, tx: Transaction, subscription: Subscription, lease: Mapping[str, int]) -> None:
        self._tx = tx
        self._subscription = subscription
        self._guard = {"subscription": subscription.number, "now": tx.now, **lease}

    def hold(self, row: Row, found: Sequence[Any], look: QueueLook) -> Claimed:
        tx = self._tx
        held = consumption.decide_held(
            row, self._subscription.policy, min(each.tried_ms for each in found), look, tx.now
        )
        ids = sorted(each.message_id for each in found)
        values = {"ids": ids, "old_attempt": row.attempt, "new_due_ms": held.due_ms}
        return Claimed(held=tx.connection.execute(tx.sql.hold, {**self._guard, **values}).rowcount)

    def take(self, old: Row, new: Row, numbers: list[MessageNumber]) -> Claimed:
        mine = self._claim(old, new, numbers)
        if new.state is ConsumptionState.SCHEDULED:
            _load_copies(self._tx, self._subscription.number, mine, new.attempt)
            return Claimed(delivered=len(mine))
        if new.state is ConsumptionState.FAILED:
            pairs = [(self._subscription.number, number) for number in mine]
            _note_failures(self._tx, dict.fromkeys(pairs, old), dict.fromkeys(pairs, new), errors={})
            return Claimed(failed=len(mine))
        return Claimed(cancelled=len(mine))

    def _claim(self, old: Row, new: Row, numbers: list[MessageNumber]) -> list[MessageNumber]:
        tx = self._tx
        goes_out = new.state is ConsumptionState.SCHEDULED
        values = _new_values(new, tx.now) | {
            "new_incarnation": tx.incarnation if goes_out else None,
            "new_tried_ms": tx.now if goes_out else None,
            "old_attempt": old.attempt,
            "old_tried": old.tried,
            "ids": numbers,
        }
        won = tx.connection.execute(tx.sql.claim, {**self._guard, **values}).rowcount
        if won == len(numbers):
            return numbers
        if won == 0:
            return []
        rows = tx.rows(tx.sql.lock_consumptions, subscription=self._subscription.number, ids=numbers)
        return [row.message_id for row in rows if _row(row) == new]


def _load_copies(
    tx: Transaction, subscription: SubscriptionNumber, numbers: list[MessageNumber], attempt: Attempt
) -> None:
    for row in tx.rows(tx.sql.bodies, ids=numbers) if numbers else ():
        tx.copies.append(
            Copy(
                shard=tx.sql.shard,
                number=row.id,
                subscription=subscription,
                attempt=attempt,
                topic=row.topic_no,
                producer=row.producer_no,
                key=row.message_key,
                body=row.body,
                content_type=row.content_type,
                headers=parse_headers(row.headers),
            )
        )
