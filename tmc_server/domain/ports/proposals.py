"""Port for what waits for a second operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tmc_server.domain.proposals import NewProposal, Proposal, ProposalNumber, ProposalState


class ProposalDesk(Protocol):
    """Each change is one transaction with its audit row. All block."""

    def propose(self, new: NewProposal) -> Proposal:
        """Store it; a pending one for the same call is answered as it is."""

    def proposal(self, number: ProposalNumber) -> Proposal:
        """Raises ProposalUnknown."""

    def decide(self, actor: str, number: ProposalNumber, state: ProposalState, reason: str) -> Proposal:
        """PENDING -> APPROVED or REJECTED; in that state already, it is answered as it is.

        Raises ProposalUnknown, ProposalClosed.
        """

    def proposals(self, before: ProposalNumber | None, limit: int, *, pending_only: bool) -> Sequence[Proposal]:
        """Newest first."""
