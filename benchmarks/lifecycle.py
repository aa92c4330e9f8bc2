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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import floor, handrolled
from benchmarks.cpu import seconds_of
from tests.support.cluster import Cluster
from tmc_storm.eventually import eventually

LIFE = (sys.executable, str(Path(__file__).parent / "life.py"))
ROOT = Path(__file__).parents[1]


class Ledgers:
    """What producers submitted and the consumer handled, over all runs."""

    def __init__(self) -> None:
        self.lost = self.duplicates = self.invented = 0

    def compare(self, folder: Path) -> None:
        committed = [key for path in folder.glob("*.committed") for key in path.read_text().split()]
        handled = dict(line.split()[:2] for line in (folder / "handled").read_text().splitlines())
        self.lost += len(set(committed) - set(handled))
        self.invented += len(set(handled) - set(committed))
        self.duplicates += sum(int(times) - 1 for times in handled.values())


@dataclass(frozen=True)
class Lives:
    """per_s: full lives per second.  cpu_us: CPU microseconds per message by part, PARTS.  folder: what its processes wrote."""

    per_s: float
    cpu_us: Mapping[str, float]
    folder: Path


SIDES = (
    "floor",
    "single_256",
    "async_256",
    "handrolled_naive",
    "batched",
    "handrolled_batched",
    "single_64",
    "single_1",
)
LIVES = {  # mode, processes, callers in each, share of the messages; 0: 400 of them
    "single_256": ("produce", 4, 64, 1.0),
    "async_256": ("tasks", 4, 64, 1.0),
    "batched": ("batches", 2, 8, 1.0),
    "single_64": ("produce", 1, 64, 0.25),
    "single_1": ("produce", 1, 1, 0.0),
}
RATIOS = {
    "ratio_to_floor": ("single_256", "floor"),
    "async_ratio_to_floor": ("async_256", "floor"),
    "batched_ratio_to_floor": ("batched", "floor"),
    "ratio_to_handrolled_naive": ("single_256", "handrolled_naive"),
}
PARTS = ("server", "database", "broker", "callers", "consumer")


def _of_center(cluster: Cluster) -> dict[str, float]:
    """Return CPU seconds by part."""
    return {
        "server": seconds_of(server.pid for server in cluster.servers),
        "database": seconds_of(database.process.pid for database in cluster.databases if database.process is not None),
        "broker": seconds_of([cluster.broker.process.pid]),
    }


def run(
    cluster: Cluster,
    mode: str,
    processes: int,
    threads: int,
    count: int,
    ledgers: Ledgers,
    producer: Sequence[str] = LIFE,
    **settings: str,
) -> Lives:
    """Live that many lives. producer: a command that takes the arguments of benchmarks/life.py.

    settings: BENCH_ variables of the processes.
    """
    folder = Path(tempfile.mkdtemp(prefix="tmc-life-"))
    count = count // (processes * threads) * processes * threads
    address = cluster.servers[0].address
    commands = [[*LIFE, "consume", address, cluster.keys["coupons"], str(count), str(folder)]] + [
        [
            *producer,
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
            command,
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
    before = _of_center(cluster)
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    consumer, *producers = [json.loads(process.communicate()[0]) for process in started]
    after = _of_center(cluster)
    ledgers.compare(folder)
    cpu_s = {part: after[part] - before[part] for part in after}
    cpu_s |= {"callers": sum(producer["cpu_s"] for producer in producers), "consumer": consumer["cpu_s"]}
    return Lives(
        per_s=count / (consumer["ended"] - min(producer["began"] for producer in producers)),
        cpu_us={part: seconds / count * 1e6 for part, seconds in cpu_s.items()},
        folder=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--spread", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=SIDES, choices=SIDES, metavar="SIDE", help=", ".join(SIDES))
    options = parser.parse_args()
    ledgers = Ledgers()
    rounds: list[dict[str, float]] = []
    cpu_us: dict[str, list[Mapping[str, float]]] = {}
    part = options.messages // options.rounds
    with Cluster(lease_seconds=10, pool_mb=1024, own_broker=True) as cluster:
        server, broker = cluster.databases[0], cluster.broker
        cluster.register("orders", "coupons")
        topic_settings = {"spread": options.spread, "open_limit": 10_000_000}
        cluster.in_effect(cluster.subscribe("bench.paid", "coupons", topic_settings=topic_settings))
        run(cluster, "batches", 2, 8, 4000, ledgers)  # warm up

        def measured(side: str) -> float:
            if side == "floor":
                return floor.messages_per_s(server, 3)
            if side == "handrolled_naive":
                return handrolled.messages_per_s(server, broker, 2000, batched=False)
            if side == "handrolled_batched":
                return handrolled.messages_per_s(server, broker, 20_000, batched=True)
            mode, processes, threads, share = LIVES[side]
            made = run(cluster, mode, processes, threads, int(part * share) or 400, ledgers)
            cpu_us.setdefault(side, []).append(made.cpu_us)
            return made.per_s

        for _ in range(options.rounds):
            rounds.append({side: measured(side) for side in SIDES if side in options.only})
        eventually(lambda: set(cluster.consumptions()) == {"ACKED"}, seconds=30)
        unacked = sum(count for state, count in cluster.consumptions().items() if state != "ACKED")
        memory_mb = cluster.servers[0].rss_mb()
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}

    result: dict[str, Any] = {
        key: round(statistics.median(each[value] / each[over] for each in rounds), 3)
        for key, (value, over) in RATIOS.items()
        if value in found and over in found
    }
    result |= {f"{name}_per_s": round(value) for name, value in found.items()}
    for name, several in cpu_us.items():
        of_each = {part: [each[part] for each in several] for part in PARTS}
        of_each["clients"] = [each["callers"] + each["consumer"] for each in several]
        result |= {f"{part}_us_{name}": round(statistics.median(values)) for part, values in of_each.items()}
    result |= {
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
