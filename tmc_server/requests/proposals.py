"""What needs two operators: the first one proposes it, another one approves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from tmc_server.domain.operators import Operator, Role
from tmc_server.domain.ports.operators import OperatorEditor
from tmc_server.domain.ports.proposals import ProposalDesk
from tmc_server.domain.proposals import (
    ApprovalRules,
    NewProposal,
    Proposal,
    ProposalAction,
    ProposalNumber,
    ProposalState,
)
from tmc_server.errors import ApprovalRequired, ProposalClosed
from tmc_server.requests import validation
from tmc_server.requests.listing import Covers, Listing, filled

Before = Callable[[], Awaitable[None]]
"""Awaited when a request was found valid, before it takes effect. Raises what stops it."""

_LONGEST_REASON = 500


async def no_approval_needed() -> None:
    """A Before: nothing has to happen."""


class Proposals:
    """rules: which calls need two operators."""

    def __init__(self, desk: ProposalDesk, rules: ApprovalRules, operators: OperatorEditor) -> None:
        self._desk = desk
        self._rules = rules
        self._operators = operators

    @property
    def counts_again(self) -> bool:
        """Return whether the count of a bulk job decides anything, so that a caller's word is not enough."""
        return self._rules.bulk_over is not None

    def before(self, action: ProposalAction, count: int, make: Callable[[], NewProposal]) -> Before:
        """Return what precedes a call about `count` deliveries or messages, which may need a second operator.

        make: the proposal, of a valid call.
        """
        if not self._rules.need(action, count):
            return no_approval_needed

        async def propose() -> None:
            """Raises ApprovalRequired."""
            new = make()
            made = await asyncio.to_thread(self._desk.propose, replace(new, reason=validation.reason(new.reason)))
            if made.actor == new.actor:
                raise ApprovalRequired(
                    f"This needs a second operator, and is proposal {made.number} now: another operator approves it with "
                    f"`tmc admin approve {made.number}`."
                )
            raise ApprovalRequired(
                f"{made.actor} has proposed the same: approve it with `tmc admin approve {made.number}`."
            )

        return propose

    async def get(self, number: int) -> Proposal:
        """Raises ProposalUnknown."""
        return await asyncio.to_thread(self._desk.proposal, ProposalNumber(number))

    async def approving(self, operator: Operator, found: Proposal, reason: str) -> tuple[Before, str]:
        """Return what precedes the call that was proposed. Approved already, it is made once more, which changes nothing.

        Returns: what stores the approval, and the reason for the audit row of the call. Raises ApprovalRequired: it is the
        operator's own, ProposalClosed.
        """
        why = validation.reason(reason)
        if found.actor == operator.name:
            raise ApprovalRequired(f"Proposal {found.number} is your own: another operator has to approve it.")
        await asyncio.to_thread(self._demand_rights, found)
        if found.state is not ProposalState.PENDING:  # closed, or approved: then the first approval stands
            found = await asyncio.to_thread(self._desk.decide, operator.name, found.number, ProposalState.APPROVED, why)
        by, because = (found.decided_by, found.decision_reason) if found.decided_by else (operator.name, why)

        async def approve() -> None:
            """Raises ProposalClosed."""
            await asyncio.to_thread(self._desk.decide, operator.name, found.number, ProposalState.APPROVED, why)

        text = f"proposal {found.number} of {found.actor}, approved by {by}: {because}; {found.reason}"
        return approve, text[:_LONGEST_REASON]

    def _demand_rights(self, found: Proposal) -> None:
        """Raises ProposalClosed: who proposed it may no longer do so."""
        known = {each.name: each for each in self._operators.operators()}
        proposer = known.get(found.actor)
        if proposer is None or proposer.role < Role.OPERATOR or not proposer.covers(found.topic):
            raise ProposalClosed(
                f"{found.actor} no longer has the rights for proposal {found.number}: make the call yourself."
            )

    async def reject(self, operator: Operator, number: int, reason: str) -> Proposal:
        """Raises ProposalUnknown, ProposalClosed."""
        why = validation.reason(reason)
        return await asyncio.to_thread(
            self._desk.decide, operator.name, ProposalNumber(number), ProposalState.REJECTED, why
        )

    async def proposals(
        self, page_size: int, page_token: str, covers: Covers, *, pending_only: bool
    ) -> Listing[Proposal]:
        """Newest first, without those about topics that the operator may not see."""
        limit = validation.page_size(page_size)
        first = ProposalNumber(validation.number_token(page_token)) if page_token else None

        def after(last: Proposal | None, most: int) -> Sequence[Proposal]:
            return self._desk.proposals(last.number if last is not None else first, most, pending_only=pending_only)

        rows = await asyncio.to_thread(filled, after, lambda found: covers(found.topic), limit)
        return Listing(rows=rows, next_token=str(rows[-1].number) if len(rows) == limit else "")
