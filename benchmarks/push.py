"""Deliveries by webhook beside those over a consumer's stream, for `bench ingress`: the same messages, the same server.

Messages are published while their topic is paused. A round lasts from the first delivery to the last ack. Consumers do nothing
but answer: over the stream, one AckMany for each response; the webhook is a bare asyncio server in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import grpc
import uvloop

from benchmarks.cpu import seconds_of
from tests.support.cluster import Cluster
from tmc_common.protocol import (
    admin_pb2,
    consumption_pb2,
    consumption_pb2_grpc,
    message_pb2,
    message_pb2_grpc,
    types_pb2,
)
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

SIDES = ("stream", "webhook", "webhook-batch")
_BODY = os.urandom(256)
_CREDIT = 2_000


async def _receive(port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            lines = head.lower().split(b"\r\n")
            length = next((line.partition(b":")[2] for line in lines if line.startswith(b"content-length:")), b"0")
            await reader.readexactly(int(length))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _consume(address: str, key: str) -> None:
    metadata = [("tmc-app", "stream"), ("authorization", f"Bearer {key}")]
    stub = consumption_pb2_grpc.ConsumptionServiceStub(grpc.insecure_channel(address))
    credit: SimpleQueue[int] = SimpleQueue()

    def requests() -> Any:
        yield consumption_pb2.SubscribeRequest(topics=["push.paid"], credit=_CREDIT)
        while True:
            yield consumption_pb2.SubscribeRequest(credit=credit.get())

    for response in stub.Subscribe(requests(), metadata=metadata):
        acks = [
            consumption_pb2.AckRequest(message_id=each.message_id, attempt=each.attempt) for each in response.deliveries
        ]
        stub.AckMany(consumption_pb2.AckManyRequest(items=acks), metadata=metadata)
        credit.put(len(acks))


class Push:
    """cluster: with built-in delivery and webhooks to this machine, and the app `orders`."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        port = free_port()
        cluster.register(*SIDES)

        def start(*arguments: str) -> None:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.push", *arguments])
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("receive", str(port))
        eventually(lambda: _listens(port))
        for side in SIDES:
            forward = None if side == "stream" else types_pb2.Forward(kind=side, target=f"http://127.0.0.1:{port}/")
            made = cluster.subscribe(
                "push.paid" if side == "stream" else f"push.{side}",
                side,
                **({"forward": forward} if forward is not None else {}),
            )
            cluster.in_effect(made)
        start("consume", cluster.servers[0].address, cluster.keys["stream"])

    def run(self, side: str, count: int) -> tuple[float, float]:
        """One round. Returns: deliveries per second, and microseconds of the server's CPU for each."""
        topic = "push.paid" if side == "stream" else f"push.{side}"
        cluster = self._cluster
        cluster.admin("PauseTopic", admin_pb2.PauseTopicRequest(name=topic, reason="bench"))
        before = cluster.consumptions()["ACKED"]
        self._publish(topic, count)
        server = [cluster.servers[0].pid]
        cluster.admin("ResumeTopic", admin_pb2.ResumeTopicRequest(name=topic, reason="bench"))
        eventually(lambda: cluster.consumptions()["ACKED"] > before)
        first, began, cpu = cluster.consumptions()["ACKED"], time.monotonic(), seconds_of(server)
        eventually(lambda: cluster.consumptions()["ACKED"] == before + count, seconds=300)
        delivered = before + count - first
        return delivered / (time.monotonic() - began), (seconds_of(server) - cpu) / delivered * 1e6

    def _publish(self, topic: str, count: int) -> None:
        metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {self._cluster.keys['orders']}")]
        with grpc.insecure_channel(self._cluster.servers[0].address) as channel:
            stub = message_pb2_grpc.MessageServiceStub(channel)
            for _ in range(count // 500):
                items = [
                    message_pb2.PublishRequest(
                        topic=topic, key=os.urandom(8).hex(), body=_BODY, attempt_id=os.urandom(16)
                    )
                    for _ in range(500)
                ]
                for answer in stub.PublishMany(message_pb2.PublishManyRequest(items=items), metadata=metadata).results:
                    assert not answer.HasField("error"), answer


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        uvloop.run(_receive(int(sys.argv[2])))
    else:
        _consume(*sys.argv[2:])
