"""Before a request is looked at: budgets, unfinished requests, connections of strangers, fields on the wire, failed logins."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import grpc
import pytest

from tests.support.metrics import value
from tmc_common.protocol import message_pb2
from tmc_server.domain.catalog import App
from tmc_server.errors import (
    AdminOnly,
    CredentialsInvalid,
    CredentialsMissing,
    InvalidField,
    MalformedRequest,
    RateLimited,
)
from tmc_server.metrics import METRICS
from tmc_server.requests.caller import Allowance, Budget
from tmc_server.rpc.authentication import FailedLogins
from tmc_server.rpc.doorkeeper import Doorkeeper, Sockets
from tmc_server.rpc.reads import OF_APPS, OF_STRANGERS, STRANGERS, Overdue, Reads
from tmc_server.rpc.refusing import refuse
from tmc_server.rpc.strangers import UnauthenticatedMethods
from tmc_server.rpc.wire import check_fields

ONE, OTHER = (
    App(number=i, id=f"app{i}", service_name="", biz_id="", alert_email="", alert_phone="", key_hashes=())
    for i in (1, 2)
)


class TestBudget:
    def test_calls_have_a_rate_for_each_app_by_itself(self) -> None:
        budget = Budget(Allowance(calls_per_second=2), lambda: 100.0)
        budget.begin_call(ONE)
        budget.begin_stream(ONE)
        with pytest.raises(RateLimited):
            budget.begin_call(ONE)
        budget.begin_call(OTHER)

    def test_open_calls_and_streams_are_counted_until_they_end(self) -> None:
        budget = Budget(Allowance(open_calls=2, streams=1))
        budget.begin_call(ONE)
        budget.begin_call(ONE)
        budget.begin_stream(ONE)
        for refused in (budget.begin_call, budget.begin_stream):
            with pytest.raises(RateLimited):
                refused(ONE)
        budget.begin_call(OTHER)
        budget.end_call(ONE)
        budget.end_stream(ONE)
        budget.begin_call(ONE)
        budget.begin_stream(ONE)

    def test_bytes_are_counted_by_rate_and_while_they_are_open(self) -> None:
        budget = Budget(Allowance(bytes_per_second=1000, open_bytes=100), lambda: 100.0)
        budget.begin_request(ONE, 60)
        with pytest.raises(RateLimited):
            budget.begin_request(ONE, 60)
        budget.end_request(ONE, 60)
        budget.begin_request(ONE, 500)  # one alone is never too large
        budget.end_request(ONE, 500)
        with pytest.raises(RateLimited) as caught:
            budget.begin_request(ONE, 500)
        assert caught.value.retry_after_ms > 1


class _Unread:
    """A call whose request does not come; refused: with which status."""

    def __init__(self) -> None:
        self.refused: grpc.StatusCode | None = None
        self._ended = asyncio.Event()

    async def read(self) -> bytes:
        await self._ended.wait()
        raise grpc.aio.AbortError

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.refused = code
        self._ended.set()
        raise grpc.aio.AbortError


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TestUnfinishedRequests:
    async def _outcome(self, sender: int, count: int, waited_s: float) -> list[_Unread]:
        clock = [0.0]
        reads, calls = Reads(lambda: clock[0]), [_Unread() for _ in range(count)]
        tasks = [asyncio.ensure_future(reads.next(call, sender)) for call in calls]
        await asyncio.sleep(0)
        clock[0] = waited_s
        reads.look()
        for _ in range(10):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [call for call in calls if call.refused is grpc.StatusCode.RESOURCE_EXHAUSTED]

    @pytest.mark.parametrize("sender", [7, STRANGERS])
    def test_of_many_the_ones_over_the_crowd_are_refused_soon(self, sender: int) -> None:
        patience = OF_STRANGERS if sender == STRANGERS else OF_APPS
        refused = asyncio.run(self._outcome(sender, patience.crowd + 5, patience.crowded_s + 0.01))
        assert len(refused) == 5

    def test_few_may_take_their_time_but_not_for_ever(self) -> None:
        assert asyncio.run(self._outcome(7, OF_APPS.crowd, OF_APPS.crowded_s + 1)) == []
        assert len(asyncio.run(self._outcome(7, 1, OF_APPS.longest_s + 1))) == 1

    def test_the_newest_of_a_crowd_is_refused_so_the_others_get_through(self) -> None:
        async def story() -> list[int]:
            clock = [0.0]
            reads, calls = Reads(lambda: clock[0]), [_Unread() for _ in range(OF_APPS.crowd + 1)]
            tasks = [asyncio.ensure_future(reads.next(call, 7)) for call in calls]
            await asyncio.sleep(0)
            clock[0] = OF_APPS.crowded_s + 0.01
            reads.look()
            await _settle()
            refused = [number for number, call in enumerate(calls) if call.refused]
            await _end(tasks)
            return refused

        assert asyncio.run(story()) == [OF_APPS.crowd]

    @pytest.mark.parametrize("sender", [7, STRANGERS])
    def test_time_in_which_the_loop_stood_still_does_not_count(self, sender: int) -> None:
        async def story() -> tuple[int, int]:
            clock = [0.0]
            patience = OF_STRANGERS if sender == STRANGERS else OF_APPS
            reads, calls = Reads(lambda: clock[0]), [_Unread() for _ in range(patience.crowd + 2)]
            tasks = [asyncio.ensure_future(reads.next(call, sender)) for call in calls]
            await asyncio.sleep(0)
            clock[0] = 100.0
            reads._look_on()
            await _settle()
            after_stall = sum(call.refused is not None for call in calls)
            clock[0] += patience.crowded_s
            reads.look()
            await _settle()
            refused = sum(call.refused is not None for call in calls)
            await _end(tasks)
            return after_stall, refused

        assert asyncio.run(story()) == (0, 2)

    def test_only_a_sender_that_had_all_the_time_is_overdue(self) -> None:
        async def story(count: int, waited_s: float) -> list[type[BaseException]]:
            clock = [0.0]
            reads = Reads(lambda: clock[0])
            tasks = [asyncio.ensure_future(reads.next(_Unread(), STRANGERS)) for _ in range(count)]
            await asyncio.sleep(0)
            clock[0] = waited_s
            reads.look()
            await _settle()
            ended = [type(task.exception()) for task in tasks if task.done()]
            await _end(tasks)
            return ended

        assert asyncio.run(story(2, OF_STRANGERS.crowded_s + 0.01)) == [grpc.aio.AbortError]
        assert asyncio.run(story(1, OF_STRANGERS.longest_s + 0.01)) == [Overdue]


class _Peer:
    def __init__(self, name: str, left_s: float | None = None) -> None:
        self.name = name
        self._left_s = left_s

    def peer(self) -> str:
        return self.name

    def time_remaining(self) -> float | None:
        return self._left_s


class _FakeSockets(Sockets):
    def __init__(self, *peers: str) -> None:
        self.live = {peer: number for number, peer in enumerate(peers)}
        self.closed: list[str] = []

    def connections(self, port: int) -> dict[str, int]:
        return dict(self.live)

    def shut_down(self, number: int, peer: str) -> bool:
        assert self.live.pop(peer) == number
        self.closed.append(peer)
        return True


class TestDoorkeeper:
    def test_a_connection_that_sends_many_calls_without_a_key_waits_and_no_other_does(self) -> None:
        """Five at once, four a second."""

        async def story() -> list[int]:
            clock = [50.0]
            doorkeeper = Doorkeeper(100, _FakeSockets(), lambda: clock[0])

            async def answered(peer: str, count: int) -> int:
                calls = [asyncio.ensure_future(doorkeeper.hold_up(_Peer(peer))) for _ in range(count)]
                await _settle()
                at_once = sum(call.done() for call in calls)
                await _end(calls)
                return at_once

            seen = [await answered("a", 9), await answered("b", 1)]
            clock[0] += 0.8
            return [*seen, await answered("a", 9)]

        assert asyncio.run(story()) == [5, 1, 3]

    @pytest.mark.parametrize(
        ("retry_after_ms", "left_s", "held_s"),
        [(14, None, 0.1), (300, 5.0, 0.3), (60_000, None, 1.0), (300, 0.5, 0.25)],
    )
    def test_an_app_over_a_limit_learns_it_when_it_may_repeat(
        self, monkeypatch: pytest.MonkeyPatch, retry_after_ms: int, left_s: float | None, held_s: float
    ) -> None:
        """At least a tenth of a second later, before half of its deadline; and it need not wait for that again."""
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        peer = _Peer("a", left_s)
        error = RateLimited(retry_after_ms=retry_after_ms)
        asyncio.run(Doorkeeper(100, _FakeSockets()).hold_back(error, peer))
        assert slept == [held_s]
        assert error.retry_after_ms == max(1, retry_after_ms - round(held_s * 1000))

    def test_the_more_calls_of_a_stranger_wait_the_longer_each_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def story() -> list[float]:
            slept: list[float] = []

            async def hold(seconds: float) -> None:
                slept.append(seconds)
                await asyncio.Event().wait()

            doorkeeper = Doorkeeper(100, _FakeSockets(), lambda: 50.0)
            monkeypatch.setattr(doorkeeper, "_hold", hold)
            calls = [asyncio.ensure_future(doorkeeper.hold_up(_Peer("a"))) for _ in range(200)]
            calls += [asyncio.ensure_future(doorkeeper.hold_up(_Peer("b"))) for _ in range(6)]
            doorkeeper.showed_key(_Peer("c"))
            calls += [asyncio.ensure_future(doorkeeper.hold_up(_Peer("c"))) for _ in range(100)]
            await _settle()
            await _end(calls)
            return slept

        slept = asyncio.run(story())
        assert len(slept) == 195 + 1 + 95  # five each are answered at once
        assert all(seconds <= 2 * 4.5 for seconds in (*slept[:32], *slept[195:]))  # c showed a key
        assert all(seconds >= 5 * 2.0 for seconds in slept[128:195])

    def test_strangers_never_have_more_than_half_of_the_connections(self) -> None:
        clock = [0.0]
        sockets = _FakeSockets(*(f"peer{i}" for i in range(8)))
        doorkeeper = Doorkeeper(10, sockets, lambda: clock[0])
        doorkeeper.showed_key(_Peer("peer0"))
        doorkeeper.sweep()
        assert sockets.closed == []  # they may still show a key
        clock[0] = 1.5
        doorkeeper.showed_key(_Peer("peer1"))
        doorkeeper.sweep()
        assert sockets.closed == ["peer2"]

    def test_a_proven_connection_waits_for_no_health_check(self) -> None:
        async def story() -> list[bool]:
            doorkeeper = Doorkeeper(100, _FakeSockets("a", "b"), lambda: 50.0)
            doorkeeper.showed_key(_Peer("a"))
            held = []
            for peer in (_Peer("a"), _Peer("b")):
                doorkeeper.offended(peer)
                checks = [asyncio.ensure_future(doorkeeper.admit(peer)) for _ in range(30)]
                await _settle()
                held.append(not all(check.done() for check in checks))
                await _end(checks)
            return held

        assert asyncio.run(story()) == [False, True]

    def test_a_connection_that_shows_its_key_during_a_sweep_stays_proven(self) -> None:
        class ShownMeanwhile(_FakeSockets):
            def connections(self, port: int) -> dict[str, int]:
                live = super().connections(port)
                doorkeeper.showed_key(_Peer("new"))
                return live

        doorkeeper = Doorkeeper(10, ShownMeanwhile("old"), lambda: 0.0)
        doorkeeper.sweep()
        assert doorkeeper.proven(_Peer("new"))

    def test_only_the_connection_that_is_meant_is_shut_down(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
            ends = [listening.accept()[0] for _ in clients]
            first, second = (f"ipv4:127.0.0.1:{client.getsockname()[1]}" for client in clients)
            sockets = Sockets()
            found = sockets.connections({port})
            assert found == {first: ends[0].fileno(), second: ends[1].fileno()}
            assert not sockets.shut_down(found[first], second)
            assert sockets.shut_down(found[first], first)
            clients[0].settimeout(10)
            assert clients[0].recv(1) == b""
            clients[1].sendall(b"still open")
            assert ends[1].recv(100) == b"still open"
            for each in (*clients, *ends):
                each.close()


class _Call(_Unread):
    """A call on a connection. request: None if it never comes."""

    def __init__(self, peer: str, request: bytes | None = b"") -> None:
        super().__init__()
        self._peer = peer
        self._request = request

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return self._peer

    async def read(self) -> bytes:
        return await super().read() if self._request is None else self._request


class _Details:
    method = "/grpc.health.v1.Health/Any"


class TestOpenToAll:
    async def _guarded(self, guard: UnauthenticatedMethods, handler: Any) -> Any:
        async def continuation(_details: Any) -> Any:
            return handler

        return await guard.intercept_service(continuation, _Details())

    def test_watches_are_limited_per_connection_and_not_for_all_together(self) -> None:
        async def watch(_request: bytes, _context: Any) -> None:
            await asyncio.Event().wait()

        async def story() -> tuple[int, int]:
            doorkeeper = Doorkeeper(1000, _FakeSockets())
            doorkeeper.showed_key(_Peer("greedy"))  # or some would wait
            guard = UnauthenticatedMethods(Reads(), doorkeeper)
            guarded = await self._guarded(
                guard, grpc.unary_stream_rpc_method_handler(watch, request_deserializer=bytes)
            )
            greedy = [_Call("greedy") for _ in range(6)]
            others = [_Call(f"other{i}") for i in range(200)]
            tasks = [asyncio.ensure_future(guarded.stream_stream(None, call)) for call in (*greedy, *others)]
            for _ in range(100):
                await _settle()
            refused = sum(call.refused is not None for call in greedy), sum(call.refused is not None for call in others)
            await _end(tasks)
            again = asyncio.ensure_future(guarded.stream_stream(None, ended := _Call("greedy")))
            await _settle()
            assert ended.refused is None  # the places of ended streams are free again
            await _end([again])
            return refused

        assert asyncio.run(story()) == (2, 0)

    def test_health_checks_that_met_in_a_crowd_are_not_held_against_their_connection(self) -> None:
        async def check(_request: bytes, _context: Any) -> bytes:
            return b"serving"

        async def story(stuck: int, waited_s: float) -> tuple[int, bool]:
            clock = [0.0]
            reads = Reads(lambda: clock[0])
            guard = UnauthenticatedMethods(reads, Doorkeeper(1000, _FakeSockets(), lambda: clock[0]))
            guarded = await self._guarded(guard, grpc.unary_unary_rpc_method_handler(check, request_deserializer=bytes))
            calls = [_Call("a", None) for _ in range(stuck)]
            tasks = [asyncio.ensure_future(guarded.stream_unary(None, call)) for call in calls]
            await _settle()
            clock[0] = waited_s
            reads.look()
            await _settle()
            following = asyncio.ensure_future(guarded.stream_unary(None, _Call("a")))
            await _settle()
            outcome = sum(call.refused is not None for call in calls), following.done()
            await _end([*tasks, following])
            return outcome

        assert asyncio.run(story(2, OF_STRANGERS.crowded_s + 0.01)) == (1, True)
        assert asyncio.run(story(1, OF_STRANGERS.longest_s + 0.01)) == (1, False)

    def test_unfinished_requests_of_one_connection_leave_room_for_another(self) -> None:
        async def check(_request: bytes, _context: Any) -> bytes:
            return b"serving"

        async def story() -> bool:
            guard = UnauthenticatedMethods(Reads(lambda: 0.0), Doorkeeper(1000, _FakeSockets()))
            guarded = await self._guarded(guard, grpc.unary_unary_rpc_method_handler(check, request_deserializer=bytes))
            stuck = [asyncio.ensure_future(guarded.stream_unary(None, _Call("a", None))) for _ in range(15)]
            await _settle()
            neighbor = asyncio.ensure_future(guarded.stream_unary(None, _Call("b")))
            await _settle()
            answered = neighbor.done()
            await _end([*stuck, neighbor])
            return answered

        assert asyncio.run(story())


MANY = message_pb2.PrepareManyRequest.DESCRIPTOR


class TestFieldsOnTheWire:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x0a\x00" * 100_000,
            b"\x8a\x00\x00" * 100_000,  # the same tag, written overlong
            message_pb2.PrepareManyRequest(items=[message_pb2.PrepareRequest(key="k")]).SerializeToString()
            + b"\x0a"
            + bytes((0x80 | 100_000 & 0x7F, 0x80 | 100_000 >> 7 & 0x7F, 100_000 >> 14))
            + b"\x2a\x00" * 50_000,
        ],
        ids=["empty items", "overlong tags", "empty headers"],
    )
    def test_a_request_that_would_become_far_larger_is_not_decoded(self, data: bytes) -> None:
        message_pb2.PrepareManyRequest.FromString(data)  # protobuf itself takes it
        with pytest.raises(MalformedRequest):
            check_fields(data, MANY)

    def test_every_valid_batch_passes(self) -> None:
        headers = {f"h{i}": "x" for i in range(64)}
        for body in (b"\n" * 2000, b"*" * 2000, b"\xaa\x8a" * 1000, b""):
            item = message_pb2.PrepareRequest(topic="t", key="k" * 50, body=body, headers=headers)
            check_fields(message_pb2.PrepareManyRequest(items=[item] * 1000).SerializeToString(), MANY)


class _Failed:
    def __init__(self, app: str) -> None:
        self._app = app

    def peer(self) -> str:
        return "ipv4:192.0.2.1:9"

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [("tmc-app", self._app), ("authorization", "Bearer marked-secret")]


class TestFailedLogins:
    def _count(self, kind: str) -> float:
        return value(METRICS.login_failures, kind)

    def test_each_is_counted_by_kind_and_one_line_a_second_tells_of_them(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock = [10.0]
        failed = FailedLogins(1.0, lambda: clock[0])
        before = {kind: self._count(kind) for kind in ("missing", "invalid", "admin")}
        with caplog.at_level(logging.WARNING, "tmc.login"):
            for error in (CredentialsInvalid(), CredentialsInvalid(), CredentialsMissing(), AdminOnly()):
                assert failed.note(error, _Failed("orders\x1b[2J" + "x" * 500))
            clock[0] = 11.0
            assert failed.note(CredentialsInvalid(), _Failed("orders"))
            assert not failed.note(InvalidField("tmc-tag", "be short"), _Failed("orders"))
        assert {kind: self._count(kind) - count for kind, count in before.items()} == {
            "missing": 1,
            "invalid": 3,
            "admin": 1,
        }
        assert len(caplog.messages) == 2
        assert caplog.messages[1].endswith("3 more since the last of these lines")
        assert "192.0.2.1" in caplog.text
        assert "marked-secret" not in caplog.text
        assert "\x1b" not in caplog.text
        assert len(caplog.messages[0]) < 300


class _Ended:
    async def abort(self, *_: object) -> None:
        raise self.error

    error: Any = grpc.aio.AbortError("aborted")


def test_a_refused_call_lets_go_of_the_frames_its_errors_came_through() -> None:
    try:
        try:
            raise KeyError
        except KeyError as exc:
            raise CredentialsInvalid from exc
    except CredentialsInvalid as exc:
        error = exc
    cause = error.__cause__
    asyncio.run(refuse(_Ended(), error))
    assert [each.__traceback__ for each in (error, cause, _Ended.error)] == [None] * 3
    assert error.__cause__ is error.__context__ is None
