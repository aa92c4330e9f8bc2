"""The full life with producers in Go instead of our SDK, in turns: single calls, and operations over one stream.

One process of 64 goroutines over one connection each time, beside one process of 64 asyncio tasks of the SDK; and the same with
256. The consumer is the SDK's. See benchmarks/lifecycle.py. Needs Go.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.lifecycle import PARTS, Ledgers, Lives, run
from tests.support.cluster import Cluster
from tests.support.go_client import built
from tmc_storm.eventually import eventually

SIDES = ("tasks", "stream", "unary")
CALLERS = (64, 256)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=10_000)
    options = parser.parse_args()
    ledgers, rounds = Ledgers(), []
    with Cluster(lease_seconds=10, pool_mb=1024, own_broker=True) as cluster:
        go = {"producer": [str(built())]}
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe("bench.paid", "coupons", topic_settings={"open_limit": 10_000_000}))
        run(cluster, "batches", 2, 8, 4000, ledgers)  # warm up

        def measured(side: str, callers: int) -> Lives:
            return run(cluster, side, 1, callers, options.messages, ledgers, **({} if side == "tasks" else go))

        for _ in range(options.rounds):
            rounds.append({(side, callers): measured(side, callers) for callers in CALLERS for side in SIDES})
        eventually(lambda: set(cluster.consumptions()) == {"ACKED"}, seconds=30)
        unacked = sum(count for state, count in cluster.consumptions().items() if state != "ACKED")

    def ratio(side: str, callers: int) -> float:
        return statistics.median(each[side, callers].per_s / each["tasks", callers].per_s for each in rounds)

    result = {
        f"foreign_{side}_ratio{'' if callers == 64 else f'_{callers}'}": round(ratio(side, callers), 2)
        for callers in CALLERS
        for side in ("stream", "unary")
    }
    for side, callers in rounds[0]:
        lives = [each[side, callers] for each in rounds]
        result[f"{side}_{callers}_per_s"] = round(statistics.median(each.per_s for each in lives))
        for part in PARTS:
            result[f"{part}_us_{side}_{callers}"] = round(statistics.median(each.cpu_us[part] for each in lives))
    result |= {"lost": ledgers.lost, "invented": ledgers.invented, "duplicate_effects": ledgers.duplicates}
    result |= {"unacked": unacked, "rounds": options.rounds}
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
