"""Stored rows as operators and owners read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tmc_server.domain.bulk import ItemOutcome
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Attempt, BulkJobNumber, MessageNumber, OrderSequence, Shard, SubscriptionNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckView:
    """Progress of a message's checks. due_ms None: no further check is due."""

    attempt: Attempt
    checked: int
    due_ms: int | None
    unreached_ms: int | None
    target: str
    last_answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """Times in milliseconds since the epoch; decided_ms None: not decided. body None: not asked for."""

    shard: Shard
    number: MessageNumber
    topic: int
    producer: int
    producer_tag: str
    key: str
    state: MessageState
    body: bytes | None
    content_type: str
    headers: Mapping[str, str]
    delay_ms: int
    created_ms: int
    decided_ms: int | None
    attempt_id: bytes
    digest: bytes
    check: CheckView


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionView:
    """One delivery duty. tried_ms, tried_by: when and by which server run its last copy was handed over; None: it is answered
    with an error, or was never queued.

    extended: how often, in its current attempt.  sequence: None: delivered without regard to its order key.

    waits_for: while WAITING, the message whose ack it waits for.

    key, error, fingerprint: in lists only. Of the message; what its consumer said last; of the error it is FAILED with.
    """

    shard: Shard
    number: MessageNumber
    subscription: SubscriptionNumber
    state: ConsumptionState
    attempt: Attempt
    tried: int
    due_ms: int | None
    created_ms: int
    closed_ms: int | None
    tried_ms: int | None = None
    extended: int = 0
    sequence: OrderSequence | None = None
    waits_for: MessageNumber | None = None
    tried_by: int | None = None
    key: str = ""
    error: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One failed attempt, or a check that decided nothing (subscription 0).

    tried_ms, tried_by: when and by which server run it was handed over; None: not known.  unanswered: nobody said anything.
    """

    subscription: SubscriptionNumber
    attempt: Attempt
    at_ms: int
    error: str
    tried_ms: int | None = None
    tried_by: int | None = None
    unanswered: bool = False


@dataclass(frozen=True, slots=True)
class MessageDetail:
    """A message with its deliveries and their failed attempts."""

    message: MessageView
    consumptions: Sequence[ConsumptionView]
    failed_attempts: Sequence[AttemptView]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAct:
    """One row of the audit trail. origin: where the call came from.  change: one line per field that changed."""

    actor: str
    action: str
    subject: str
    reason: str
    at_ms: int
    origin: str = ""
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealReport:
    """The sealed audit rows of one database. verified: rows whose seal is right, from the first one on; unsealed: to come.

    unkeyed: of those that are verified, rows that were sealed without a secret.
    fault: the first thing that is wrong; "": nothing.  head: the last seal, and its number, 0 if there is none.
    """

    database: str
    verified: int
    unkeyed: int
    unsealed: int
    fault: str
    head: bytes
    head_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryJob:
    """What a bulk job did to a delivery."""

    job: BulkJobNumber
    subscription: SubscriptionNumber
    outcome: ItemOutcome
    detail: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedAlert:
    """An alert about a message, or one of its deliveries."""

    kind: str
    subscription: SubscriptionNumber
    detail: str
    at_ms: int
