"""tmc.v1.MessageService: prepare, submit, roll back, publish, singly, in batches, and over streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tmc_common.protocol import message_pb2, types_pb2
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Answer, Stored
from tmc_server.errors import InvalidField, TmcError
from tmc_server.requests import validation
from tmc_server.requests.administering import Administering
from tmc_server.requests.caller import Caller, Item, when_allowed
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.lookup import Lookup
from tmc_server.requests.preparing import Preparing
from tmc_server.requests.producing import perform_both
from tmc_server.rpc import convert
from tmc_server.rpc.call_stream import Work
from tmc_server.rpc.items import Turns, only
from tmc_server.rpc.status import item_error

_STATE: dict[MessageState, Any] = {
    state: types_pb2.MessageState.Value(f"MESSAGE_STATE_{state.name}") for state in MessageState
}
_READS_AT_ONCE = 2  # of one app; all apps share the threads that read


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """The messages that answer an RPC and its batch: of one call, of one item, of all items."""

    one: Any
    item: Any
    many: Any

    def to_one(self, stored: Stored) -> Any:
        return self.one(message_id=_text(stored), state=_STATE[stored.state])

    def to_item(self, answer: Answer) -> Any:
        if isinstance(answer, Stored):
            return self.item(message_id=_text(answer), state=_STATE[answer.state])
        assert isinstance(answer, TmcError)
        return self.item(error=item_error(answer))


_PREPARE = _Answers(
    one=message_pb2.PrepareResponse, item=message_pb2.PrepareResult, many=message_pb2.PrepareManyResponse
)
_PUBLISH = _Answers(
    one=message_pb2.PublishResponse, item=message_pb2.PublishResult, many=message_pb2.PublishManyResponse
)
_SUBMIT = _Answers(one=message_pb2.SubmitResponse, item=message_pb2.SubmitResult, many=message_pb2.SubmitManyResponse)
_ROLLBACK = _Answers(
    one=message_pb2.RollbackResponse, item=message_pb2.RollbackResult, many=message_pb2.RollbackManyResponse
)


def _to_result(answered: tuple[message_pb2.Operation, Answer]) -> message_pb2.OperationResult:
    operation, answer = answered
    if isinstance(answer, Stored):
        return message_pb2.OperationResult(id=operation.id, message_id=_text(answer), state=_STATE[answer.state])
    assert isinstance(answer, TmcError)
    return message_pb2.OperationResult(id=operation.id, error=item_error(answer))


def _text(stored: Stored) -> str:
    return str(stored.message_id) if stored.message_id is not None else ""


class MessageServicer:
    """Methods take the caller and a request."""

    def __init__(self, preparing: Preparing, deciding: Deciding, administering: Administering, lookup: Lookup) -> None:
        self._preparing = preparing
        self._deciding = deciding
        self._turns = Turns()
        self._reading: dict[int, asyncio.Semaphore] = {}
        self._administering = administering
        self._lookup = lookup

    async def Prepare(self, caller: Caller, request: message_pb2.PrepareRequest) -> Any:
        return await self._one(self._preparing, _PREPARE, caller, self._prepare_item(caller), request)

    async def PrepareMany(self, caller: Caller, request: message_pb2.PrepareManyRequest) -> Any:
        return await self._many(self._preparing, _PREPARE, caller, self._prepare_item(caller), request)

    async def Publish(self, caller: Caller, request: message_pb2.PublishRequest) -> Any:
        return await self._one(self._preparing, _PUBLISH, caller, self._publish_item(caller), request)

    async def PublishMany(self, caller: Caller, request: message_pb2.PublishManyRequest) -> Any:
        return await self._many(self._preparing, _PUBLISH, caller, self._publish_item(caller), request)

    async def Submit(self, caller: Caller, request: message_pb2.SubmitRequest) -> Any:
        return await self._one(self._deciding, _SUBMIT, caller, self._decide_item(caller, commit=True), request)

    async def SubmitMany(self, caller: Caller, request: message_pb2.SubmitManyRequest) -> Any:
        return await self._many(self._deciding, _SUBMIT, caller, self._decide_item(caller, commit=True), request)

    async def Rollback(self, caller: Caller, request: message_pb2.RollbackRequest) -> Any:
        return await self._one(self._deciding, _ROLLBACK, caller, self._decide_item(caller, commit=False), request)

    async def RollbackMany(self, caller: Caller, request: message_pb2.RollbackManyRequest) -> Any:
        return await self._many(self._deciding, _ROLLBACK, caller, self._decide_item(caller, commit=False), request)

    async def Produce(self, caller: Caller, request: message_pb2.ProduceRequest) -> Work:
        """Admit a request of a stream, as soon as the rate of items allows it. Raises InvalidField: their number."""
        operations = request.operations
        count = validation.items(len(operations), "operations")
        await when_allowed(lambda: self._preparing.admit(caller, count))
        return partial(self._performed, caller, operations)

    async def _performed(self, caller: Caller, operations: Sequence[message_pb2.Operation]) -> Any:
        items = await self._turns.items(caller, self._operation_item(caller), operations)
        answers = await perform_both(self._preparing, self._deciding, caller, items)
        results = await self._turns.each(caller, _to_result, list(zip(operations, answers, strict=True)))
        return message_pb2.ProduceResponse(results=results)

    async def DescribeChecks(self, caller: Caller, _request: Any) -> Any:
        self._preparing.announce(caller)
        return message_pb2.DescribeChecksResponse(check_token=caller.app.check_token)

    async def GetMessage(self, caller: Caller, request: message_pb2.GetMessageRequest) -> Any:
        async with self._reading.setdefault(caller.app.number, asyncio.Semaphore(_READS_AT_ONCE)):
            view = await self._lookup.own_message(caller, request.message_id, request.topic, request.key)
        return convert.message_to(view, self._administering.catalog, with_body=True)

    @staticmethod
    async def _one(
        use_case: Preparing | Deciding, answers: _Answers, caller: Caller, make: Callable[[Any], Item], request: Any
    ) -> Any:
        use_case.admit(caller, 1)
        return answers.to_one(only(await use_case.perform(caller, [make(request)])))

    async def _many(
        self,
        use_case: Preparing | Deciding,
        answers: _Answers,
        caller: Caller,
        make: Callable[[Any], Item],
        request: Any,
    ) -> Any:
        use_case.admit(caller, len(request.items))
        items = await self._turns.items(caller, make, request.items)
        stored = await use_case.perform(caller, items)
        return answers.many(results=await self._turns.each(caller, answers.to_item, stored))

    def _operation_item(self, caller: Caller) -> Callable[[message_pb2.Operation], Item]:
        make: dict[str, Callable[[Any], Item]] = {
            "prepare": self._prepare_item(caller),
            "publish": self._publish_item(caller),
            "submit": self._decide_item(caller, commit=True),
            "rollback": self._decide_item(caller, commit=False),
        }

        def item(operation: message_pb2.Operation) -> Item:
            kind = operation.WhichOneof("operation")
            if kind is None:
                raise InvalidField("operation", "be one of prepare, submit, rollback, publish")
            return make[kind](getattr(operation, kind))

        return item

    def _prepare_item(self, caller: Caller) -> Callable[[message_pb2.PrepareRequest], Item]:
        return lambda request: self._item(
            caller,
            request,
            publish=False,
            ledger_id=request.ledger_id,
            check_target=request.check_target,
            transaction_time_ms=request.transaction_time_ms,
        )

    def _publish_item(self, caller: Caller) -> Callable[[message_pb2.PublishRequest], Item]:
        return lambda request: self._item(caller, request, publish=True)

    def _item(
        self,
        caller: Caller,
        request: message_pb2.PrepareRequest | message_pb2.PublishRequest,
        *,
        publish: bool,
        ledger_id: bytes = b"",
        check_target: str = "",
        transaction_time_ms: int = 0,
    ) -> Item:
        return self._preparing.item(
            caller,
            publish=publish,
            topic=request.topic,
            key=request.key,
            body=request.body,
            content_type=request.content_type,
            headers=request.headers,
            attempt_id=request.attempt_id,
            delay_ms=request.delay_ms,
            ledger_id=ledger_id,
            check_target=check_target,
            transaction_time_ms=transaction_time_ms,
            order_key=request.order_key,
        )

    def _decide_item(
        self, caller: Caller, *, commit: bool
    ) -> Callable[[message_pb2.SubmitRequest | message_pb2.RollbackRequest], Item]:
        return lambda request: self._deciding.item(
            caller,
            commit=commit,
            message_id=request.message_id,
            topic=request.topic,
            key=request.key,
            attempt_id=request.attempt_id,
        )
