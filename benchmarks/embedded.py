"""The embedded center (`tmc dev`, SQLite, built-in delivery): full lives per second, prepare to stored ack.

64 producer threads with single calls through the SDK in one process, one consumer in another; the clock stops at the last
stored ack, read from the center's own tables.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import grpc

import tmc_client as tmc
from benchmarks.serving import TMC
from tmc_server.domain.placement import table_index_for
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

_TOPIC = "bench.paid"
_LIMIT = timedelta(seconds=30)
_CONSUMER = """
import sys, tmc_client as tmc
consumer = tmc.Consumer(tmc.connect(sys.argv[1], app="coupons"), concurrency=4, prefetch=500)
@consumer.listener("bench.paid")
def handle(body: bytes) -> None: ...
consumer.run()
"""


def _counts(data: Path) -> tuple[int, int]:
    """(acked, open) consumptions in the center's file."""
    nn = f"{table_index_for(_TOPIC):02d}"
    with sqlite3.connect(f"file:{data}?mode=ro", uri=True, timeout=10) as connection:
        query = f"SELECT COALESCE(SUM(state = 2), 0), COALESCE(SUM(state <> 2), 0) FROM tmc_consumption_{nn}"
        acked, left = connection.execute(query).fetchone()
    return int(acked), int(left)


def run(messages: int, threads: int) -> float:
    """Messages per second of one center."""
    folder = Path(tempfile.mkdtemp(prefix="tmc-bench-"))
    port, data = free_port(), folder / "center.db"
    address = f"127.0.0.1:{port}"
    environment = os.environ | {"TMC_LIMITS__ITEMS_PER_SECOND": "0"}
    center = subprocess.Popen(
        [TMC, "dev", "--port", str(port), "--data", str(data)], env=environment, stderr=subprocess.DEVNULL
    )
    consumer = subprocess.Popen([sys.executable, "-c", _CONSUMER, address], stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(30)
        client = tmc.connect(address, app="orders", timeout=_LIMIT)
        client.publish(_TOPIC, b"", key="first")
        eventually(lambda: _subscribed(data), seconds=30)
        body = os.urandom(256)

        def produce(worker: int) -> None:
            for i in range(messages // threads):
                client.submit(client.prepare(_TOPIC, body, key=f"{worker}-{i}"))

        workers = [threading.Thread(target=produce, args=(i,)) for i in range(threads)]
        began = time.monotonic()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        total = messages // threads * threads
        eventually(lambda: _counts(data)[0] >= total, seconds=120)
        elapsed = time.monotonic() - began
        client.close()
        return total / elapsed
    finally:
        for process in (consumer, center):
            process.terminate()
            process.wait(30)


def _subscribed(data: Path) -> bool:
    with sqlite3.connect(f"file:{data}?mode=ro", uri=True, timeout=10) as connection:
        return bool(connection.execute("SELECT COUNT(*) FROM tmc_subscription").fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = {
        "messages_per_s": round(statistics.median(run(options.messages, 64) for _ in range(options.rounds))),
        "messages": options.messages,
        "callers": 64,
        "rounds": options.rounds,
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:20} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
