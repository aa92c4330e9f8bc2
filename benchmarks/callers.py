"""Producers and consumers as separate processes: each reports how many full lives it stored in a given time.

usage: callers.py batched|single|async ADDRESS ORDERS_KEY COUPONS_KEY THREADS SECONDS      prints one JSON line
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from datetime import timedelta

import grpc

import tmc_client as tmc
from tmc_client import aio
from tmc_client.connecting import sender
from tmc_client.producing.producer import wait
from tmc_common.protocol import consumption_pb2, consumption_pb2_grpc, message_pb2, message_pb2_grpc

TOPIC = "bench.paid"
BODY = os.urandom(256)
LIMIT = timedelta(seconds=30)


def batched(address: str, orders_key: str, coupons_key: str, stop: float, size: int = 100) -> int:
    """Explicit batches: one caller prepares, submits and acks `size` messages at a time."""
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    messages, consumptions = (
        message_pb2_grpc.MessageServiceStub(channel),
        consumption_pb2_grpc.ConsumptionServiceStub(channel),
    )
    producer = [("tmc-app", "orders"), ("authorization", f"Bearer {orders_key}")]
    consumer = [("tmc-app", "coupons"), ("authorization", f"Bearer {coupons_key}")]
    prefix, count = os.urandom(6).hex(), 0
    while time.monotonic() < stop:
        prepares = [
            message_pb2.PrepareRequest(topic=TOPIC, key=f"{prefix}-{count + i}", body=BODY, attempt_id=os.urandom(16))
            for i in range(size)
        ]
        prepared = messages.PrepareMany(message_pb2.PrepareManyRequest(items=prepares), metadata=producer, timeout=30)
        submits = [message_pb2.SubmitRequest(message_id=result.message_id) for result in prepared.results]
        submitted = messages.SubmitMany(message_pb2.SubmitManyRequest(items=submits), metadata=producer, timeout=30)
        acks = [consumption_pb2.AckRequest(message_id=result.message_id) for result in submitted.results]
        acked = consumptions.AckMany(consumption_pb2.AckManyRequest(items=acks), metadata=consumer, timeout=30)
        assert not any(result.HasField("error") for result in acked.results)
        count += size
    return count


def single(orders: tmc.Center, coupons: tmc.Center, stop: float) -> int:
    """Single calls: the SDK's sender batches those that its callers make at the same time."""
    prefix, count = os.urandom(6).hex(), 0
    while time.monotonic() < stop:
        prepared = orders.prepare(TOPIC, BODY, key=f"{prefix}-{count}", timeout=LIMIT)
        message_id = orders.submit(prepared, timeout=LIMIT)
        ack = consumption_pb2.AckRequest(message_id=message_id)
        wait(coupons.sender.send(sender.ACK, ack, LIMIT.total_seconds()), LIMIT)
        count += 1
    return count


async def single_async(orders: aio.AsyncCenter, coupons: tmc.Center, stop: float) -> int:
    """The same single calls from asyncio tasks."""
    prefix, count = os.urandom(6).hex(), 0
    while time.monotonic() < stop:
        prepared = await orders.prepare(TOPIC, BODY, key=f"{prefix}-{count}", timeout=LIMIT)
        message_id = await orders.submit(prepared, timeout=LIMIT)
        ack = consumption_pb2.AckRequest(message_id=message_id)
        await aio.awaited(coupons.sender.send(sender.ACK, ack, LIMIT.total_seconds()), LIMIT)
        count += 1
    return count


def main(mode: str, address: str, orders_key: str, coupons_key: str, threads: str, seconds: str) -> None:
    counts: list[int] = []
    orders = tmc.connect(address, app="orders", key=orders_key)
    coupons = tmc.connect(address, app="coupons", key=coupons_key)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    stop = began + float(seconds)

    async def tasks() -> None:
        face = aio.AsyncCenter(orders)
        counts.extend(await asyncio.gather(*(single_async(face, coupons, stop) for _ in range(int(threads)))))

    def work() -> None:
        if mode == "batched":
            counts.append(batched(address, orders_key, coupons_key, stop))
        else:
            counts.append(single(orders, coupons, stop))

    if mode == "async":
        asyncio.run(tasks())
    workers = [threading.Thread(target=work) for _ in range(0 if mode == "async" else int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps({"messages": sum(counts), "callers": len(counts), "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
