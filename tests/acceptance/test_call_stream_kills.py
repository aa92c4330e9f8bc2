"""Streams of operations while servers are killed and stopped: what was left unanswered is repeated, and counts once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from contextlib import suppress

import grpc
import pytest

from tests.support.cluster import Cluster
from tests.support.dose import LONG
from tmc_common.protocol import message_pb2, message_pb2_grpc, types_pb2
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200 if LONG else 300)]
_MESSAGES = 20_000 if LONG else 1_000
_CALLERS = 32
_TURNS = 10 if LONG else 4  # a kill and a stop in turn, of the server that has the stream


class _Producer:
    """The operations of many tasks over one stream at a time; the next one goes to the next server."""

    def __init__(self, cluster: Cluster) -> None:
        self._servers = itertools.cycle(cluster.servers)
        self._metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {cluster.keys['orders']}")]
        self._asked: dict[int, tuple[message_pb2.Operation, asyncio.Future[message_pb2.OperationResult]]] = {}
        self._fresh: list[message_pb2.Operation] = []
        self._arrived = asyncio.Event()
        self._ids = itertools.count(1)
        self.server = next(self._servers)
        self.streams = self.repeated = 0

    async def perform(self, operation: message_pb2.Operation) -> message_pb2.OperationResult:
        operation.id = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._asked[operation.id] = operation, answer
        self._fresh.append(operation)
        self._arrived.set()
        return await answer

    async def run(self) -> None:
        while True:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the latter: it ended while nobody read
                await self._over_one_stream()
            self.server = next(self._servers)
            await asyncio.sleep(0.05)

    async def _over_one_stream(self) -> None:
        self.streams += 1
        self._fresh = [operation for operation, _ in self._asked.values()]
        self.repeated += len(self._fresh) if self.streams > 1 else 0
        async with grpc.aio.insecure_channel(self.server.address) as channel:
            stream = message_pb2_grpc.MessageServiceStub(channel).Produce(metadata=self._metadata)
            while True:
                while not self._fresh:
                    self._arrived.clear()
                    await self._arrived.wait()
                batch, self._fresh = self._fresh[:200], self._fresh[200:]
                await stream.write(message_pb2.ProduceRequest(operations=batch))
                response = await stream.read()
                if response is grpc.aio.EOF:
                    return
                for result in response.results:
                    _, answer = self._asked.pop(result.id)
                    answer.set_result(result)


def _is_rolled_back(number: int) -> bool:
    return number % 5 == 4


async def _one(producer: _Producer, number: int) -> None:
    prepare = message_pb2.PrepareRequest(
        topic="order.paid",
        key=f"m{number}",
        body=b"%d" % number,
        attempt_id=hashlib.sha256(b"%d" % number).digest()[:16],
    )
    prepared = await _answered(producer, message_pb2.Operation(prepare=prepare))
    if _is_rolled_back(number):
        decide = message_pb2.Operation(rollback=message_pb2.RollbackRequest(message_id=prepared.message_id))
    else:
        decide = message_pb2.Operation(submit=message_pb2.SubmitRequest(message_id=prepared.message_id))
    decided = await _answered(producer, decide)
    wanted = types_pb2.MESSAGE_STATE_ROLLED_BACK if _is_rolled_back(number) else types_pb2.MESSAGE_STATE_COMMITTED
    assert decided.state == wanted


async def _answered(producer: _Producer, operation: message_pb2.Operation) -> message_pb2.OperationResult:
    """Perform it again as long as the answer says that this may help."""
    while True:
        result = await producer.perform(operation)
        if not result.HasField("error"):
            return result
        assert result.error.retry_after_ms, result.error
        await asyncio.sleep(result.error.retry_after_ms / 1000)


async def _produce(cluster: Cluster) -> _Producer:
    producer = _Producer(cluster)
    part = _MESSAGES // (_TURNS + 1)
    numbers, done, most = iter(range(_MESSAGES)), 0, part

    async def caller() -> None:
        nonlocal done
        for number in numbers:
            while number >= most:
                await asyncio.sleep(0.01)
            await _one(producer, number)
            done += 1
            if done == _MESSAGES:
                running.cancel()

    async def disturb() -> None:
        nonlocal most
        for turn in range(_TURNS):
            while done < (most if turn % 2 else most - part // 2):  # a stop comes while nobody asks
                await asyncio.sleep(0.001)
            server = producer.server
            await asyncio.to_thread(server.terminate if turn % 2 else server.kill)
            await asyncio.to_thread(server.start)
            most += part
        most = _MESSAGES

    async with asyncio.TaskGroup() as group:  # what fails in one ends all
        running = group.create_task(producer.run())
        group.create_task(disturb())
        for _ in range(_CALLERS):
            group.create_task(caller())
    return producer


@pytest.mark.takes_turns("killed servers")
def test_what_a_killed_server_left_unanswered_counts_once() -> None:
    with Cluster(servers=2) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(
            cluster.subscribe("order.paid", "coupons", topic_settings={"transaction_time_ms": 120_000})
        )  # nobody answers checks here
        producer = asyncio.run(_produce(cluster))
        rolled_back = sum(map(_is_rolled_back, range(_MESSAGES)))
        assert producer.streams > _TURNS
        assert producer.repeated > 0
        eventually(lambda: "PREPARED" not in cluster.messages())
        assert cluster.messages() == {"COMMITTED": _MESSAGES - rolled_back, "ROLLED_BACK": rolled_back}
        print(f"streams: {_MESSAGES} messages, {_TURNS} kills and stops, {producer.repeated} operations repeated")
