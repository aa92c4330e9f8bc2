"""Four eyes: calls of one operator that take effect when a second one approves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NewType

ProposalNumber = NewType("ProposalNumber", int)

VALID_MS = 86_400_000
"""How long a proposal can be approved."""


class ProposalAction(Enum):
    """By the RPC that was called."""

    DECIDE = "DecideMessage"
    BULK = "StartBulkJob"


class ProposalState(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    PENDING = 1
    APPROVED = 2
    REJECTED = 3
    EXPIRED = 4  #: never stored: PENDING when its time is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRules:
    """decide: decisions by hand need two operators.  bulk_over: so do bulk jobs of more deliveries; None: none do."""

    decide: bool = False
    bulk_over: int | None = None

    def need(self, action: ProposalAction, count: int) -> bool:
        """count: how many deliveries or messages the call is about."""
        if action is ProposalAction.DECIDE:
            return self.decide
        return self.bulk_over is not None and count > self.bulk_over


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProposal:
    """topic: its name; "": several.  subject: what would be done, for people.  request: the call's own, serialized.

    digest: of the action and the request without its reason: the same call has the same one.
    """

    action: ProposalAction
    topic: str
    subject: str
    request: bytes
    digest: bytes
    actor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """As stored. decided_by "": nobody has approved or rejected it.  Times in milliseconds since the epoch."""

    number: ProposalNumber
    action: ProposalAction
    topic: str
    subject: str
    request: bytes
    actor: str
    reason: str
    created_ms: int
    expires_ms: int
    state: ProposalState
    decided_by: str = ""
    decided_ms: int = 0
    decision_reason: str = ""
