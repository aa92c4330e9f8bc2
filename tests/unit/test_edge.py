"""Before a request is looked at: budgets, unfinished requests, connections of strangers, fields on the wire, failed logins."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import grpc
import pytest

from tmc_client.protocol import message_pb2
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
from tmc_server.rpc.reads import OF_APPS, OF_STRANGERS, STRANGERS, Reads
from tmc_server.rpc.refusing import refuse
from tmc_server.rpc.wire import check_fields

ONE, OTHER = (App(i, f"app{i}", "", "", "", "", ()) for i in (1, 2))


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


class _Peer:
    def __init__(self, name: str) -> None:
        self.name = name

    def peer(self) -> str:
        return self.name


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
        async def story() -> tuple[int, bool, bool]:
            doorkeeper = Doorkeeper(100, _FakeSockets(), lambda: 50.0)
            at_once = 0
            for _ in range(20):
                await asyncio.wait_for(doorkeeper.hold_up(_Peer("a")), 0.5)
                at_once += 1
            held = asyncio.ensure_future(doorkeeper.hold_up(_Peer("a")))
            other = asyncio.ensure_future(doorkeeper.hold_up(_Peer("b")))
            for _ in range(5):
                await asyncio.sleep(0)
            outcome = at_once, held.done(), other.done()
            held.cancel()
            return outcome

        assert asyncio.run(story()) == (20, False, True)

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

    def test_only_the_connection_that_is_meant_is_shut_down(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
            ends = [listening.accept()[0] for _ in clients]
            first, second = (f"ipv4:127.0.0.1:{client.getsockname()[1]}" for client in clients)
            sockets = Sockets()
            found = sockets.connections(port)
            assert found == {first: ends[0].fileno(), second: ends[1].fileno()}
            assert not sockets.shut_down(found[first], second)
            assert sockets.shut_down(found[first], first)
            clients[0].settimeout(10)
            assert clients[0].recv(1) == b""
            clients[1].sendall(b"still open")
            assert ends[1].recv(100) == b"still open"
            for each in (*clients, *ends):
                each.close()


MANY = message_pb2.PrepareManyRequest.DESCRIPTOR


class TestFieldsOnTheWire:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x0a\x00" * 100_000,
            b"\x8a\x00\x00" * 100_000,  # the same tag, written overlong
            message_pb2.PrepareManyRequest(items=[message_pb2.PrepareRequest(key="k")]).SerializeToString()
            + b"\x0a" + bytes((0x80 | 100_000 & 0x7F, 0x80 | 100_000 >> 7 & 0x7F, 100_000 >> 14)) + b"\x2a\x00" * 50_000,
        ],
        ids=["empty items", "overlong tags", "empty headers"],
    )  # fmt: skip
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
        return METRICS.login_failures.labels(kind)._value.get()

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
            "missing": 1, "invalid": 3, "admin": 1,
        }  # fmt: skip
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
