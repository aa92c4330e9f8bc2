"""The life of a message: states, the table of transitions, and the decision it answers.

The table is the single source: SQL guards, tests and docs/states.md are compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import assert_never

from msgspec import Struct

from tmc_common.headers import is_context
from tmc_server.errors import AlreadyCommitted, AlreadyRolledBack, TmcError


class MessageState(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    PREPARED = 1  #: stored, waits for the producer's decision
    COMMITTED = 2  #: submitted, consumption rows exist
    ROLLED_BACK = 3  #: forgotten, its key is free again
    CHECK_FAILED = 4  #: asked as often as allowed, and nobody knew: a human decides

    __hash__ = int.__hash__  # the enum's own is written in Python, and states are keys on the hot path


class MessageEvent(Enum):
    """What can happen to a message, named by the call that causes it."""

    PREPARE = "Prepare"
    PUBLISH = "Publish"
    SUBMIT = "Submit"
    ROLLBACK = "Rollback"
    EXHAUST = "checking, limit"
    REACTIVATE = "ReactivateCheck"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Transition:
    """One allowed move, with its letter in docs/states.md."""

    letter: str
    to: MessageState


TRANSITIONS: Mapping[tuple[MessageState | None, MessageEvent], Transition] = {
    (None, MessageEvent.PREPARE): Transition("a", MessageState.PREPARED),
    (None, MessageEvent.PUBLISH): Transition("b", MessageState.COMMITTED),
    (MessageState.PREPARED, MessageEvent.SUBMIT): Transition("c", MessageState.COMMITTED),
    (MessageState.PREPARED, MessageEvent.ROLLBACK): Transition("d", MessageState.ROLLED_BACK),
    (MessageState.PREPARED, MessageEvent.EXHAUST): Transition("q", MessageState.CHECK_FAILED),
    (MessageState.CHECK_FAILED, MessageEvent.REACTIVATE): Transition("r", MessageState.PREPARED),
    (MessageState.CHECK_FAILED, MessageEvent.SUBMIT): Transition("s", MessageState.COMMITTED),
    (MessageState.CHECK_FAILED, MessageEvent.ROLLBACK): Transition("t", MessageState.ROLLED_BACK),
}


class Closing(Enum):
    """When a message can no longer change."""

    NOT_YET = "it is undecided"
    ITSELF = "it is closed"
    WITH_DELIVERIES = "it is closed when all its deliveries are"


def closing(state: MessageState) -> Closing:
    """Return when a message in this state is closed. mypy reports a state without a case."""
    match state:
        case MessageState.PREPARED | MessageState.CHECK_FAILED:
            return Closing.NOT_YET
        case MessageState.ROLLED_BACK:
            return Closing.ITSELF
        case MessageState.COMMITTED:
            return Closing.WITH_DELIVERIES
        case _:
            assert_never(state)


def _those(how: Closing) -> tuple[MessageState, ...]:
    return tuple(state for state in MessageState if closing(state) is how)


UNDECIDED = _those(Closing.NOT_YET)
CLOSED_ITSELF = _those(Closing.ITSELF)
CLOSED_WITH_DELIVERIES = _those(Closing.WITH_DELIVERIES)

_OPPOSITE: Mapping[MessageState, type[TmcError]] = {
    MessageState.COMMITTED: AlreadyCommitted,
    MessageState.ROLLED_BACK: AlreadyRolledBack,
}


def sources(event: MessageEvent) -> tuple[MessageState, ...]:
    """The states an event may start from: the guard of its UPDATE."""
    return tuple(state for state, caused_by in TRANSITIONS if caused_by is event and state is not None)


class Decided(Struct, frozen=True):
    """The outcome of a submit or rollback: the state afterwards, and whether a row has to change for it."""

    state: MessageState
    changes: bool


_DECIDED: Mapping[tuple[MessageState | None, MessageEvent], Decided] = {
    **{moved: Decided(transition.to, changes=True) for moved, transition in TRANSITIONS.items()},
    (MessageState.COMMITTED, MessageEvent.SUBMIT): Decided(MessageState.COMMITTED, changes=False),
    (MessageState.ROLLED_BACK, MessageEvent.ROLLBACK): Decided(MessageState.ROLLED_BACK, changes=False),
}


def decide(state: MessageState, event: MessageEvent) -> Decided | TmcError:
    """Answer a submit or rollback of a message in `state`: move, repeat the earlier answer, or refuse the opposite."""
    return _DECIDED.get((state, event)) or _OPPOSITE[state]()


def digest_of(body: bytes, content_type: str, headers: Mapping[str, str], delay_ms: int) -> bytes:
    """SHA-256 over everything a consumer could tell apart, each part with its length in front.

    Trace context is left out: a repeat of a call may come from another span.
    """
    digest = hashlib.sha256(b"%d:%d:" % (delay_ms, len(body)))
    digest.update(body)
    digest.update(content_type.encode())
    for name in sorted(name for name in headers if not is_context(name)):
        digest.update(f"\0{len(name)}:{name}{len(headers[name])}:{headers[name]}".encode())
    return digest.digest()
