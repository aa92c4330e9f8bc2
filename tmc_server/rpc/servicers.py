"""The services' methods: convert, ask the request, convert back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2, types_pb2
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Attempt, SubscriptionNumber
from tmc_server.domain.operations import Answer, Stored
from tmc_server.domain.ports.catalog import CheckChange
from tmc_server.domain.ports.delivery import BrokerAddress, Copy, DeliveryStream, DeliveryStreams
from tmc_server.errors import InvalidField, MalformedRequest, NotBuiltIn, SubscriptionUnknown, TmcError
from tmc_server.requests import deciding, preparing, validation
from tmc_server.requests.acking import Acking
from tmc_server.requests.administering import Administering
from tmc_server.requests.caller import Caller, Item
from tmc_server.requests.first_use import EnsureTopic, topics_exist
from tmc_server.requests.signing import Signing
from tmc_server.requests.undecided import Undecided
from tmc_server.rpc import convert
from tmc_server.rpc.status import item_error

_STATE: dict[MessageState, Any] = {
    state: types_pb2.MessageState.Value(f"MESSAGE_STATE_{state.name}") for state in MessageState
}
_LOOKS_AT_ONCE = 2  # of one app; all apps share the threads that read
_SLICE = 100  # items; about a millisecond
_DELIVERIES_PER_RESPONSE = 200
_BYTES_PER_RESPONSE = 1 << 20  # below what a gRPC client takes by default


def _try(make: Callable[[Any], Item], request: Any) -> Item:
    """One item of a batch: refused items do not stop their neighbors."""
    try:
        return make(request)
    except TmcError as error:
        return error.with_traceback(None)  # its frames hold the request


class Turns:
    """Large batches are made into items slice by slice, one batch of an app at a time.

    The loop is back with other apps after each slice, however many batches one app has sent.
    """

    def __init__(self) -> None:
        self._locks: dict[int, asyncio.Lock] = {}

    async def items(self, caller: Caller, make: Callable[[Any], Item], requests: Sequence[Any]) -> list[Item]:
        if len(requests) <= _SLICE:
            return [_try(make, request) for request in requests]
        made: list[Item] = []
        async with self._locks.setdefault(caller.app.number, asyncio.Lock()):
            for start in range(0, len(requests), _SLICE):
                made += [_try(make, request) for request in requests[start : start + _SLICE]]
                await asyncio.sleep(0)
        return made


def _only(answers: Sequence[Answer]) -> Any:
    """The answer to a single call, raised when it is an error."""
    answer = answers[0]
    if isinstance(answer, TmcError):
        raise answer
    return answer


class MessageServicer:
    """tmc.v1.MessageService."""

    def __init__(self, prepare: preparing.Preparing, decide: deciding.Deciding, administering: Administering) -> None:
        self._preparing = prepare
        self._deciding = decide
        self._turns = Turns()
        self._looking: dict[int, asyncio.Semaphore] = {}
        self._administering = administering

    def _prepare_item(self, caller: Caller, publish: bool) -> Callable[[message_pb2.PrepareRequest], Item]:
        return lambda request: self._preparing.item(
            caller,
            publish=publish,
            topic=request.topic,
            key=request.key,
            body=request.body,
            content_type=request.content_type,
            headers=request.headers,
            attempt_id=request.attempt_id,
            delay_ms=request.delay_ms,
            ledger_id=request.ledger_id,
            check_target=request.check_target,
        )

    async def _store(self, caller: Caller, request: message_pb2.PrepareRequest, publish: bool) -> Any:
        self._preparing.admit(caller, 1)
        item: Any = self._prepare_item(caller, publish)(request)
        answer = _only(await self._preparing.perform(caller, [item]))
        return message_pb2.PrepareResponse(message_id=preparing.id_of(item, answer), state=_STATE[answer.state])

    async def _store_many(self, caller: Caller, request: message_pb2.PrepareManyRequest, publish: bool) -> Any:
        self._preparing.admit(caller, len(request.items))
        items = await self._turns.items(caller, self._prepare_item(caller, publish), request.items)
        answers = await self._preparing.perform(caller, items)
        return message_pb2.PrepareManyResponse(results=map(_prepare_result, items, answers))

    async def Prepare(self, caller: Caller, request: message_pb2.PrepareRequest) -> Any:
        return await self._store(caller, request, publish=False)

    async def PrepareMany(self, caller: Caller, request: message_pb2.PrepareManyRequest) -> Any:
        return await self._store_many(caller, request, publish=False)

    async def Publish(self, caller: Caller, request: message_pb2.PrepareRequest) -> Any:
        return await self._store(caller, request, publish=True)

    async def PublishMany(self, caller: Caller, request: message_pb2.PrepareManyRequest) -> Any:
        return await self._store_many(caller, request, publish=True)

    def _decide_item(self, caller: Caller, commit: bool) -> Callable[[message_pb2.DecideRequest], Item]:
        return lambda request: self._deciding.item(
            caller,
            commit=commit,
            message_id=request.message_id,
            topic=request.topic,
            key=request.key,
            attempt_id=request.attempt_id,
        )

    async def _decide(self, caller: Caller, request: message_pb2.DecideRequest, commit: bool) -> Any:
        self._deciding.admit(caller, 1)
        item: Any = self._decide_item(caller, commit)(request)
        answer = _only(await self._deciding.perform(caller, [item]))
        return message_pb2.DecideResponse(
            message_id=deciding.id_of(item, caller, answer),
            state=_STATE[answer.state],
        )

    async def _decide_many(self, caller: Caller, request: message_pb2.DecideManyRequest, commit: bool) -> Any:
        self._deciding.admit(caller, len(request.items))
        items = await self._turns.items(caller, self._decide_item(caller, commit), request.items)
        answers = await self._deciding.perform(caller, items)
        results = (_decide_result(item, caller, answer) for item, answer in zip(items, answers, strict=True))
        return message_pb2.DecideManyResponse(results=results)

    async def Submit(self, caller: Caller, request: message_pb2.DecideRequest) -> Any:
        return await self._decide(caller, request, commit=True)

    async def SubmitMany(self, caller: Caller, request: message_pb2.DecideManyRequest) -> Any:
        return await self._decide_many(caller, request, commit=True)

    async def Rollback(self, caller: Caller, request: message_pb2.DecideRequest) -> Any:
        return await self._decide(caller, request, commit=False)

    async def RollbackMany(self, caller: Caller, request: message_pb2.DecideManyRequest) -> Any:
        return await self._decide_many(caller, request, commit=False)

    async def DescribeChecks(self, caller: Caller, _request: Any) -> Any:
        self._preparing.announce(caller)
        return message_pb2.DescribeChecksResponse(check_token=await self._administering.check_token(caller.app))

    async def GetMessage(self, caller: Caller, request: message_pb2.GetMessageRequest) -> Any:
        async with self._looking.setdefault(caller.app.number, asyncio.Semaphore(_LOOKS_AT_ONCE)):
            view = await self._administering.own_message(caller, request.message_id, request.topic, request.key)
        return convert.message_to(view, self._administering.catalog)


def _prepare_result(item: Any, answer: Any) -> message_pb2.PrepareResult:
    if isinstance(answer, Stored):
        return message_pb2.PrepareResult(message_id=preparing.id_of(item, answer), state=_STATE[answer.state])
    return message_pb2.PrepareResult(error=item_error(answer))


def _decide_result(item: Any, caller: Caller, answer: Any) -> message_pb2.DecideResult:
    if isinstance(answer, Stored):
        return message_pb2.DecideResult(
            message_id=deciding.id_of(item, caller, answer),
            state=_STATE[answer.state],
        )
    return message_pb2.DecideResult(error=item_error(answer))


def _ack_result(answer: Answer) -> consumption_pb2.AckResult:
    if isinstance(answer, TmcError):
        return consumption_pb2.AckResult(error=item_error(answer))
    return consumption_pb2.AckResult()


class ConsumptionServicer:
    """tmc.v1.ConsumptionService.

    streams: built-in delivery, None with a broker.  broker: where consumers find it.
    ensure_topic: `tmc dev` makes topics that a consumer names first.
    """

    def __init__(
        self,
        acking: Acking,
        administering: Administering,
        signing: Signing,
        streams: DeliveryStreams | None,
        broker: BrokerAddress | None = None,
        ensure_topic: EnsureTopic = topics_exist,
    ) -> None:
        self._acking = acking
        self._turns = Turns()
        self._administering = administering
        self._signing = signing
        self._streams = streams
        self._broker = broker
        self._ensure_topic = ensure_topic

    def _ack_item(self, caller: Caller) -> Callable[[consumption_pb2.AckRequest], Item]:
        return lambda request: self._acking.ack(caller, request.message_id, Attempt(request.attempt))

    def _nack_item(self, caller: Caller) -> Callable[[consumption_pb2.NackRequest], Item]:
        def make(request: consumption_pb2.NackRequest) -> Item:
            if request.unsigned:
                return self._acking.sign_again(caller, request.message_id, Attempt(request.attempt))
            return self._acking.nack(
                caller,
                request.message_id,
                Attempt(request.attempt),
                request.error,
                request.reject,
                request.retry_after_ms if request.HasField("retry_after_ms") else None,
                request.handler_hangs,
            )

        return make

    def _extend_item(self, caller: Caller) -> Callable[[consumption_pb2.ExtendRequest], Item]:
        return lambda request: self._acking.extend(
            caller, request.message_id, Attempt(request.attempt), request.extend_ms
        )

    async def _one(self, caller: Caller, make: Callable[[Any], Item], request: Any, response: Any) -> Any:
        self._acking.admit(caller, 1)
        _only(await self._acking.perform(caller, [make(request)]))
        return response

    async def _many(self, caller: Caller, make: Callable[[Any], Item], request: Any, response: Any) -> Any:
        self._acking.admit(caller, len(request.items))
        answers = await self._acking.perform(caller, await self._turns.items(caller, make, request.items))
        return response(results=map(_ack_result, answers))

    async def Ack(self, caller: Caller, request: consumption_pb2.AckRequest) -> Any:
        return await self._one(caller, self._ack_item(caller), request, consumption_pb2.AckResponse())

    async def AckMany(self, caller: Caller, request: consumption_pb2.AckManyRequest) -> Any:
        return await self._many(caller, self._ack_item(caller), request, consumption_pb2.AckManyResponse)

    async def Nack(self, caller: Caller, request: consumption_pb2.NackRequest) -> Any:
        return await self._one(caller, self._nack_item(caller), request, consumption_pb2.NackResponse())

    async def NackMany(self, caller: Caller, request: consumption_pb2.NackManyRequest) -> Any:
        return await self._many(caller, self._nack_item(caller), request, consumption_pb2.NackManyResponse)

    async def Extend(self, caller: Caller, request: consumption_pb2.ExtendRequest) -> Any:
        return await self._one(caller, self._extend_item(caller), request, consumption_pb2.ExtendResponse())

    async def ExtendMany(self, caller: Caller, request: consumption_pb2.ExtendManyRequest) -> Any:
        return await self._many(caller, self._extend_item(caller), request, consumption_pb2.ExtendManyResponse)

    async def DescribeSubscriptions(
        self, caller: Caller, request: consumption_pb2.DescribeSubscriptionsRequest
    ) -> consumption_pb2.DescribeSubscriptionsResponse:
        has_queues = self._broker is not None
        own = await self._signing.own_subscriptions(caller, with_keys=request.verifies and has_queues)
        catalog = self._administering.catalog
        signed = has_queues and self._signing.enabled
        return consumption_pb2.DescribeSubscriptionsResponse(
            subscriptions=[convert.subscription_info_to(each, catalog, has_queues, signed) for each in own],
            broker=convert.broker_to(self._broker),
        )

    async def ReportForgedCopies(
        self, caller: Caller, request: consumption_pb2.ReportForgedCopiesRequest
    ) -> consumption_pb2.ReportForgedCopiesResponse:
        self._signing.report(caller, request.topic, request.count, request.message_id)
        return consumption_pb2.ReportForgedCopiesResponse()

    async def Subscribe(self, caller: Caller, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        if self._streams is None:
            raise NotBuiltIn
        first = await anext(requests, None)
        if first is None:
            raise MalformedRequest
        stream = self._streams.open(self._subscriptions(caller, first))
        credit = asyncio.create_task(self._read_credit(stream, first, requests))
        batch: asyncio.Task[list[Copy]] | None = None
        try:
            while True:
                batch = asyncio.create_task(stream.next_batch(_DELIVERIES_PER_RESPONSE, _BYTES_PER_RESPONSE))
                await asyncio.wait({batch, credit}, return_when=asyncio.FIRST_COMPLETED)
                if not batch.done():
                    credit.result()  # the consumer ended the stream, or sent nonsense
                    return
                copies, batch = batch.result(), None
                catalog = self._administering.catalog
                deliveries = [convert.delivery_to(copy, catalog) for copy in copies]
                yield consumption_pb2.SubscribeResponse(deliveries=deliveries)
        finally:
            credit.cancel()
            if batch is not None and not batch.cancel() and batch.exception() is None:
                stream.put_back(batch.result())  # taken, but the call ended before they were written
            stream.close()

    def _subscriptions(self, caller: Caller, first: consumption_pb2.SubscribeRequest) -> list[SubscriptionNumber]:
        validation.between(len(first.topics), "topics", 1, validation.MAX_ITEMS)
        numbers = []
        for name in first.topics:
            validation.topic(name, "topics")
            self._ensure_topic(caller, name)
            catalog = self._administering.catalog
            topic = catalog.topic_by_name.get(name)
            number = topic.number if topic is not None else -1
            tag = caller.tag or (topic.default_tag if topic is not None else "")
            subscription = catalog.subscription_by_name.get((number, caller.app.number, tag))
            if subscription is None or subscription.removed_ms is not None or subscription.forward is not None:
                raise SubscriptionUnknown(
                    f"App {caller.app.id} with tag {tag!r} has no subscription to {name}: subscribe first."
                )
            numbers.append(subscription.number)
        return numbers

    async def _read_credit(self, stream: DeliveryStream, first: Any, requests: AsyncIterator[Any]) -> None:
        self._add_credit(stream, first.credit)
        async for request in requests:
            if request.topics:
                raise InvalidField("topics", "be in the first request only: open another stream for other topics")
            self._add_credit(stream, request.credit)

    @staticmethod
    def _add_credit(stream: DeliveryStream, credit: int) -> None:
        stream.add_credit(validation.between(credit, "credit", 0, 10_000))


class AdminServicer:
    """tmc.v1.AdminService. The identity is the operator's name."""

    def __init__(self, administering: Administering, undecided: Undecided, signing: Signing) -> None:
        self._admin = administering
        self._signing = signing
        self._undecided = undecided

    async def RegisterApp(self, actor: str, request: admin_pb2.RegisterAppRequest) -> Any:
        app, key, effective_ms = await self._admin.register_app(actor, convert.new_app_from(request))
        return admin_pb2.RegisterAppResponse(app=convert.app_to(app), key=key, effective_ms=effective_ms)

    async def AddAppKey(self, actor: str, request: admin_pb2.AddAppKeyRequest) -> Any:
        key, effective_ms = await self._admin.add_app_key(actor, request.id, request.replace_newest, request.tag)
        return admin_pb2.AddAppKeyResponse(key=key, effective_ms=effective_ms)

    async def DropOldAppKey(self, actor: str, request: admin_pb2.DropOldAppKeyRequest) -> Any:
        effective_ms = await self._admin.drop_old_app_key(actor, request.id, request.tag, request.drop_newest)
        return admin_pb2.DropOldAppKeyResponse(effective_ms=effective_ms)

    async def ListApps(self, _actor: str, _request: Any) -> Any:
        return admin_pb2.ListAppsResponse(apps=map(convert.app_to, self._admin.catalog.apps.values()))

    async def RotateCheckToken(self, actor: str, request: admin_pb2.RotateCheckTokenRequest) -> Any:
        effective_ms = await self._admin.rotate_check_token(actor, request.id, request.reason)
        return admin_pb2.RotateCheckTokenResponse(effective_ms=effective_ms)

    async def DisableApp(self, actor: str, request: admin_pb2.DisableAppRequest) -> Any:
        effective_ms = await self._admin.set_app_disabled(actor, request.id, True, request.reason)
        return admin_pb2.DisableAppResponse(effective_ms=effective_ms)

    async def EnableApp(self, actor: str, request: admin_pb2.EnableAppRequest) -> Any:
        effective_ms = await self._admin.set_app_disabled(actor, request.id, False, request.reason)
        return admin_pb2.EnableAppResponse(effective_ms=effective_ms)

    async def RegisterTopic(self, actor: str, request: admin_pb2.RegisterTopicRequest) -> Any:
        topic = await self._admin.register_topic(actor, convert.topic_settings_from(request))
        return convert.topic_to(topic, self._admin.catalog)

    async def UpdateTopic(self, actor: str, request: admin_pb2.UpdateTopicRequest) -> Any:
        topic, effective_ms = await self._admin.update_topic(
            actor,
            request.name,
            request.transaction_time_ms if request.HasField("transaction_time_ms") else None,
            request.open_limit if request.HasField("open_limit") else None,
        )
        return convert.topic_to(replace(topic, effective_ms=effective_ms), self._admin.catalog)

    async def ListTopics(self, _actor: str, _request: Any) -> Any:
        catalog = self._admin.catalog
        topics = [convert.topic_to(topic, catalog) for topic in catalog.topics.values()]
        return admin_pb2.ListTopicsResponse(topics=topics)

    async def RegisterSubscription(self, actor: str, request: admin_pb2.RegisterSubscriptionRequest) -> Any:
        change = convert.policy_fields(request.update_mask) if request.HasField("update_mask") else None
        subscription = await self._admin.register_subscription(
            actor, convert.new_subscription_from(request), change, request.untried
        )
        return convert.subscription_to(subscription, self._admin.catalog)

    async def RemoveSubscription(self, actor: str, request: admin_pb2.RemoveSubscriptionRequest) -> Any:
        subscription = await self._admin.remove_subscription(actor, request.topic, request.app, request.tag)
        return convert.subscription_to(subscription, self._admin.catalog)

    async def ListSubscriptions(self, _actor: str, request: admin_pb2.ListSubscriptionsRequest) -> Any:
        catalog = self._admin.catalog
        found = [convert.subscription_to(s, catalog) for s in self._admin.subscriptions(request.topic)]
        return admin_pb2.ListSubscriptionsResponse(subscriptions=found)

    async def GetDeliveryKeys(self, actor: str, request: admin_pb2.GetDeliveryKeysRequest) -> Any:
        return convert.delivery_keys_to(await self._signing.keys(actor, request.topic, request.app, request.tag))

    async def RotateDeliveryKey(self, actor: str, request: admin_pb2.RotateDeliveryKeyRequest) -> Any:
        keys = await self._signing.rotate(actor, request.topic, request.app, request.tag, request.drop_previous)
        return convert.delivery_keys_to(keys)

    async def GetMessage(self, _actor: str, request: admin_pb2.AdminGetMessageRequest) -> Any:
        detail = await self._admin.message(request.message_id, request.topic, request.key)
        return convert.detail_to(detail, self._admin.catalog)

    async def ListMessages(self, _actor: str, request: admin_pb2.ListMessagesRequest) -> Any:
        page = await self._admin.messages(
            request.topic, request.state, request.from_ms, request.to_ms, request.page_size, request.page_token
        )
        catalog = self._admin.catalog
        messages = [convert.message_to(view, catalog) for view in page.rows]
        return admin_pb2.ListMessagesResponse(messages=messages, next_page_token=page.next_token)

    async def ListConsumptions(self, _actor: str, request: admin_pb2.ListConsumptionsRequest) -> Any:
        page = await self._admin.consumptions(
            request.topic, request.app, request.state, request.page_size, request.page_token
        )
        catalog = self._admin.catalog
        topic = catalog.topic_by_name[request.topic]
        rows = [convert.consumption_to(view, topic.number, topic.owner, catalog) for view in page.rows]
        return admin_pb2.ListConsumptionsResponse(consumptions=rows, next_page_token=page.next_token)

    async def ReactivateConsumption(self, actor: str, request: admin_pb2.ReactivateConsumptionRequest) -> Any:
        view = await self._admin.reactivate(actor, request.message_id, request.app, request.tag, request.reason)
        catalog = self._admin.catalog
        parsed = validation.message_id(request.message_id)
        return convert.consumption_to(view, parsed.topic, parsed.app, catalog)

    async def ListServers(self, _actor: str, _request: Any) -> Any:
        servers, places = await self._admin.servers(), await self._admin.shard_places()
        return admin_pb2.ListServersResponse(
            servers=map(convert.server_to, servers), shard_map=map(convert.shard_place_to, places)
        )

    async def ListInstances(self, _actor: str, request: admin_pb2.ListInstancesRequest) -> Any:
        addresses = await self._admin.instances(request.app, request.tag)
        return admin_pb2.ListInstancesResponse(addresses=sorted(addresses))

    async def SetTopicCheck(self, actor: str, request: admin_pb2.SetTopicCheckRequest) -> Any:
        retry = convert.policy_from(request.retry) if request.HasField("retry") else None
        targets = [convert.target_from(target) for target in request.targets]
        change = None
        if request.HasField("update_mask"):
            fields = convert.policy_fields(request.update_mask, "targets")
            targets = targets if "targets" in request.update_mask.paths else []
            change = CheckChange(policy=fields, removed_targets=list(request.removed_targets))
        topic, effective_ms = await self._undecided.set_topic_check(
            actor, request.topic, targets, retry, request.untried, change
        )
        return convert.checks_to(topic, effective_ms)

    async def GetTopicCheck(self, _actor: str, request: admin_pb2.GetTopicCheckRequest) -> Any:
        return convert.checks_to(self._undecided.topic(request.topic), 0)

    async def CheckNow(self, _actor: str, request: admin_pb2.CheckNowRequest) -> Any:
        return convert.report_to(await self._undecided.check_now(request.message_id))

    async def ReactivateCheck(self, actor: str, request: admin_pb2.ReactivateCheckRequest) -> Any:
        view = await self._undecided.reactivate(actor, request.message_id, request.reason)
        return convert.message_to(view, self._admin.catalog)

    async def ReactivateChecks(self, actor: str, request: admin_pb2.ReactivateChecksRequest) -> Any:
        matched, more = await self._undecided.reactivate_many(
            actor,
            request.topic,
            request.from_ms,
            request.to_ms,
            request.limit if request.HasField("limit") else None,
            request.dry_run,
            request.reason,
        )
        return admin_pb2.ReactivateChecksResponse(matched=matched, more=more)

    async def DecideMessage(self, actor: str, request: admin_pb2.DecideMessageRequest) -> Any:
        view = await self._undecided.decide(actor, request.message_id, request.verdict, request.reason)
        return convert.message_to(view, self._admin.catalog)
