"""How long one message takes: one caller alone, and an open loop at 25, 50 and 75 % of what the center can do.

latency_ratio: prepare and submit of one caller, one after the other, beside two raw commits of the same rows on the same
database, in turns. The open loop starts messages at a rate, whatever the ones before take, and counts from when each was due, so
that a pause of the center is in the figures of all that were due during it. to_handler_ms: from the submit to the handler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tmc_client as tmc
from benchmarks import floor
from benchmarks.lifecycle import LIFE, ROOT, Ledgers, Lives, run
from tests.support.cluster import Cluster
from tmc_storm.eventually import eventually

TOPIC = "bench.paid"
SHARES = (25, 50, 75)  # percent
TURN = 50


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _ms(work: Callable[[int], None], numbers: Sequence[int]) -> list[float]:
    took = []
    for number in numbers:
        began = time.perf_counter()
        work(number)
        took.append((time.perf_counter() - began) * 1000)
    return took


def one_caller(cluster: Cluster, turns: int) -> dict[str, float]:
    """Medians in milliseconds, and the median of the ratios of turns."""
    raw = floor.RawCommits(cluster.databases[0])
    address, count, body, numbers = cluster.servers[0].address, TURN * (turns + 1), os.urandom(256), itertools.count()
    center = tmc.connect(address, app="orders", key=cluster.keys["orders"])
    folder = Path(tempfile.mkdtemp(prefix="tmc-life-"))
    consuming = subprocess.Popen(
        [*LIFE, "consume", address, cluster.keys["coupons"], str(count), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert consuming.stdout is not None
    assert consuming.stdout.readline() == "ready\n"

    def ours(number: int) -> None:
        center.submit(center.prepare(TOPIC, body, key=f"{folder.name}-{number}"))

    sides: list[tuple[list[float], list[float]]] = []
    for _ in range(turns + 1):
        drawn = list(itertools.islice(numbers, TURN))
        sides.append((_ms(ours, drawn), _ms(raw.two_commits, drawn)))
    consuming.communicate("go\n", timeout=60)
    del sides[0]  # warm up
    center.close()
    raw.close()
    ratios = [statistics.median(made) / statistics.median(bare) for made, bare in sides]
    return {
        "latency_ratio": round(statistics.median(ratios), 2),
        "alone_ms": round(statistics.median(ms for made, _ in sides for ms in made), 2),
        "raw_commits_ms": round(statistics.median(ms for _, bare in sides for ms in bare), 2),
    }


def _times(lives: Lives) -> tuple[list[float], list[float]]:
    """Milliseconds from due to submitted, and from the submit to the handler."""
    handled = {key: float(at) for key, _, at in (line.split() for line in _lines(lives.folder / "handled"))}
    submits, arrivals = [], []
    for path in lives.folder.glob("*.times"):
        for key, seconds, submitted in map(str.split, _lines(path)):
            submits.append(float(seconds) * 1000)
            arrivals.append((handled[key] - float(submitted)) * 1000)
    return submits, arrivals


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each open loop")
    options = parser.parse_args()
    ledgers, rounds = Ledgers(), []
    with Cluster(lease_seconds=10, pool_mb=1024, own_broker=True) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe(TOPIC, "coupons", topic_settings={"open_limit": 10_000_000}))
        run(cluster, "batches", 2, 8, 4000, ledgers)  # warm up
        result: dict[str, Any] = one_caller(cluster, turns=10 * options.rounds)
        for _ in range(options.rounds):
            most = run(cluster, "tasks", 2, 64, 12_000, ledgers).per_s
            figures = {"maximum_per_s": most}
            for share in SHARES:
                per_s = most * share / 100
                lives = run(
                    cluster,
                    "paced",
                    2,
                    1,
                    int(per_s * options.seconds),
                    ledgers,
                    BENCH_PER_S=str(per_s / 2),
                )
                submits, arrivals = _times(lives)
                for name, percent in (("p50", 50), ("p99", 99), ("p999", 99.9)):
                    figures[f"{name}_ms_{share}"] = _percentile(submits, percent)
                figures[f"to_handler_ms_{share}"] = statistics.median(arrivals)
                figures[f"to_handler_p99_ms_{share}"] = _percentile(arrivals, 99)
            rounds.append(figures)
        eventually(lambda: set(cluster.consumptions()) == {"ACKED"}, seconds=30)
    medians = {name: round(statistics.median(each[name] for each in rounds), 1) for name in rounds[0]}
    result |= {"p99_ms_half": medians["p99_ms_50"], "to_handler_ms": medians["to_handler_ms_50"]} | medians
    result |= {"lost": ledgers.lost, "invented": ledgers.invented, "duplicate_effects": ledgers.duplicates}
    result |= {"rounds": options.rounds}
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
