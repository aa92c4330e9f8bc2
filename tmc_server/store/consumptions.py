"""Ack, nack, extend, give back, reactivate: the consumption half of a batch, and the claim of due rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tmc_server.domain import consumption as duty
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import ConsumptionState, Decision, Row
from tmc_server.domain.operations import DONE, LOCKED, Ack, Consume, Extend, GiveBack, Nack, Reactivate
from tmc_server.domain.ports import Copy
from tmc_server.errors import SubscriptionUnknown, TmcError
from tmc_server.store.messages import parse_headers
from tmc_server.store.transaction import Transaction

_Pair = tuple[int, int]  # subscription, message number


def consume(tx: Transaction, operations: Sequence[Consume]) -> None:
    """Decide each operation in the order of arrival on the locked rows, then write what changed."""
    before, locked = _lock(tx, operations)
    after = dict(before)
    accepted: list[Consume] = []
    for operation in operations:
        pair = (operation.subscription, operation.number)
        row = after.get(pair)
        if row is None:
            operation.answer = LOCKED if pair in locked else SubscriptionUnknown()
            continue
        decision = _decide(operation, row, tx.now)
        if isinstance(decision, TmcError):
            operation.answer = decision
            continue
        operation.answer = DONE
        if decision is not None:
            after[pair] = decision
            accepted.append(operation)
    _write(tx, before, after)
    _journal(tx, accepted)
    errors = {(o.subscription, o.number): o.error for o in accepted if isinstance(o, Nack)}
    _alert_failed(tx, before, after, errors)


def _lock(tx: Transaction, operations: Sequence[Consume]) -> tuple[dict[_Pair, Row], set[_Pair]]:
    wanted: dict[int, set[int]] = {}
    for operation in operations:
        wanted.setdefault(operation.subscription, set()).add(operation.number)
    rows: dict[_Pair, Row] = {}
    locked: set[_Pair] = set()
    for subscription, numbers in sorted(wanted.items()):
        for row in tx.rows(tx.sql.lock_consumptions, subscription=subscription, ids=sorted(numbers)):
            rows[subscription, row.message_id] = _row(row)
        missing = sorted(number for number in numbers if (subscription, number) not in rows)
        if missing:
            found = tx.rows(tx.sql.existing_consumptions, subscription=subscription, ids=missing)
            locked |= {(subscription, row.message_id) for row in found}
    tx.reach("locked")
    return rows, locked


def _row(row: Any) -> Row:
    return Row(ConsumptionState(row.state), row.attempt, row.tried, row.due_ms)


def _decide(operation: Consume, row: Row, now: int) -> Decision:
    match operation:
        case Ack():
            return duty.decide_ack(row, now)
        case Nack():
            return duty.decide_nack(
                row, operation.attempt, operation.policy, now, operation.retry_after_ms, operation.reject
            )
        case Extend():
            return duty.decide_extend(row, operation.attempt, operation.extend_ms, now)
        case GiveBack():
            return duty.decide_give_back(row, operation.attempt, operation.after_ms, now)
        case Reactivate():
            return duty.decide_reactivate(row, now)
    raise TypeError(f"{type(operation).__name__} is no operation on a consumption")


def _write(tx: Transaction, before: dict[_Pair, Row], after: dict[_Pair, Row]) -> None:
    acked: dict[int, list[int]] = {}
    changed: list[dict[str, Any]] = []
    for (subscription, number), row in after.items():
        old = before[subscription, number]
        if row == old:
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


def _journal(tx: Transaction, accepted: Sequence[Consume]) -> None:
    tx.insert(
        tx.sql.insert_attempts,
        [
            {
                "message_id": nack.number,
                "subscription_no": nack.subscription,
                "attempt": nack.attempt,
                "at_ms": tx.now,
                "incarnation": tx.incarnation,
                "error": nack.error,
            }
            for nack in accepted
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
                "subject": f"message {change.number} subscription {change.subscription}",
                "reason": change.reason,
            }
            for change in accepted
            if isinstance(change, Reactivate)
        ],
    )


def _alert_failed(
    tx: Transaction, before: dict[_Pair, Row], after: dict[_Pair, Row], errors: Mapping[_Pair, str]
) -> None:
    tx.alert_once(
        {
            "kind": "delivery failed",
            "topic_no": _topic_of(tx, subscription),
            "message_id": number,
            "subscription_no": subscription,
            "attempt": row.attempt,
            "detail": f"given up after try {row.attempt}: {errors.get((subscription, number), 'no ack')}"[:500],
        }
        for (subscription, number), row in after.items()
        if row.state is ConsumptionState.FAILED and before[subscription, number].state is not ConsumptionState.FAILED
    )


def _topic_of(tx: Transaction, subscription: int) -> int:
    known = tx.catalog.subscriptions.get(subscription)
    return known.topic if known is not None else 0


def claim_due(tx: Transaction, subscription: Subscription, due: Sequence[Any]) -> dict[ConsumptionState, int]:
    """Move due rows on: tried once more, FAILED at the limit, CANCELLED when the subscription is gone.

    due: rows as read without locks. Each is claimed by a guarded UPDATE before anything is sent; rows that somebody
    else moved meanwhile are left alone. Copies of what was claimed go to the outlet after the commit.
    Returns: how many rows were moved, by the state they are in now.
    """
    subscribed = not subscription.is_removed(tx.now)
    groups: dict[tuple[Row, Row], list[int]] = {}
    for found in due:
        old = _row(found)
        if old.state is not ConsumptionState.SCHEDULED:
            continue
        # Rows of one group get the same values, so their due time as read does not tell them apart.
        same = Row(old.state, old.attempt, old.tried, None)
        new = duty.decide_due(old, subscription.policy, subscribed, tx.now)
        groups.setdefault((same, new), []).append(found.message_id)
    moved: dict[ConsumptionState, int] = {}
    for (old, new), numbers in sorted(groups.items(), key=lambda group: min(group[1])):
        mine = _claim(tx, subscription.number, old, new, sorted(numbers))
        moved[new.state] = moved.get(new.state, 0) + len(mine)
        if new.state is ConsumptionState.SCHEDULED:
            _load_copies(tx, subscription.number, mine, new.attempt)
        elif new.state is ConsumptionState.FAILED:
            pairs = [(subscription.number, number) for number in mine]
            _alert_failed(tx, dict.fromkeys(pairs, old), dict.fromkeys(pairs, new), errors={})
    tx.reach("written")
    return moved


def _claim(tx: Transaction, subscription: int, old: Row, new: Row, numbers: list[int]) -> list[int]:
    values = _new_values(new, tx.now) | {"new_incarnation": tx.incarnation}
    guard = {"subscription": subscription, "old_attempt": old.attempt, "old_tried": old.tried, "now": tx.now}
    won = tx.connection.execute(tx.sql.claim, {**guard, **values, "ids": numbers}).rowcount
    if won == len(numbers):
        return numbers
    rows = tx.rows(tx.sql.lock_consumptions, subscription=subscription, ids=numbers)
    return [row.message_id for row in rows if _row(row) == new]


def _load_copies(tx: Transaction, subscription: int, numbers: list[int], attempt: int) -> None:
    for row in tx.rows(tx.sql.bodies, ids=numbers) if numbers else ():
        tx.copies.append(
            Copy(
                tx.sql.shard, row.id, subscription, attempt, row.topic_no, row.producer_no, row.message_key, row.body,
                row.content_type, parse_headers(row.headers),
            )
        )  # fmt: skip
