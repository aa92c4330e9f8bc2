"""Serves calls over one stream: each request is answered by one response, as soon as it is done.

A rate that would refuse a single call slows a stream down: its requests wait, and while `_AT_ONCE` of them wait or run, no
further one is read, so that flow control stops the sender. Only more bytes than an app may have open end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from google.protobuf.message import Message

from tmc_server.domain.catalog import App
from tmc_server.errors import RateLimited, ShuttingDown
from tmc_server.requests.caller import Budget
from tmc_server.rpc.refusing import Context

_AT_ONCE = 16
_LONGEST_PAUSE_S = 0.1  # what is open may end at any time

Perform = Callable[[bytes], Awaitable[Message]]


class CallStream:
    """An app's stream. On the loop only.  perform: answers one request; what it raises ends the stream."""

    def __init__(self, context: Context, app: App, budget: Budget, perform: Perform) -> None:
        self._context = context
        self._app = app
        self._budget = budget
        self._perform = perform
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._writing = asyncio.Lock()  # gRPC takes one response at a time
        self._reading: asyncio.Task[None] | None = None
        self._broken_by: Exception | None = None

    async def serve(self) -> None:
        """Serve until the client has sent its last request, or something ended the stream early, which is raised.

        Either way, requests that have been read are answered first.
        """
        async with asyncio.TaskGroup() as tasks:
            self._reading = tasks.create_task(self._read(tasks))
        if self._broken_by is not None:
            raise self._broken_by

    def finish(self) -> None:
        """Read no more: the client continues elsewhere."""
        self._end(ShuttingDown())

    def _end(self, cause: Exception) -> None:
        if self._broken_by is None:
            self._broken_by = cause
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._room.acquire()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            try:
                self._budget.hold_request(self._app, len(data))
            except RateLimited as error:
                self._end(error)
                return
            answering = tasks.create_task(self._answer(data))
            answering.add_done_callback(partial(self._done, len(data)))  # also of one that was canceled before it began

    async def _answer(self, data: bytes) -> None:
        try:
            response = await self._within_rates(data)
            async with self._writing:
                await self._context.write(response)
        except Exception as exc:  # noqa: BLE001 - `serve` raises it, once the others are answered
            self._end(exc)

    def _done(self, size: int, _answering: asyncio.Task[None]) -> None:
        self._budget.end_request(self._app, size)
        self._room.release()

    async def _within_rates(self, data: bytes) -> Message:
        app, budget = self._app, self._budget
        await when_allowed(lambda: budget.begin_call(app))
        try:
            await when_allowed(lambda: budget.take_bytes(app, len(data)))
            return await self._perform(data)
        finally:
            budget.end_call(app)


async def when_allowed(take: Callable[[], None]) -> None:
    """Take from a limit, as soon as it allows it."""
    while True:
        try:
            return take()
        except RateLimited as limited:
            await asyncio.sleep(min(limited.retry_after_ms / 1000, _LONGEST_PAUSE_S))
