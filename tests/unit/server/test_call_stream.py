"""Calls over one stream: their order, what slows them down, and how the stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any

import grpc
import pytest

from tmc_server.domain.catalog import App
from tmc_server.errors import MalformedRequest, RateLimited, ShuttingDown
from tmc_server.requests.caller import Allowance, Budget
from tmc_server.rpc.call_stream import CallStream

AT_ONCE = 16
APP = App(number=1, id="orders", service_name="", biz_id="", alert_email="", alert_phone="", key_hashes=())


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run


class Line:
    """The client's side of a stream."""

    def __init__(self, requests: int = 0, ends: bool = True) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[Any] = []
        self.read_so_far = 0
        self._is_writing = False
        for number in range(requests):
            self.requests.put_nowait(str(number).encode())
        if ends:
            self.requests.put_nowait(grpc.aio.EOF)

    async def read(self) -> Any:
        request = await self.requests.get()
        self.read_so_far += request is not grpc.aio.EOF
        return request

    async def write(self, response: Any) -> None:
        assert not self._is_writing, "gRPC takes one response at a time"
        self._is_writing = True
        await asyncio.sleep(0)
        self._is_writing = False
        self.written.append(response)


async def _settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def _stream(line: Any, perform: Callable[[bytes], Awaitable[Any]], budget: Budget | None = None) -> CallStream:
    return CallStream(line, APP, budget or Budget(Allowance()), perform)


class Work:
    """Requests that are performed when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[bytes, asyncio.Future[bytes]] = {}

    async def perform(self, data: bytes) -> Any:
        self.begun[data] = asyncio.get_running_loop().create_future()
        return await self.begun[data]

    def done(self, *numbers: int) -> None:
        for number in numbers:
            self.begun[b"%d" % number].set_result(b"%d" % number)


@on_a_loop
async def test_responses_come_as_they_are_ready() -> None:
    line, work = Line(3), Work()
    serving = asyncio.create_task(_stream(line, work.perform).serve())
    await _settled()
    for numbers in ((2,), (0, 1)):
        work.done(*numbers)
        await _settled()
    await serving
    assert line.written == [b"2", b"0", b"1"]


@on_a_loop
async def test_no_more_is_read_than_is_worked_on() -> None:
    line, work = Line(40), Work()
    serving = asyncio.create_task(_stream(line, work.perform).serve())
    await _settled()
    assert (line.read_so_far, len(work.begun)) == (AT_ONCE, AT_ONCE)
    work.done(5)
    await _settled()
    assert line.read_so_far == AT_ONCE + 1
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


@on_a_loop
async def test_a_client_that_reads_no_response_is_not_read_either() -> None:
    line, stuck = Line(40), asyncio.Event()

    async def write(response: Any) -> None:
        await stuck.wait()

    async def perform(data: bytes) -> Any:
        return data

    line.write = write  # type: ignore[method-assign]
    serving = asyncio.create_task(_stream(line, perform).serve())
    await _settled()
    assert line.read_so_far == AT_ONCE
    serving.cancel()
    await asyncio.wait({serving})


@on_a_loop
async def test_what_breaks_the_stream_is_raised_after_the_others_are_answered() -> None:
    line, work = Line(2, ends=False), Work()

    async def perform(data: bytes) -> Any:
        if data == b"1":
            raise MalformedRequest
        return await work.perform(data)

    serving = asyncio.create_task(_stream(line, perform).serve())
    await _settled()
    line.requests.put_nowait(b"too late")
    work.done(0)
    with pytest.raises(MalformedRequest):
        await serving
    assert line.written == [b"0"]


@on_a_loop
async def test_a_stream_that_is_finished_answers_what_it_has_read() -> None:
    line, work = Line(1, ends=False), Work()
    stream = _stream(line, work.perform)
    serving = asyncio.create_task(stream.serve())
    await _settled()
    stream.finish()
    await _settled()
    assert not serving.done()
    work.done(0)
    with pytest.raises(ShuttingDown):
        await serving
    assert line.written == [b"0"]


@pytest.mark.parametrize(
    "allowance",
    [Allowance(calls_per_second=1), Allowance(bytes_per_second=1), Allowance(open_calls=1)],
    ids=["calls_per_second", "bytes_per_second", "open_calls"],
)
@on_a_loop
async def test_a_limit_delays_requests_and_refuses_none(allowance: Allowance, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, pause = 100.0, 0, asyncio.sleep

    async def wait(seconds: float) -> None:
        nonlocal now, waits
        now, waits = now + seconds, waits + (seconds > 0)
        await pause(0)

    monkeypatch.setattr(
        "tmc_server.rpc.call_stream.asyncio.sleep", wait
    )  # of this module's asyncio: `pause` is the real one

    async def perform(data: bytes) -> Any:
        await pause(0)
        return data

    line = Line(5)
    budget = Budget(allowance, lambda: now)
    await CallStream(line, APP, budget, perform).serve()  # type: ignore[arg-type]
    assert sorted(line.written) == [b"0", b"1", b"2", b"3", b"4"]
    assert waits
    now += 60
    budget.begin_call(APP)  # all was given back
    budget.begin_request(APP, 1)


@on_a_loop
async def test_more_open_bytes_than_an_app_may_have_end_the_stream_after_what_was_read() -> None:
    line, work = Line(4, ends=False), Work()
    budget = Budget(Allowance(open_bytes=3))
    serving = asyncio.create_task(_stream(line, work.perform, budget).serve())
    await _settled()
    assert (line.read_so_far, len(work.begun)) == (4, 3)
    work.done(0, 1, 2)
    with pytest.raises(RateLimited):
        await serving
    assert line.written == [b"0", b"1", b"2"]
    budget.begin_request(APP, 3)


@on_a_loop
@pytest.mark.parametrize("turns", range(8))
async def test_a_canceled_stream_gives_its_budget_back(turns: int) -> None:
    line, work = Line(3, ends=False), Work()
    budget = Budget(Allowance(open_calls=3, open_bytes=3))
    serving = asyncio.create_task(_stream(line, work.perform, budget).serve())
    for _ in range(turns):  # some of its requests have not begun
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait({serving})
    for _ in range(3):
        budget.begin_call(APP)
        budget.begin_request(APP, 1)
