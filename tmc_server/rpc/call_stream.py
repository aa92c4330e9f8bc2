"""Serves calls over one stream: each request is answered by one response, as soon as it is done.

Requests are admitted one after the other, those of all streams of an app in one line. A rate that would refuse a single call
makes that line wait, so that flow control stops the sender; only its head takes any time of the loop. What is admitted runs
beside other requests, up to `_AT_ONCE` of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from google.protobuf.message import Message

from tmc_server.errors import ShuttingDown
from tmc_server.rpc.refusing import Context, let_go

_AT_ONCE = 4

Work = Callable[[], Awaitable[Message]]
Hold = Callable[[int], Callable[[], None]]
Admit = Callable[[bytes], Awaitable[Work]]


class CallStream:
    """One stream of an app. On the loop only.

    hold: counts the bytes of a request that was read; returns what gives them back.  admit: waits until the request may run;
    returns what answers it.  line: of the app.  failure: makes of an exception what the stream ends with, logged if need be.
    What `hold`, `admit` or the work raises ends the stream.
    """

    def __init__(
        self,
        context: Context,
        *,
        hold: Hold,
        admit: Admit,
        line: asyncio.Lock,
        failure: Callable[[Exception], Exception],
    ) -> None:
        self._context = context
        self._hold = hold
        self._admit = admit
        self._line = line
        self._failure = failure
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._writing = asyncio.Lock()  # gRPC takes one response at a time
        self._reading: asyncio.Task[None] | None = None
        self._ended_by: Exception | None = None

    async def serve(self) -> None:
        """Serve until the client has sent its last request, or something ended the stream early, which is raised.

        Either way, requests that were admitted are answered first.
        """
        async with asyncio.TaskGroup() as tasks:
            self._reading = tasks.create_task(self._read(tasks))
        if self._ended_by is not None:
            raise self._ended_by

    def finish(self) -> None:
        """Admit no more: the client continues elsewhere."""
        if self._reading is not None and not self._reading.done():
            self._end(ShuttingDown())

    def _end(self, cause: Exception) -> None:
        failure = self._failure(cause)
        let_go(failure)  # its frames hold the request
        if self._ended_by is None:
            self._ended_by = failure
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        try:
            while True:
                await self._room.acquire()
                data = await self._context.read()
                if data is grpc.aio.EOF:
                    return
                let_bytes_go = self._hold(len(data))
                try:
                    async with self._line:
                        work = await self._admit(data)
                except BaseException:
                    let_bytes_go()
                    raise
                del data  # the request has its own copy
                answering = tasks.create_task(
                    self._answer(work)
                )  # canceled before it begins, it runs nothing of its own
                answering.add_done_callback(partial(self._done, let_bytes_go))
        except Exception as exc:  # noqa: BLE001 - `serve` raises it, once the others are answered
            self._end(exc)

    async def _answer(self, work: Work) -> None:
        try:
            response = await work()
            async with self._writing:
                await self._context.write(response)
        except Exception as exc:  # noqa: BLE001 - `serve` raises it, once the others are answered
            self._end(exc)

    def _done(self, let_bytes_go: Callable[[], None], _answering: asyncio.Task[None]) -> None:
        let_bytes_go()
        self._room.release()
