"""Produce: all operations over one stream, as a client without our SDK sends them."""

from __future__ import annotations

import os
import queue
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.server.test_api import refusal
from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2, message_pb2, message_pb2_grpc, types_pb2
from tmc_server.domain.catalog import App
from tmc_server.errors import RateLimited
from tmc_server.requests.caller import Caller, RateLimiter
from tmc_server.rpc.message_service import MessageServicer
from tmc_storm.eventually import eventually


class Stream:
    """A stream of operations. Give it requests; take what was answered, by operation id."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel, *more: tuple[str, str]) -> None:
        self._requests: queue.SimpleQueue[message_pb2.ProduceRequest | bytes | None] = queue.SimpleQueue()
        produce = channel.stream_stream(
            "/tmc.v1.MessageService/Produce",
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=message_pb2.ProduceResponse.FromString,
        )
        self.call = produce(self._sent(), metadata=[*center.as_app("orders"), *more], timeout=60)
        self._ids = iter(range(1, 1_000_000))

    def _sent(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request

    def send(self, *operations: message_pb2.Operation) -> list[int]:
        """Send them in one request. Returns their ids."""
        for operation in operations:
            operation.id = next(self._ids)
        self._requests.put(message_pb2.ProduceRequest(operations=operations))
        return [operation.id for operation in operations]

    def send_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def end(self) -> None:
        self._requests.put(None)

    def next_response(self) -> list[message_pb2.OperationResult]:
        return list(next(self.call).results)

    def ask(self, *operations: message_pb2.Operation) -> list[message_pb2.OperationResult]:
        """Send a request and wait for its response: no other one is open."""
        ids = self.send(*operations)
        results = self.next_response()
        assert [each.id for each in results] == ids
        return results

    def status(self) -> tuple[str, str]:
        """How it ended."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.call)
        return refusal(caught.value)[:2]


def _prepare(key: str, **changes: Any) -> message_pb2.Operation:
    given = {"topic": "order.paid", "key": key, "body": b"{}", "attempt_id": os.urandom(16)} | changes
    return message_pb2.Operation(prepare=message_pb2.PrepareRequest(**given))


def _publish(key: str, **changes: Any) -> message_pb2.Operation:
    given = {"topic": "order.paid", "key": key, "body": b"{}", "attempt_id": os.urandom(16)} | changes
    return message_pb2.Operation(publish=message_pb2.PublishRequest(**given))


def _submit(message_id: str) -> message_pb2.Operation:
    return message_pb2.Operation(submit=message_pb2.SubmitRequest(message_id=message_id))


def _rollback(message_id: str) -> message_pb2.Operation:
    return message_pb2.Operation(rollback=message_pb2.RollbackRequest(message_id=message_id))


def _state(center: RunningCenter, channel: grpc.Channel, message_id: str) -> str:
    request = message_pb2.GetMessageRequest(message_id=message_id)
    stub = message_pb2_grpc.MessageServiceStub(channel)
    return types_pb2.MessageState.Name(stub.GetMessage(request, metadata=center.as_app("orders"), timeout=20).state)


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('produce')}/c.db") as made:
        yield made


@pytest.fixture
def channel(center: RunningCenter) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)]) as made:
        yield made


def test_all_operations_go_over_one_stream(center: RunningCenter, channel: grpc.Channel) -> None:
    stream = Stream(center, channel)
    first, second, third = stream.ask(_prepare("a"), _prepare("b"), _publish("c"))
    assert [each.state for each in (first, second, third)] == [
        types_pb2.MESSAGE_STATE_PREPARED,
        types_pb2.MESSAGE_STATE_PREPARED,
        types_pb2.MESSAGE_STATE_COMMITTED,
    ]
    results = stream.ask(_submit(first.message_id), _rollback(second.message_id))
    assert [(each.message_id, each.state) for each in results] == [
        (first.message_id, types_pb2.MESSAGE_STATE_COMMITTED),
        (second.message_id, types_pb2.MESSAGE_STATE_ROLLED_BACK),
    ]
    stream.end()
    assert list(stream.call) == []
    assert stream.call.code() is grpc.StatusCode.OK
    states = [_state(center, channel, each.message_id) for each in (first, second, third)]
    assert states == ["MESSAGE_STATE_COMMITTED", "MESSAGE_STATE_ROLLED_BACK", "MESSAGE_STATE_COMMITTED"]


def test_an_operation_that_is_refused_stops_no_other(center: RunningCenter, channel: grpc.Channel) -> None:
    stream = Stream(center, channel)
    results = stream.ask(
        _prepare("fine"),
        _prepare("nowhere", topic="unknown.topic"),
        _prepare(" outer blank "),
        message_pb2.Operation(),
        _submit("no id"),
        _prepare("fine"),
    )
    assert [types_pb2.Reason.Name(each.error.reason) for each in results[1:]] == [
        "TOPIC_UNKNOWN",
        "FIELD_INVALID",
        "FIELD_INVALID",
        "FIELD_INVALID",
        "KEY_IN_PROGRESS",
    ]
    assert not results[0].HasField("error")
    assert [results[place].error.field for place in (2, 3, 4)] == ["key", "operation", "message_id"]
    assert (results[1].message_id, results[1].state) == ("", 0)
    stream.end()


def test_a_repeat_over_another_stream_is_the_same_message(center: RunningCenter, channel: grpc.Channel) -> None:
    operation, results = _prepare("repeated"), []
    for _ in range(2):
        stream = Stream(center, channel)
        results += stream.ask(operation)
        stream.call.cancel()
    assert results[0].message_id == results[1].message_id


