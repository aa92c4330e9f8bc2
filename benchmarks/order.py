"""What order costs: full lives with 10,000 order keys against the same without, sides alternating in one run.

ordered_share: throughput with order keys by that without. blocked_share: the same with one key blocked, a thousand messages
waiting behind its failed head, by that with order keys and nothing blocked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import tmc_client as tmc
from benchmarks.lifecycle import Ledgers, run
from tests.support.cluster import Cluster
from tmc_storm.eventually import eventually

KEYS = 10_000
WAITING = 1_000


def _block(cluster: Cluster) -> None:
    """A key whose head is rejected, with messages behind it."""
    address = cluster.servers[0].address
    with tmc.connect(address, app="orders", key=cluster.keys["orders"]) as orders:
        for number in range(WAITING):
            orders.publish("bench.blocked", b"x" * 256, key=f"blocked-{number}", order_key="blocked")
    with tmc.connect(address, app="coupons", key=cluster.keys["coupons"]) as coupons:
        consumer = tmc.Consumer(coupons)

        @consumer.listener("bench.blocked")
        def reject(body: bytes) -> None:
            raise tmc.Reject("it blocks its key")

        with consumer:
            eventually(lambda: cluster.consumptions()["FAILED"] == 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    options = parser.parse_args()
    with Cluster(lease_seconds=10, pool_mb=1024) as cluster:
        cluster.register("orders", "coupons")
        large = {"open_limit": 10_000_000}
        sides = {
            "plain": ("bench.plain", {}, "0"),
            "ordered": ("bench.ordered", {"ordered": True}, str(KEYS)),
            "blocked": ("bench.blocked", {"ordered": True}, str(KEYS)),
        }
        made = [
            cluster.subscribe(topic, "coupons", topic_settings={**large, **settings})
            for topic, settings, _ in sides.values()
        ]
        cluster.in_effect(*made)
        _block(cluster)
        ledgers = Ledgers()
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds + 1):
            for side, (topic, _settings, keys) in sides.items():
                variables = {"BENCH_TOPIC": topic, "BENCH_ORDER_KEYS": keys}
                rate = run(cluster, "batches", 2, 8, options.messages, ledgers, **variables).per_s
                if number:  # the first round warms up
                    rates[side].append(rate)
                print(f"{side}: {rate:,.0f}/s", file=sys.stderr)
    middle = {side: statistics.median(found) for side, found in rates.items()}
    figures = {
        "ordered_share": round(middle["ordered"] / middle["plain"], 3),
        "blocked_share": round(middle["blocked"] / middle["ordered"], 3),
        "plain_per_s": round(middle["plain"]),
        "ordered_per_s": round(middle["ordered"]),
        "lost": ledgers.lost,
        "duplicate_effects": ledgers.duplicates,
    }
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
