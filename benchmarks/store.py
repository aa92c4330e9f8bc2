"""Group commit on MariaDB or PostgreSQL through gRPC against the floor, sides alternating in one run; ratios first.

A full life is prepare + submit + ack, three durable answers, 256-byte bodies, one topic in one shard, one subscriber, no
delivery. batched: 16 callers with explicit batches of 100. single_N: N threads in two processes (one for N = 1) with single
calls through the SDK; async_256: the same from asyncio tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import floor
from benchmarks.serving import TOPIC, Served, serving
from tests.support.cluster import KINDS
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

CALLERS = str(Path(__file__).parent / "callers.py")


def drive(served: Served, mode: str, processes: int, threads: int, seconds: float) -> float:
    """Full lives per second of `processes` x `threads` callers."""
    command = [
        sys.executable,
        CALLERS,
        mode,
        served.address,
        served.orders_key,
        served.coupons_key,
        str(threads),
        str(seconds),
    ]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in started]
    elapsed = time.monotonic() - began
    return sum(result["messages"] for result in results) / elapsed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--database", choices=KINDS, default="mariadb")
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    server = MariaDB(pool_mb=1024) if options.database == "mariadb" else PostgreSQL(pool_mb=1024)
    rounds: list[dict[str, float]] = []
    try:
        with serving(server.url("tmc_bench")) as served:
            drive(served, "batched", 2, 8, 1.5)  # warm up
            for _ in range(options.rounds):
                rounds.append(
                    {
                        "floor": floor.messages_per_s(server, options.seconds),
                        "batched": drive(served, "batched", 2, 8, options.seconds),
                        "single_256": drive(served, "single", 2, 128, options.seconds),
                        "async_256": drive(served, "async", 2, 128, options.seconds),
                        "single_64": drive(served, "single", 2, 32, options.seconds),
                        "single_1": drive(served, "single", 1, 1, options.seconds / 2),
                    }
                )
    finally:
        server.stop()

    def middle(value: str, over: str | None = None) -> float:
        return statistics.median(r[value] / (r[over] if over else 1) for r in rounds)

    result = {
        "ratio_to_floor": round(middle("batched", "floor"), 3),
        "single_ratio_to_floor": round(middle("single_256", "floor"), 3),
        "floor_messages_per_s": round(middle("floor")),
        "batched_messages_per_s": round(middle("batched")),
        "single_256_messages_per_s": round(middle("single_256")),
        "async_256_messages_per_s": round(middle("async_256")),
        "single_64_messages_per_s": round(middle("single_64")),
        "single_1_messages_per_s": round(middle("single_1")),
        "topic": TOPIC,
        "spread": 1,
        "rounds": len(rounds),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
