"""What strangers and a greedy tenant cost a polite neighbor, on one machine with all of them.

Without a key: benchmarks/strangers.py floods for 60 s, while a neighbor makes 20 calls a second over one connection; the
server's memory and the neighbor's 99th percentile. With a key: a tenant publishes batches of 1,000 in one shard as fast as
it is answered; a neighbor in the same shard publishes at its own rate, far below a fair share, with and without it. Then a
tenant that is busy in all shards (benchmarks/hostile_shards.py), and what one with hanging endpoints takes from its
neighbor's checks (benchmarks/hostile_checks.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

from benchmarks import hostile_checks, hostile_shards
from benchmarks.serving import TOPIC, Served, serving
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_storm.services.mariadb import MariaDB

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_CALLS_PER_S = 20
_GREEDY_THREADS, _GREEDY_BATCH = 8, 1000
_NEIGHBOUR_THREADS, _NEIGHBOUR_BATCH, _NEIGHBOUR_BATCHES_PER_S = 2, 10, 10


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB


def a_message() -> message_pb2.PublishRequest:
    return message_pb2.PublishRequest(topic=TOPIC, key=os.urandom(8).hex(), body=b"x" * 256, attempt_id=os.urandom(16))


class Tenant:
    """An app on a connection of its own."""

    def __init__(self, served: Served, app: str, key: str, topic: str) -> None:
        self.channel = grpc.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)])
        self.messages = message_pb2_grpc.MessageServiceStub(self.channel)
        self.metadata = [("tmc-app", app), ("authorization", f"Bearer {key}")]
        self.topic = topic
        self.answers: Counter[str] = Counter()
        self.seconds: list[float] = []

    def begin(self, count: int) -> threading.Event:
        """Send one batch; outcomes are counted when the answer arrives. Returns: an event that is set then."""
        items = [a_message() for _ in range(count)]
        for item in items:
            item.topic = self.topic
        began, answered = time.monotonic(), threading.Event()

        def note(call: grpc.Future) -> None:
            self.seconds.append(time.monotonic() - began)
            try:
                results = call.result().results
                self.answers.update("refused" if result.HasField("error") else "stored" for result in results)
            except grpc.RpcError:
                self.answers["refused"] += count
            answered.set()

        request = message_pb2.PublishManyRequest(items=items)
        self.messages.PublishMany.future(request, metadata=self.metadata, timeout=30).add_done_callback(note)
        return answered

    def p99_ms(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)] * 1000


def at_rate(tenant: Tenant, batch: int, per_s: float, until: float) -> None:
    """Open loop: a late answer does not move the next call. Returns when all are answered."""
    began, sent = time.monotonic(), []
    while (now := time.monotonic()) < until:
        if len(sent) <= (now - began) * per_s:
            sent.append(tenant.begin(batch))
        else:
            time.sleep(0.002)
    for answered in sent:
        answered.wait()


def one_after_the_other(tenant: Tenant, batch: int, until: float) -> None:
    while time.monotonic() < until:
        tenant.begin(batch).wait()


def strangers(served: Served, seconds: float, kinds: str) -> dict[str, object]:
    neighbor = Tenant(served, "orders", served.orders_key, TOPIC)
    at_rate(neighbor, 1, _CALLS_PER_S, time.monotonic() + 2)
    neighbor.seconds.clear()
    neighbor.answers.clear()
    command = [sys.executable, "-m", "benchmarks.strangers", served.address, str(seconds), kinds]
    flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    calls = threading.Thread(target=at_rate, args=(neighbor, 1, _CALLS_PER_S, time.monotonic() + seconds))
    calls.start()
    peak = 0.0
    while calls.is_alive():
        peak = max(peak, rss_mb(served.pid))
        calls.join(0.02)
    sent = json.loads(flood.communicate()[0])
    return {
        "rss_peak_mb": round(peak),
        "rss_after_mb": round(rss_mb(served.pid)),
        "neighbour_p99_ms": round(neighbor.p99_ms(), 1),
        "neighbour_worst_ms": round(max(neighbor.seconds) * 1000, 1),
        "neighbour_calls": len(neighbor.seconds),
        "neighbour_refused_by_flood": neighbor.answers["refused"],
        "flood": sent,
    }


def tenants(served: Served, seconds: float) -> dict[str, object]:
    def neighbour_alone_or_not(greedy: Tenant | None) -> tuple[Tenant, float]:
        neighbor = Tenant(served, "polite", served.keys["polite"], "polite.paid")
        until = time.monotonic() + seconds
        work = [
            threading.Thread(target=at_rate, args=(neighbor, _NEIGHBOUR_BATCH, _NEIGHBOUR_BATCHES_PER_S, until))
            for _ in range(_NEIGHBOUR_THREADS)
        ]
        if greedy is not None:
            work += [
                threading.Thread(target=one_after_the_other, args=(greedy, _GREEDY_BATCH, until))
                for _ in range(_GREEDY_THREADS)
            ]
        for thread in work:
            thread.start()
        time.sleep(seconds)
        in_time = neighbor.answers["stored"] / seconds  # what is answered later does not count
        for thread in work:
            thread.join()
        return neighbor, in_time

    _, alone = neighbour_alone_or_not(None)
    greedy = Tenant(served, "orders", served.orders_key, TOPIC)
    neighbor, beside = neighbour_alone_or_not(greedy)
    return {
        "neighbour_loss_share": round(max(0.0, 1 - beside / alone), 3),
        "neighbour_refused": neighbor.answers["refused"],
        "neighbour_messages_per_s": round(beside),
        "neighbour_messages_per_s_alone": round(alone),
        "neighbour_batch_p99_ms": round(neighbor.p99_ms(), 1),
        "greedy_messages_per_s": round(greedy.answers["stored"] / seconds),
        "greedy_refused_per_s": round(greedy.answers["refused"] / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="of the flood without a key")
    parser.add_argument("--kinds", default="large,small,unfinished,connections,streams,compressed", help="of strangers")
    parser.add_argument("--without-checks", action="store_true", help="leave out what hostile_checks.py measures")
    options = parser.parse_args()
    server = MariaDB(pool_mb=1024)
    try:
        environment = {"TMC_LIMITS__ITEMS_PER_SECOND": "50000"}
        with serving(server.url("tmc_hostile"), environment=environment, polite=True) as served:
            result = tenants(served, 10) | strangers(served, options.seconds, options.kinds)
    finally:
        server.stop()
    result |= hostile_shards.measure()
    if not options.without_checks:
        result |= hostile_checks.measure()
    print(json.dumps(result) if options.json else "\n".join(f"{key:32} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
