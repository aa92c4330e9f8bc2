"""Redelivery: deliveries whose copies are gone, delays, and take-over after a kill; one server over MariaDB and RabbitMQ.

messages_per_s: 100,000 deliveries that were tried once, are due, and have no copy in any queue: from the moment they are
due to the last stored ack, with a consumer that fetches 500 copies ahead. default_per_s: the same of fewer, with the
default of 32. rss_growth_mb: of the server meanwhile. delay_late_ms: p99 from the end of a delay to the stored
ack, of messages with random delays. takeover_ms: the same for messages whose delay ends after the server that looks after
their shard was killed, beside a second one; lease_ms is what that one has to wait for. ordered_share: see `bench order`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import tmc_client as tmc
from tests.support.cluster import KINDS, Cluster, Kind
from tests.support.rows import Rows
from tmc_server.domain.consumption import ConsumptionState
from tmc_storm.eventually import eventually

ROOT = Path(__file__).parents[1]
TOPIC = "bench.redelivered"
LEASE_S = 3.0
_PREFETCH = 500
_PUBLISHED_S = 15.0  # all are published by then
ACKED = int(ConsumptionState.ACKED)


class Consumer:
    """A process of its own that acks at once; of every server. prefetch: copies fetched ahead, by default the SDK's."""

    def __init__(self, cluster: Cluster, prefetch: int | None = None) -> None:
        command = ["-m", "benchmarks.consumer", cluster.addresses, "coupons", cluster.keys["coupons"], TOPIC]
        if prefetch is not None:
            command.append(str(prefetch))
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        self._process.communicate()


def opened(cluster: Cluster, prefetch: int | None = None) -> tuple[Rows, Consumer]:
    cluster.register("orders", "coupons")
    made = cluster.subscribe(TOPIC, "coupons", topic_settings={"spread": 4, "open_limit": 10_000_000})
    cluster.in_effect(made)
    return Rows(cluster, TOPIC, made), Consumer(cluster, prefetch)


def redelivered(rows: Rows, cluster: Cluster, count: int) -> dict[str, Any]:
    """Make `count` rows due and wait for their acks."""
    before = cluster.servers[0].rss_mb()
    rows.fill(count, ConsumptionState.SCHEDULED, "9000000000000")
    began = rows.make_due()
    eventually(lambda: _acked(rows) >= count, seconds=600)
    last = rows.one("MAX(closed_ms)", f"state = {ACKED}")
    return {
        "messages_per_s": round(count / ((last - began) / 1000)),
        "rss_growth_mb": round(cluster.servers[0].rss_mb() - before),
    }


def _acked(rows: Rows) -> int:
    time.sleep(0.2)
    return rows.one("COUNT(*)", f"state = {ACKED}")


def publish_delayed(cluster: Cluster, address: str, count: int, due_s: float) -> None:
    """Messages that are due evenly over ten seconds from `due_s` (of time.monotonic) on."""
    dice = random.Random(1)
    with tmc.connect(address, app="orders", key=cluster.keys["orders"]) as orders:
        for number in range(count):
            due = due_s + dice.uniform(0, 10)
            delay = timedelta(seconds=due - time.monotonic())
            orders.publish(TOPIC, b"x" * 256, key=f"delayed-{number}", delay=delay)


def late_ms(kind: Kind, count: int) -> int:
    with Cluster(kind=kind, lease_seconds=10) as cluster:
        rows, consumer = opened(cluster)
        publish_delayed(cluster, cluster.servers[0].address, count, time.monotonic() + _PUBLISHED_S)
        eventually(lambda: _acked(rows) >= count, seconds=120)
        late = rows.lateness_ms("TRUE")
        consumer.stop()
        rows.close()
    return late[int(len(late) * 0.99)]


def takeover_ms(kind: Kind, count: int) -> int:
    with Cluster(servers=2, kind=kind, lease_seconds=LEASE_S) as cluster:
        cluster.shared(2)
        rows, consumer = opened(cluster)
        first = cluster.servers[0]
        due_s = time.monotonic() + _PUBLISHED_S
        publish_delayed(cluster, cluster.servers[1].address, count, due_s)
        mine = next(set(each.shards) for each in cluster.live_servers() if str(first.pid) in each.name.split(":"))
        time.sleep(max(0.0, due_s + 1 - time.monotonic()))
        first.kill()
        killed_ms = int(time.time() * 1000)
        eventually(lambda: _acked(rows) >= count, seconds=120)
        shards = ", ".join(map(str, mine))
        late = rows.lateness_ms(f"{{shard}} IN ({shards}) AND since_ms > {killed_ms}")
        consumer.stop()
        rows.close()
    return late[int(len(late) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--deliveries", type=int, default=100_000)
    parser.add_argument("--database", choices=KINDS, default="mariadb")
    parser.add_argument("--delayed", type=int, default=2_000)
    options = parser.parse_args()
    with Cluster(kind=options.database, lease_seconds=10, pool_mb=1024) as cluster:
        rows, consumer = opened(cluster, _PREFETCH)
        redelivered(rows, cluster, 2_000)  # warm up
        rows.clear()
        figures = redelivered(rows, cluster, options.deliveries)
        consumer.stop()
        rows.clear()
        consumer = Consumer(cluster)
        figures["default_per_s"] = redelivered(rows, cluster, options.deliveries // 5)["messages_per_s"]
        consumer.stop()
        rows.close()
    figures |= {
        "delay_late_ms": late_ms(options.database, options.delayed),
        "takeover_ms": takeover_ms(options.database, options.delayed),
        "lease_ms": round(LEASE_S * 1000),
    }
    order = [sys.executable, "-m", "benchmarks.order", "--json"]
    ordered = json.loads(subprocess.run(order, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
    figures["ordered_share"] = ordered["ordered_share"]
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