@pytest.mark.parametrize(
    "data",
    [b"\x0a\xff", b"", message_pb2.ProduceRequest(operations=[message_pb2.Operation()] * 1001).SerializeToString()],
    ids=["no request", "no operation", "too many operations"],
)
def test_a_request_that_is_none_ends_the_stream_after_the_others_are_answered(
    center: RunningCenter, channel: grpc.Channel, data: bytes
) -> None:
    stream = Stream(center, channel)
    ids = stream.send(_publish(f"before {len(data)}"))
    stream.send_bytes(data)
    assert [each.id for each in stream.next_response()] == ids
    assert stream.status()[0] == "INVALID_ARGUMENT"


def test_random_requests_end_in_documented_answers(center: RunningCenter, channel: grpc.Channel) -> None:
    dice = random.Random(11)
    for _ in range(300):
        stream = Stream(center, channel)
        stream.send_bytes(dice.choice([b"\x0a", b"\x0a\x02", b""]) + dice.randbytes(dice.randrange(30)))
        stream.end()
        assert _ended(stream) in ("OK", "INVALID_ARGUMENT")


def _ended(stream: Stream) -> str:
    try:
        list(stream.call)
    except grpc.RpcError as exc:
        return refusal(exc)[0]
    return "OK"


def test_a_rate_slows_a_stream_down_and_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, refused = RateLimiter.take, 0

    def counted(limiter: RateLimiter, app: App, amount: int) -> None:
        nonlocal refused
        try:
            take(limiter, app, amount)
        except RateLimited:
            refused += 1
            raise

    monkeypatch.setattr(RateLimiter, "take", counted)
    with (
        RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"items_per_second": 300}) as slow,
        grpc.insecure_channel(slow.address, [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        stream = Stream(slow, channel)
        for number in range(6):
            stream.send(*(_publish(f"{number}-{each}") for each in range(100)))
        stream.end()
        results = [result for response in stream.call for result in response.results]
        assert len(results) == 600
        assert not any(result.HasField("error") for result in results)
        assert refused, "nothing waited for the rate"


def test_a_stream_has_the_rights_that_its_operator_has_now(tmp_path: Path) -> None:
    with (
        RunningCenter(f"sqlite:///{tmp_path}/c.db") as center,
        grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        admin = center.admin(channel)
        made = admin.RegisterOperator(
            admin_pb2.RegisterOperatorRequest(name="ann", role=admin_pb2.ROLE_OPERATOR, reason="test"),
            metadata=center.operator,
        )
        stream = Stream(center, channel, ("tmc-operator", f"Bearer {made.token}"))
        assert not stream.ask(_publish("before"))[0].HasField("error")
        narrowed = admin_pb2.UpdateOperatorRequest(name="ann", topics=["other."], reason="test")
        narrowed.update_mask.paths.append("topics")
        admin.UpdateOperator(narrowed, metadata=center.operator)

        def refused() -> bool:
            (result,) = stream.ask(_publish(os.urandom(8).hex()))
            return bool(result.error.reason == types_pb2.TOPIC_NOT_ALLOWED)

        eventually(refused)
        stream.end()


def test_the_trace_of_a_stream_is_not_that_of_its_messages(center: RunningCenter, channel: grpc.Channel) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    stream = Stream(center, channel, ("traceparent", trace))
    (result,) = stream.ask(_publish("untraced"))
    stub = message_pb2_grpc.MessageServiceStub(channel)
    request = message_pb2.GetMessageRequest(message_id=result.message_id)
    assert "traceparent" not in stub.GetMessage(request, metadata=center.as_app("orders"), timeout=20).headers
    stream.end()


def test_a_stream_ends_when_its_key_is_dropped(tmp_path: Path) -> None:
    with (
        RunningCenter(f"sqlite:///{tmp_path}/c.db") as center,
        grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        admin, stream = center.admin(channel), Stream(center, channel)
        stream.ask(_publish("before"))
        admin.AddAppKey(admin_pb2.AddAppKeyRequest(id="orders"), metadata=center.operator)
        admin.DropOldAppKey(admin_pb2.DropOldAppKeyRequest(id="orders"), metadata=center.operator)
        assert stream.status() == ("UNAUTHENTICATED", "CREDENTIALS_INVALID")


def test_a_server_that_stops_ends_its_streams_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    produce, admitted = MessageServicer.Produce, 0

    async def counted(servicer: MessageServicer, caller: Caller, request: message_pb2.ProduceRequest) -> Any:
        nonlocal admitted
        work = await produce(servicer, caller, request)
        admitted += 1
        return work

    monkeypatch.setattr(MessageServicer, "Produce", counted)
    center = RunningCenter(f"sqlite:///{tmp_path}/c.db")
    with (
        grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)]) as channel,
        closing(sqlite3.connect(tmp_path / "c.db", isolation_level=None)) as lock,
    ):
        stream = Stream(center, channel)
        stream.ask(_publish("before"))
        lock.execute("BEGIN IMMEDIATE")
        ids = stream.send(_publish("during"))
        eventually(lambda: admitted == 2)
        stopping = threading.Thread(target=center.stop)
        stopping.start()
        lock.execute("ROLLBACK")
        assert [each.id for each in stream.next_response()] == ids
        assert stream.status() == ("UNAVAILABLE", "SHUTTING_DOWN")
        stopping.join()
