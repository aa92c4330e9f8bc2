"""The RPCs about alerts."""

from __future__ import annotations

from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.alerts import Silence
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.operators import Operator
from tmc_server.requests.alerts import EpisodeView, SilenceFilter
from tmc_server.requests.listing import in_order, listed
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.convert import subscriber, topic_name
from tmc_server.rpc.filling import filled


class AlertServicer(AdminParts):
    """The part of AdminService about alerts."""

    async def ListAlerts(self, operator: Operator, request: admin_pb2.ListAlertsRequest) -> Any:
        page = await self.alerts.episodes(request.resolved, request.page_size, request.page_token, operator.covers)
        alerts = [_alert_to(view, self.catalog) for view in page.rows]
        return admin_pb2.ListAlertsResponse(alerts=alerts, next_page_token=page.next_token)

    async def AcknowledgeAlert(self, operator: Operator, request: admin_pb2.AcknowledgeAlertRequest) -> Any:
        view = await self.alerts.acknowledge(operator.name, request.alert_id, request.reason)
        return _alert_to(view, self.catalog)

    async def SilenceAlerts(self, operator: Operator, request: admin_pb2.SilenceAlertsRequest) -> Any:
        wanted = SilenceFilter(topic=request.topic, app=request.app, tag=request.tag, kind=request.kind)
        made = await self.alerts.silence(operator.name, wanted, request.for_ms, request.reason)
        return _silence_to(made, self.catalog)

    async def EndSilence(self, operator: Operator, request: admin_pb2.EndSilenceRequest) -> Any:
        ended = await self.alerts.end_silence(operator.name, request.silence, request.reason)
        return _silence_to(ended, self.catalog)

    async def ListSilences(self, operator: Operator, request: admin_pb2.ListSilencesRequest) -> Any:
        silences = [_silence_to(each, self.catalog) for each in await self.alerts.silences()]
        found = [each for each in silences if operator.covers(each.topic)]
        page = listed(found, lambda each: in_order(each.silence), request.page_size, request.page_token)
        return admin_pb2.ListSilencesResponse(silences=page.rows, next_page_token=page.next_token)


def _alert_to(view: EpisodeView, catalog: Catalog) -> admin_pb2.Alert:
    episode = view.episode
    topic = catalog.topics.get(episode.topic)
    producer = topic.owner if topic is not None else 0
    app, tag = subscriber(catalog, episode.subscription)
    return filled(
        admin_pb2.Alert,
        episode,
        alert_id=episode.id,
        topic=topic.name if topic is not None else "",
        app=app,
        tag=tag,
        message_ids=[str(MessageId(episode.topic, producer, shard, number)) for shard, number in episode.samples],
        silenced_until_ms=view.silenced_until_ms,
    )


def _silence_to(silence: Silence, catalog: Catalog) -> admin_pb2.Silence:
    app, tag = subscriber(catalog, SubscriptionNumber(silence.subscription))
    topic = topic_name(catalog, silence.topic) if silence.topic else ""
    return filled(admin_pb2.Silence, silence, silence=silence.id, topic=topic, app=app, tag=tag)
