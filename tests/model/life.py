"""One message with one subscriber, as a state machine over the domain's own decisions: everything that may happen next.

A service may crash at any point. What it sent may arrive late, twice, or after its opposite. Of two servers the first may
sleep between its look at a row and its claim. Copies may be lost or handed out twice. An operator may decide or reactivate.
Time is left out: whatever may be due is due. `without` takes one guard out, see GUARDS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from msgspec import structs

from tests.support.dose import LONG
from tmc_server.domain import consumption, message
from tmc_server.domain.checks import CheckAnswer, CheckState, Verdict, decide_after_unknown
from tmc_server.domain.consumption import Budget, ConsumptionState, Row
from tmc_server.domain.message import Closing, MessageEvent, MessageState
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import TmcError

POLICY = RetryPolicy(max_retry=1)
BUDGET = Budget(number=MessageNumber(1), since_ms=0)
ATTEMPTS = CHECKS = 3 if LONG else 2  # of one delivery, of one message

GUARDS = {
    "opposite decision": "a decision after the opposite one is refused",
    "tombstone": "the Prepare of an attempt that was rolled back is refused",
    "fence": "before a check is answered ROLLBACK, a marker keeps the transaction from committing",
    "own attempt": "a nack counts for the attempt it is about",
    "inbox": "a copy whose effect is noted has no second one",
    "lease": "a claim holds only with the lease of the shard",
    "as read": "a claim changes a row only if it is as it was read",
    "ack is final": "only what is scheduled is claimed",
    "retention": "only what is closed is removed",
}


class Transaction(Enum):
    """Of the service. WRITTEN: its ledger row is there and not committed."""

    NOT_YET = 0
    OPEN = 1
    WRITTEN = 2
    COMMITTED = 3
    ABORTED = 4


class Ledger(Enum):
    EMPTY = 0
    ROW = 1
    MARKER = 2


class Call(Enum):
    """What a service sends. The network keeps it: it may arrive at any time, and again."""

    PREPARE = 0
    SUBMIT = 1
    ROLLBACK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Everything that is known anywhere about one message. attempts are numbers of copies, checks are numbered from 1."""

    transaction: Transaction = Transaction.NOT_YET
    is_up: bool = True
    sent: frozenset[Call] = frozenset()
    ledger: Ledger = Ledger.EMPTY
    said_rollback: bool = False  # some check was answered ROLLBACK

    state: MessageState | None = None
    first_decision: MessageState | None = None
    is_rolled_back: bool = False  # its tombstone
    is_gone: bool = False
    by_operator: bool = False
    check: int = 0
    checked: int = 0
    questions: frozenset[int] = frozenset()
    answers: frozenset[tuple[int, Verdict]] = frozenset()

    row: Row | None = None
    second_server: bool = False  # it has taken over the lease
    read: Row | None = None  # what the first server read and has not claimed yet
    copies: frozenset[int] = frozenset()
    nacks: frozenset[int] = frozenset()
    is_ack_sent: bool = False
    was_acked: bool = False
    ran_out: bool = False  # it failed because its retries were used up, not by a nack
    is_noted: bool = False  # in the inbox
    effects: int = 0
    wrong: str = ""  # what an action did that it must not


def broken(life: Life) -> str:
    """Which invariant does not hold; "": all do."""
    committed = life.transaction is Transaction.COMMITTED
    if life.wrong:
        return life.wrong
    if not life.by_operator and not committed and (life.state is MessageState.COMMITTED or life.effects):
        return "invented: delivered without its transaction"
    if life.said_rollback and committed:
        return "a check was answered ROLLBACK, and the transaction committed"
    if not life.by_operator and committed and life.state is MessageState.ROLLED_BACK:
        return "lost: rolled back, and the transaction committed"
    if life.effects > 1:
        return "doubled: two effects"
    if life.was_acked and life.row is not None and life.row.state is not ConsumptionState.ACKED:
        return "an ack was undone"
    if life.first_decision is not None and life.state not in (life.first_decision, None):
        return "a decision was changed"
    if life.is_rolled_back and life.state not in (MessageState.ROLLED_BACK, None):
        return "an attempt that was rolled back came back"
    if life.is_gone and committed and not life.by_operator and not life.effects:
        return "lost: removed before it had its effect"
    failed = life.row is not None and life.row.state is ConsumptionState.FAILED
    if failed and not life.ran_out and life.row is not None and life.row.attempt not in life.nacks:
        return "failed, and its newest attempt was not refused"
    return ""


