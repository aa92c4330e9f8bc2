"""The life of one delivery (message x subscription): states, transitions, decisions.

Two counters: `attempt` numbers the attempts and never decreases; `tried` counts those that use up the policy's budget
since submit or reactivation, the current one included. An attempt uses up a retry only if a handler failed: it raised, or
it began (`begun`) and its process died. An attempt whose copy was lost, given back or postponed does not: `tried` drops,
`attempt` does not. Operations on one attempt (give back, nack, extend, reject) are guarded by its number. An ack is not:
it is valid for every copy, and final.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from tmc_server.domain.numbers import ANSWERED, NO_ATTEMPT, NO_RUN, Attempt, MessageNumber, RunNumber, Shard
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import AttemptStale, ConsumptionClosed, TmcError


class ConsumptionState(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    SCHEDULED = 1  #: has a due time: is delivered then, again and again, until acked
    ACKED = 2  #: the consumer is done; final
    FAILED = 3  #: attempts used up, or rejected; a human was alerted
    CANCELLED = 4  #: an operator cancelled it, or the subscription was removed
    WAITING = 5  #: an earlier message of its order key is still open

    __hash__ = int.__hash__  # the enum's own is written in Python, and states are keys on the hot path


def is_open(state: ConsumptionState) -> bool:
    """Return whether a delivery in this state can still change. mypy reports a state without a case."""
    match state:
        case ConsumptionState.SCHEDULED | ConsumptionState.FAILED | ConsumptionState.WAITING:
            return True
        case ConsumptionState.ACKED | ConsumptionState.CANCELLED:
            return False
        case _:
            assert_never(state)


OPEN = tuple(state for state in ConsumptionState if is_open(state))
CLOSED = tuple(state for state in ConsumptionState if not is_open(state))


class ConsumptionEvent(Enum):
    """What can happen to a consumption, named by the call or duty that causes it."""

    SUBMIT = "Submit"
    QUEUE = "Submit, behind others"
    RELEASE = "its turn has come"
    DELIVER = "redelivering"
    GIVE_BACK = "give back"
    NACK = "Nack"
    EXTEND = "Extend"
    REJECT = "Nack(reject)"
    EXHAUST = "redelivering, limit"
    ACK = "Ack"
    REMOVE = "redelivering, removed"
    CANCEL = "CancelConsumption"
    HOLD = "redelivering, copy waits"
    REACTIVATE = "ReactivateConsumption"
    HURRY = "DeliverNow"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Transition:
    """One allowed move, with its letter in docs/states.md; `own_try`: guarded by the attempt number too."""

    letter: str
    to: ConsumptionState
    own_try: bool = False


_S = ConsumptionState
_E = ConsumptionEvent
TRANSITIONS: Mapping[tuple[ConsumptionState | None, ConsumptionEvent], Transition] = {
    (None, _E.SUBMIT): Transition("e", _S.SCHEDULED),
    (_S.SCHEDULED, _E.DELIVER): Transition("f", _S.SCHEDULED),
    (_S.SCHEDULED, _E.GIVE_BACK): Transition("g", _S.SCHEDULED, own_try=True),
    (_S.SCHEDULED, _E.NACK): Transition("h", _S.SCHEDULED, own_try=True),
    (_S.SCHEDULED, _E.EXTEND): Transition("i", _S.SCHEDULED, own_try=True),
    (_S.SCHEDULED, _E.REJECT): Transition("j", _S.FAILED, own_try=True),
    (_S.SCHEDULED, _E.EXHAUST): Transition("k", _S.FAILED),
    (_S.SCHEDULED, _E.ACK): Transition("l", _S.ACKED),
    (_S.FAILED, _E.ACK): Transition("m", _S.ACKED),
    (_S.SCHEDULED, _E.REMOVE): Transition("n", _S.CANCELLED),
    (_S.FAILED, _E.REACTIVATE): Transition("o", _S.SCHEDULED),
    (_S.SCHEDULED, _E.HOLD): Transition("p", _S.SCHEDULED),
    (None, _E.QUEUE): Transition("u", _S.WAITING),
    (_S.WAITING, _E.RELEASE): Transition("v", _S.SCHEDULED),
    (_S.WAITING, _E.ACK): Transition("w", _S.ACKED),
    (_S.WAITING, _E.REMOVE): Transition("x", _S.CANCELLED),
    (_S.SCHEDULED, _E.CANCEL): Transition("y", _S.CANCELLED),
    (_S.FAILED, _E.CANCEL): Transition("z", _S.CANCELLED),
    (_S.WAITING, _E.CANCEL): Transition("aa", _S.CANCELLED),
    (_S.SCHEDULED, _E.HURRY): Transition("ab", _S.SCHEDULED),
}


def sources(event: ConsumptionEvent) -> tuple[ConsumptionState, ...]:
    """The states an event may start from: the guard of its UPDATE."""
    return tuple(state for state, caused_by in TRANSITIONS if caused_by is event and state is not None)


class Row(Struct, frozen=True):
    """What a decision needs to know of a consumption, and what it may change.

    begun: the run of a handler that began the current attempt; ANSWERED: it was nacked or taken back.
    """

    state: ConsumptionState
    attempt: Attempt
    tried: int
    due_ms: int | None
    begun: RunNumber = NO_RUN


class Budget(Struct, frozen=True, kw_only=True):
    """What a retry policy needs to know of a row beside its tries. since_ms: when its first attempt could be made."""

    number: MessageNumber
    since_ms: int

    def is_used_up(self, row: Row, policy: RetryPolicy, at_ms: int, *, counts: bool) -> bool:
        """at_ms: when the next attempt would be made.  counts: whether the row's last one uses up a retry."""
        return policy.is_used_up(row.tried, at_ms - self.since_ms, counts)


