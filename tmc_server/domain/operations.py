"""What the store is asked to do, as data: requests build these, the group commit carries them, the store answers.

An operation never changes. Answers travel beside the operations, in a list of the same order.

Prepare, submit, rollback and ack are idempotent: repeated after an uncertain commit, they find their own work and
give the same answer. Operations on one attempt are guarded by its number: repeated, they may answer "done already".

A message crosses the center as a dozen records. Those of the hot path are msgspec's: made in a tenth of the time of a
frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from tmc_server.domain.catalog import Topic
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import MessageId
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import (
    NO_ATTEMPT,
    NO_RUN,
    Attempt,
    MessageNumber,
    RunNumber,
    Shard,
    SubscriptionNumber,
)
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import TmcError


class Stored(Struct, frozen=True, kw_only=True, eq=False):
    """The answer to prepare, publish, submit and rollback. message_id None: a rollback of what was never stored.

    changed False: the message was in this state before.
    """

    message_id: MessageId | None
    state: MessageState
    changed: bool = True

    def __eq__(self, other: object) -> bool:
        """Compare what callers see: a repetition gets the same answer."""
        if not isinstance(other, Stored):
            return NotImplemented
        return (self.message_id, self.state) == (other.message_id, other.state)

    def __ne__(self, other: object) -> bool:
        return not self == other  # a struct's own compares identities

    def __hash__(self) -> int:
        return hash((self.message_id, self.state))


class Done(Struct, frozen=True, eq=False):
    """The answer to any operation on a consumption. subscription: whose row it was, of all numbers of its name."""

    subscription: SubscriptionNumber

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Done) or NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(Done)


Answer = Stored | Done | TmcError

THE_CENTER = 0
"""The app number of the center's own operations."""


class Operation(Struct, frozen=True, eq=False, kw_only=True):
    """The base; two operations are never equal.

    shard: where its row is.  app: number of the app that asked; its operations wait in a line of their own.
    """

    shard: Shard
    app: int

    @property
    def size(self) -> int:
        """Bytes it adds to a queue and a transaction, roughly."""
        return 100


class Prepare(Operation, frozen=True, eq=False, kw_only=True):
    """Insert a message of the app that asked. publish: COMMITTED at once, with consumption rows.

    transaction_time_ms: of this message, if it is longer than its topic's.
    """

    number: MessageNumber
    topic: Topic
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
    transaction_time_ms: int = 0

    @property
    def message_id(self) -> MessageId:
        """The public id, should it be stored."""
        return MessageId(self.topic.number, self.app, self.shard, self.number)

    @property
    def size(self) -> int:
        return 1000 + len(self.body) + sum(len(name) + len(text) for name, text in self.headers.items())


class Decide(Operation, frozen=True, eq=False, kw_only=True):
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


class Consume(Operation, frozen=True, eq=False, kw_only=True):
    """The base of everything about one consumption."""

    number: MessageNumber
    subscription: SubscriptionNumber


class Ack(Consume, frozen=True, eq=False, kw_only=True):
    """The effect is done. attempt: of the copy that was handled, 0: not known."""

    attempt: Attempt = NO_ATTEMPT


class Nack(Consume, frozen=True, eq=False, kw_only=True):
    """The handler failed, or with retry_after_ms it postpones the message, which does not count.

    hangs: the handler ran longer than its consumer allows; the owner is alerted.  run: NO_RUN: not said.
    """

    attempt: Attempt
    policy: RetryPolicy
    error: str
    reject: bool = False
    retry_after_ms: int | None = None
    hangs: bool = False
    run: RunNumber = NO_RUN


class Extend(Consume, frozen=True, eq=False, kw_only=True):
    """The consumer needs longer. run: the run of a handler that has begun; NO_RUN: the copy waits for a free one."""

    attempt: Attempt
    extend_ms: int
    run: RunNumber = NO_RUN


class GiveBack(Consume, frozen=True, eq=False, kw_only=True):
    """No handler began the copy: it never reached a consumer, or that consumer stops.

    tried_ms: of the copy handed over at this time alone; None: of any of the attempt.
    """

    attempt: Attempt
    after_ms: int
    tried_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a bulk job acts on: deliveries that have been in this state since `as_of_ms` or longer."""

    state: ConsumptionState
    as_of_ms: int


class ByOperator(Consume, frozen=True, eq=False, kw_only=True):
    """The base of what operators do about one consumption; audited. selected: of a bulk job, whose items are its record.

    origin: where the call came from; "": it is the work of a bulk job.
    """

    actor: str
    reason: str
    origin: str = ""
    selected: Selected | None = None


class Reactivate(ByOperator, frozen=True, eq=False, kw_only=True):
    """A failed delivery is tried again."""


class DeliverNow(ByOperator, frozen=True, eq=False, kw_only=True):
    """A scheduled delivery does not wait for its due time."""


class Cancel(ByOperator, frozen=True, eq=False, kw_only=True):
    """A delivery is given up for good."""
