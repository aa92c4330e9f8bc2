"""Measures what a message costs as things grow, each beside the usual message, in turns.

The usual one has 256 bytes, one subscriber, a topic in one shard, one server, and empty tables. Others have ten subscribers, a
body of 16 KiB or of 256 KiB, a topic in all 32 shards, or tables with millions of closed messages. Lives per second with
batches of 100 (of 4 MiB at most), and CPU microseconds of server, database and broker. subscribers_ratio: deliveries per second
to ten over those to one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.idle import fill
from benchmarks.lifecycle import Ledgers, Lives, run
from tests.support.cluster import Cluster
from tmc_storm.eventually import eventually

MANY = 10
PARTS = ("server", "database", "broker")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One kind of message, by how it differs from the usual one. share: of the messages of a round."""

    topic: str = "bench.paid"
    share: float = 1.0
    settings: Mapping[str, str] = field(default_factory=dict)


def _cluster(stack: ExitStack) -> Cluster:
    cluster = stack.enter_context(Cluster(lease_seconds=10, pool_mb=1024, own_broker=True))
    cluster.register("orders", "coupons", *(f"more{number}" for number in range(1, MANY)))
    settings = {"open_limit": 10_000_000}
    made = [
        cluster.subscribe("bench.paid", "coupons", topic_settings=settings),
        cluster.subscribe("bench.spread", "coupons", topic_settings=settings | {"spread": 32}),
        cluster.subscribe("bench.many", "coupons", topic_settings=settings),
        *(cluster.subscribe("bench.many", f"more{n}", topic_settings=settings) for n in range(1, MANY)),
    ]
    cluster.in_effect(*made)
    return cluster


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=12_000, help="of the usual side, each round")
    parser.add_argument("--rows", type=int, default=5_000_000, help="closed messages in the tables of the old side")
    options = parser.parse_args()
    ledgers, rounds = Ledgers(), []
    with ExitStack() as stack:
        usual, old = _cluster(stack), _cluster(stack)
        fill(old.databases[0], options.rows)
        others = ",".join(f"more{number}:{usual.keys[f'more{number}']}" for number in range(1, MANY))
        sides = {
            "usual": (usual, Side()),
            "old_rows": (old, Side()),
            "subscribers": (usual, Side(topic="bench.many", share=0.25, settings={"BENCH_SUBSCRIBERS": others})),
            "spread": (usual, Side(topic="bench.spread")),
            "body_16k": (usual, Side(share=0.5, settings={"BENCH_BODY": str(16 << 10)})),
            "body_256k": (usual, Side(share=0.05, settings={"BENCH_BODY": str(256 << 10)})),
        }

        def measured(cluster: Cluster, side: Side) -> Lives:
            settings = {"BENCH_TOPIC": side.topic, **side.settings}
            return run(cluster, "batches", 2, 4, int(options.messages * side.share), ledgers, **settings)

        for cluster in (usual, old):
            run(cluster, "batches", 2, 8, 4000, ledgers)  # warm up
        for _ in range(options.rounds):
            rounds.append({name: measured(*side) for name, side in sides.items()})
        for cluster in (usual, old):
            eventually(
                lambda cluster=cluster: cluster.consumptions()["ACKED"] >= cluster.consumptions().total(), seconds=60
            )

    result: dict[str, Any] = {}
    for name in rounds[0]:
        if name != "usual":
            ratio = statistics.median(each[name].per_s / each["usual"].per_s for each in rounds)
            result[f"{name}_ratio"] = round(ratio * (MANY if name == "subscribers" else 1), 3)
    for name in rounds[0]:
        result[f"{name}_per_s"] = round(statistics.median(each[name].per_s for each in rounds))
        for part in PARTS:
            result[f"{part}_us_{name}"] = round(statistics.median(each[name].cpu_us[part] for each in rounds))
    result |= {"lost": ledgers.lost, "invented": ledgers.invented, "duplicate_effects": ledgers.duplicates}
    result |= {"rounds": options.rounds, "old_rows": options.rows}
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
