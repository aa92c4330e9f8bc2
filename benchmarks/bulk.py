"""A bulk job that reactivates 100,000 FAILED deliveries, beside traffic at a fixed rate.

bulk_per_s: deliveries per second from the job's start time to its end. traffic_loss_share: what of the offered lives did
not end in their time beside the job, more than without it; rounds alternate. What is reactivated is delivered to a consumer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster
from tests.support.rows import Rows
from tmc_common.protocol import admin_pb2
from tmc_server.domain.consumption import ConsumptionState
from tmc_storm.eventually import eventually

HERE = Path(__file__).parent


def reactivate(cluster: Cluster, rate: int) -> tuple[float, Any]:
    """Returns: deliveries per second, and the job at its end."""
    wanted = admin_pb2.BulkFilter(action=admin_pb2.BULK_ACTION_REACTIVATE, topic="bench.failed")
    seen = cluster.admin("DryRunBulkJob", admin_pb2.DryRunBulkJobRequest(filter=wanted))
    start = admin_pb2.StartBulkJobRequest(
        filter=wanted, dry_run=seen.dry_run, count=seen.count, reason="bench", rate=rate, hold_ms=0
    )
    job = cluster.admin("StartBulkJob", start)

    def ended() -> Any:
        time.sleep(0.2)
        found = cluster.admin("GetBulkJob", admin_pb2.GetBulkJobRequest(job=job.job))
        return found if found.finished_ms else None

    done = eventually(ended, seconds=600)
    return done.done / ((done.finished_ms - done.start_ms) / 1000), done


def steady(cluster: Cluster, rate: int, seconds: int) -> subprocess.Popen[str]:
    keys = (cluster.keys["orders"], cluster.keys["coupons"])
    command = [sys.executable, "-m", "benchmarks.steady", cluster.servers[0].address, *keys, str(rate), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--deliveries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--traffic", type=int, default=200, help="lives offered per second")
    parser.add_argument("--rate", type=int, default=3_000, help="the job's rate")
    options = parser.parse_args()
    with Cluster(lease_seconds=10, pool_mb=1024) as cluster:
        cluster.register("orders", "coupons", "sleepers")
        large = {"open_limit": 10_000_000, "spread": 4}
        paid = cluster.subscribe("bench.paid", "coupons", topic_settings=large)
        failing = cluster.subscribe("bench.failed", "sleepers", topic_settings=large)
        cluster.in_effect(paid, failing)
        rows = Rows(cluster, "bench.failed", failing)
        address, key = cluster.servers[0].address, cluster.keys["sleepers"]
        consumer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.consumer", address, "sleepers", key, "bench.failed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
        )
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        rates: list[float] = []
        alone: list[dict[str, float]] = []
        beside: list[dict[str, float]] = []
        seconds = options.deliveries // options.rate + 10
        json.loads(steady(cluster, options.traffic, 5).communicate()[0])  # warm up
        for _ in range(options.rounds):
            alone.append(json.loads(steady(cluster, options.traffic, seconds).communicate()[0]))
            rows.fill(options.deliveries, ConsumptionState.FAILED, "NULL")
            traffic = steady(cluster, options.traffic, seconds)
            rate, job = reactivate(cluster, options.rate)
            assert job.done == options.deliveries, job
            rates.append(rate)
            beside.append(json.loads(traffic.communicate()[0]))
            eventually(lambda: not rows.one("COUNT(*)", f"state <> {int(ConsumptionState.ACKED)}"), seconds=600)
            print(f"{rate:,.0f}/s, alone {alone[-1]}, beside {beside[-1]}", file=sys.stderr)
        consumer.communicate()
        rows.close()
    share = {
        side: sum(each["done"] for each in found) / sum(each["offered"] for each in found)
        for side, found in (("alone", alone), ("beside", beside))
    }
    figures = {
        "bulk_per_s": round(statistics.median(rates)),
        "traffic_loss_share": round(1 - share["beside"] / share["alone"], 3),
        "traffic_per_s": options.traffic,
        "p99_alone_ms": statistics.median(each["p99_ms"] for each in alone),
        "p99_beside_ms": statistics.median(each["p99_ms"] for each in beside),
    }
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
