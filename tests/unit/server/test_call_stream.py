"""Calls over one stream: their order, what slows them down, and how the stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from typing import Any

import grpc
import pytest

from tmc_server.domain.catalog import App
from tmc_server.errors import MalformedRequest, RateLimited, ShuttingDown
from tmc_server.requests.caller import Allowance, Budget
from tmc_server.rpc.call_stream import CallStream

AT_ONCE = 4
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


def _stream(
    line: Any,
    perform: Callable[[bytes], Awaitable[Any]],
    budget: Budget | None = None,
    turns: asyncio.Lock | None = None,
) -> CallStream:
    limits = budget or Budget(Allowance())

    def hold(size: int) -> Callable[[], None]:
        limits.hold_request(APP, size)
        return partial(limits.end_request, APP, size)

    async def admit(data: bytes) -> Callable[[], Awaitable[Any]]:
        await limits.when_rates_allow(APP, len(data))
        return partial(perform, data)

    return CallStream(line, hold=hold, admit=admit, line=turns or asyncio.Lock(), failure=lambda exc: exc)


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
    work.done(2)
    await _settled()
    assert line.read_so_far == AT_ONCE + 1
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


@on_a_loop
async def test_a_client_that_reads_no_response_is_not_read_either() -> None:
    class Stuck(Line):
        async def write(self, response: Any) -> None:
            await asyncio.Event().wait()

    line = Stuck(40)

    async def perform(data: bytes) -> Any:
        return data

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


class Time:
    """A clock that sleeps move, and how many slept at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sleeping, self.slept, self.crowd = 100.0, 0, 0, 0
        self._pause = asyncio.sleep
        monkeypatch.setattr("tmc_server.requests.caller.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            self.slept += 1
            self.sleeping += 1
            self.crowd = max(self.crowd, self.sleeping)
        for _ in range(5):
            await self._pause(0)
        self.now += seconds
        self.sleeping -= seconds > 0


async def _same(data: bytes) -> Any:
    return data


@on_a_loop
@pytest.mark.parametrize(
    "allowance",
    [Allowance(calls_per_second=1), Allowance(bytes_per_second=1)],
    ids=["calls_per_second", "bytes_per_second"],
)
async def test_a_rate_delays_requests_and_refuses_none(allowance: Allowance, monkeypatch: pytest.MonkeyPatch) -> None:
    time, line = Time(monkeypatch), Line(5)
    budget = Budget(allowance, lambda: time.now)
    await _stream(line, _same, budget).serve()
    assert sorted(line.written) == [b"0", b"1", b"2", b"3", b"4"]
    assert time.slept == 4  # one second each, but for the first
    time.now += 60
    budget.begin_request(APP, 1)


@on_a_loop
async def test_of_all_that_waits_for_a_rate_only_the_first_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    time, turns = Time(monkeypatch), asyncio.Lock()
    budget = Budget(Allowance(calls_per_second=1), lambda: time.now)
    lines = [Line(3) for _ in range(5)]
    await asyncio.gather(*(_stream(line, _same, budget, turns).serve() for line in lines))
    assert [len(line.written) for line in lines] == [3] * 5
    assert (time.crowd, time.slept) == (1, 14)


@on_a_loop
async def test_small_requests_do_not_overtake_a_large_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    time, turns, order = Time(monkeypatch), asyncio.Lock(), list[bytes]()

    async def perform(data: bytes) -> Any:
        order.append(data[:1])
        return data

    budget = Budget(Allowance(bytes_per_second=100), lambda: time.now)
    large, small = Line(), Line()
    large.requests = asyncio.Queue()
    for request in (b"a" * 60, b"L" * 100, grpc.aio.EOF):
        large.requests.put_nowait(request)
    serving = asyncio.create_task(_stream(large, perform, budget, turns).serve())
    for _ in range(3):
        await asyncio.sleep(0)
    small.requests = asyncio.Queue()
    for request in (*[b"s"] * 20, grpc.aio.EOF):
        small.requests.put_nowait(request)
    await asyncio.gather(serving, _stream(small, perform, budget, turns).serve())
    assert b"L" in order[:3]


@on_a_loop
async def test_a_stream_that_is_finished_does_not_wait_for_its_rates() -> None:
    line, budget = (
        Line(3, ends=False),
        Budget(Allowance(calls_per_second=1, open_bytes=3), lambda: 100.0),
    )  # time stands still
    stream = _stream(line, _same, budget)
    serving = asyncio.create_task(stream.serve())
    await _settled()
    stream.finish()
    with pytest.raises(ShuttingDown):
        await serving
    assert line.written == [b"0"]
    budget.hold_request(APP, 3)


@on_a_loop
async def test_a_stream_whose_client_has_sent_all_ends_well_when_it_is_finished() -> None:
    line, work = Line(1), Work()
    stream = _stream(line, work.perform)
    serving = asyncio.create_task(stream.serve())
    await _settled()
    stream.finish()
    work.done(0)
    await serving
    assert line.written == [b"0"]


@on_a_loop
async def test_a_read_that_fails_ends_the_stream_after_what_was_read() -> None:
    class Broken(Line):
        async def read(self) -> Any:
            if self.read_so_far == 2:
                raise RuntimeError("the call is broken")
            return await super().read()

    line, work = Broken(3), Work()
    serving = asyncio.create_task(_stream(line, work.perform).serve())
    await _settled()
    work.done(0, 1)
    with pytest.raises(RuntimeError, match="broken"):
        await serving
    assert line.written == [b"0", b"1"]


@on_a_loop
async def test_more_open_bytes_than_an_app_may_have_end_the_stream_after_what_was_read() -> None:
    line, work = Line(3, ends=False), Work()
    budget = Budget(Allowance(open_bytes=2))
    serving = asyncio.create_task(_stream(line, work.perform, budget).serve())
    await _settled()
    assert (line.read_so_far, len(work.begun)) == (3, 2)
    work.done(0, 1)
    with pytest.raises(RateLimited):
        await serving
    assert line.written == [b"0", b"1"]
    budget.begin_request(APP, 2)


@on_a_loop
@pytest.mark.parametrize("turns", range(8))
async def test_a_canceled_stream_gives_its_budget_back(turns: int) -> None:
    line, work = Line(3, ends=False), Work()
    budget = Budget(Allowance(open_bytes=3))
    serving = asyncio.create_task(_stream(line, work.perform, budget).serve())
    for _ in range(turns):  # some of its requests have not begun
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait({serving})
    budget.begin_request(APP, 3)
