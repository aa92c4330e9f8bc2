"""What the store is asked to do, as data: requests build these, group commit carries them, the store answers them.

Prepare, submit, rollback and ack are idempotent: run again after an uncertain commit they find their own work and answer
the same. Whatever belongs to one try is guarded by its attempt number: run again, the answer may be that it is done already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tmc_server.domain.catalog import Topic
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_ATTEMPT, Attempt, MessageNumber, SubscriptionNumber
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import TmcError


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to prepare, publish, submit and rollback. number None: a rollback of what was never stored.

    changed: this operation made it so; False: it was so before.
    """

    number: MessageNumber | None
    state: MessageState
    changed: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to everything about a consumption."""


class Locked:
    """Not an answer yet: somebody else holds the row, the operation is tried again shortly."""


class Again:
    """Not an answer yet: the operation wrote a tombstone and looks again after the commit."""


DONE = Done()
LOCKED = Locked()
AGAIN = Again()
Answer = Stored | Done | Locked | Again | TmcError


@dataclass(slots=True, eq=False)
class Operation:
    """The base. answer: set by the store.  again: its AGAIN was committed.  ticket, tries: for group commit alone.

    app: number of the app that asked, which queues for a shard by itself; 0: the center's own work.
    """

    answer: Answer | None = field(default=None, init=False)
    app: int = field(default=0, init=False)
    again: bool = field(default=False, init=False)
    ticket: object = field(default=None, init=False)
    tries: int = field(default=0, init=False)

    @property
    def size(self) -> int:
        """Bytes it adds to a queue and a transaction, roughly."""
        return 100


@dataclass(slots=True, eq=False)
class Prepare(Operation):
    """Insert a message. publish: COMMITTED at once, with consumption rows."""

    number: MessageNumber
    topic: Topic
    producer: int
    producer_tag: str
    key: str
    attempt_id: bytes
    digest: bytes
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    delay_ms: int
    ledger_id: bytes | None
    publish: bool = False
    check_target: str = ""

    @property
    def size(self) -> int:
        return 1000 + len(self.body) + sum(len(name) + len(text) for name, text in self.headers.items())


@dataclass(slots=True, eq=False)
class Decide(Operation):
    """Submit (commit=True) or roll back one message, by number or by key and attempt id.

    only_this_tag: by number too, messages of other environments are unknown.
    """

    commit: bool
    topic: Topic
    producer_tag: str
    number: MessageNumber | None
    key: str = ""
    attempt_id: bytes = b""
    only_this_tag: bool = False


@dataclass(slots=True, eq=False)
class Consume(Operation):
    """The base of everything about one consumption."""

    number: MessageNumber
    subscription: SubscriptionNumber


@dataclass(slots=True, eq=False)
class Ack(Consume):
    """The effect is done. attempt: of the copy that was handled, 0: not known."""

    attempt: Attempt = NO_ATTEMPT


@dataclass(slots=True, eq=False, kw_only=True)
class Nack(Consume):
    """The try failed. hangs: its handler ran longer than its consumer allows, the owner is alerted."""

    attempt: Attempt
    policy: RetryPolicy
    error: str
    reject: bool = False
    retry_after_ms: int | None = None
    hangs: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Extend(Consume):
    """The handler needs longer."""

    attempt: Attempt
    extend_ms: int


@dataclass(slots=True, eq=False, kw_only=True)
class GiveBack(Consume):
    """The copy never reached the consumer."""

    attempt: Attempt
    after_ms: int


@dataclass(slots=True, eq=False, kw_only=True)
class SignAgain(Consume):
    """A consumer refused a copy without a signature. since_ms: no copy that was handed over later lacks one."""

    attempt: Attempt
    since_ms: int


@dataclass(slots=True, eq=False, kw_only=True)
class Reactivate(Consume):
    """An operator wants a failed delivery tried again."""

    actor: str
    reason: str
