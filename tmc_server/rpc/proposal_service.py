"""The RPCs that may need two operators, and those about what was proposed."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.bulk import BulkAction
from tmc_server.domain.checks import Verdict
from tmc_server.domain.ids import MessageId
from tmc_server.domain.operators import Operator
from tmc_server.domain.proposals import NewProposal, Proposal, ProposalAction
from tmc_server.requests.administering import Administering
from tmc_server.requests.bulk import BulkJobs
from tmc_server.requests.deciding_by_hand import DecidingByHand
from tmc_server.requests.proposals import Before, Proposals, at_once
from tmc_server.rpc import convert
from tmc_server.rpc.bulk_service import filter_from, job_to
from tmc_server.rpc.permission import demand_topic


class ProposalServicer:
    """The part of AdminService about decisions that may need two operators."""

    def __init__(
        self, proposals: Proposals, by_hand: DecidingByHand, bulk: BulkJobs, administering: Administering
    ) -> None:
        self._proposals = proposals
        self._deciding = by_hand
        self._starting = bulk
        self._catalog_of = administering

    async def DecideMessage(self, operator: Operator, request: admin_pb2.DecideMessageRequest) -> Any:
        message = MessageId.parse(request.message_id)
        topic = convert.topic_name(self._catalog_of.catalog, message.topic) if message is not None else ""
        subject = f"{_name(Verdict, request.verdict)} message {request.message_id}"
        new = _proposed(ProposalAction.DECIDE, operator, request, topic, subject)
        return await self._decide(operator, request, self._proposals.before(new, 1))

    async def StartBulkJob(self, operator: Operator, request: admin_pb2.StartBulkJobRequest) -> Any:
        wanted = request.filter
        names = " ".join(filter(None, [wanted.topic, wanted.app, wanted.tag and f"({wanted.tag})"]))
        action = _name(BulkAction, wanted.action)
        new = _proposed(
            ProposalAction.BULK, operator, request, wanted.topic, f"{action} {request.count} deliveries of {names}"
        )
        return await self._start(operator, request, self._proposals.before(new, request.count))

    async def _decide(self, operator: Operator, request: admin_pb2.DecideMessageRequest, before: Before) -> Any:
        message = await self._deciding.decide(
            operator.name, request.message_id, request.verdict, request.reason, before
        )
        return convert.message_to(message, self._catalog_of.catalog)

    async def _start(self, operator: Operator, request: admin_pb2.StartBulkJobRequest, before: Before) -> Any:
        report = await self._starting.start(
            operator.name,
            filter_from(request.filter),
            dry_run=request.dry_run,
            count=request.count,
            reason=request.reason,
            rate=request.rate if request.HasField("rate") else None,
            hold_ms=request.hold_ms if request.HasField("hold_ms") else None,
            before=before,
        )
        return job_to(report, self._catalog_of.catalog)

    async def ListProposals(self, operator: Operator, request: admin_pb2.ListProposalsRequest) -> Any:
        page = await self._proposals.proposals(request.page_size, request.page_token, pending_only=request.pending_only)
        shown = [_proposal_to(each) for each in page.rows if operator.covers(each.topic)]
        return admin_pb2.ListProposalsResponse(proposals=shown, next_page_token=page.next_token)

    async def ApproveProposal(self, operator: Operator, request: admin_pb2.ApproveProposalRequest) -> Any:
        found = await self._proposals.get(request.proposal)
        demand_topic(operator, found.topic)
        approved, reason = await self._proposals.approve(operator, found, request.reason)
        answer = admin_pb2.ApproveProposalResponse(proposal=_proposal_to(approved))
        if found.action is ProposalAction.DECIDE:
            decision = admin_pb2.DecideMessageRequest.FromString(found.request)
            decision.reason = reason
            answer.message.CopyFrom(await self._decide(operator, decision, at_once))
        else:
            start = admin_pb2.StartBulkJobRequest.FromString(found.request)
            start.reason = reason
            answer.job.CopyFrom(await self._start(operator, start, at_once))
        return answer

    async def RejectProposal(self, operator: Operator, request: admin_pb2.RejectProposalRequest) -> Any:
        demand_topic(operator, (await self._proposals.get(request.proposal)).topic)
        return _proposal_to(await self._proposals.reject(operator, request.proposal, request.reason))


def _name(kind: type[IntEnum], number: int) -> str:
    """ "": it is none, and the request is refused for it."""
    return next((each.name for each in kind if each == number), "")


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
    return admin_pb2.Proposal(
        proposal=found.number,
        action=found.action.value,
        topic=found.topic,
        subject=found.subject,
        actor=found.actor,
        reason=found.reason,
        created_ms=found.created_ms,
        expires_ms=found.expires_ms,
        state=admin_pb2.ProposalState.Name(found.state),
        decided_by=found.decided_by,
        decided_ms=found.decided_ms,
        decision_reason=found.decision_reason,
    )
