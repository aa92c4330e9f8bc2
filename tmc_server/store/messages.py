"""Prepare, publish, submit, rollback: the message half of a batch.

Two attempts with one key never decide each other's message: the unique key admits one live message, the attempt id
tells a repeat from another attempt, and a rollback leaves a tombstone, so that a late Prepare of the same attempt is
refused. The tombstone is read after the insert, so the later of the two transactions always sees the earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.ids import MessageId
from tmc_server.domain.message import TRANSITIONS, UNDECIDED, Decided, MessageEvent, MessageState, decide
from tmc_server.domain.numbers import NO_MESSAGE, NO_SUBSCRIPTION, MessageNumber
from tmc_server.domain.operations import Answer, Decide, Operation, Prepare, Stored
from tmc_server.errors import (
    AlreadyCommitted,
    AlreadyRolledBack,
    CatalogStale,
    ContentDiffers,
    KeyCommitted,
    KeyInProgress,
    MessageGone,
    MessageUnknown,
)
from tmc_server.store.copies import Submitted, parse_headers
from tmc_server.store.engines import StoreConflict
from tmc_server.store.lines import LineName, Lines
from tmc_server.store.outcomes import Outcome, Wait
from tmc_server.store.scheduling import lines_of, schedule
from tmc_server.store.transaction import Transaction

_Key = tuple[int, str, str]  # topic, tag, message key
_Attempt = tuple[bytes, int, str, str]  # attempt id, topic, tag, message key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """The live message that holds a key."""

    number: MessageNumber
    producer: int
    attempt_id: bytes
    digest: bytes
    state: MessageState


def _key_of(operation: Prepare) -> _Key:
    return (operation.topic.number, operation.producer_tag, operation.key)


def _attempt_of(operation: Prepare) -> _Attempt:
    return (operation.attempt_id, *_key_of(operation))


def prepare(tx: Transaction, operations: Sequence[Prepare]) -> dict[Operation, Outcome]:
    """Insert messages. Returns: what is stored under each one's key afterwards, or why it is not."""
    outcomes: dict[Operation, Outcome] = {}
    joining = {
        operation: lines_of(tx, operation.topic.number, operation.headers)
        for operation in operations
        if operation.publish and operation.topic.ordered
    }
    lines = Lines(tx, {name for names in joining.values() for name in names})
    # Sorted by key: two batches take their locks in the same order and do not deadlock.
    first: dict[_Key, Prepare] = {}
    twins: list[Prepare] = []
    for operation in sorted(operations, key=_key_of):
        if operation.publish and tx.catalog_is_stale:
            outcomes[operation] = CatalogStale()
        elif not lines.busy.isdisjoint(joining.get(operation, ())):
            outcomes[operation] = Wait.LOCKED
        elif first.setdefault(_key_of(operation), operation) is not operation:
            twins.append(operation)
    holders = _insert(tx, list(first.values()))
    won = [operation for key, operation in first.items() if key not in holders]
    refused = _refuse_tombstoned(tx, won)
    for key, operation in first.items():
        if key in holders:
            outcomes[operation] = _answer_to_loser(operation, holders[key])
        elif operation in refused:
            outcomes[operation] = AlreadyRolledBack()
        else:
            outcomes[operation] = Stored(message_id=operation.message_id, state=_target(operation))
    for twin in twins:
        winner = first[_key_of(twin)]
        holder = holders.get(_key_of(twin)) or _as_holder(winner)
        outcomes[twin] = Wait.LOCKED if winner in refused else _answer_to_loser(twin, holder)
    published = {operation for operation in won if operation.publish} - refused
    with lines:
        schedule(tx, [Submitted.published(operation) for operation in operations if operation in published], lines)
    return outcomes


def _target(operation: Prepare) -> MessageState:
    return TRANSITIONS[None, MessageEvent.PUBLISH if operation.publish else MessageEvent.PREPARE].to


def _as_holder(operation: Prepare) -> _Holder:
    return _Holder(
        number=operation.number,
        producer=operation.app,
        attempt_id=operation.attempt_id,
        digest=operation.digest,
        state=_target(operation),
    )


