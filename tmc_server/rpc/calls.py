"""What surrounds every RPC: authenticate, count, read, decode, run, turn errors into statuses. In this order.

A request is not read before its sender is authenticated: flow control stops it after one window. Therefore every
handler takes a stream of bytes, even for unary requests: gRPC hands over such calls before their message.

Handlers are made from the service descriptors, so a new RPC cannot be forgotten: without an entry in domain/rights.py
the server does not start. No client input ends in UNKNOWN or INTERNAL: bytes that are no request are an
INVALID_ARGUMENT, and an unexpected exception is logged with a correlation id, and the caller gets only that id.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import isasyncgenfunction
from typing import Any, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from prometheus_client import Histogram

from tmc_common import tracing
from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import App
from tmc_server.domain.operators import Operator, Role
from tmc_server.domain.rights import RIGHTS, Right
from tmc_server.errors import (
    CredentialsInvalid,
    InternalFault,
    MalformedRequest,
    RateLimited,
    ShuttingDown,
    StoreUnavailable,
    TmcError,
)
from tmc_server.metrics import METRICS
from tmc_server.origin import LONGEST_ORIGIN, ORIGIN
from tmc_server.requests.caller import Budget, Caller
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.call_stream import CallStream, Work
from tmc_server.rpc.doorkeeper import Doorkeeper
from tmc_server.rpc.permission import demand_role, demand_topics
from tmc_server.rpc.reads import OPERATORS, Reads
from tmc_server.rpc.refusing import Context, let_go, refuse
from tmc_server.rpc.status import CODES
from tmc_server.rpc.wire import check_fields

log = EventLog("tmc.rpc")

_REVOKED_LOOK_S = 0.5
_MOVE_S = 5.0
_MOVE_PAUSE_S = 0.1
_LOOKS_AT_ONCE = 3  # of one operator, at what only shows something

Identify = Callable[[Any], Any]
Answer = TypeVar("Answer")
Call = Callable[[Any, Any], Awaitable[Message | None]]
"""Serves one call: what precedes its requests, and its context. Returns: its answer; None: it was refused."""
Decode = Callable[[int, bytes], Awaitable[Message]]
"""Makes a request of what a sender sent. The sender is an app's number, or OPERATORS. Raises MalformedRequest."""


class Edge:
    """What all calls of a server share. On the loop only."""

    def __init__(self, authentication: Authentication, budget: Budget, doorkeeper: Doorkeeper) -> None:
        self.authentication = authentication
        self.budget = budget
        self.doorkeeper = doorkeeper
        self.reads = Reads()
        self._looks: dict[str, asyncio.Semaphore] = {}
        self._streams: set[_Stream] = set()
        self._lines: dict[int, asyncio.Lock] = {}
        self._stopping = False
        self._seen: object = None
        self._looking = False

    def identity(self, identify: Identify, context: Context) -> Any:
        """Raises what `identify` raises."""
        found = identify(context.invocation_metadata() or ())
        if isinstance(found, Caller):
            self.authentication.certificate(found, context)
        self.doorkeeper.showed_key(context)
        return found

    def operator(self, context: Context) -> Operator:
        """Raises AdminOnly."""
        found = self.authentication.operator(context.invocation_metadata() or (), context.auth_context())
        self.doorkeeper.showed_key(context)
        return found

    def looks(self, operator: Operator) -> asyncio.Semaphore:
        """Return what limits an operator's looks, which take threads of all: further ones wait for the operator's own."""
        return self._looks.setdefault(operator.name, asyncio.Semaphore(_LOOKS_AT_ONCE))

    async def refuse(self, context: Context, error: TmcError) -> None:
        """End a call of one of our services."""
        if isinstance(error, RateLimited):
            let_go(error)
            await self.doorkeeper.hold_back(error, context)
        if self.authentication.note(error, context):
            await self.doorkeeper.hold_up(context)
        await refuse(context, error)

    def line(self, app: App) -> asyncio.Lock:
        """Return the line in which the requests of an app's streams are admitted."""
        return self._lines.setdefault(app.number, asyncio.Lock())

    def opened(self, stream: _Stream) -> None:
        """Register a stream: from now on it ends soon after its key is revoked. Raises ShuttingDown."""
        if self._stopping:
            raise ShuttingDown
        self._streams.add(stream)
        if not self._looking:
            self._looking = True
            self._seen = self.authentication.catalog
            self._look_later()

    def closed(self, stream: _Stream) -> None:
        self._streams.discard(stream)

    def finish_streams(self) -> None:
        """Have streams of calls end, answered, and let no other begin: a stream would outlast any grace."""
        self._stopping = True
        for stream in self._streams:
            stream.finish()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(_REVOKED_LOOK_S, self._look)

    def _look(self) -> None:
        catalog = self.authentication.catalog
        if catalog is not self._seen:
            self._seen = catalog
            for stream in self._streams:
                stream.authenticate_again()
        self._looking = bool(self._streams)
        if self._looking:
            self._look_later()


