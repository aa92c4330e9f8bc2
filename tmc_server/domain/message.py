"""The life of a message: states, the table of arrows, and the decision it answers.

The table is the single source: SQL guards, tests and docs/states.md are compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from tmc_server.errors import AlreadyCommitted, AlreadyRolledBack, TmcError


class MessageState(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    PREPARED = 1  #: stored, waits for the producer's decision
    COMMITTED = 2  #: submitted, consumption rows exist
    ROLLED_BACK = 3  #: forgotten, its key is free again
    CHECK_FAILED = 4  #: asked as often as allowed, and nobody knew: a human decides


class MessageEvent(Enum):
    """What can happen to a message, named by the call that causes it."""

    PREPARE = "Prepare"
    PUBLISH = "Publish"
    SUBMIT = "Submit"
    ROLLBACK = "Rollback"
    EXHAUST = "checking, limit"
    REACTIVATE = "ReactivateCheck"


@dataclass(frozen=True)
class Arrow:
    """One allowed move, with its letter in docs/states.md."""

    letter: str
    to: MessageState


ARROWS: Mapping[tuple[MessageState | None, MessageEvent], Arrow] = {
    (None, MessageEvent.PREPARE): Arrow("a", MessageState.PREPARED),
    (None, MessageEvent.PUBLISH): Arrow("b", MessageState.COMMITTED),
    (MessageState.PREPARED, MessageEvent.SUBMIT): Arrow("c", MessageState.COMMITTED),
    (MessageState.PREPARED, MessageEvent.ROLLBACK): Arrow("d", MessageState.ROLLED_BACK),
    (MessageState.PREPARED, MessageEvent.EXHAUST): Arrow("q", MessageState.CHECK_FAILED),
    (MessageState.CHECK_FAILED, MessageEvent.REACTIVATE): Arrow("r", MessageState.PREPARED),
    (MessageState.CHECK_FAILED, MessageEvent.SUBMIT): Arrow("s", MessageState.COMMITTED),
    (MessageState.CHECK_FAILED, MessageEvent.ROLLBACK): Arrow("t", MessageState.ROLLED_BACK),
}
UNDECIDED = (MessageState.PREPARED, MessageState.CHECK_FAILED)

_OPPOSITE: Mapping[MessageState, type[TmcError]] = {
    MessageState.COMMITTED: AlreadyCommitted,
    MessageState.ROLLED_BACK: AlreadyRolledBack,
}


def sources(event: MessageEvent) -> tuple[MessageState, ...]:
    """The states an event may start from: the guard of its UPDATE."""
    return tuple(state for state, caused_by in ARROWS if caused_by is event and state is not None)


@dataclass(frozen=True)
class Decided:
    """The outcome of a submit or rollback: the state afterwards, and whether a row has to change for it."""

    state: MessageState
    changes: bool


def decide(state: MessageState, event: MessageEvent) -> Decided | TmcError:
    """Answer a submit or rollback of a message in `state`: move, repeat the earlier answer, or refuse the opposite."""
    arrow = ARROWS.get((state, event))
    if arrow is not None:
        return Decided(arrow.to, changes=True)
    wanted = MessageState.COMMITTED if event is MessageEvent.SUBMIT else MessageState.ROLLED_BACK
    return Decided(state, changes=False) if state is wanted else _OPPOSITE[state]()


TRACE_HEADERS = frozenset({"traceparent", "tracestate"})


def digest_of(body: bytes, content_type: str, headers: Mapping[str, str], delay_ms: int) -> bytes:
    """SHA-256 over everything a consumer could tell apart, each part with its length in front.

    Trace context is left out: a repeat of a call may come from another span.
    """
    digest = hashlib.sha256(b"%d:%d:" % (delay_ms, len(body)))
    digest.update(body)
    digest.update(content_type.encode())
    for name in sorted(set(headers) - TRACE_HEADERS):
        digest.update(f"\0{len(name)}:{name}{len(headers[name])}:{headers[name]}".encode())
    return digest.digest()