def _answer_to_loser(operation: Prepare, holder: _Holder) -> Answer:
    held = MessageId(operation.topic.number, holder.producer, operation.shard, holder.number)
    message_id = str(held)
    if holder.attempt_id == operation.attempt_id:
        if holder.digest != operation.digest:
            return ContentDiffers(message_id=message_id)
        if operation.publish and holder.state in UNDECIDED:
            return KeyInProgress("This attempt was prepared before: submit it instead.", message_id=message_id)
        return Stored(message_id=held, state=holder.state, changed=holder.number == operation.number)
    if holder.state in UNDECIDED:
        return KeyInProgress(message_id=message_id)
    return KeyCommitted(message_id=message_id)


def _insert(tx: Transaction, operations: list[Prepare]) -> dict[_Key, _Holder]:
    """Insert messages whose key is free. Returns: the holders of the keys that were taken.

    On a conflict, look up the holders and repeat without the losers. Sources: docs/decisions/0003-idempotent-insert.md,
    0040-postgresql.md.
    """
    holders: dict[_Key, _Holder] = {}
    pending = operations
    for _ in range(3):
        inserted = tx.insert_free(tx.sql.insert_messages, [_row_of(operation, tx.now) for operation in pending])
        pending = [operation for operation in pending if operation.number not in inserted]
        if not pending:
            return holders
        holders.update(_look_up(tx, pending))
        pending = [operation for operation in pending if _key_of(operation) not in holders]
    raise RuntimeError("an insert clashes with rows that hold none of its keys: a message number was made twice")


def _look_up(tx: Transaction, operations: Iterable[Prepare]) -> dict[_Key, _Holder]:
    groups: dict[tuple[int, str], list[str]] = {}
    for operation in operations:
        groups.setdefault((operation.topic.number, operation.producer_tag), []).append(operation.key)
    return {
        (topic, tag, row.message_key): _Holder(
            number=row.id,
            producer=row.producer_no,
            attempt_id=row.attempt_id,
            digest=row.digest,
            state=MessageState(row.state),
        )
        for (topic, tag), keys in groups.items()
        for row in tx.rows(tx.sql.live_by_keys, topic=topic, tag=tag, keys=keys)
    }


def _row_of(operation: Prepare, now: int) -> dict[str, Any]:
    topic, publish = operation.topic, operation.publish
    return {
        "id": operation.number,
        "topic_no": topic.number,
        "producer_no": operation.app,
        "producer_tag": operation.producer_tag,
        "message_key": operation.key,
        "live": 1,
        "attempt_id": operation.attempt_id,
        "ledger_id": operation.ledger_id,
        "digest": operation.digest,
        "state": int(_target(operation)),
        "content_type": operation.content_type,
        "headers": json.dumps(dict(operation.headers), ensure_ascii=False) if operation.headers else None,
        "body": operation.body,
        "delay_ms": operation.delay_ms,
        "due_ms": None if publish else now + max(topic.transaction_time_ms, operation.transaction_time_ms),
        "created_ms": now,
        "decided_ms": now if publish else None,
        "check_target": operation.check_target,
    }


def _refuse_tombstoned(tx: Transaction, inserted: Sequence[Prepare]) -> set[Prepare]:
    """Delete inserted messages that were rolled back before they arrived. Returns: their operations."""
    if not inserted:
        return set()
    dead = _tombstoned(tx, [_attempt_of(operation) for operation in inserted])
    refused = {operation for operation in inserted if _attempt_of(operation) in dead}
    if refused:
        numbers = sorted(operation.number for operation in refused)
        tx.change(tx.sql.delete_messages, len(numbers), ids=numbers)
    return refused


def decide_each(
    tx: Transaction, operations: Sequence[Decide], buried: Collection[Operation]
) -> dict[Operation, Outcome]:
    """Submit and roll back, in the order of arrival; consumption rows for exactly what was submitted here.

    buried: operations whose tombstones are committed. Returns: an outcome for each operation.
    """
    outcomes: dict[Operation, Outcome] = {}
    meant = _numbers_of(tx, operations, buried)
    named = sorted({number for number in meant.values() if number is not None})
    rows = {row.id: row for row in tx.rows(tx.sql.lock_messages, ids=named)} if named else {}
    tx.reach("locked")
    missing = [number for number in named if number not in rows]
    locked = {row.id: row for row in tx.rows(tx.sql.existing_messages, ids=missing)} if missing else {}
    lines, behind = _lines_to_join(tx, meant, rows, locked)
    states = {number: MessageState(row.state) for number, row in rows.items()}
    moved: dict[MessageEvent, list[MessageNumber]] = {MessageEvent.SUBMIT: [], MessageEvent.ROLLBACK: []}
    for operation, number in meant.items():
        row = rows.get(number) if number is not None else None
        if number in locked or number in behind:
            outcomes[operation] = Wait.LOCKED
        elif number is None:
            outcomes[operation] = _unknown_attempt(operation, operation in buried)
        elif row is None or row.topic_no != operation.topic.number or _is_hidden(row, operation):
            outcomes[operation] = MessageGone() if row is None and tx.is_gone(number) else MessageUnknown()
        elif operation.commit and tx.catalog_is_stale:
            outcomes[operation] = CatalogStale()
        else:
            outcomes[operation] = _decide_one(operation, states, moved, row)
    if burying := [operation for operation in operations if outcomes[operation] is Wait.BURIED]:
        _bury(tx, [(each.attempt_id, each.topic.number, each.producer_tag, each.key) for each in burying])
        tx.reach("buried")
    write_decisions(tx, rows, moved, lines)
    _alert_contradictions(tx, meant, outcomes)
    return outcomes


