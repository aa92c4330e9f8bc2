"""tmc.v1.ConsumptionService: receive, ack, nack, extend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from tmc_common.protocol import consumption_pb2
from tmc_server.domain.numbers import Attempt, RunNumber, SubscriptionNumber
from tmc_server.domain.operations import Answer
from tmc_server.domain.ports.delivery import BrokerAddress, Copy, DeliveryStream, DeliveryStreams
from tmc_server.errors import InvalidField, MalformedRequest, NotBuiltIn, SubscriptionUnknown, TmcError
from tmc_server.requests import validation
from tmc_server.requests.acking import Acking
from tmc_server.requests.administering import Administering
from tmc_server.requests.caller import Caller, Item
from tmc_server.requests.first_use import EnsureTopic, topics_exist
from tmc_server.requests.signing import Signing
from tmc_server.rpc import convert
from tmc_server.rpc.items import Turns, only
from tmc_server.rpc.status import item_error

_DELIVERIES_PER_RESPONSE = 200
_BYTES_PER_RESPONSE = 1 << 20  # below what a gRPC client takes by default


class ConsumptionServicer:
    """Methods take the caller and a request.

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
            if request.not_begun:
                return self._acking.give_back(caller, request.message_id, Attempt(request.attempt))
            return self._acking.nack(
                caller,
                request.message_id,
                Attempt(request.attempt),
                request.error,
                request.reject,
                request.retry_after_ms if request.HasField("retry_after_ms") else None,
                request.handler_hangs,
                RunNumber(request.run),
            )

        return make

    def _extend_item(self, caller: Caller) -> Callable[[consumption_pb2.ExtendRequest], Item]:
        return lambda request: self._acking.extend(
            caller, request.message_id, Attempt(request.attempt), request.extend_ms, RunNumber(request.run)
        )

    async def _one(self, caller: Caller, make: Callable[[Any], Item], request: Any, response: Any) -> Any:
        self._acking.admit(caller, 1)
        only(await self._acking.perform(caller, [make(request)]))
        return response

    async def _many(self, caller: Caller, make: Callable[[Any], Item], request: Any, response: Any, result: Any) -> Any:
        self._acking.admit(caller, len(request.items))
        answers = await self._acking.perform(caller, await self._turns.items(caller, make, request.items))

        def to_item(answer: Answer) -> Any:
            return result(error=item_error(answer)) if isinstance(answer, TmcError) else result()

        return response(results=await self._turns.each(caller, to_item, answers))

    async def Ack(self, caller: Caller, request: consumption_pb2.AckRequest) -> Any:
        return await self._one(caller, self._ack_item(caller), request, consumption_pb2.AckResponse())

    async def AckMany(self, caller: Caller, request: consumption_pb2.AckManyRequest) -> Any:
        return await self._many(
            caller,
            self._ack_item(caller),
            request,
            consumption_pb2.AckManyResponse,
            consumption_pb2.AckResult,
        )

    async def Nack(self, caller: Caller, request: consumption_pb2.NackRequest) -> Any:
        return await self._one(caller, self._nack_item(caller), request, consumption_pb2.NackResponse())

    async def NackMany(self, caller: Caller, request: consumption_pb2.NackManyRequest) -> Any:
        return await self._many(
            caller,
            self._nack_item(caller),
            request,
            consumption_pb2.NackManyResponse,
            consumption_pb2.NackResult,
        )

    async def Extend(self, caller: Caller, request: consumption_pb2.ExtendRequest) -> Any:
        return await self._one(caller, self._extend_item(caller), request, consumption_pb2.ExtendResponse())

    async def ExtendMany(self, caller: Caller, request: consumption_pb2.ExtendManyRequest) -> Any:
        return await self._many(
            caller,
            self._extend_item(caller),
            request,
            consumption_pb2.ExtendManyResponse,
            consumption_pb2.ExtendResult,
        )

    async def DescribeSubscriptions(
        self, caller: Caller, request: consumption_pb2.DescribeSubscriptionsRequest
    ) -> consumption_pb2.DescribeSubscriptionsResponse:
        has_queues = self._broker is not None
        own = self._signing.own_subscriptions(caller)
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
