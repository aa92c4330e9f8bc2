"""The full life through the production form: prepare, submit, RabbitMQ, handler, stored ack; sides alternating in one run.

One server over MariaDB, one topic with 256-byte bodies, one subscriber in a process of its own; callers are 4 processes of 64
threads with single calls through the SDK (also as asyncio tasks, and 64 and 1 callers), and explicit batches of 100. The clock
stops when the last ack is stored. lost, duplicate_effects and unacked come from the ledgers of producers and consumer and
from the center's tables. Beside it: the floor (the same SQL in batches, nothing around it) and two hand-rolled outboxes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import floor, handrolled
from tests.support.cluster import Cluster
from tests.support.eventually import eventually

LIFE = str(Path(__file__).parent / "life.py")
ROOT = Path(__file__).parents[1]


class Ledgers:
    """What producers submitted and the consumer handled, over all runs."""

    def __init__(self) -> None:
        self.lost = self.duplicates = self.invented = 0

    def compare(self, folder: Path) -> None:
        committed = [key for path in folder.glob("*.committed") for key in path.read_text().split()]
        handled = dict(line.split() for line in (folder / "handled").read_text().splitlines())
        self.lost += len(set(committed) - set(handled))
        self.invented += len(set(handled) - set(committed))
        self.duplicates += sum(int(times) - 1 for times in handled.values())


def run(
    cluster: Cluster, mode: str, processes: int, threads: int, count: int, ledgers: Ledgers, **settings: str
) -> float:
    """Full lives per second. settings: BENCH_ variables of the processes, see benchmarks/life.py."""
    folder = Path(tempfile.mkdtemp(prefix="tmc-life-"))
    count = count // (processes * threads) * processes * threads
    address = cluster.servers[0].address
    commands = [["consume", address, cluster.keys["coupons"], str(count), str(folder)]] + [
        [
            mode,
            address,
            cluster.keys["orders"],
            f"{folder.name}-{number}",
            str(threads),
            str(count // processes),
            str(folder),
        ]
        for number in range(processes)
    ]
    started = [
        subprocess.Popen(
            [sys.executable, LIFE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | settings,
        )
        for command in commands
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    consumer, *producers = [json.loads(process.communicate()[0]) for process in started]
    ledgers.compare(folder)
    return count / (consumer["ended"] - min(producer["began"] for producer in producers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--spread", type=int, default=1)
    options = parser.parse_args()
    ledgers = Ledgers()
    rounds: list[dict[str, float]] = []
    with Cluster(lease_seconds=10, pool_mb=1024) as cluster:
        server, broker = cluster.databases[0], cluster.broker
        cluster.register("orders", "coupons")
        topic_settings = {"spread": options.spread, "open_limit": 10_000_000}
        cluster.in_effect(cluster.subscribe("bench.paid", "coupons", topic_settings=topic_settings))
        run(cluster, "batches", 2, 8, 4000, ledgers)  # warm up
        part = options.messages // options.rounds
        for _ in range(options.rounds):
            rounds.append(
                {
                    "floor": floor.messages_per_s(server, 3),
                    "single_256": run(cluster, "produce", 4, 64, part, ledgers),
                    "async_256": run(cluster, "tasks", 4, 64, part, ledgers),
                    "handrolled_naive": handrolled.messages_per_s(server, broker, 2000, batched=False),
                    "batched": run(cluster, "batches", 2, 8, part, ledgers),
                    "handrolled_batched": handrolled.messages_per_s(server, broker, 20_000, batched=True),
                    "single_64": run(cluster, "produce", 1, 64, part // 4, ledgers),
                    "single_1": run(cluster, "produce", 1, 1, 400, ledgers),
                }
            )
        eventually(lambda: set(cluster.consumptions()) == {"ACKED"}, seconds=30)
        unacked = sum(count for state, count in cluster.consumptions().items() if state != "ACKED")
        memory_mb = cluster.servers[0].rss_mb()

    def middle(value: str, over: str | None = None) -> float:
        return statistics.median(r[value] / (r[over] if over else 1) for r in rounds)

    result = {
        "ratio_to_floor": round(middle("single_256", "floor"), 3),
        "async_ratio_to_floor": round(middle("async_256", "floor"), 3),
        "ratio_to_handrolled_naive": round(middle("single_256", "handrolled_naive"), 2),
        "batched_ratio_to_floor": round(middle("batched", "floor"), 3),
        "messages_per_s": round(middle("single_256")),
        "async_messages_per_s": round(middle("async_256")),
        "floor_messages_per_s": round(middle("floor")),
        "batched_messages_per_s": round(middle("batched")),
        "handrolled_naive_per_s": round(middle("handrolled_naive")),
        "handrolled_batched_per_s": round(middle("handrolled_batched")),
        "single_64_messages_per_s": round(middle("single_64")),
        "single_1_messages_per_s": round(middle("single_1")),
        "lost": ledgers.lost,
        "invented": ledgers.invented,
        "duplicate_effects": ledgers.duplicates,
        "unacked": unacked,
        "server_memory_mb": round(memory_mb),
        "rounds": len(rounds),
        "all_rounds": [{key: round(value) for key, value in r.items()} for r in rounds],
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