def _lines_to_join(
    tx: Transaction,
    meant: Mapping[Decide, MessageNumber | None],
    rows: Mapping[MessageNumber, Any],
    locked: Mapping[MessageNumber, Any],
) -> tuple[Lines, set[MessageNumber]]:
    """Lock the lines that submitted messages join.

    Returns: the lines, and the messages that cannot be submitted now: their line is locked, or the row of a message of
    their order key that was submitted before them is.
    """
    joining: dict[MessageNumber, set[LineName]] = {}
    for operation, number in meant.items():
        row = None if number is None else rows.get(number) or locked.get(number)
        if row is None or not operation.commit or not operation.topic.ordered:
            continue
        is_meant = row.topic_no == operation.topic.number and not _is_hidden(row, operation)
        if is_meant and MessageState(row.state) in UNDECIDED:
            joining[row.id] = lines_of(tx, row.topic_no, parse_headers(row.headers))
    lines = Lines(tx, {name for number, names in joining.items() for name in names if number in rows})
    closed, behind = set(lines.busy), set[MessageNumber]()
    for number, names in joining.items():  # in the order of arrival
        if number in locked:
            closed |= names
        elif not closed.isdisjoint(names):
            behind.add(number)
    return lines, behind


def _is_hidden(row: Any, operation: Decide) -> bool:
    return operation.only_this_tag and bool(row.producer_tag != operation.producer_tag)


def _decide_one(
    operation: Decide,
    states: dict[MessageNumber, MessageState],
    moved: dict[MessageEvent, list[MessageNumber]],
    row: Any,
) -> Answer:
    event = MessageEvent.SUBMIT if operation.commit else MessageEvent.ROLLBACK
    outcome = decide(states[row.id], event)
    message_id = MessageId(row.topic_no, row.producer_no, operation.shard, row.id)
    if not isinstance(outcome, Decided):
        outcome.message_id = str(message_id)
        return outcome
    if outcome.changes:
        moved[event].append(row.id)
        states[row.id] = outcome.state
    return Stored(message_id=message_id, state=outcome.state, changed=outcome.changes)


def write_decisions(
    tx: Transaction,
    rows: dict[MessageNumber, Any],
    moved: dict[MessageEvent, list[MessageNumber]],
    lines: Lines | None = None,
    decided_by: str = "",
) -> None:
    """Submit and roll back locked rows (of `lock_messages`), by number, in the order of `moved`.

    lines: those that the submitted ones join; None: wait for them here.  decided_by: "": the producer.
    """
    submitted, rolled_back = moved[MessageEvent.SUBMIT], moved[MessageEvent.ROLLBACK]
    recovered: dict[int, list[MessageNumber]] = {}
    for number in (*submitted, *rolled_back):
        if rows[number].state == MessageState.CHECK_FAILED:
            recovered.setdefault(rows[number].topic_no, []).append(number)
    for topic, numbers in sorted(recovered.items()):
        tx.note_recovered(topic, NO_SUBSCRIPTION, numbers)
    if submitted:
        tx.change(tx.sql.submit, len(submitted), ids=sorted(submitted), now=tx.now)
        messages = [Submitted.stored(rows[number]) for number in submitted]
        if lines is None:
            joined = {name for each in messages for name in lines_of(tx, each.topic, each.headers)}
            lines = Lines(tx, joined, wait=True)
        with lines:
            schedule(tx, messages, lines)
    if decided_by and (decided := sorted([*submitted, *rolled_back])):
        tx.change(tx.sql.write_decided_by, len(decided), ids=decided, decided_by=decided_by)
    if rolled_back:
        tx.change(tx.sql.roll_back, len(rolled_back), ids=sorted(rolled_back), now=tx.now)
        buried = (rows[number] for number in rolled_back)
        _bury(tx, [(row.attempt_id, row.topic_no, row.producer_tag, row.message_key) for row in buried])


