"""Health and reflection answer without authentication, so they get little: short requests, a bounded number of calls at once.

An interceptor, so that it holds for every service that is not ours. Like ours, their requests are read
only when there is room for them. No connection can take all of that room, and those that showed a key have their own:
clients and load balancers take a server out whose health they cannot see.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from tmc_server.errors import MalformedRequest, RateLimited, TmcError
from tmc_server.rpc.doorkeeper import Doorkeeper
from tmc_server.rpc.reads import STRANGERS, Overdue, Reads
from tmc_server.rpc.refusing import Context, let_go, refuse

OWN_SERVICES = "/tmc."
_REQUEST_BYTES = 4096
_MOST_READS = 4  # further ones wait; an unfinished one is refused soon, see reads.py
_READS_OF_ONE = 2  # per connection
_MOST_WATCHES = 4  # per connection, further ones are refused; clients of gRPC keep one on each
_MOST_STREAMS = 128  # with many requests (reflection), of all connections together


class _Places:
    """Limits how many calls of each kind or connection run at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: Counter[str] = Counter()

    @contextmanager
    def one(self, of: str) -> Iterator[None]:
        if self._inside[of] >= self._most:
            raise RateLimited("Too many calls without a key at once: repeat after the given time.")
        self._inside[of] += 1
        try:
            yield
        finally:
            self._inside[of] -= 1
            if not self._inside[of]:
                del self._inside[of]


class _Turns:
    """Who may read now: few in all, fewer of one connection. Others wait."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(_MOST_READS)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while anybody is in it

    def of(self, peer: str) -> asyncio.Semaphore:
        return self._of.setdefault(peer, asyncio.Semaphore(_READS_OF_ONE))


class UnauthenticatedMethods(grpc.aio.ServerInterceptor):
    """Guards every method of other services."""

    def __init__(self, reads: Reads, doorkeeper: Doorkeeper) -> None:
        self._reads = reads
        self._doorkeeper = doorkeeper
        self._turns = {proven: _Turns() for proven in (False, True)}
        self._watches = _Places(_MOST_WATCHES)
        self._streams = _Places(_MOST_STREAMS)
        self._guarded: dict[Any, Any] = {}
        self._unknown: Any = grpc.stream_unary_rpc_method_handler(self._no_such_method)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return self._unknown
        if details.method.startswith(OWN_SERVICES):
            return handler
        guarded = self._guarded.get(handler)
        if guarded is None:
            guarded = self._guarded[handler] = self._guard(handler)
        return guarded

    def _guard(self, handler: Any) -> Any:
        options = {"response_serializer": handler.response_serializer}
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler), **options)
        return grpc.stream_unary_rpc_method_handler(self._unary(handler), **options)

    async def _no_such_method(self, _requests: Any, context: Context) -> None:
        await self._doorkeeper.hold_up(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    def _unary(self, handler: Any) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(_requests: Any, context: Context) -> Any:
            try:
                await self._doorkeeper.admit(context)
                return await handler.unary_unary(await self._request(handler, context), context)
            except grpc.aio.AbortError as refused:  # while it was read: gRPC raises it again
                if isinstance(refused, Overdue):
                    self._doorkeeper.offended(context)
                let_go(refused)
                return None
            except TmcError as exc:
                error = exc
            await refuse(context, error)
            return None

        return call

    def _streaming(self, handler: Any) -> Callable[[Any, Context], Awaitable[None]]:
        async def responses(context: Context) -> Any:
            if handler.request_streaming:
                return handler.stream_stream(self._requests(handler, context), context)
            return handler.unary_stream(await self._request(handler, context), context)

        async def call(_requests: Any, context: Context) -> None:
            try:
                await self._doorkeeper.admit(context)
                with self._streams.one("all") if handler.request_streaming else self._watches.one(context.peer()):
                    answers = await responses(context)
                    if hasattr(answers, "__aiter__"):
                        async for answer in answers:
                            await context.write(answer)
                    else:
                        await answers  # it writes by itself
                    return
            except grpc.aio.AbortError as refused:
                let_go(refused)
                return
            except TmcError as exc:
                error = exc
            await refuse(context, error)

        return call

    async def _requests(self, handler: Any, context: Context) -> AsyncIterator[Any]:
        while (data := await self._reads.next(context, STRANGERS)) is not None:
            yield _decoded(handler, data)

    async def _request(self, handler: Any, context: Context) -> Any:
        turns = self._turns[self._doorkeeper.proven(context)]
        async with turns.of(context.peer()), turns.all:
            data = await self._reads.one(context, STRANGERS)
        return _decoded(handler, data)


def _decoded(handler: Any, data: bytes) -> Any:
    if len(data) > _REQUEST_BYTES:
        raise MalformedRequest
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        raise MalformedRequest from None