@dataclass(eq=False, kw_only=True)
class _Stream:
    """An open stream: its credentials and the task that serves it.

    revoked: why they are no longer valid.  finish: have it end soon, when the server stops.
    """

    identify: Identify
    metadata: Any
    task: asyncio.Task[Any]
    revoked: TmcError | None = None
    finish: Callable[[], None] = lambda: None

    def authenticate_again(self) -> None:
        try:
            self.identify(self.metadata)
        except TmcError as error:
            self.revoked = error.with_traceback(None)
            self.task.cancel()


_Exchange = Callable[[Caller, _Stream, Context], Awaitable[None]]


def handlers(service: ServiceDescriptor, servicer: object, edge: Edge) -> grpc.GenericRpcHandler:
    """Return all methods of `servicer`, each async (identity, request) -> response, or (identity, requests) -> responses.

    A stream may also be calls of its own: async (identity, request) -> what answers it, once the request is admitted.
    """
    made = {method.name: _handler(method, getattr(servicer, method.name), edge) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, made)


def _handler(method: MethodDescriptor, behavior: Any, edge: Edge) -> Any:
    decode = _decoder(method.input_type)
    if method.server_streaming:
        name = _name(method)
        is_talk = isasyncgenfunction(behavior)
        exchange = _conversation(behavior, decode) if is_talk else _call_stream(name, behavior, decode, edge)
        return grpc.stream_stream_rpc_method_handler(_streaming(exchange, edge), response_serializer=_serialize)

    async def decode_now(_sender: int, data: bytes) -> Message:
        return decode(data)

    return grpc.stream_unary_rpc_method_handler(
        unary_call(method, behavior, edge, decode_now), response_serializer=_serialize
    )


def _name(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}/{method.name}"


def _serialize(response: Message) -> bytes:
    return response.SerializeToString()


def _decoder(descriptor: Descriptor) -> Callable[[bytes], Message]:
    request_class = message_factory.GetMessageClass(descriptor)

    def decode(data: bytes) -> Message:
        check_fields(data, descriptor)
        try:
            return request_class.FromString(data)
        except DecodeError:
            raise MalformedRequest from None

    return decode


def unary_call(
    method: MethodDescriptor, behavior: Callable[[Any, Any], Awaitable[Message]], edge: Edge, decode: Decode
) -> Call:
    """Return what surrounds `behavior`, whatever carries its requests."""
    name = _name(method)
    right: Right = RIGHTS[f"{method.containing_service.full_name}/{method.name}"]
    budget, reads = edge.budget, edge.reads

    async def of_app(caller: Caller, context: Context) -> Message:
        app = caller.app
        budget.begin_call(app)
        try:
            data = await reads.one(context, app.number)
            size = len(data)
            budget.begin_request(app, size)
            try:
                request = await decode(app.number, data)
                del data  # the request has its own copy
                return await behavior(caller, request)
            finally:
                budget.end_request(app, size)
        finally:
            budget.end_call(app)

    async def of_operator(operator: Operator, role: Role, context: Context) -> Message:
        demand_role(operator, role)
        request = await decode(OPERATORS, await reads.one(context, OPERATORS))
        demand_topics(operator, right, request, edge.authentication.catalog)
        ORIGIN.set(context.peer()[:LONGEST_ORIGIN])
        if role > Role.VIEWER:
            return await behavior(operator, request)
        async with edge.looks(operator):
            return await _through_a_move(lambda: behavior(operator, request))

    async def serve(context: Context) -> Message:
        if right.role is None:
            return await of_app(edge.identity(edge.authentication.app, context), context)
        return await of_operator(edge.operator(context), right.role, context)

    async def call(_requests: Any, context: Context) -> Message | None:
        began = time.monotonic()
        try:
            answer = await _outcome(serve(context))
        except grpc.aio.AbortError as refused:  # while it was read: gRPC raises it again
            let_go(refused)
            return None
        if not isinstance(answer, TmcError):
            _served(name).observe(time.monotonic() - began)
            return answer
        METRICS.call_seconds.labels(name, CODES[type(answer)].name).observe(time.monotonic() - began)
        await edge.refuse(context, answer)
        return None

    return _traced(name, call)


async def _through_a_move(look: Callable[[], Awaitable[Message]]) -> Message:
    """Repeat a look that meets a shard on its way to another database, which takes a second or two."""
    until = time.monotonic() + _MOVE_S
    while True:
        try:
            return await look()
        except StoreUnavailable as exc:
            if not exc.lacks_table or time.monotonic() > until:
                raise
        await asyncio.sleep(_MOVE_PAUSE_S)