def _numbers_of(
    tx: Transaction, operations: Sequence[Decide], buried: Collection[Operation]
) -> dict[Decide, MessageNumber | None]:
    """Return the numbers of the messages that are meant, in the order of the operations."""
    named = [operation for operation in operations if operation.number is None and operation not in buried]
    keys: dict[tuple[int, str], list[str]] = {}
    for operation in named:
        keys.setdefault((operation.topic.number, operation.producer_tag), []).append(operation.key)
    found: dict[_Attempt, MessageNumber] = {
        (row.attempt_id, topic, tag, row.message_key): MessageNumber(row.id)
        for (topic, tag), several in keys.items()
        for row in tx.rows(tx.sql.attempts_by_keys, topic=topic, tag=tag, keys=several)
    }
    return {
        operation: operation.number
        if operation.number is not None
        else _number_of_buried(tx, operation)
        if operation in buried
        else found.get((operation.attempt_id, operation.topic.number, operation.producer_tag, operation.key))
        for operation in operations
    }


def _number_of_buried(tx: Transaction, operation: Decide) -> MessageNumber | None:
    """Wait for a Prepare that is in progress: the tombstone of its attempt is committed."""
    if not tx.locking_reads_see_inserts:
        _wait_for_inserts(tx, operation)
    found = tx.rows(
        tx.sql.by_attempt_waiting,
        topic=operation.topic.number,
        tag=operation.producer_tag,
        key=operation.key,
        attempt=operation.attempt_id,
    )
    return MessageNumber(found[0].id) if found else None


def _wait_for_inserts(tx: Transaction, operation: Decide) -> None:
    """Wait for a Prepare of this key that is not committed yet, by an insert that clashes with it."""
    placeholder = dict.fromkeys(tx.sql.insert_messages.columns, 0) | {
        "id": NO_MESSAGE,
        "topic_no": operation.topic.number,
        "producer_tag": operation.producer_tag,
        "message_key": operation.key,
        "live": 1,
        **dict.fromkeys(("attempt_id", "digest", "body"), b""),
        **dict.fromkeys(("content_type", "check_target"), ""),
        **dict.fromkeys(("ledger_id", "headers", "due_ms", "decided_ms")),
    }
    if tx.insert_free(tx.sql.insert_messages, [placeholder]):
        tx.change(tx.sql.delete_messages, 1, ids=[NO_MESSAGE])


def _unknown_attempt(operation: Decide, buried: bool) -> Outcome:
    if operation.commit:
        return MessageUnknown()
    return Stored(message_id=None, state=MessageState.ROLLED_BACK, changed=False) if buried else Wait.BURIED


def _bury(tx: Transaction, attempts: Sequence[_Attempt]) -> None:
    fresh = sorted(set(attempts) - _tombstoned(tx, attempts))
    try:
        tx.insert(
            tx.sql.insert_tombstones,
            [
                {"attempt_id": id_, "topic_no": topic, "producer_tag": tag, "message_key": key, "created_ms": tx.now}
                for id_, topic, tag, key in fresh
            ],
        )
    except sa.exc.IntegrityError as exc:
        raise StoreConflict("another transaction buried the same attempt at the same moment") from exc


def _tombstoned(tx: Transaction, attempts: Sequence[_Attempt]) -> set[_Attempt]:
    """Return which of these attempts were rolled back."""
    rows = tx.rows(tx.sql.tombstones, ids=sorted({attempt[0] for attempt in attempts}))
    return {(row.attempt_id, row.topic_no, row.producer_tag, row.message_key) for row in rows} & set(attempts)


def _alert_contradictions(
    tx: Transaction, meant: Mapping[Decide, MessageNumber | None], outcomes: Mapping[Operation, Outcome]
) -> None:
    tx.alert_once(
        {
            "kind": "contradiction",
            "topic_no": operation.topic.number,
            "message_id": number,
            "subscription_no": 0,
            "attempt": 0,
            "detail": "submit after rollback" if operation.commit else "rollback after submit",
        }
        for operation, number in meant.items()
        if isinstance(outcomes[operation], AlreadyCommitted | AlreadyRolledBack)
    )
