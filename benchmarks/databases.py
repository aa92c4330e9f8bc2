"""The full life over MariaDB and over PostgreSQL, in turns; beside the ratios, the CPU time of a message by part.

A center each, with a broker of its own; 256-byte bodies, one subscriber, durable settings. See benchmarks/lifecycle.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.lifecycle import PARTS, Ledgers, run
from tests.support.cluster import KINDS, Cluster, Kind
from tmc_storm.eventually import eventually

MODES = {"batched": ("batches", 2, 8), "tasks": ("tasks", 4, 64)}


class Side:
    """One center; figures of each round, and CPU seconds by part."""

    def __init__(self, kind: Kind, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(Cluster(kind=kind, lease_seconds=10, pool_mb=1024, own_broker=True))
        self.cluster.register("orders", "coupons")
        made = self.cluster.subscribe("bench.paid", "coupons", topic_settings={"open_limit": 10_000_000})
        self.cluster.in_effect(made)
        self.rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.cpu_us: dict[str, list[Mapping[str, float]]] = {mode: [] for mode in MODES}

    def run(self, mode: str, count: int, ledgers: Ledgers) -> None:
        name, processes, threads = MODES[mode]
        lives = run(self.cluster, name, processes, threads, count, ledgers)
        self.rates[mode].append(lives.per_s)
        self.cpu_us[mode].append(lives.cpu_us)

    def unacked(self) -> int:
        eventually(lambda: set(self.cluster.consumptions()) == {"ACKED"}, seconds=30)
        return sum(count for state, count in self.cluster.consumptions().items() if state != "ACKED")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=16_000)
    options = parser.parse_args()
    ledgers = Ledgers()
    with ExitStack() as stack:
        sides = {kind: Side(kind, stack) for kind in KINDS}
        for side in sides.values():
            run(side.cluster, "batches", 2, 8, 4000, ledgers)  # warm up
        for _ in range(options.rounds):
            for mode in MODES:
                for side in sides.values():
                    side.run(mode, options.messages, ledgers)
        unacked = sum(side.unacked() for side in sides.values())
    result: dict[str, Any] = {
        f"postgresql_ratio_{mode}": round(
            statistics.median(
                ours / theirs
                for ours, theirs in zip(sides["postgresql"].rates[mode], sides["mariadb"].rates[mode], strict=True)
            ),
            2,
        )
        for mode in MODES
    }
    for kind, side in sides.items():
        for mode in MODES:
            result[f"{kind}_{mode}_per_s"] = round(statistics.median(side.rates[mode]))
            for part in PARTS:
                result[f"{kind}_{mode}_{part}_us"] = round(statistics.median(each[part] for each in side.cpu_us[mode]))
    result |= {
        "lost": ledgers.lost,
        "invented": ledgers.invented,
        "duplicate_effects": ledgers.duplicates,
        "unacked": unacked,
        "rounds": options.rounds,
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
