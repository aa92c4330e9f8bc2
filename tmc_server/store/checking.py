"""Claim and hold checks and record their answers, in one open transaction.

An answer counts only while the message is undecided and still has the check number that the question was asked under.
A decision by check takes the same path as one by the producer: the same transitions, the same consumption rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tmc_common.headers import context_of
from tmc_server.domain.checks import (
    DECIDED_BY_CHECK,
    AfterUnknown,
    CheckAnswer,
    CheckState,
    Verdict,
    decide_after_unknown,
)
from tmc_server.domain.fingerprint import fingerprint
from tmc_server.domain.message import UNDECIDED, MessageEvent, MessageState
from tmc_server.domain.numbers import NO_ATTEMPT, NO_SUBSCRIPTION, Attempt, MessageNumber, Shard
from tmc_server.domain.ports.checks import Checked, Pending, Recorded
from tmc_server.store.copies import parse_headers
from tmc_server.store.journal import JournalRow, write_journal
from tmc_server.store.messages import write_decisions
from tmc_server.store.transaction import Transaction

_ANSWER = 500
_HOUR_MS = 3_600_000
_OPPOSITE = {MessageState.COMMITTED: Verdict.ROLLBACK, MessageState.ROLLED_BACK: Verdict.COMMIT}


def pending_of(shard: Shard, row: Any) -> Pending:
    """A row of `due_checks` or `asked_messages`."""
    state = CheckState(attempt=row.check_attempt, checked=row.checked, unreached_ms=row.unreached_ms, due_ms=row.due_ms)
    return Pending(
        shard=shard,
        number=row.id,
        topic=row.topic_no,
        producer=row.producer_no,
        producer_tag=row.producer_tag,
        key=row.message_key,
        attempt_id=row.attempt_id,
        ledger_id=row.ledger_id or b"",
        created_ms=row.created_ms,
        since_ms=row.created_ms if row.since_ms is None else row.since_ms,
        target=row.check_target,
        context=context_of(parse_headers(row.headers)),
        state=state,
    )


def claim(tx: Transaction, pending: Sequence[Pending], until_ms: int, lease: Mapping[str, int]) -> list[Pending]:
    """Claim due checks. lease: required owner and epoch of the shard's lease. Returns: those claimed, as updated."""
    before = {each.number: each for each in pending}
    ids, until = sorted(before), tx.now + until_ms
    won = tx.execute(tx.sql.claim_checks, ids=ids, now=tx.now, until=until, **lease).rowcount
    tx.reach("written")
    rows = tx.rows(tx.sql.asked_messages, ids=ids) if won else ()
    return [
        pending_of(tx.sql.shard, row)
        for row in rows
        if row.due_ms == until and row.check_attempt == before[row.id].state.attempt + 1
    ]


def hold(tx: Transaction, pending: Sequence[Pending], pause_ms: int, detail: str, lease: Mapping[str, int]) -> int:
    """Postpone checks whose service cannot be asked now. Returns: how many were postponed."""
    moved: int = tx.execute(
        tx.sql.hold_checks,
        ids=sorted(each.number for each in pending),
        now=tx.now,
        until=tx.now + pause_ms,
        since=tx.now,
        answer=detail[:_ANSWER],
        **lease,
    ).rowcount
    return moved