def _traced(name: str, call: Call) -> Call:
    """Put a span around each call, if the server uses OpenTelemetry."""
    service, _, method = name.partition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": f"tmc.v1.{service}", "rpc.method": method}

    async def traced(requests: Any, context: Context) -> Message | None:
        if not tracing.is_on():
            return await call(requests, context)
        metadata = {key: text for key, text in context.invocation_metadata() or () if isinstance(text, str)}
        with tracing.span(f"tmc.v1.{name}", "SERVER", attributes, parent=metadata) as span:
            answer = await call(requests, context)
            code = context.code()
            number = code.value[0] if isinstance(code, grpc.StatusCode) else code or 0
            tracing.note(span, "rpc.grpc.status_code", number)
            return answer

    return traced


@cache
def _served(name: str) -> Histogram:
    """Make the histogram with the first call, or every server would begin with a thousand series that stay empty."""
    return METRICS.call_seconds.labels(name, "OK")


def _conversation(
    behavior: Callable[[Any, Any], AsyncGenerator[Message]], decode: Callable[[bytes], Message]
) -> _Exchange:
    async def exchange(caller: Caller, _stream: _Stream, context: Context) -> None:
        async with aclosing(behavior(caller, _requests(context, decode))) as responses:
            async for response in responses:
                await context.write(response)

    return exchange


def _call_stream(
    name: str, behavior: Callable[[Any, Any], Awaitable[Work]], decode: Callable[[bytes], Message], edge: Edge
) -> _Exchange:
    async def exchange(opener: Caller, stream: _Stream, context: Context) -> None:
        app = opener.app

        def hold(size: int) -> Callable[[], None]:
            edge.budget.hold_request(app, size)
            return partial(edge.budget.end_request, app, size)

        async def admit(data: bytes) -> Work:
            await edge.budget.when_rates_allow(app, len(data))
            caller = edge.identity(stream.identify, context)  # an operator's rights may have changed or expired
            # The trace in the stream's metadata is not that of its messages.
            return _timed(name, await behavior(replace(caller, context={}), decode(data)))

        calls = CallStream(context, hold=hold, admit=admit, line=edge.line(app), failure=_failure)
        stream.finish = calls.finish
        await calls.serve()

    return exchange


def _timed(name: str, work: Work) -> Work:
    async def timed() -> Message:
        began = time.monotonic()
        response = await work()
        _served(name).observe(time.monotonic() - began)
        return response

    return timed


def _failure(exc: Exception) -> Exception:
    return exc if isinstance(exc, grpc.aio.AbortError) else _as_ours(exc)


def _streaming(exchange: _Exchange, edge: Edge) -> Callable[[Any, Context], Awaitable[None]]:
    identify = edge.authentication.app

    async def serve(stream: _Stream, context: Context) -> None:
        caller = edge.identity(identify, context)
        with _open_stream(edge, stream, caller.app):
            await exchange(caller, stream, context)

    async def call(_requests: Any, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        stream = _Stream(identify=identify, metadata=context.invocation_metadata() or (), task=task)
        try:
            error = await _outcome(serve(stream, context))
        except asyncio.CancelledError:
            error = stream.revoked
            if error is None:
                raise
            task.uncancel()
            if isinstance(error, CredentialsInvalid):
                error = CredentialsInvalid("The key of this stream was dropped: open another with a new key.")
        if error is not None:
            await edge.refuse(context, error)

    return call


@contextmanager
def _open_stream(edge: Edge, stream: _Stream, app: App) -> Iterator[None]:
    edge.budget.begin_stream(app)
    METRICS.streams_open.inc()
    try:
        edge.opened(stream)
        yield
    finally:
        METRICS.streams_open.dec()
        edge.closed(stream)
        edge.budget.end_stream(app)


async def _requests(context: Context, decode: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    """The requests of a stream, until the client has sent its last. Raises MalformedRequest."""
    while True:
        data: Any = await context.read()
        if data is grpc.aio.EOF:
            return
        yield decode(data)


async def _outcome(work: Awaitable[Answer]) -> Answer | TmcError:
    """The one place where an exception becomes a status, whatever broke."""
    try:
        return await work
    except grpc.aio.AbortError:  # refused already: nothing is left to say
        raise
    except Exception as exc:  # noqa: BLE001 - the edge, see the module
        return _as_ours(exc)


def _as_ours(exc: Exception) -> TmcError:
    return exc if isinstance(exc, TmcError) and type(exc) in CODES else unforeseen(exc)


def unforeseen(exc: Exception) -> TmcError:
    """Log a fault of ours. Returns: what its caller gets, with the id under which it is in the log."""
    correlation_id = uuid.uuid4().hex[:12]
    log.error("call_failed", "a call failed, correlation id %s", correlation_id, exc_info=exc)
    return InternalFault(f"The center failed on this call; its operators find it by correlation id {correlation_id}.")
