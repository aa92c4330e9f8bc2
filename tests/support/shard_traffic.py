"""Traffic on one shard that repeats nothing, so that each refused call is seen, and the command that moves the shard."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import grpc

import tmc_client as tmc
from tests.support.cluster import TMC, Cluster
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_storm.eventually import eventually

TOPIC = "order.paid"
_DEADLINE_S = 30


class ShardTraffic:
    """Threads that publish, and a consumer.

    batch: messages of a call, each under an order key of its own.
    per_s: messages of all threads; they fall behind if a call takes longer.
    """

    def __init__(self, cluster: Cluster, *, shard: int, threads: int, batch: int, per_s: float) -> None:
        self.shard = shard
        self.failed: list[str] = []
        self._sent: list[list[str]] = [[] for _ in range(threads * batch)]  # by order key
        self.got: list[str] = []
        self._batch = batch
        self._pause_s = threads * batch / per_s
        cluster.register("orders", "coupons")
        settings = {"table_index": shard, "ordered": True, "open_limit": 10_000_000, "unacked_limit": 10_000_000}
        cluster.in_effect(cluster.subscribe(TOPIC, "coupons", topic_settings=settings))
        self._coupons = tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"])
        self._consumer = tmc.Consumer(self._coupons)

        @self._consumer.listener(TOPIC)
        def paid(body: bytes, message: tmc.Message) -> None:
            self.got.append(message.key)

        self._consumer.start()
        self._channel = cluster.channel("ipv4:" + cluster.addresses)
        self._call = message_pb2_grpc.MessageServiceStub(self._channel).PublishMany
        self._metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {cluster.keys['orders']}")]
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._publish, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _publish(self, number: int) -> None:
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._pause_s, time.monotonic())
            order_keys = range(number * self._batch, (number + 1) * self._batch)
            keys = {order_key: f"{order_key}-{len(self._sent[order_key])}" for order_key in order_keys}
            request = message_pb2.PublishManyRequest(
                items=[
                    message_pb2.PublishRequest(
                        topic=TOPIC, key=key, body=b"x" * 256, order_key=str(order_key), attempt_id=uuid.uuid4().bytes
                    )
                    for order_key, key in keys.items()
                ]
            )
            try:
                answer = self._call(request, metadata=self._metadata, timeout=_DEADLINE_S)
                self.failed += [each.error.message for each in answer.results if each.HasField("error")]
            except grpc.RpcError as exc:
                self.failed.append(str(exc))
            for order_key, key in keys.items():
                self._sent[order_key].append(key)

    @property
    def count(self) -> int:
        """How many messages were published."""
        return sum(map(len, self._sent))

    def goes_on(self, messages: int) -> None:
        """Wait until this number of further messages is published."""
        begun = self.count
        eventually(lambda: self.count >= begun + messages)

    def stop(self) -> None:
        """Publish no more, and wait until all is consumed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        with suppress(AssertionError):
            eventually(lambda: len(set(self.got)) == self.count)
        self._consumer.stop(timedelta(seconds=10))
        self._channel.close()
        self._coupons.close()

    @property
    def lost(self) -> int:
        return self.count - len(set(self.got))

    @property
    def out_of_order(self) -> int:
        """How many order keys' messages came in another order than they were published in."""
        got: list[list[str]] = [[] for _ in self._sent]
        for key in dict.fromkeys(self.got):
            got[int(key.partition("-")[0])].append(key)
        return sum(one != other for one, other in zip(got, self._sent, strict=True))


def start_move(cluster: Cluster, shard: int, *arguments: str) -> subprocess.Popen[str]:
    """Run `tmc move-shard` in the background."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [TMC, "move-shard", str(shard), *arguments], env=os.environ | cluster.settings, text=True, **pipes
    )


def move(cluster: Cluster, shard: int, *arguments: str, seconds: float = 120) -> str:
    """Run `tmc move-shard`. Returns: what it said."""
    process = start_move(cluster, shard, *arguments)
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said.strip()


def kill_moves(
    cluster: Cluster, traffic: ShardTraffic, *, to: str, kills: int, longest_s: float, undo_each: int
) -> int:
    """Kill the command at random, and continue it or, now and then, undo the move. Returns: how many were at work then."""
    killed = 0
    for number in range(kills):
        process = start_move(cluster, traffic.shard, "--to", to)
        time.sleep(random.Random(number).uniform(0.5, longest_s))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if number % undo_each == undo_each - 1:
            start_move(cluster, traffic.shard, "--undo").communicate()
            traffic.goes_on(20)
    return killed