def moves(life: Life, without: str = "") -> Iterator[tuple[str, Life]]:
    """What may happen next: a sentence, and the life afterwards."""
    yield from _service(life)
    yield from _calls(life, without)
    yield from _checks(life, without)
    yield from _claims(life, without)
    yield from _consumer(life, without)
    yield from _operator(life)
    yield from _retention(life, without)


def _service(life: Life) -> Iterator[tuple[str, Life]]:
    if life.is_up:
        if Call.PREPARE not in life.sent:
            yield "the service prepares", replace(life, sent=life.sent | {Call.PREPARE})
        elif life.transaction is Transaction.NOT_YET:
            yield "its Prepare timed out, it rolls back", _aborted(life)
            if life.state is not None:
                yield "its transaction begins", replace(life, transaction=Transaction.OPEN)
        if life.transaction is Transaction.OPEN:
            if life.ledger is Ledger.MARKER:
                yield "its ledger row meets the marker, it rolls back", _aborted(life)
            else:
                yield "it writes its ledger row", replace(life, transaction=Transaction.WRITTEN)
        if life.transaction is Transaction.WRITTEN:
            yield (
                "its transaction commits",
                replace(life, transaction=Transaction.COMMITTED, ledger=Ledger.ROW),
            )
        if life.transaction in (Transaction.OPEN, Transaction.WRITTEN):
            yield "its transaction fails, it rolls back", _aborted(life)
        ended = life.transaction in (Transaction.COMMITTED, Transaction.ABORTED)
        after = life.transaction if ended else Transaction.ABORTED
        yield "the service crashes", replace(life, is_up=False, transaction=after)
    if life.transaction is Transaction.COMMITTED and Call.SUBMIT not in life.sent:
        yield "it submits, now or when it starts again", replace(life, sent=life.sent | {Call.SUBMIT})


def _aborted(life: Life) -> Life:
    return replace(life, transaction=Transaction.ABORTED, sent=life.sent | {Call.ROLLBACK})


def _calls(life: Life, without: str) -> Iterator[tuple[str, Life]]:
    if life.is_gone:
        return  # late callers learn that, nothing changes
    if Call.PREPARE in life.sent and life.state is None and (not life.is_rolled_back or without == "tombstone"):
        yield "Prepare arrives", replace(life, state=MessageState.PREPARED)
    if Call.SUBMIT in life.sent and life.state is not None:
        yield "Submit arrives", _decided(life, MessageEvent.SUBMIT, without)
    if Call.ROLLBACK in life.sent:
        if life.state is None:
            yield "Rollback arrives before its Prepare", replace(life, is_rolled_back=True)
        else:
            yield "Rollback arrives", _decided(life, MessageEvent.ROLLBACK, without)


def _decided(life: Life, event: MessageEvent, without: str) -> Life:
    assert life.state is not None
    decision = message.decide(life.state, event)
    if isinstance(decision, TmcError):
        if without != "opposite decision":
            return life
        state = MessageState.COMMITTED if event is MessageEvent.SUBMIT else MessageState.ROLLED_BACK
    elif decision.changes:
        state = decision.state
    else:
        return life
    first = life.first_decision or state
    if state is MessageState.ROLLED_BACK:
        return replace(life, state=state, first_decision=first, is_rolled_back=True)
    row = _timeless(consumption.first_try(POLICY, 0, BUDGET.number))
    return replace(life, state=state, first_decision=first, row=row, copies=frozenset({row.attempt}))


def _checks(life: Life, without: str) -> Iterator[tuple[str, Life]]:
    if life.state is MessageState.PREPARED and life.check < CHECKS:
        number = life.check + 1
        yield f"check {number} begins", replace(life, check=number, questions=life.questions | {number})
    for number in life.questions:
        verdict, ledger = _answer(life, without)
        asked = replace(
            life,
            questions=life.questions - {number},
            answers=life.answers | {(number, verdict)},
            ledger=ledger,
            said_rollback=life.said_rollback or verdict is Verdict.ROLLBACK,
        )
        yield f"check {number} is answered {verdict.name}", asked
    for number, verdict in life.answers:
        rest = replace(life, answers=life.answers - {(number, verdict)})
        if number != life.check or life.state not in message.UNDECIDED:
            yield f"the answer of check {number} comes too late", rest
        elif verdict is not Verdict.UNKNOWN:
            event = MessageEvent.SUBMIT if verdict is Verdict.COMMIT else MessageEvent.ROLLBACK
            yield f"the answer of check {number} decides", _decided(rest, event, without)
        elif life.state is MessageState.PREPARED:
            was = CheckState(attempt=life.check, checked=life.checked, unreached_ms=None, due_ms=0)
            after = decide_after_unknown(was, CheckAnswer(Verdict.UNKNOWN), POLICY, 0, number=BUDGET.number, age_ms=0)
            state = MessageState.CHECK_FAILED if after.failed else life.state
            yield f"the answer of check {number} is counted", replace(rest, checked=after.state.checked, state=state)


