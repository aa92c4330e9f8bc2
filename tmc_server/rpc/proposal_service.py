"""The RPCs that may need two operators, and those about what was proposed."""

from __future__ import annotations

import hashlib
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.bulk import BulkAction
from tmc_server.domain.checks import Verdict
from tmc_server.domain.operators import Operator
from tmc_server.domain.proposals import NewProposal, Proposal, ProposalAction
from tmc_server.errors import ProposalUnknown
from tmc_server.requests import validation
from tmc_server.requests.proposals import Before
from tmc_server.rpc import convert
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.bulk_service import filter_from, in_words, job_to
from tmc_server.rpc.filling import filled

_LONGEST_SUBJECT = 500


class ProposalServicer(AdminParts):
    """The part of AdminService about decisions that may need two operators."""

    async def DecideMessage(self, operator: Operator, request: admin_pb2.DecideMessageRequest) -> Any:
        def make() -> NewProposal:
            message = validation.message_id(request.message_id)
            same = admin_pb2.DecideMessageRequest()
            same.CopyFrom(request)
            same.message_id = str(message)  # an id can be written in several ways
            topic = convert.topic_name(self.catalog, message.topic)
            subject = f"{Verdict(request.verdict).name} message {message}"
            return _proposed(ProposalAction.DECIDE, operator, same, topic, subject)

        return await self._decide(operator, request, self.proposals.before(ProposalAction.DECIDE, 1, make))

    async def StartBulkJob(self, operator: Operator, request: admin_pb2.StartBulkJobRequest) -> Any:
        def make() -> NewProposal:
            selection = self.bulk.selection_of(filter_from(request.filter), request.dry_run)
            selected = in_words(selection, self.catalog)
            subject = f"{BulkAction(request.filter.action).name} {request.count}: {selected}"[:_LONGEST_SUBJECT]
            return _proposed(ProposalAction.BULK, operator, request, request.filter.topic, subject)

        return await self._start(operator, request, self.proposals.before(ProposalAction.BULK, request.count, make))

    async def _decide(self, operator: Operator, request: admin_pb2.DecideMessageRequest, before: Before) -> Any:
        message = await self.by_hand.decide(operator.name, request.message_id, request.verdict, request.reason, before)
        return convert.message_to(message, self.catalog)

    async def _start(self, operator: Operator, request: admin_pb2.StartBulkJobRequest, before: Before) -> Any:
        report = await self.bulk.start(
            operator.name,
            filter_from(request.filter),
            dry_run=request.dry_run,
            count=request.count,
            reason=request.reason,
            rate=request.rate if request.HasField("rate") else None,
            hold_ms=request.hold_ms if request.HasField("hold_ms") else None,
            before=before,
            counts_again=self.proposals.counts_again,
        )
        return job_to(report, self.catalog)

    async def ListProposals(self, operator: Operator, request: admin_pb2.ListProposalsRequest) -> Any:
        page = await self.proposals.proposals(
            request.page_size, request.page_token, operator.covers, pending_only=request.pending_only
        )
        return admin_pb2.ListProposalsResponse(proposals=map(_proposal_to, page.rows), next_page_token=page.next_token)

    async def ApproveProposal(self, operator: Operator, request: admin_pb2.ApproveProposalRequest) -> Any:
        found = await self._seen(operator, request.proposal)
        approve, reason = await self.proposals.approving(operator, found, request.reason)
        answer = admin_pb2.ApproveProposalResponse()
        if found.action is ProposalAction.DECIDE:
            decision = admin_pb2.DecideMessageRequest.FromString(found.request)
            decision.reason = reason
            answer.message.CopyFrom(await self._decide(operator, decision, approve))
        else:
            start = admin_pb2.StartBulkJobRequest.FromString(found.request)
            start.reason = reason
            answer.job.CopyFrom(await self._start(operator, start, approve))
        answer.proposal.CopyFrom(_proposal_to(await self.proposals.get(found.number)))
        return answer

    async def RejectProposal(self, operator: Operator, request: admin_pb2.RejectProposalRequest) -> Any:
        await self._seen(operator, request.proposal)
        return _proposal_to(await self.proposals.reject(operator, request.proposal, request.reason))

    async def _seen(self, operator: Operator, number: int) -> Proposal:
        """Raises ProposalUnknown, also for one about a topic of others."""
        found = await self.proposals.get(number)
        if not operator.covers(found.topic):
            raise ProposalUnknown
        return found


def _proposed(action: ProposalAction, operator: Operator, request: Any, topic: str, subject: str) -> NewProposal:
    same = type(request)()
    same.CopyFrom(request)
    same.ClearField("reason")
    data = action.value.encode() + b"\0" + same.SerializeToString(deterministic=True)
    return NewProposal(
        action=action,
        topic=topic,
        subject=subject,
        request=request.SerializeToString(),
        digest=hashlib.sha256(data).digest(),
        actor=operator.name,
        reason=request.reason,
    )


def _proposal_to(found: Proposal) -> admin_pb2.Proposal:
    return filled(admin_pb2.Proposal, found, proposal=found.number, action=found.action.value)
