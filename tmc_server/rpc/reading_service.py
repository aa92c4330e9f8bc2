"""tmc.v1.AdminService: the part about what is stored, and why."""

from __future__ import annotations

from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.operators import Operator
from tmc_server.domain.ports.reading import AuditFilter
from tmc_server.requests.browsing import Wanted
from tmc_server.rpc import convert
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.filling import filled, record_from


class ReadingServicer(AdminParts):
    """Methods take the operator who calls and a request."""

    async def GetMessageDetail(self, operator: Operator, request: admin_pb2.GetMessageDetailRequest) -> Any:
        detail = await self.lookup.message(request.message_id, request.topic, request.key)
        shows_body = operator.reads_bodies and not request.without_body
        answer = convert.detail_to(detail, self.catalog, with_body=shows_body)
        answer.body_withheld = not (operator.reads_bodies or request.without_body)
        if answer.message.body:
            await self.auditing.read_body(operator.name, answer.message.message_id)
        return answer

    async def GetOverview(self, operator: Operator, _request: Any) -> Any:
        now, topics = await self.overviewing.overview()
        shown = [convert.topic_overview_to(each, self.catalog) for each in topics]
        covered = [each for each in shown if operator.covers(each.topic)]
        return admin_pb2.GetOverviewResponse(now_ms=now, topics=covered)

    async def ExplainMessage(self, _operator: Operator, request: admin_pb2.ExplainMessageRequest) -> Any:
        message, found = await self.explaining.explain(request.message_id, request.topic, request.key)
        catalog = self.catalog
        return admin_pb2.ExplainMessageResponse(
            message_id=convert.message_to(message, catalog).message_id,
            explanations=[convert.explanation_to(each, message, catalog) for each in found],
        )

    async def GetTimeline(self, _operator: Operator, request: admin_pb2.GetTimelineRequest) -> Any:
        message, events = await self.timelines.timeline(request.message_id, request.topic, request.key)
        catalog = self.catalog
        return admin_pb2.GetTimelineResponse(
            message_id=convert.message_to(message, catalog).message_id,
            events=[convert.event_to(event, catalog) for event in events],
        )

    async def SearchMessages(self, operator: Operator, request: admin_pb2.SearchMessagesRequest) -> Any:
        page = await self.searching.messages(
            request.text, request.topic, operator.covers, request.page_size, request.page_token
        )
        messages = [convert.message_to(view, self.catalog) for view in page.rows]
        return admin_pb2.SearchMessagesResponse(messages=messages, next_page_token=page.next_token)

    async def ListFailureGroups(self, operator: Operator, request: admin_pb2.ListFailureGroupsRequest) -> Any:
        now, groups, more = await self.searching.failures(
            request.topic, request.app, request.tag, operator.covers, request.limit
        )
        catalog = self.catalog
        shown = [convert.failure_group_to(group, catalog) for group in groups]
        return admin_pb2.ListFailureGroupsResponse(groups=shown, more=more, now_ms=now)

    async def ListMessages(self, operator: Operator, request: admin_pb2.ListMessagesRequest) -> Any:
        page = await self.browsing.messages(request.topic, request.state, record_from(Wanted, request), operator.covers)
        messages = [convert.message_to(view, self.catalog) for view in page.rows]
        return admin_pb2.ListMessagesResponse(messages=messages, next_page_token=page.next_token)

    async def ListAudit(self, _operator: Operator, request: admin_pb2.ListAuditRequest) -> Any:
        wanted = record_from(AuditFilter, request)
        page = await self.auditing.trail(wanted, request.message_id, request.page_size, request.page_token)
        entries = [filled(admin_pb2.AuditEntry, act) for act in page.rows]
        return admin_pb2.ListAuditResponse(entries=entries, next_page_token=page.next_token)

    async def VerifyAudit(self, _operator: Operator, _request: Any) -> Any:
        found = await self.auditing.verify()
        seals = [filled(admin_pb2.AuditSeal, each, head=each.head.hex() if each.head_number else "") for each in found]
        return admin_pb2.VerifyAuditResponse(databases=seals)

    async def ListConsumptions(self, operator: Operator, request: admin_pb2.ListConsumptionsRequest) -> Any:
        page = await self.browsing.consumptions(
            request.topic,
            request.app,
            request.tag,
            request.state,
            request.fingerprint,
            record_from(Wanted, request),
            operator.covers,
        )
        catalog = self.catalog
        topics = [catalog.topics[catalog.subscriptions[view.subscription].topic] for view in page.rows]
        rows = [
            convert.consumption_to(view, topic.number, topic.owner, catalog)
            for view, topic in zip(page.rows, topics, strict=True)
        ]
        return admin_pb2.ListConsumptionsResponse(consumptions=rows, next_page_token=page.next_token)