def _answer(life: Life, without: str) -> tuple[Verdict, Ledger]:
    """By the ledger, from any instance of the service; the verdict, and the ledger afterwards."""
    if life.ledger is Ledger.ROW:
        return Verdict.COMMIT, life.ledger
    if life.transaction is Transaction.WRITTEN:
        return Verdict.UNKNOWN, life.ledger  # the marker would wait for the row
    return Verdict.ROLLBACK, life.ledger if without == "fence" else Ledger.MARKER


def _claims(life: Life, without: str) -> Iterator[tuple[str, Life]]:
    row = life.row
    if row is None:
        return
    is_within_bounds = row.attempt < ATTEMPTS or row.tried > POLICY.max_retry  # the latter adds no attempt
    may_claim = is_within_bounds and (row.state is ConsumptionState.SCHEDULED or without == "ack is final")
    if not life.second_server:
        yield "the second server takes over the lease", replace(life, second_server=True)
        if may_claim and life.read is None:
            yield "the first server reads the due row", replace(life, read=row)
    elif may_claim:
        yield "the second server claims the due row", _claimed(life, row)
    if life.read is not None:
        left = replace(life, read=None)
        may_write = not life.second_server or without == "lease"
        if may_write and (row == life.read or without == "as read"):
            claimed = _claimed(left, life.read)
            wrong = "claimed without the lease" if life.second_server else ""
            yield "the first server claims what it read", replace(claimed, wrong=wrong)
        else:
            yield "the first server's claim finds the row or the lease changed", left


def _claimed(life: Life, row: Row) -> Life:
    after = _timeless(
        consumption.decide_due(structs.replace(row, state=ConsumptionState.SCHEDULED), POLICY, True, 0, BUDGET)
    )
    if after.state is ConsumptionState.FAILED:
        return replace(life, row=after, ran_out=True)
    return replace(life, row=after, copies=life.copies | {after.attempt})


def _consumer(life: Life, without: str) -> Iterator[tuple[str, Life]]:
    for attempt in life.copies:
        noted = life.is_noted and without != "inbox"
        yield (
            f"copy {attempt} is handled",
            replace(life, effects=life.effects + (not noted), is_noted=True, is_ack_sent=True),
        )
        if not life.is_noted and attempt not in life.nacks:
            yield f"the handler fails on copy {attempt}", replace(life, nacks=life.nacks | {attempt})
        if attempt < ATTEMPTS:  # the last one stands for all further ones
            yield f"copy {attempt} is lost", replace(life, copies=life.copies - {attempt})
    if life.row is None:
        return
    if life.is_ack_sent:
        decision = consumption.decide_ack(life.row, 0)
        if isinstance(decision, Row):
            yield "the ack arrives", replace(life, row=_timeless(decision), was_acked=True)
    for attempt in life.nacks:
        about = life.row.attempt if without == "own attempt" else attempt
        decision = consumption.decide_nack(life.row, about, POLICY, 0, BUDGET)
        if isinstance(decision, Row):
            yield f"the nack of copy {attempt} arrives", replace(life, row=_timeless(decision))


def _operator(life: Life) -> Iterator[tuple[str, Life]]:
    if life.state is MessageState.CHECK_FAILED:
        by_hand = replace(life, by_operator=True)
        yield "an operator decides to commit", _decided(by_hand, MessageEvent.SUBMIT, "")
        yield "an operator decides to roll back", _decided(by_hand, MessageEvent.ROLLBACK, "")
        if life.check < CHECKS:
            yield "an operator has it checked again", replace(life, state=MessageState.PREPARED, checked=0)
    if life.row is not None and life.row.state is ConsumptionState.FAILED:
        decision = consumption.decide_reactivate(life.row, 0)
        assert isinstance(decision, Row)
        yield "an operator reactivates the delivery", replace(life, row=_timeless(decision), ran_out=False)


def _retention(life: Life, without: str) -> Iterator[tuple[str, Life]]:
    if life.state is None:
        return
    how = message.closing(life.state)
    delivered = life.row is not None and not consumption.is_open(life.row.state)
    if how is Closing.ITSELF or (how is Closing.WITH_DELIVERIES and (delivered or without == "retention")):
        yield "retention removes it", replace(life, is_gone=True, state=None, row=None, read=None)


def _timeless(row: Row) -> Row:
    return structs.replace(row, due_ms=None if row.due_ms is None else 0)
