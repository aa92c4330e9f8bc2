"""Transactional messages through every door, in turns: gRPC batches, a queue of RabbitMQ, a topic of Kafka, and single calls of
gRPC and HTTP.

Each message is a prepare and a submit, 256-byte bodies, no subscriber. Two producer processes; a round ends when the last
message is committed. gRPC: PrepareMany and SubmitMany of 100, four callers a process. Queues: persistent, confirmed by the
broker at the end of each page of 500 steps, signed, no answers. Single calls: 16 asyncio tasks a process, with grpc.aio, and
with a bare client of HTTP that has a connection for each. benchmarks/push.py adds webhooks beside a stream. `lost` and `doubled`
are counted in the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pika
import uvloop
from confluent_kafka import Producer

from benchmarks.cpu import seconds_of
from benchmarks.push import SIDES, Push
from tests.support.cluster import Cluster
from tests.support.doors import Step, attributes_of, has_queue
from tests.support.kafka import Kafka
from tmc_common.amqp import CorkedConnection
from tmc_common.protocol import admin_pb2, message_pb2, message_pb2_grpc
from tmc_common.signatures import sign
from tmc_common.submission import queue_of, signed
from tmc_storm.eventually import eventually

DOORS = ("grpc", "rabbitmq", "kafka")
SINGLE = ("unary", "http")
_PROCESSES, _CALLERS, _BATCH, _PAGE, _TASKS = 2, 4, 100, 500, 16
_BODY = os.urandom(256)


def _attempt(run: str, number: int) -> bytes:
    return hashlib.sha256(f"{run} {number}".encode()).digest()[:16]


def _by_grpc(address: str, secret: str, run: str, numbers: range) -> None:
    stub = message_pb2_grpc.MessageServiceStub(grpc.insecure_channel(address))
    metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {secret}")]

    def batch(start: int) -> None:
        several = [numbers[i] for i in range(start, min(start + _BATCH, len(numbers)))]
        prepares = [
            message_pb2.PrepareRequest(topic="bench.paid", key=f"{run}-{n}", body=_BODY, attempt_id=_attempt(run, n))
            for n in several
        ]
        answers = stub.PrepareMany(message_pb2.PrepareManyRequest(items=prepares), metadata=metadata).results
        submits = [message_pb2.SubmitRequest(message_id=answer.message_id) for answer in answers]
        for answer in stub.SubmitMany(message_pb2.SubmitManyRequest(items=submits), metadata=metadata).results:
            assert not answer.HasField("error"), answer

    with ThreadPoolExecutor(_CALLERS) as callers:
        list(callers.map(batch, range(0, len(numbers), _BATCH)))


def _letters(run: str, numbers: range, secret: str) -> Any:
    queue, key = queue_of("orders", "default"), bytes.fromhex(secret)
    for number in numbers:
        for op in ("prepare", "submit"):
            body = _BODY if op == "prepare" else b""
            step = Step(op=op, topic="bench.paid", key=f"{run}-{number}", attempt=_attempt(run, number), body=body)
            given = attributes_of(step)
            given["tmcsignature"] = sign(key, signed(queue, given, "", body, {}))
            yield step, given


class _Publisher:
    """Pages of letters over one connection of pika, each confirmed as a whole."""

    def __init__(self, url: str) -> None:
        self._confirmed, self._open = threading.Event(), threading.Event()
        self._last = self._sent = 0
        self._channel: Any = None
        self.connection = CorkedConnection(
            pika.URLParameters(url),
            on_open_callback=lambda opened: opened.channel(on_open_callback=self._on_channel),
            on_close_callback=lambda connection, _: connection.ioloop.stop(),
        )
        self._thread = threading.Thread(target=self.connection.ioloop.start)
        self._thread.start()
        assert self._open.wait(30)

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._open.set())

    def _on_confirm(self, frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        self._last = max(self._last, frame.method.delivery_tag)
        if self._last == self._sent:
            self._confirmed.set()

    def publish(self, page: list[Any]) -> None:
        self._confirmed.clear()
        self.connection.ioloop.add_callback_threadsafe(lambda: self._publish(page))
        assert self._confirmed.wait(60)

    def _publish(self, page: list[Any]) -> None:
        self._sent += len(page)
        queue = queue_of("orders", "default")
        with self.connection.corked():
            for step, given in page:
                headers = {f"cloudEvents:{name}": text for name, text in given.items()}
                properties = pika.BasicProperties(headers=headers, delivery_mode=2)
                self._channel.basic_publish("", queue, step.body, properties)

    def close(self) -> None:
        self.connection.ioloop.add_callback_threadsafe(self.connection.close)
        self._thread.join(10)


def _by_rabbitmq(url: str, secret: str, run: str, numbers: range) -> None:
    publisher, page = _Publisher(url), []
    for letter in _letters(run, numbers, secret):
        page.append(letter)
        if len(page) == _PAGE:
            publisher.publish(page)
            page = []
    if page:
        publisher.publish(page)
    publisher.close()


def _by_kafka(bootstrap: str, secret: str, run: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 2})
    queue = queue_of("orders", "default")
    for step, given in _letters(run, numbers, secret):
        headers = [(f"ce_{name}", text.encode()) for name, text in given.items()]
        while True:
            try:
                producer.produce(queue, step.body, step.key.encode(), headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0


async def _in_tasks(numbers: range, live: Callable[[int], Awaitable[None]]) -> None:
    waiting = iter(numbers)

    async def task() -> None:
        for number in waiting:
            await live(number)

    await asyncio.gather(*(task() for _ in range(_TASKS)))


def _by_unary(address: str, secret: str, run: str, numbers: range) -> None:
    async def work() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = message_pb2_grpc.MessageServiceStub(channel)
            metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {secret}")]

            async def live(n: int) -> None:
                prepare = message_pb2.PrepareRequest(
                    topic="bench.paid", key=f"{run}-{n}", body=_BODY, attempt_id=_attempt(run, n)
                )
                prepared = await stub.Prepare(prepare, metadata=metadata)
                await stub.Submit(message_pb2.SubmitRequest(message_id=prepared.message_id), metadata=metadata)

            await _in_tasks(numbers, live)

    uvloop.run(work())


def _by_http(address: str, secret: str, run: str, numbers: range) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    usual = f"HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\ntmc-app: orders\r\nAuthorization: Bearer {secret}\r\n"
    body = base64.b64encode(_BODY).decode()
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(name: str, given: Mapping[str, str]) -> Any:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        data = json.dumps(given).encode()
        writer.write(f"POST /v1/messages:{name} {usual}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
        idle.append((reader, writer))
        return answer

    async def live(n: int) -> None:
        attempt = base64.b64encode(_attempt(run, n)).decode()
        prepared = await call(
            "prepare", {"topic": "bench.paid", "key": f"{run}-{n}", "body": body, "attemptId": attempt}
        )
        await call("submit", {"messageId": prepared["messageId"]})

    async def work() -> None:
        await _in_tasks(numbers, live)
        for _, writer in idle:
            writer.close()

    uvloop.run(work())


_WORKERS = {"grpc": _by_grpc, "rabbitmq": _by_rabbitmq, "kafka": _by_kafka, "unary": _by_unary, "http": _by_http}


class Bench:
    def __init__(self, stack: ExitStack) -> None:
        kafka = Kafka()
        stack.callback(kafka.stop)
        self.cluster = stack.enter_context(
            Cluster(
                lease_seconds=10,
                pool_mb=1024,
                own_broker=True,
                http=True,
                TMC_DELIVERY__KIND="builtin",
                TMC_WEBHOOKS__ALLOW='["127.0.0.0/8:*"]',
                TMC_KAFKA__BOOTSTRAP=kafka.bootstrap,
                TMC_SUBMISSION__KAFKA="true",
                TMC_SUBMISSION__RABBITMQ="true",
            )
        )
        cluster = self.cluster
        cluster.register("orders")
        cluster.admin(
            "RegisterTopic",
            admin_pb2.RegisterTopicRequest(
                name="bench.paid", owner="orders", open_limit=10_000_000, transaction_time_ms=600_000
            ),
        )
        secret = cluster.admin("OpenSubmitQueue", admin_pb2.OpenSubmitQueueRequest(id="orders")).secret
        with cluster.broker.connect() as connection:
            eventually(lambda: has_queue(connection, queue_of("orders", "default")))
        eventually(lambda: queue_of("orders", "default") in kafka.admin().list_topics(timeout=5).topics)
        self.targets = {
            "grpc": (cluster.addresses, cluster.keys["orders"]),
            "rabbitmq": (cluster.broker.url, secret),
            "kafka": (kafka.bootstrap, secret),
            "unary": (cluster.addresses, cluster.keys["orders"]),
            "http": (cluster.servers[0].url, cluster.keys["orders"]),
        }
        self.total = 0
        self.rates: dict[str, list[float]] = {door: [] for door in _WORKERS}
        self.server_us: dict[str, list[float]] = {door: [] for door in _WORKERS}

    def run(self, door: str, count: int, keep: bool = True) -> None:
        """One round. keep False: to warm up."""
        run = os.urandom(4).hex()
        server = [self.cluster.servers[0].pid]
        began, cpu = time.monotonic(), seconds_of(server)
        each = count // _PROCESSES
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.ingress",
                    "--worker",
                    door,
                    *self.targets[door],
                    run,
                    str(i * each),
                    str(each),
                ]
            )
            for i in range(_PROCESSES)
        ]
        assert [worker.wait() for worker in workers] == [0] * _PROCESSES
        self.total += each * _PROCESSES
        eventually(lambda: self.cluster.messages()["COMMITTED"] >= self.total, seconds=300)
        if keep:
            self.rates[door].append(count / (time.monotonic() - began))
            self.server_us[door].append((seconds_of(server) - cpu) / count * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--worker", nargs=6)
    options = parser.parse_args()
    if options.worker:
        door, target, secret, run, first, count = options.worker
        _WORKERS[door](target, secret, run, range(int(first), int(first) + int(count)))
        return
    with ExitStack() as stack:
        bench = Bench(stack)
        push = Push(bench.cluster, stack)
        for door in _WORKERS:
            bench.run(door, 2_000, keep=False)
        pushed: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for door in DOORS:
                bench.run(door, options.messages)
            for door in SINGLE:
                bench.run(door, options.messages // 4)
        stored = bench.cluster.messages()
        for _ in range(options.rounds):
            for side in SIDES:
                pushed[side].append(push.run(side, options.messages // 2))

    def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
        return round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 2)

    deliveries = {side: [per_s for per_s, _ in each] for side, each in pushed.items()}
    result: dict[str, Any] = {f"{door}_ratio": ratio(bench.rates[door], bench.rates["grpc"]) for door in DOORS[1:]}
    result["http_unary_ratio"] = ratio(bench.rates["http"], bench.rates["unary"])
    result["push_ratio"] = ratio(deliveries["webhook-batch"], deliveries["stream"])
    result["push_single_ratio"] = ratio(deliveries["webhook"], deliveries["stream"])
    result["lost"] = bench.total - stored["COMMITTED"] if stored["COMMITTED"] < bench.total else 0
    result["doubled"] = max(0, sum(stored.values()) - bench.total)
    result["per_s"] = {door: round(statistics.median(rates)) for door, rates in bench.rates.items()}
    result["deliveries_per_s"] = {side: round(statistics.median(each)) for side, each in deliveries.items()}
    result["server_us"] = {door: round(statistics.median(each)) for door, each in bench.server_us.items()}
    result["server_us"] |= {side: round(statistics.median(us for _, us in each)) for side, each in pushed.items()}
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    if result["lost"] or result["doubled"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
