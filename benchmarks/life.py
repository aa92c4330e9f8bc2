"""Processes of the lifecycle benchmark: producers that record what they submitted, and one consumer.

usage: life.py produce ADDRESS KEY NAME THREADS COUNT FOLDER      single calls: prepare, submit
       life.py tasks ADDRESS KEY NAME TASKS COUNT FOLDER          the same from asyncio tasks
       life.py batches ADDRESS KEY NAME THREADS COUNT FOLDER      explicit batches of 100, of 4 MiB at most
       life.py paced ADDRESS KEY NAME 1 COUNT FOLDER              from asyncio tasks that begin at a rate, BENCH_PER_S, whatever
                                                                  the ones before take; NAME.times: key, seconds, submit
       life.py consume ADDRESS KEY COUNT FOLDER                   until COUNT distinct messages were handled and acked;
                                                                  handled: key, how often, when first

BENCH_TOPIC: another topic.  BENCH_BODY: bytes of a body.  BENCH_ORDER_KEYS: how many order keys its messages have, in turn.
BENCH_SUBSCRIBERS: APP:KEY of further subscribers, which must have handled each message, too; comma-separated.

Each prints "ready", waits for a line, and prints one JSON line with monotonic times, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import grpc

import tmc_client as tmc
import tmc_client.aio
from tmc_common.protocol import message_pb2, message_pb2_grpc

TOPIC = os.environ.get("BENCH_TOPIC", "bench.paid")
ORDER_KEYS = int(os.environ.get("BENCH_ORDER_KEYS", "0"))
BODY = os.urandom(int(os.environ.get("BENCH_BODY", "256")))
BATCH = min(100, (4 << 20) // len(BODY))  # a center takes requests of 16 MiB
SUBSCRIBERS = [each.split(":") for each in os.environ.get("BENCH_SUBSCRIBERS", "").split(",") if each]
LIMIT = timedelta(seconds=60)


def _order_key(*numbers: int) -> str:
    """Callers take the keys in turn, each from another place."""
    caller, number = numbers
    return f"key-{(caller * 7919 + number) % ORDER_KEYS}" if ORDER_KEYS else ""


class Began(NamedTuple):
    """Seconds of the monotonic clock, and of CPU that were used before."""

    at: float
    cpu_s: float


def _started() -> Began:
    print("ready", flush=True)
    sys.stdin.readline()
    return Began(time.monotonic(), time.process_time())


def produce(address: str, key: str, name: str, threads: str, count: str, folder: str) -> None:
    center = tmc.connect(address, app="orders", key=key)
    share = int(count) // int(threads)
    committed: list[str] = []

    def work(thread: int) -> None:
        for number in range(share):
            message = f"{name}-{thread}-{number}"
            center.submit(
                center.prepare(TOPIC, BODY, key=message, order_key=_order_key(thread, number), timeout=LIMIT),
                timeout=LIMIT,
            )
            committed.append(message)

    _run(work, int(threads), committed, f"{folder}/{name}.committed")
    center.close()


def tasks(address: str, key: str, name: str, callers: str, count: str, folder: str) -> None:
    share = int(count) // int(callers)
    committed: list[str] = []

    async def work(face: tmc.aio.AsyncCenter, task: int) -> None:
        for number in range(share):
            message = f"{name}-{task}-{number}"
            line = _order_key(task, number)
            prepared = await face.prepare(TOPIC, BODY, key=message, order_key=line, timeout=LIMIT)
            await face.submit(prepared, timeout=LIMIT)
            committed.append(message)

    async def main() -> Began:
        face = tmc.aio.connect(address, app="orders", key=key)
        began = _started()
        await asyncio.gather(*(work(face, task) for task in range(int(callers))))
        return began

    began = asyncio.run(main())
    _report(began, committed, f"{folder}/{name}.committed")


def paced(address: str, key: str, name: str, _callers: str, count: str, folder: str) -> None:
    """Seconds count from when a message was due, not from when this process came to it."""
    per_s = float(os.environ["BENCH_PER_S"])
    committed: list[str] = []
    times: list[str] = []

    async def one(face: tmc.aio.AsyncCenter, message: str, due: float) -> None:
        prepared = await face.prepare(TOPIC, BODY, key=message, timeout=LIMIT)
        submitted = time.monotonic()
        await face.submit(prepared, timeout=LIMIT)
        committed.append(message)
        times.append(f"{message} {time.monotonic() - due} {submitted}")

    async def main() -> Began:
        face = tmc.aio.connect(address, app="orders", key=key)
        began = _started()
        async with asyncio.TaskGroup() as group:
            for number in range(int(count)):
                due = began.at + number / per_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(one(face, f"{name}-{number}", due))
        return began

    began = asyncio.run(main())
    Path(folder, f"{name}.times").write_text("\n".join(times))
    _report(began, committed, f"{folder}/{name}.committed")


def batches(address: str, key: str, name: str, threads: str, count: str, folder: str) -> None:
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    stub = message_pb2_grpc.MessageServiceStub(channel)
    metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {key}")]
    share = int(count) // int(threads)
    committed: list[str] = []

    def work(thread: int) -> None:
        for start in range(0, share, BATCH):
            numbers = range(start, min(share, start + BATCH))
            keys = [f"{name}-{thread}-{number}" for number in numbers]
            prepares = [
                message_pb2.PrepareRequest(
                    topic=TOPIC,
                    key=key,
                    body=BODY,
                    attempt_id=os.urandom(16),
                    order_key=_order_key(thread, number),
                )
                for key, number in zip(keys, numbers, strict=True)
            ]
            made = stub.PrepareMany(message_pb2.PrepareManyRequest(items=prepares), metadata=metadata, timeout=60)
            submits = [message_pb2.SubmitRequest(message_id=result.message_id) for result in made.results]
            done = stub.SubmitMany(message_pb2.SubmitManyRequest(items=submits), metadata=metadata, timeout=60)
            assert not any(result.HasField("error") for result in done.results), done.results[0]
            committed.extend(keys)

    _run(work, int(threads), committed, f"{folder}/{name}.committed")


def _run(work, threads: int, committed: list[str], path: str) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = _started()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    _report(began, committed, path)


def _report(began: Began, committed: list[str], path: str) -> None:
    cpu_s = time.process_time() - began.cpu_s
    with open(path, "w") as file:
        file.write("\n".join(committed))
    print(json.dumps({"began": began.at, "cpu_s": cpu_s}), flush=True)


def consume(address: str, key: str, count: str, folder: str) -> None:
    wanted, own = int(count), Path(folder).name
    subscribers = [("coupons", key), *SUBSCRIBERS]
    handled: list[Counter[str]] = [Counter() for _ in subscribers]
    first: dict[str, float] = {}
    done = threading.Semaphore(0)

    def consumer_of(app: str, app_key: str, counts: Counter[str]) -> tmc.Consumer:
        consumer = tmc.Consumer(tmc.connect(address, app=app, key=app_key), concurrency=4, prefetch=1000)

        @consumer.listener(TOPIC)
        def handle(body: bytes, message: tmc.Message) -> None:
            if not message.key.startswith(own):
                return  # of the run before
            first.setdefault(message.key, time.monotonic())
            counts[message.key] += 1
            if counts[message.key] == 1 and len(counts) == wanted:
                done.release()

        return consumer

    with ExitStack() as stack:
        consumers = [
            stack.enter_context(consumer_of(*who, counts)) for who, counts in zip(subscribers, handled, strict=True)
        ]
        began = _started()
        for _ in consumers:
            done.acquire(timeout=600)
        for consumer in consumers:
            consumer.stop()  # acks are stored when it returns
        ended, cpu_s = time.monotonic(), time.process_time() - began.cpu_s
    everywhere = set(handled[0]).intersection(*handled[1:])
    with open(f"{folder}/handled", "w") as file:
        file.writelines(f"{name} {max(each[name] for each in handled)} {first[name]}\n" for name in everywhere)
    print(json.dumps({"ended": ended, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    {"produce": produce, "tasks": tasks, "batches": batches, "paced": paced, "consume": consume}[sys.argv[1]](
        *sys.argv[2:]
    )
