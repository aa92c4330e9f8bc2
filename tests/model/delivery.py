"""One delivery, handed to two consumers, as a state machine over the domain's own decisions: what may count, and what not.

A handler may begin a copy without a word, or tell the center first, as with each copy that is delivered again. Both consumers
may have the same copy: a broker gives it to the second one when the first dies, or loses its connection. Copies may be lost,
given back although they arrived, and postponed by their handlers. Time is left out: whatever may be due is due. `without`
takes one guard out, see GUARDS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from tests.support.dose import LONG
from tmc_server.domain import consumption
from tmc_server.domain.consumption import Budget, ConsumptionState, Row
from tmc_server.domain.numbers import ANSWERED, NO_RUN, Attempt, MessageNumber, RunNumber
from tmc_server.domain.retry import RetryPolicy

POLICY = RetryPolicy(max_retry=1)
BUDGET = Budget(number=MessageNumber(1), since_ms=0)
ATTEMPTS = 4 if LONG else 3

GUARDS = {
    "begun": "an attempt that no handler began uses up no retry",
    "ask first": "a copy that is delivered again is handled only if no other run of its attempt has begun",
    "not given back": "what a handler has begun is not given back",
    "postponed": "a message that its handler postpones uses up no retry",
    "over": "no run begins an attempt that was nacked or taken back",
}

Run = tuple[int, int]
"""Attempt and consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """running: handlers that the center knows of.  began: the same, ended or not, but for those that postponed it.

    silent: handed over, and the center has heard nothing of the current attempt.  nacks: attempts that were refused.
    """

    row: Row
    copies: frozenset[int] = frozenset({1})
    running: frozenset[Run] = frozenset()
    began: frozenset[Run] = frozenset()
    nacks: frozenset[int] = frozenset()
    silent: bool = True


def start() -> Delivery:
    return Delivery(row=_timeless(consumption.first_try(POLICY, 0, BUDGET.number)))


def broken(life: Delivery) -> str:
    """Name the invariant that does not hold; "": all do."""
    began = {attempt for attempt, _ in life.began}
    if life.row.state is ConsumptionState.FAILED and len(began | life.nacks) <= POLICY.max_retry:
        return "failed, and handlers have not failed as often as the policy allows"
    if life.row.state is ConsumptionState.SCHEDULED and life.row.tried < len(began):
        return "an attempt that a handler began does not count"
    if len({attempt for attempt, _ in life.running}) < len(life.running):
        return "two runs of one attempt at once, although the center was asked"
    return ""


def moves(life: Delivery, without: str = "") -> Iterator[tuple[str, Delivery]]:
    """Yield what may happen next: a sentence, and the delivery afterwards."""
    if life.row.state is ConsumptionState.ACKED:
        return
    yield from _claims(life, without)
    yield from _begins(life, without)
    yield from _ends(life, without)
    yield from _gives_back(life, without)
    if life.row.state is ConsumptionState.FAILED:
        again = consumption.decide_reactivate(life.row, 0)
        assert isinstance(again, Row)
        fresh = replace(life, row=_timeless(again), running=frozenset(), began=frozenset(), nacks=frozenset())
        yield "an operator reactivates it", replace(fresh, silent=False)


def _claims(life: Delivery, without: str) -> Iterator[tuple[str, Delivery]]:
    if life.row.state is not ConsumptionState.SCHEDULED or life.row.attempt >= ATTEMPTS:
        return
    lost_ms = 0 if life.silent and not life.row.begun and without != "begun" else None
    after = _timeless(consumption.decide_due(life.row, POLICY, True, 0, BUDGET, lost_ms=lost_ms))
    if after.state is ConsumptionState.FAILED:
        yield "its retries are used up", replace(life, row=after)
    else:
        yield (
            f"attempt {after.attempt} is handed over",
            replace(life, row=after, copies=life.copies | {after.attempt}, silent=True),
        )


def _begins(life: Delivery, without: str) -> Iterator[tuple[str, Delivery]]:
    for attempt, run in {(attempt, run) for attempt in life.copies for run in (1, 2)} - life.began:
        this = frozenset({(attempt, run)})
        row = life.row
        if without == "over" and row.begun == ANSWERED:
            row = structs.replace(row, begun=NO_RUN)
        asked = consumption.decide_extend(row, Attempt(attempt), 0, 0, RunNumber(run))
        if isinstance(asked, Row):
            begun = replace(life, row=_timeless(asked), running=life.running | this, began=life.began | this)
            yield f"consumer {run} begins copy {attempt}, as the center allows", begun
        elif without == "ask first" and row.state is ConsumptionState.SCHEDULED:
            yield f"consumer {run} begins copy {attempt}", replace(life, running=life.running | this)


def _ends(life: Delivery, without: str) -> Iterator[tuple[str, Delivery]]:
    for attempt in life.copies:
        yield f"copy {attempt} is handled and acked", replace(life, row=_acked(life.row))
        nacked = consumption.decide_nack(life.row, Attempt(attempt), POLICY, 0, BUDGET)
        if isinstance(nacked, Row) and attempt not in life.nacks:
            refused = replace(_ended(life, attempt), nacks=life.nacks | {attempt}, silent=False)
            yield f"a handler fails on copy {attempt}", replace(refused, row=_timeless(nacked))
        if attempt < life.row.attempt:
            yield f"copy {attempt} is lost", replace(life, copies=life.copies - {attempt})
    for attempt, run in life.running:
        yield f"consumer {run} dies over copy {attempt}", replace(life, running=life.running - {(attempt, run)})
        after_ms = None if without == "postponed" else 0
        later = consumption.decide_nack(life.row, Attempt(attempt), POLICY, 0, BUDGET, retry_after_ms=after_ms)
        if isinstance(later, Row):
            began = frozenset(each for each in life.began if each[0] != attempt)
            postponed = replace(_ended(life, attempt), row=_timeless(later), began=began, silent=False)
            yield f"the handler postpones copy {attempt}", postponed


def _gives_back(life: Delivery, without: str) -> Iterator[tuple[str, Delivery]]:
    row = structs.replace(life.row, begun=NO_RUN) if without == "not given back" else life.row
    after = consumption.decide_give_back(row, row.attempt, 0, 0)
    if isinstance(after, Row) and life.row.begun != ANSWERED:
        yield f"copy {row.attempt} is given back", replace(life, row=_timeless(after), silent=False)


def _ended(life: Delivery, attempt: int) -> Delivery:
    return replace(life, running=frozenset(each for each in life.running if each[0] != attempt))


def _acked(row: Row) -> Row:
    acked = consumption.decide_ack(row, 0)
    assert isinstance(acked, Row)
    return _timeless(acked)


def _timeless(row: Row) -> Row:
    return structs.replace(row, due_ms=None if row.due_ms is None else 0)