Decision = Row | TmcError | None
"""The row afterwards; None: no change, the answer is the same as the first time; TmcError: why it is refused."""


def _transition(row: Row, event: ConsumptionEvent, attempt: Attempt | None = None) -> Transition | TmcError:
    transition = TRANSITIONS.get((row.state, event))
    if transition is None and row.state is ConsumptionState.WAITING:
        return ConsumptionClosed(
            "The delivery waits for an earlier message of its order key: reactivate or cancel that one."
        )
    if transition is None:
        return ConsumptionClosed(f"The delivery is {row.state.name} already: nothing was changed.")
    if transition.own_try and attempt != row.attempt:
        return AttemptStale()
    return transition


def decide_ack(row: Row, now: int) -> Decision:
    """Acks are true for every copy; one for a cancelled row is accepted and changes nothing."""
    transition = TRANSITIONS.get((row.state, ConsumptionEvent.ACK))
    return None if transition is None else replace(row, state=transition.to, due_ms=None)


def decide_nack(
    row: Row,
    attempt: Attempt,
    policy: RetryPolicy,
    now: int,
    budget: Budget,
    *,
    retry_after_ms: int | None = None,
    reject: bool = False,
    run: RunNumber = NO_RUN,
) -> Decision:
    """The handler failed: due again by the policy, FAILED if rejected or the last attempt.

    retry_after_ms: the consumer postpones it: due then, and the attempt does not count; only an age limit ends that.
    run: whose failure it is; AttemptStale if another run has begun. NO_RUN: not said.
    """
    counts = retry_after_ms is None
    wait_ms = policy.delay_for_ms(row.tried, budget.number) if retry_after_ms is None else retry_after_ms
    exhausted = budget.is_used_up(row, policy, now + wait_ms, counts=counts)
    transition = _transition(row, ConsumptionEvent.REJECT if reject or exhausted else ConsumptionEvent.NACK, attempt)
    if isinstance(transition, TmcError):
        return transition
    if run and row.begun not in (NO_RUN, ANSWERED, run):
        return AttemptStale("Another run of this attempt has begun: its answer counts.")
    if transition.to is ConsumptionState.FAILED:
        return replace(row, state=transition.to, due_ms=None, begun=ANSWERED)
    tried = row.tried if counts or row.begun == ANSWERED else _without_this(row)
    return replace(row, tried=tried, due_ms=now + wait_ms, begun=ANSWERED)


