"""Open-loop traffic: full lives begun at a fixed rate, whether earlier ones have ended or not.

usage: steady.py ADDRESS ORDERS_KEY COUPONS_KEY RATE SECONDS      prints one JSON line: offered, done, p99_ms
Done counts lives that ended, with their ack stored, before the time was over.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import tmc_client as tmc
from benchmarks.callers import BODY, LIMIT, TOPIC
from tmc_client import aio
from tmc_client.connecting import sender
from tmc_common.protocol import consumption_pb2

_TICK_S = 0.01


async def offer(orders: tmc.Center, coupons: tmc.Center, rate: float, seconds: float) -> dict[str, float]:
    face, prefix = aio.AsyncCenter(orders), os.urandom(6).hex()
    took: list[float] = []

    async def live(number: int) -> None:
        began = time.monotonic()
        prepared = await face.prepare(TOPIC, BODY, key=f"{prefix}-{number}", timeout=LIMIT)
        ack = consumption_pb2.AckRequest(message_id=await face.submit(prepared, timeout=LIMIT))
        await aio.awaited(coupons.sender.send(sender.ACK, ack, LIMIT.total_seconds()), LIMIT)
        took.append(time.monotonic() - began)

    began, offered, running = time.monotonic(), 0, set()
    while (now := time.monotonic() - began) < seconds:
        while offered < now * rate:
            task = asyncio.create_task(live(offered))
            running.add(task)
            task.add_done_callback(running.discard)
            offered += 1
        await asyncio.sleep(_TICK_S)
    done = len(took)
    await asyncio.gather(*running)
    return {"offered": offered, "done": done, "p99_ms": round(sorted(took)[int(len(took) * 0.99)] * 1000, 1)}


def main(address: str, orders_key: str, coupons_key: str, rate: str, seconds: str) -> None:
    orders = tmc.connect(address, app="orders", key=orders_key)
    coupons = tmc.connect(address, app="coupons", key=coupons_key)
    print(json.dumps(asyncio.run(offer(orders, coupons, float(rate), float(seconds)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
