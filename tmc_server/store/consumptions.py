"""Ack, nack, extend, give back, reactivate, deliver now, cancel: the consumption half of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tmc_server.domain import consumption
from tmc_server.domain.consumption import Budget, ConsumptionState, Decision, Row
from tmc_server.domain.fingerprint import fingerprint
from tmc_server.domain.numbers import MessageNumber, OrderHash, OrderSequence, SubscriptionNumber
from tmc_server.domain.operations import (
    Ack,
    ByOperator,
    Cancel,
    Consume,
    DeliverNow,
    Done,
    Extend,
    GiveBack,
    Nack,
    Operation,
    Reactivate,
)
from tmc_server.domain.ordering import OrderMode, releases_next
from tmc_server.domain.ports.reading import Flow
from tmc_server.errors import CatalogStale, ConsumptionClosed, MessageGone, SubscriptionUnknown, TmcError
from tmc_server.store.auditing import act
from tmc_server.store.journal import NO_ACK, JournalRow, write_journal
from tmc_server.store.lines import LineName, Lines
from tmc_server.store.outcomes import Outcome, Wait
from tmc_server.store.transaction import Transaction

UNDER_WAY = (ConsumptionState.SCHEDULED, ConsumptionState.WAITING)
_ACTIONS: Mapping[type[ByOperator], str] = {
    Reactivate: "reactivate consumption",
    DeliverNow: "deliver now",
    Cancel: "cancel consumption",
}
_BLOCKED = "; the later messages of its order key wait until it is acked, reactivated or cancelled"
_Pair = tuple[SubscriptionNumber, MessageNumber]
_Accepted = tuple[_Pair, Consume]


def consume(tx: Transaction, operations: Sequence[Consume]) -> dict[Operation, Outcome]:
    """Decide each operation in the order of arrival on the locked rows, then write what changed."""
    locked = _lock(tx, _pairs(operations))
    owned = _any_life(tx, operations, locked)
    with Lines(tx, set(locked.lines.values())) as lines:
        return _consume(tx, operations, locked, owned, lines)


def _consume(
    tx: Transaction,
    operations: Sequence[Consume],
    locked: _Locked,
    owned: Mapping[Consume, _Pair],
    lines: Lines,
) -> dict[Operation, Outcome]:
    outcomes: dict[Operation, Outcome] = {}
    before = {pair: held.row for pair, held in locked.held.items()}
    after = dict(before)
    accepted: list[_Accepted] = []
    answered: set[_Pair] = set()  # in this batch
    for operation in operations:
        pair = owned.get(operation, (operation.subscription, operation.number))
        row = after.get(pair)
        if row is None:
            outcomes[operation] = Wait.LOCKED if pair in locked.busy else _missing(tx, operation.number)
            continue
        if locked.lines.get(pair) in lines.busy:
            outcomes[operation] = Wait.LOCKED
            continue
        held = locked.held[pair]
        if isinstance(operation, ByOperator) and not _is_selected(operation, row, held.moved_ms):
            outcomes[operation] = ConsumptionClosed(
                f"The delivery is {row.state.name} now: it moved after the dry run."
            )
            continue
        if isinstance(operation, Reactivate | DeliverNow) and _is_removed(tx, pair[0]):
            outcomes[operation] = ConsumptionClosed(
                "The delivery is of a registration that was removed: nothing is delivered to it any more. Cancel it."
            )
            continue
        tried_ms = 0 if pair in answered else held.tried_ms
        decision = _decide(operation, row, tried_ms, tx.now, held.budget)
        if isinstance(decision, Row) and decision.state is ConsumptionState.FAILED and _may_be_spared(tx, operation):
            decision = CatalogStale()
        if isinstance(decision, TmcError):
            outcomes[operation] = decision
            continue
        if decision is not None and decision.state is ConsumptionState.FAILED and _is_removed(tx, pair[0]):
            decision = consumption.decide_removed(row)
        outcomes[operation] = Done(pair[0])
        if isinstance(operation, Ack | Nack | Extend) and (operation.attempt or 1) == row.attempt:
            tx.drained_until[pair[0]] = max(tx.drained_until[pair[0]], held.tried_ms)
        if decision is not None:
            after[pair] = decision
            accepted.append((pair, operation))
            if not isinstance(operation, DeliverNow):
                answered.add(pair)
    _write(tx, before, after, accepted)
    heads = {pair for pair, line in locked.lines.items() if lines.is_head(line, pair[1])}
    _advance_lines(tx, lines, locked, before, after)
    _journal(tx, accepted, locked)
    errors = {pair: operation.error for pair, operation in accepted if isinstance(operation, Nack)}
    rejected = {pair for pair, operation in accepted if isinstance(operation, Nack) and operation.reject}
    note_failures(tx, before, after, errors, heads, rejected=rejected)
    _alert_hanging(tx, accepted)
    return outcomes


def _advance_lines(
    tx: Transaction, lines: Lines, locked: _Locked, before: Mapping[_Pair, Row], after: Mapping[_Pair, Row]
) -> None:
    """Give the next delivery of an order key its turn where a head was closed."""
    left: dict[SubscriptionNumber, list[tuple[OrderHash, OrderSequence]]] = {}
    passed: dict[SubscriptionNumber, dict[OrderHash, OrderSequence | None]] = {}
    overtaken: dict[SubscriptionNumber, list[MessageNumber]] = {}
    for pair, line in locked.lines.items():
        subscription, number = pair
        row = after[pair]
        if row.state is before[pair].state:
            continue
        is_head = lines.is_head(line, number)
        if before[pair].state is ConsumptionState.WAITING:
            left.setdefault(subscription, []).append((line[1], locked.sequences[pair]))
        elif is_head and _releases_next(tx, subscription, row):
            passed.setdefault(subscription, {})[line[1]] = locked.sequences.get(pair)
        elif not is_head and row.state is ConsumptionState.SCHEDULED:
            overtaken.setdefault(subscription, []).append(number)
    for subscription, numbers in overtaken.items():
        tx.execute(tx.sql.lines.forget_sequence, subscription=subscription, ids=sorted(numbers))
    for subscription, leaving in left.items():
        lines.leave(subscription, leaving)
    for subscription, closed in sorted(passed.items()):
        lines.advance(tx.catalog.subscriptions[subscription], closed)


def _releases_next(tx: Transaction, subscription: SubscriptionNumber, row: Row) -> bool:
    if row.state is ConsumptionState.FAILED and tx.catalog_is_stale:
        return False  # the order mode may have changed: the ordering duty decides
    return releases_next(row.state, _order(tx, subscription))


def _order(tx: Transaction, subscription: SubscriptionNumber) -> OrderMode:
    return tx.catalog.subscriptions[subscription].order


def _is_removed(tx: Transaction, subscription: SubscriptionNumber) -> bool:
    """Return whether it was removed, which is final: its name may be registered again, under another number."""
    known = tx.catalog.subscriptions.get(subscription)
    return known is not None and known.is_removed


def _missing(tx: Transaction, number: MessageNumber) -> TmcError:
    if tx.catalog_is_stale:  # it may have got the message by a subscription that this copy lacks
        return CatalogStale()
    return MessageGone() if tx.is_gone(number) else SubscriptionUnknown()


def _may_be_spared(tx: Transaction, operation: Consume) -> bool:
    """Return whether to delay giving up: the catalog copy is stale, so the retry policy may have changed."""
    return tx.catalog_is_stale and not (isinstance(operation, Nack) and operation.reject)


class _Held(Struct, frozen=True, kw_only=True):
    """A locked row. tried_ms, tried_by: when its newest copy was handed over, and by which server run; 0 and None: none was,
    or it is answered or with a consumer.

    moved_ms: since when it is in its state.
    """

    row: Row
    tried_ms: int
    tried_by: int | None
    budget: Budget
    moved_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Locked:
    """busy: rows that another transaction has locked.

    lines, sequences: of rows with an order key; a row that was skipped may have lost its sequence.
    """

    held: dict[_Pair, _Held] = field(default_factory=dict)
    lines: dict[_Pair, LineName] = field(default_factory=dict)
    sequences: dict[_Pair, OrderSequence] = field(default_factory=dict)
    busy: set[_Pair] = field(default_factory=set)

    def has(self, pair: _Pair) -> bool:
        return pair in self.held or pair in self.busy


def _pairs(operations: Sequence[Consume]) -> list[_Pair]:
    return [(operation.subscription, operation.number) for operation in operations]


def _any_life(tx: Transaction, operations: Sequence[Consume], locked: _Locked) -> dict[Consume, _Pair]:
    """Find rows that belong to an earlier registration of the same subscription, and add them to `locked`.

    A caller names topic, app and tag; only the rows tell which registration of that name received the message.
    """
    lives = tx.catalog.earlier_registrations
    found: dict[Consume, _Pair] = {}
    lost = [
        operation
        for operation in operations
        if operation.subscription in lives and not locked.has((operation.subscription, operation.number))
    ]
    for age in range(max((len(lives[operation.subscription]) for operation in lost), default=0)):
        pairs = {
            operation: (lives[operation.subscription][age], operation.number)
            for operation in lost
            if operation not in found and age < len(lives[operation.subscription])
        }
        _lock(tx, [pair for pair in pairs.values() if not locked.has(pair)], locked)
        found |= {operation: pair for operation, pair in pairs.items() if locked.has(pair)}
    return found


def _lock(tx: Transaction, pairs: Sequence[_Pair], into: _Locked | None = None) -> _Locked:
    """Lock the rows that nobody else holds."""
    locked = _Locked() if into is None else into
    wanted: dict[SubscriptionNumber, set[MessageNumber]] = {}
    for subscription, number in pairs:
        wanted.setdefault(subscription, set()).add(number)
    ids = {subscription: sorted(numbers) for subscription, numbers in wanted.items()}
    for row in tx.rows(tx.sql.lock_consumptions, ids=ids) if ids else ():
        pair = SubscriptionNumber(row.subscription_no), MessageNumber(row.message_id)
        locked.held[pair] = _Held(
            row=row_of(row),
            tried_ms=row.tried_ms or 0,
            tried_by=row.incarnation,
            budget=Budget(number=pair[1], since_ms=row.since_ms),
            moved_ms=_moved_ms(row, tx.now),
        )
        if row.order_hash is not None:
            locked.lines[pair] = (pair[0], OrderHash(row.order_hash))
        if row.sequence is not None:
            locked.sequences[pair] = OrderSequence(row.sequence)
    for subscription, numbers in sorted(wanted.items()):
        missing = sorted(number for number in numbers if (subscription, number) not in locked.held)
        if missing:
            found = tx.rows(tx.sql.existing_consumptions, subscription=subscription, ids=missing)
            locked.busy.update((subscription, row.message_id) for row in found)
    tx.reach("locked")
    return locked


def _moved_ms(row: Any, now: int) -> int:
    """Return when a row came into its state; a delayed one was made in it, and its budget begins later."""
    if row.closed_ms is not None:
        return int(row.closed_ms)
    return int(row.since_ms if row.since_ms <= now else row.created_ms)


def _is_selected(operation: ByOperator, row: Row, moved_ms: int) -> bool:
    selected = operation.selected
    return selected is None or (row.state is selected.state and moved_ms <= selected.as_of_ms)


def row_of(row: Any) -> Row:
    return Row(ConsumptionState(row.state), row.attempt, row.tried, row.due_ms, row.begun)


def _decide(operation: Consume, row: Row, tried_ms: int, now: int, budget: Budget) -> Decision:
    match operation:
        case Ack():
            return consumption.decide_ack(row, now)
        case Nack():
            return consumption.decide_nack(
                row,
                operation.attempt,
                operation.policy,
                now,
                budget,
                retry_after_ms=operation.retry_after_ms,
                reject=operation.reject,
                run=operation.run,
            )
        case Extend():
            return consumption.decide_extend(row, operation.attempt, operation.extend_ms, now, operation.run)
        case GiveBack() if operation.tried_ms not in (None, tried_ms):
            return None  # a repetition of the commit handed over a copy of its own
        case GiveBack():
            return consumption.decide_give_back(row, operation.attempt, operation.after_ms, now)
        case Reactivate():
            return consumption.decide_reactivate(row, now)
        case DeliverNow():
            return consumption.decide_deliver_now(row, tried_ms, now)
        case Cancel():
            return consumption.decide_cancel(row)
    raise TypeError(f"{type(operation).__name__} is no operation on a consumption")


def _write(
    tx: Transaction, before: Mapping[_Pair, Row], after: Mapping[_Pair, Row], accepted: Sequence[_Accepted]
) -> None:
    """Answered rows are written even if unchanged, because their copies are known to have left the queue."""
    last = dict(accepted)
    fresh = {pair for pair, operation in accepted if isinstance(operation, Reactivate)}
    acked: dict[SubscriptionNumber, list[MessageNumber]] = {}
    reactivated: dict[SubscriptionNumber, list[MessageNumber]] = {}
    hurried: dict[SubscriptionNumber, list[MessageNumber]] = {}
    changed: dict[tuple[tuple[str, Any], ...], list[MessageNumber]] = {}  # by what is written
    for pair, row in after.items():
        subscription, number = pair
        old = before[pair]
        operation = last.get(pair)
        if row == old and not isinstance(operation, Nack | Extend):
            continue
        if row.state is ConsumptionState.ACKED:
            acked.setdefault(subscription, []).append(number)
        elif isinstance(operation, Reactivate) and old.state is ConsumptionState.FAILED:
            reactivated.setdefault(subscription, []).append(number)
        elif isinstance(operation, DeliverNow) and row == replace(old, due_ms=row.due_ms):
            hurried.setdefault(subscription, []).append(number)
        else:
            values = {
                "subscription": subscription,
                "old_state": int(old.state),
                "old_attempt": old.attempt,
                "extends": int(isinstance(operation, Extend)),
                "new_begun": row.begun,
                "new_since_ms": tx.now if pair in fresh else None,
                **new_values(row, tx.now),
            }
            changed.setdefault(tuple(values.items()), []).append(number)
    if acked:
        ids = {subscription: sorted(numbers) for subscription, numbers in acked.items()}
        tx.change(tx.sql.ack, sum(map(len, ids.values())), ids=ids, now=tx.now)
        tx.traffic.update({Flow(0, subscription): len(numbers) for subscription, numbers in ids.items()})
    for subscription, numbers in sorted(reactivated.items()):
        tx.change(tx.sql.reactivate, len(numbers), subscription=subscription, ids=sorted(numbers), now=tx.now)
    for subscription, numbers in sorted(hurried.items()):
        tx.change(tx.sql.deliver_now, len(numbers), subscription=subscription, ids=sorted(numbers), now=tx.now)
    for alike, numbers in changed.items():
        tx.change(tx.sql.change_consumptions, len(numbers), ids=sorted(numbers), **dict(alike))
    tx.reach("written")


def new_values(row: Row, now: int) -> dict[str, Any]:
    return {
        "new_state": int(row.state),
        "new_attempt": row.attempt,
        "new_tried": row.tried,
        "new_due_ms": row.due_ms,
        "new_closed_ms": None if row.state in UNDER_WAY else now,
    }


def _journal(tx: Transaction, accepted: Sequence[_Accepted], locked: _Locked) -> None:
    nacks = [(pair, operation) for pair, operation in accepted if isinstance(operation, Nack)]
    write_journal(
        tx,
        [
            JournalRow(
                number=number,
                subscription=subscription,
                attempt=nack.attempt,
                error=nack.error,
                tried_ms=locked.held[subscription, number].tried_ms or None,
                tried_by=locked.held[subscription, number].tried_by,
            )
            for (subscription, number), nack in nacks
        ],
    )
    tx.insert(
        tx.sql.insert_audit,
        [
            {
                **act(tx.now, change.actor, _ACTIONS[type(change)], f"message {number} subscription {subscription}"),
                "reason": change.reason,
                "origin": change.origin,
            }
            for (subscription, number), change in accepted
            if isinstance(change, ByOperator) and change.selected is None
        ],
    )


def note_failures(
    tx: Transaction,
    before: Mapping[_Pair, Row],
    after: Mapping[_Pair, Row],
    errors: Mapping[_Pair, str],
    heads: Collection[_Pair],
    *,
    rejected: Collection[_Pair] = (),
    unanswered: bool = False,
) -> None:
    """errors: what consumers said; unanswered: before the last attempt, which nobody answered.

    rejected: those that a consumer does not want again.  heads: rows that are the heads of their lines.
    """
    blocking = {pair for pair in heads if _order(tx, pair[0]) is OrderMode.STRICT}
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
        causes = {number: errors.get((subscription, number), NO_ACK) for number in numbers}
        tx.note_failed(_topic_of(tx, subscription), subscription, causes)
    tx.alert_once(
        {
            "kind": "delivery failed",
            "topic_no": _topic_of(tx, subscription),
            "message_id": number,
            "subscription_no": subscription,
            "attempt": after[subscription, number].attempt,
            "detail": (
                _rejected(after[subscription, number], errors[subscription, number])
                if (subscription, number) in rejected
                else _given_up(after[subscription, number], errors.get((subscription, number)), unanswered)
            )
            + (_BLOCKED if (subscription, number) in blocking else ""),
            "fingerprint": fingerprint(errors.get((subscription, number), NO_ACK)),
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


def _rejected(row: Row, error: str) -> str:
    return f"rejected by its consumer in attempt {row.attempt}: {error}"[: 500 - len(_BLOCKED)]


def _given_up(row: Row, error: str | None, unanswered: bool) -> str:
    cause = error or NO_ACK
    if error and unanswered:
        cause = f"{NO_ACK}; an attempt before failed: {error}"
    return f"given up after attempt {row.attempt}: {cause}"[: 500 - len(_BLOCKED)]


def _topic_of(tx: Transaction, subscription: SubscriptionNumber) -> int:
    known = tx.catalog.subscriptions.get(subscription)
    return known.topic if known is not None else 0