def _without_this(row: Row) -> int:
    """`tried` if the current attempt does not count."""
    return max(row.tried - 1, 0)


def decide_extend(row: Row, attempt: Attempt, extend_ms: int, now: int, run: RunNumber = NO_RUN) -> Decision:
    """A consumer has the copy and needs longer: the next attempt is not made before now + extend_ms.

    run: the run of a handler that has begun. From then on the attempt counts, and no other run of it may begin: AttemptStale.
    """
    transition = _transition(row, ConsumptionEvent.EXTEND, attempt)
    if isinstance(transition, TmcError):
        return transition
    if run and row.begun == ANSWERED:
        return AttemptStale("This attempt is over: another copy is on its way.")
    if run and row.begun not in (NO_RUN, run):
        return AttemptStale("Another run of this attempt has begun: leave the message to that one.")
    return replace(row, due_ms=max(row.due_ms or 0, now + extend_ms), begun=run or row.begun)


def decide_give_back(row: Row, attempt: Attempt, after_ms: int, now: int) -> Decision:
    """Give back a copy that no handler began: uncounted, due after the back-off;
    void after a newer attempt, an answer, or a run.
    """
    transition = _transition(row, ConsumptionEvent.GIVE_BACK, attempt)
    if isinstance(transition, TmcError) or row.begun != NO_RUN:
        return None
    return replace(row, tried=_without_this(row), due_ms=now + after_ms, begun=ANSWERED)


def decide_reactivate(row: Row, now: int) -> Decision:
    """An operator grants a fresh budget; attempt numbers continue."""
    transition = _transition(row, ConsumptionEvent.REACTIVATE)
    if isinstance(transition, TmcError):
        return transition
    return replace(row, state=transition.to, tried=0, due_ms=now, begun=ANSWERED)


def decide_deliver_now(row: Row, tried_ms: int, now: int) -> Decision:
    """An operator ends the wait for the next attempt. Nothing is counted, and no copy that is on its way is doubled.

    tried_ms: when the row's newest copy was handed over; 0: it is answered, or with a consumer.
    """
    transition = _transition(row, ConsumptionEvent.HURRY)
    if isinstance(transition, TmcError):
        return transition
    is_answered = row.begun == ANSWERED or row.attempt == NO_ATTEMPT
    if not is_answered and (row.begun != NO_RUN or not 0 < tried_ms <= now - VANISHED_MS):
        return ConsumptionClosed(f"Attempt {row.attempt} is on its way or with a consumer: nothing was changed.")
    return None if row.due_ms is not None and row.due_ms <= now else replace(row, due_ms=now)


def decide_cancel(row: Row) -> Decision:
    """An operator gives a delivery up for good; repeated, it changes nothing."""
    if row.state is ConsumptionState.CANCELLED:
        return None
    transition = _transition(row, ConsumptionEvent.CANCEL)
    return transition if isinstance(transition, TmcError) else replace(row, state=transition.to, due_ms=None)


def decide_removed(row: Row) -> Row:
    """Nothing is delivered any more to a subscription that was removed, and nobody is to deal with what failed there."""
    return replace(row, state=TRANSITIONS[row.state, ConsumptionEvent.REMOVE].to, due_ms=None, begun=NO_RUN)


def decide_due(
    row: Row, policy: RetryPolicy, subscribed: bool, now: int, budget: Budget, *, lost_ms: int | None = None
) -> Row:
    """A due row: cancelled when its subscription is gone, FAILED when the budget is used up, else tried once more.

    lost_ms: how long ago the copy of the last attempt was handed over, if no handler began it and nobody answered: that
    attempt does not count, and the wait after the next one is longer, up to five minutes.
    """
    if not subscribed:
        return decide_removed(row)
    if budget.is_used_up(row, policy, now, counts=lost_ms is None):
        return replace(row, state=TRANSITIONS[row.state, ConsumptionEvent.EXHAUST].to, due_ms=None, begun=NO_RUN)
    tried = (row.tried if lost_ms is None else _without_this(row)) + 1
    wait_ms = policy.delay_for_ms(tried, budget.number)
    if lost_ms is not None:
        wait_ms = _after_a_loss_ms(wait_ms, lost_ms)
    return replace(row, attempt=Attempt(row.attempt + 1), tried=tried, due_ms=now + wait_ms, begun=NO_RUN)


