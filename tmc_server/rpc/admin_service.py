"""tmc.v1.AdminService: register, show, repair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.catalog import NewApp
from tmc_server.domain.checks import CheckTarget
from tmc_server.domain.operations import ByOperator, Cancel, DeliverNow, Reactivate
from tmc_server.domain.operators import Operator
from tmc_server.domain.ports.catalog import CheckChange
from tmc_server.errors import TopicNotAllowed, TopicUnknown
from tmc_server.requests import validation
from tmc_server.requests.listing import in_order, listed
from tmc_server.rpc import convert
from tmc_server.rpc.alert_service import AlertServicer
from tmc_server.rpc.bulk_service import BulkServicer
from tmc_server.rpc.configuration_service import ConfigurationServicer
from tmc_server.rpc.filling import filled, record_from
from tmc_server.rpc.operator_service import OperatorServicer
from tmc_server.rpc.permission import demand_own_addresses, demand_owner
from tmc_server.rpc.proposal_service import ProposalServicer
from tmc_server.rpc.reading_service import ReadingServicer


class AdminServicer(
    BulkServicer, ReadingServicer, AlertServicer, OperatorServicer, ProposalServicer, ConfigurationServicer
):
    """Methods take the operator who calls and a request."""

    async def RegisterApp(self, operator: Operator, request: admin_pb2.RegisterAppRequest) -> Any:
        app, key, effective_ms = await self.administering.register_app(operator.name, record_from(NewApp, request))
        return admin_pb2.RegisterAppResponse(app=convert.app_to(app), key=key, effective_ms=effective_ms)

    async def AddAppKey(self, operator: Operator, request: admin_pb2.AddAppKeyRequest) -> Any:
        key, effective_ms = await self.administering.add_app_key(
            operator.name, request.id, request.replace_newest, request.tag
        )
        return admin_pb2.AddAppKeyResponse(key=key, effective_ms=effective_ms)

    async def DropOldAppKey(self, operator: Operator, request: admin_pb2.DropOldAppKeyRequest) -> Any:
        effective_ms = await self.administering.drop_old_app_key(
            operator.name, request.id, request.tag, request.drop_newest
        )
        return admin_pb2.DropOldAppKeyResponse(effective_ms=effective_ms)

    async def ListApps(self, _operator: Operator, request: admin_pb2.ListAppsRequest) -> Any:
        apps = self.catalog.apps.values()
        page = listed(apps, lambda app: in_order(app.number), request.page_size, request.page_token)
        return admin_pb2.ListAppsResponse(apps=map(convert.app_to, page.rows), next_page_token=page.next_token)

    async def RotateCheckToken(self, operator: Operator, request: admin_pb2.RotateCheckTokenRequest) -> Any:
        effective_ms = await self.administering.rotate_check_token(operator.name, request.id, request.reason)
        return admin_pb2.RotateCheckTokenResponse(effective_ms=effective_ms)

    async def OpenSubmitQueue(self, operator: Operator, request: admin_pb2.OpenSubmitQueueRequest) -> Any:
        queue, secret, effective_ms = await self.administering.open_submit_queue(
            operator.name,
            request.id,
            request.tag,
            unsigned=request.unsigned,
            replace_newest=request.replace_newest,
        )
        return admin_pb2.OpenSubmitQueueResponse(
            queue=convert.submit_queue_to(request.id, queue), secret=secret, effective_ms=effective_ms
        )

    async def DropOldSubmitSecret(self, operator: Operator, request: admin_pb2.DropOldSubmitSecretRequest) -> Any:
        effective_ms = await self.administering.drop_old_submit_secret(operator.name, request.id, request.tag)
        return admin_pb2.DropOldSubmitSecretResponse(effective_ms=effective_ms)

    async def CloseSubmitQueue(self, operator: Operator, request: admin_pb2.CloseSubmitQueueRequest) -> Any:
        effective_ms = await self.administering.close_submit_queue(
            operator.name, request.id, request.tag, request.reason
        )
        return admin_pb2.CloseSubmitQueueResponse(effective_ms=effective_ms)

    async def DisableApp(self, operator: Operator, request: admin_pb2.DisableAppRequest) -> Any:
        effective_ms = await self.administering.set_app_disabled(operator.name, request.id, True, request.reason)
        return admin_pb2.DisableAppResponse(effective_ms=effective_ms)

    async def EnableApp(self, operator: Operator, request: admin_pb2.EnableAppRequest) -> Any:
        effective_ms = await self.administering.set_app_disabled(operator.name, request.id, False, request.reason)
        return admin_pb2.EnableAppResponse(effective_ms=effective_ms)

    async def RegisterTopic(self, operator: Operator, request: admin_pb2.RegisterTopicRequest) -> Any:
        demand_owner(operator, request.owner, self.catalog)
        topic = await self.administering.register_topic(operator.name, convert.new_topic_from(request))
        return convert.topic_to(topic, self.catalog)

    async def UpdateTopic(self, operator: Operator, request: admin_pb2.UpdateTopicRequest) -> Any:
        changes = {field.name: value for field, value in request.ListFields() if field.has_presence}
        topic, effective_ms = await self.administering.update_topic(operator.name, request.name, changes)
        return convert.topic_to(replace(topic, effective_ms=effective_ms), self.catalog)

    async def ListTopics(self, operator: Operator, request: admin_pb2.ListTopicsRequest) -> Any:
        catalog = self.catalog
        topics = [topic for topic in catalog.topics.values() if operator.covers(topic.name)]
        page = listed(topics, lambda topic: in_order(topic.number), request.page_size, request.page_token)
        shown = [convert.topic_to(topic, catalog) for topic in page.rows]
        return admin_pb2.ListTopicsResponse(topics=shown, next_page_token=page.next_token)

    async def RegisterSubscription(self, operator: Operator, request: admin_pb2.RegisterSubscriptionRequest) -> Any:
        if operator.is_limited and request.HasField("forward"):
            raise TopicNotAllowed("A forward leads beyond the topics that you have rights for: ask an administrator.")
        change = None
        if request.HasField("update_mask"):
            change = convert.policy_fields(request.update_mask, "order")
            change += [path for path in request.update_mask.paths if path == "order"]
        subscription = await self.administering.register_subscription(
            operator.name, convert.new_subscription_from(request), change, request.untried
        )
        return convert.subscription_to(subscription, self.catalog)

    async def RemoveSubscription(self, operator: Operator, request: admin_pb2.RemoveSubscriptionRequest) -> Any:
        subscription = await self.administering.remove_subscription(
            operator.name, request.topic, request.app, request.tag
        )
        return convert.subscription_to(subscription, self.catalog)

    async def ListSubscriptions(self, operator: Operator, request: admin_pb2.ListSubscriptionsRequest) -> Any:
        catalog = self.catalog
        if request.topic and not operator.covers(request.topic):
            raise TopicUnknown.for_operators(request.topic)
        of_topic = self.administering.subscriptions(request.topic)
        found = [each for each in of_topic if operator.covers(convert.topic_name(catalog, each.topic))]
        page = listed(found, lambda each: in_order(each.number), request.page_size, request.page_token)
        shown = [convert.subscription_to(each, catalog) for each in page.rows]
        return admin_pb2.ListSubscriptionsResponse(subscriptions=shown, next_page_token=page.next_token)

    async def GetDeliveryKeys(self, operator: Operator, request: admin_pb2.GetDeliveryKeysRequest) -> Any:
        return convert.delivery_keys_to(await self.signing.keys(operator.name, request.topic, request.app, request.tag))

    async def RotateDeliveryKey(self, operator: Operator, request: admin_pb2.RotateDeliveryKeyRequest) -> Any:
        keys = await self.signing.rotate(operator.name, request.topic, request.app, request.tag, request.drop_previous)
        return convert.delivery_keys_to(keys)

    async def ReactivateConsumption(self, operator: Operator, request: admin_pb2.ReactivateConsumptionRequest) -> Any:
        return await self._act(Reactivate, operator, request)

    async def DeliverNow(self, operator: Operator, request: admin_pb2.DeliverNowRequest) -> Any:
        return await self._act(DeliverNow, operator, request)

    async def ReplayDelivery(self, operator: Operator, request: admin_pb2.ReplayDeliveryRequest) -> Any:
        view = await self.deliveries.replay(operator.name, request.message_id, request.app, request.tag, request.reason)
        return convert.message_to(view, self.catalog)

    async def CancelConsumption(self, operator: Operator, request: admin_pb2.CancelConsumptionRequest) -> Any:
        return await self._act(Cancel, operator, request)

    async def _act(self, kind: type[ByOperator], operator: Operator, request: Any) -> admin_pb2.Consumption:
        view = await self.deliveries.act(
            kind, operator.name, request.message_id, request.app, request.tag, request.reason
        )
        parsed = validation.message_id(request.message_id)
        return convert.consumption_to(view, parsed.topic, parsed.app, self.catalog)

    async def PauseTopic(self, operator: Operator, request: admin_pb2.PauseTopicRequest) -> Any:
        topic = await self.deliveries.pause_topic(operator.name, request.name, True, request.reason)
        return convert.topic_to(topic, self.catalog)

    async def ResumeTopic(self, operator: Operator, request: admin_pb2.ResumeTopicRequest) -> Any:
        topic = await self.deliveries.pause_topic(operator.name, request.name, False, request.reason)
        return convert.topic_to(topic, self.catalog)

    async def PauseSubscription(self, operator: Operator, request: admin_pb2.PauseSubscriptionRequest) -> Any:
        return await self._pause_subscription(operator, request, paused=True)

    async def ResumeSubscription(self, operator: Operator, request: admin_pb2.ResumeSubscriptionRequest) -> Any:
        return await self._pause_subscription(operator, request, paused=False)

    async def _pause_subscription(self, operator: Operator, request: Any, paused: bool) -> admin_pb2.Subscription:
        subscription = await self.deliveries.pause_subscription(
            operator.name, request.topic, request.app, request.tag, paused, request.reason
        )
        return convert.subscription_to(subscription, self.catalog)

    async def RepairOrder(self, operator: Operator, request: admin_pb2.RepairOrderRequest) -> Any:
        done = await self.deliveries.repair_order(
            operator.name, request.topic, request.app, request.tag, request.reason
        )
        return filled(admin_pb2.RepairOrderResponse, done)

    async def ListServers(self, _operator: Operator, request: admin_pb2.ListServersRequest) -> Any:
        servers = await self.administering.servers()
        page = listed(servers, lambda each: in_order(each.run.incarnation), request.page_size, request.page_token)
        shown = map(convert.server_to, page.rows)
        return admin_pb2.ListServersResponse(servers=shown, next_page_token=page.next_token)

    async def DrainServer(self, operator: Operator, request: admin_pb2.DrainServerRequest) -> Any:
        return convert.server_to(await self.administering.drain(operator.name, request.server, True, request.reason))

    async def UndrainServer(self, operator: Operator, request: admin_pb2.UndrainServerRequest) -> Any:
        return convert.server_to(await self.administering.drain(operator.name, request.server, False, request.reason))

    async def GetShardMap(self, _operator: Operator, _request: Any) -> Any:
        places = await self.administering.shard_places()
        return admin_pb2.GetShardMapResponse(shards=map(convert.shard_place_to, places))

    async def ListInstances(self, _operator: Operator, request: admin_pb2.ListInstancesRequest) -> Any:
        addresses = await self.administering.instances(request.app, request.tag)
        page = listed(addresses, str, request.page_size, request.page_token)
        return admin_pb2.ListInstancesResponse(addresses=page.rows, next_page_token=page.next_token)

    async def SetTopicCheck(self, operator: Operator, request: admin_pb2.SetTopicCheckRequest) -> Any:
        retry = convert.policy_from(request.retry) if request.HasField("retry") else None
        targets = [record_from(CheckTarget, target) for target in request.targets]
        demand_own_addresses(operator, targets)
        change = None
        if request.HasField("update_mask"):
            fields = convert.policy_fields(request.update_mask, "targets")
            targets = targets if "targets" in request.update_mask.paths else []
            change = CheckChange(policy=fields, removed_targets=list(request.removed_targets))
        topic, effective_ms = await self.by_hand.set_topic_check(
            operator.name, request.topic, targets, retry, request.untried, change
        )
        return convert.checks_to(topic, effective_ms)

    async def GetTopicCheck(self, _operator: Operator, request: admin_pb2.GetTopicCheckRequest) -> Any:
        return convert.checks_to(self.by_hand.topic(request.topic), 0)

    async def CheckNow(self, operator: Operator, request: admin_pb2.CheckNowRequest) -> Any:
        return convert.report_to(await self.by_hand.check_now(operator.name, request.message_id))

    async def TryCheck(self, operator: Operator, request: admin_pb2.TryCheckRequest) -> Any:
        target = record_from(CheckTarget, request.target)
        demand_own_addresses(operator, [target])
        tried, stored = await self.by_hand.try_check(operator.name, request.message_id, target)
        answer = admin_pb2.TryCheckResponse(tried=convert.report_to(tried))
        if stored is not None:
            answer.stored.CopyFrom(convert.report_to(stored))
        return answer

    async def ReactivateCheck(self, operator: Operator, request: admin_pb2.ReactivateCheckRequest) -> Any:
        view = await self.by_hand.reactivate(operator.name, request.message_id, request.reason)
        return convert.message_to(view, self.catalog)

    async def ReactivateChecks(self, operator: Operator, request: admin_pb2.ReactivateChecksRequest) -> Any:
        matched, more = await self.by_hand.reactivate_many(
            operator.name,
            request.topic,
            request.from_ms,
            request.to_ms,
            request.limit if request.HasField("limit") else None,
            request.dry_run,
            request.reason,
        )
        return admin_pb2.ReactivateChecksResponse(matched=matched, more=more)