def record(tx: Transaction, answers: Sequence[Checked], tell_overdue: bool) -> Recorded:
    """Record answers; each counts only for its own check. tell_overdue: see domain.ports.checks.DueChecks."""
    rows = {row.id: row for row in tx.rows(tx.sql.lock_messages, ids=sorted(each.pending.number for each in answers))}
    tx.reach("locked")
    moved: dict[MessageEvent, list[MessageNumber]] = {MessageEvent.SUBMIT: [], MessageEvent.ROLLBACK: []}
    undecided: list[tuple[Checked, AfterUnknown]] = []
    contradicted: list[Checked] = []
    overtaken = 0
    for checked in answers:
        row = rows.get(checked.pending.number)
        if row is None or MessageState(row.state) not in UNDECIDED:
            overtaken += 1
            if row is not None and checked.answer.verdict is _OPPOSITE.get(MessageState(row.state)):
                contradicted.append(checked)
        elif row.check_attempt != checked.pending.state.attempt:
            overtaken += 1
        elif checked.answer.verdict is Verdict.COMMIT and not tx.catalog_is_stale:
            moved[MessageEvent.SUBMIT].append(row.id)
        elif checked.answer.verdict is Verdict.ROLLBACK:
            moved[MessageEvent.ROLLBACK].append(row.id)
        elif MessageState(row.state) is MessageState.PREPARED:
            undecided.append((checked, _outcome(tx, checked)))
    write_decisions(tx, rows, moved, decided_by=DECIDED_BY_CHECK)
    failed = _write_undecided(tx, undecided)
    overdue = next((checked for checked, after in undecided if after.overdue), None) if tell_overdue else None
    if overdue is not None:  # one message stands for all that wait for the same service
        hour = Attempt((tx.now - overdue.pending.created_ms) // _HOUR_MS)
        tx.alert_once([_alert(overdue, "producer not reached", attempt=hour)])
    tx.alert_once(_alert(checked, "contradiction", attempt=NO_ATTEMPT) for checked in contradicted)
    return Recorded(
        committed=len(moved[MessageEvent.SUBMIT]),
        rolled_back=len(moved[MessageEvent.ROLLBACK]),
        failed=failed,
        undecided=len(undecided) - failed,
        overtaken=overtaken,
        overdue=overdue is not None,
    )


def _outcome(tx: Transaction, checked: Checked) -> AfterUnknown:
    state, topic = checked.pending.state, tx.catalog.topics[checked.pending.topic]
    if (
        checked.answer.verdict is not Verdict.UNKNOWN
    ):  # decided, but this server might miss a subscriber: ask again soon
        return AfterUnknown(replace(state, unreached_ms=None, due_ms=tx.now + 1_000))
    if tx.catalog_is_stale:  # the topic's limit may have been changed: nothing is given up, nothing is counted
        return AfterUnknown(replace(state, due_ms=tx.now + 1_000))
    return decide_after_unknown(
        state,
        checked.answer,
        topic.checks.retry,
        tx.now,
        number=checked.pending.number,
        age_ms=tx.now - checked.pending.since_ms,
        pause_ms=checked.pause_ms,
    )


def _write_undecided(tx: Transaction, undecided: Sequence[tuple[Checked, AfterUnknown]]) -> int:
    """Returns: how many are CHECK_FAILED now."""
    failed = MessageState.CHECK_FAILED
    groups: dict[tuple[tuple[str, Any], ...], list[MessageNumber]] = {}  # most of a page gets the same values
    for checked, after in undecided:
        values = {
            "old_attempt": checked.pending.state.attempt,
            "new_state": int(failed if after.failed else MessageState.PREPARED),
            "new_checked": after.state.checked,
            "new_unreached_ms": after.state.unreached_ms,
            "new_due_ms": after.state.due_ms,
            "new_answer": _told(checked.answer),
        }
        groups.setdefault(tuple(values.items()), []).append(checked.pending.number)
    for same, numbers in groups.items():
        tx.change(tx.sql.after_check, len(numbers), ids=sorted(numbers), **dict(same))
    reached = [checked for checked, _ in undecided if checked.answer.counts_toward_limit]
    write_journal(
        tx,
        [
            JournalRow(
                number=checked.pending.number,
                subscription=NO_SUBSCRIPTION,
                attempt=Attempt(checked.pending.state.attempt),
                error=_told(checked.answer),
            )
            for checked in reached
        ],
    )
    given_up = [checked for checked, after in undecided if after.failed]
    by_topic: dict[int, dict[MessageNumber, str]] = {}
    for checked in given_up:
        by_topic.setdefault(checked.pending.topic, {})[checked.pending.number] = _told(checked.answer)
    for topic, causes in sorted(by_topic.items()):
        tx.note_failed(topic, NO_SUBSCRIPTION, causes)
    tx.alert_once(
        {**_alert(checked, "check failed"), "fingerprint": fingerprint(_told(checked.answer))} for checked in given_up
    )
    return len(given_up)


def _told(answer: CheckAnswer) -> str:
    verdict = "" if answer.verdict is Verdict.UNKNOWN else f"{answer.verdict.name} "
    return f"{verdict}{answer.reason.name}: {answer.detail or answer.reason.value}"[:_ANSWER]


def _alert(checked: Checked, kind: str, attempt: Attempt | None = None) -> dict[str, Any]:
    pending = checked.pending
    return {
        "kind": kind,
        "topic_no": pending.topic,
        "message_id": pending.number,
        "subscription_no": 0,
        "attempt": pending.state.attempt if attempt is None else attempt,
        "detail": _told(checked.answer),
    }