def _after_a_loss_ms(wait_ms: int, lost_ms: int) -> int:
    """The policy's wait, doubled until it is longer than the last copy was out: few values, for rows are claimed by them."""
    longest_ms = max(wait_ms, _LONGEST_HOLD_MS)
    while wait_ms <= lost_ms and wait_ms < longest_ms:
        wait_ms = min(max(wait_ms * 2, 1), longest_ms)
    return wait_ms


VANISHED_MS = 60_000
"""How long after it was handed over a copy that nobody answered is assumed lost."""

_LONGEST_HOLD_MS = 300_000
_SHORTEST_HOLD_MS = 1_000
_STUCK_MS = 600_000
_PASSED_MARGIN_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLook:
    """What a queue looked like a moment ago. messages: those that no consumer has fetched.

    passed_ms: time of the newest attempt whose copy has left the queue, as far as any server saw; 0: none.
    A queue is first in, first out: copies of older attempts are no longer in it.
    still_ms: how long there have been consumers without any server seeing a copy leave.
    unwritten: (shard, number) of messages whose copies are on their way: not written to a stream, or not confirmed.
    """

    consumers: int = 0
    messages: int = 0
    passed_ms: int = 0
    still_ms: int = 0
    unwritten: Set[tuple[Shard, MessageNumber]] = frozenset()

    def may_hold_copy(self, tried_ms: int | None, now: int) -> bool:
        """Return whether the copy of the attempt at tried_ms may still be queued. None: it is answered, or was never queued.

        Without consumers it waits as long as the queue is not empty. If consumers have made no progress for ten
        minutes, the copy is assumed lost, even if the queue is not empty.
        """
        if tried_ms is None or self.messages == 0:
            return False
        if self.consumers == 0:
            return True
        stuck = min(self.still_ms, now - tried_ms) >= _STUCK_MS
        return tried_ms > self.passed_ms - _PASSED_MARGIN_MS and not stuck


def decide_held(row: Row, policy: RetryPolicy, tried_ms: int, look: QueueLook, now: int) -> Row:
    """The earlier copy may still be in its queue: send no second one, count nothing, look again later.

    The delay between looks increases. While consumers drain the queue, a copy just behind the last one that left is
    looked at again as soon as the queue may have reached it.
    """
    wait_ms = min(max(policy.delay_after_ms(row.tried), now - tried_ms), _LONGEST_HOLD_MS)
    if look.consumers and look.passed_ms:
        behind_ms = tried_ms + _PASSED_MARGIN_MS - look.passed_ms
        wait_ms = min(wait_ms, max(behind_ms, look.still_ms, _SHORTEST_HOLD_MS))
    return replace(row, due_ms=now + wait_ms)


def first_try(policy: RetryPolicy, now: int, number: MessageNumber) -> Row:
    """A row whose first copy is handed over at submit: attempted once, due again after the first delay."""
    due_ms = now + policy.delay_for_ms(1, number)
    return Row(ConsumptionState.SCHEDULED, attempt=Attempt(1), tried=1, due_ms=due_ms)


def untried(due_ms: int) -> Row:
    """A row that the redelivering duty picks up at its due time."""
    return Row(ConsumptionState.SCHEDULED, attempt=NO_ATTEMPT, tried=0, due_ms=due_ms)


def waiting() -> Row:
    """A row whose turn has not come: an earlier message of its order key is still open."""
    return Row(ConsumptionState.WAITING, attempt=NO_ATTEMPT, tried=0, due_ms=None)
