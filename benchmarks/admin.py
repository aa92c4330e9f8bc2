"""What operators ask of a center with five million messages in 32 shards on MariaDB, and what it costs the traffic beside it.

get, search, overview and failures are RPCs; page is the slowest page of the console, over HTTP on loopback. search: by id, by
key in all topics, by the beginning of a key, failed deliveries, the newest messages of a topic, the audit trail.
traffic_loss_share: what of the offered lives did not end in their time while an operator pages, more than without; rounds
alternate.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.bulk import steady
from benchmarks.idle import measure
from benchmarks.serving import TMC
from tests.support.cluster import Cluster
from tests.support.rows import Rows
from tmc_common.protocol import admin_pb2, admin_pb2_grpc, types_pb2
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.placement import shard_of
from tmc_storm.eventually import eventually

HERE = Path(__file__).parent
PAGES = (
    "/",
    "/search",
    "/search?topic=bench.old",
    "/failures",
    "/undecided",
    "/bulk",
    "/topics",
    "/apps",
    "/shards",
    "/alerts",
    "/audit",
    "/operators",
)
_CHUNK = 500_000


def p99(seconds: Sequence[float]) -> float:
    """Milliseconds."""
    return round(sorted(seconds)[min(int(len(seconds) * 0.99), len(seconds) - 1)] * 1000, 1)


def timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
    took = []
    for call in calls:
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return took


class Operator:
    """One who looks around, at some of the messages that are there."""

    def __init__(self, cluster: Cluster, rows: Rows, dice: random.Random) -> None:
        self.dice = dice
        self._channel = grpc.insecure_channel(cluster.servers[0].address)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._metadata = [("authorization", f"Bearer {cluster.token}")]
        self.ids: list[str] = []
        self.keys: list[str] = []
        with rows.engine.connect() as connection:
            for shard in rows.shards:
                query = f"SELECT id, message_key FROM tmc_message_{shard:02d} WHERE id MOD 997 = 0 LIMIT 200"
                for row in connection.exec_driver_sql(query):
                    self.ids.append(f"{rows.topic.number}-{rows.owner}-{shard:02d}-{row.id}")
                    if shard_of(rows.topic.table_index, rows.topic.spread, row.message_key) == shard:
                        self.keys.append(row.message_key)

    def ask(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=60)

    def get(self) -> None:
        request = admin_pb2.GetMessageDetailRequest(message_id=self.dice.choice(self.ids), without_body=True)
        assert self.ask("GetMessageDetail", request).message.message_id

    def overview(self) -> None:
        assert self.ask("GetOverview", admin_pb2.GetOverviewRequest()).topics

    def failures(self) -> None:
        assert self.ask("ListFailureGroups", admin_pb2.ListFailureGroupsRequest()).groups

    def search(self) -> None:
        key = self.dice.choice(self.keys)
        kind = self.dice.randrange(6)
        search = admin_pb2.SearchMessagesRequest
        if kind == 0:
            found = self.ask("SearchMessages", search(text=self.dice.choice(self.ids))).messages
        elif kind == 1:
            found = self.ask("SearchMessages", search(text=key)).messages
        elif kind == 2:
            found = self.ask("SearchMessages", search(text=f"{key[:-2]}*", topic="bench.old")).messages
        elif kind == 3:
            state = types_pb2.CONSUMPTION_STATE_FAILED
            request = admin_pb2.ListConsumptionsRequest(topic="bench.old", state=state)
            found = self.ask("ListConsumptions", request).consumptions
        elif kind == 4:
            newest = admin_pb2.ListMessagesRequest(topic="bench.old", newest_first=True)
            found = self.ask("ListMessages", newest).messages
        else:
            found = self.ask("ListAudit", admin_pb2.ListAuditRequest(subject="bench.old")).entries
        assert found, kind


def filled(cluster: Cluster, messages: int, failures: int) -> Rows:
    large = {"open_limit": 10_000_000, "spread": 32}
    old = cluster.subscribe("bench.old", "coupons", topic_settings=large)
    cluster.in_effect(old)
    rows = Rows(cluster, "bench.old", old)
    for _ in range(max(messages // _CHUNK, 1)):
        rows.fill(min(messages, _CHUNK), ConsumptionState.ACKED, "NULL")
    rows.fill(failures, ConsumptionState.FAILED, "NULL")
    return rows


@contextmanager
def console(cluster: Cluster, log: Path) -> Iterator[httpx.Client]:
    with open(log, "wb") as output:
        command = [TMC, "console", "--listen", "127.0.0.1:0", "--address", cluster.servers[0].address]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        said = eventually(lambda: re.search(r"http://[\w.:]+", log.read_text()))
        with httpx.Client(base_url=said[0], follow_redirects=True, timeout=60) as browser:
            eventually(lambda: _is_logged_in(browser, cluster.token))
            yield browser
    finally:
        process.terminate()
        process.wait(30)


def _is_logged_in(browser: httpx.Client, token: str) -> bool:
    try:
        return browser.post("/login", data={"token": token, "next": "/shards"}).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--failures", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--traffic", type=int, default=200, help="lives offered per second")
    parser.add_argument("--seconds", type=int, default=20, help="of traffic per round and side")
    options = parser.parse_args()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(lease_seconds=10, pool_mb=1024))
        cluster.register("orders", "coupons")
        paid = cluster.subscribe("bench.paid", "coupons", topic_settings={"open_limit": 10_000_000, "spread": 4})
        cluster.in_effect(paid)
        idle_before = measure(cluster, 10)
        began = time.monotonic()
        rows = filled(cluster, options.messages, options.failures)
        filled_in = time.monotonic() - began
        operator = Operator(cluster, rows, random.Random(5))
        browser = stack.enter_context(console(cluster, cluster.home / "console.log"))
        asked = {
            "get": timed([operator.get] * 500),
            "search": timed([operator.search] * 300),
            "overview": timed([operator.overview] * 30),
            "failures": timed([operator.failures] * 10),
        }
        pages = {page: timed([partial(_open, browser, page)] * 10) for page in PAGES}
        idle_after = measure(cluster, 10)
        json.loads(steady(cluster, options.traffic, 5).communicate()[0])  # warm up
        alone: list[dict[str, float]] = []
        beside: list[dict[str, float]] = []
        for _ in range(options.rounds):
            alone.append(json.loads(steady(cluster, options.traffic, options.seconds).communicate()[0]))
            done = threading.Event()
            paging = threading.Thread(target=_page, args=(browser, done))
            traffic = steady(cluster, options.traffic, options.seconds)
            paging.start()
            beside.append(json.loads(traffic.communicate()[0]))
            done.set()
            paging.join()
            print(f"alone {alone[-1]}, beside {beside[-1]}", file=sys.stderr)
        rows.close()
    share = {
        side: sum(each["done"] for each in found) / sum(each["offered"] for each in found)
        for side, found in (("alone", alone), ("beside", beside))
    }
    slowest = max(pages, key=lambda page: statistics.median(pages[page]))
    figures = {
        **{f"{name}_p99_ms": p99(took) for name, took in asked.items() if name in ("get", "search")},
        **{f"{name}_ms": round(statistics.median(asked[name]) * 1000, 1) for name in ("overview", "failures")},
        "page_ms": round(statistics.median(pages[slowest]) * 1000, 1),
        "slowest_page": slowest,
        "traffic_loss_share": round(1 - share["beside"] / share["alone"], 3),
        "traffic_p99_alone_ms": statistics.median(each["p99_ms"] for each in alone),
        "traffic_p99_beside_ms": statistics.median(each["p99_ms"] for each in beside),
        "idle_cpu_ms_per_s": round(idle_after, 1),
        "idle_cpu_ms_per_s_empty": round(idle_before, 1),
        "messages": options.messages,
        "filled_in_s": round(filled_in),
    }
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


def _open(browser: httpx.Client, page: str) -> None:
    browser.get(page).raise_for_status()


def _page(browser: httpx.Client, done: threading.Event) -> None:
    """A page twice a second, as one who is in a hurry."""
    while not done.wait(0.5):
        _open(browser, random.choice(PAGES))


if __name__ == "__main__":
    main()
