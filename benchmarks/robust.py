"""What one tenant's poison messages and one hung server cost all others.

poison_neighbour_delay_s: the slowest delivery of a neighbor while another tenant publishes messages for whose content the
broker closes the channel (bodies over its limit), minus the slowest of the same seconds before.
hung_server_calls_share: calls that the threads of one SDK process complete while one of two servers is stopped (SIGSTOP),
as a share of those in the same time with both servers well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import threading
import time

import tmc_client as tmc
from tests.support.cluster import Cluster
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually

_LIMIT_BYTES = 20_000
_EVERY_S = 0.02
_numbers = itertools.count()


def poison_neighbour_delay_s(seconds: float) -> dict[str, float]:
    """Two tenants on one server and one broker whose message limit is small."""
    with Cluster(lease_seconds=10) as cluster:
        cluster.broker.control("eval", f"application:set_env(rabbit, max_message_size, {_LIMIT_BYTES}).")
        cluster.register("orders", "evil", "coupons")
        retry = types_pb2.RetryPolicy(interval_ms=1000, max_retry=5)
        good = cluster.subscribe("good.topic", "coupons", retry=retry)
        evil_topic = cluster.subscribe("evil.topic", "coupons", retry=retry, owner="evil")
        cluster.in_effect(good, evil_topic)
        address = cluster.servers[0].address
        late: list[float] = []
        with (
            tmc.connect(address, app="orders", key=cluster.keys["orders"]) as orders,
            tmc.connect(address, app="evil", key=cluster.keys["evil"]) as evil,
            tmc.connect(address, app="coupons", key=cluster.keys["coupons"]) as coupons,
        ):
            consumer = tmc.Consumer(coupons)

            @consumer.listener("good.topic")
            def handle(body: dict[str, float]) -> None:
                late.append(time.time() - body["at"])

            @consumer.listener("evil.topic")
            def ignore(body: bytes) -> None:
                """Handles the valid messages of the other tenant."""

            def slowest(poison: bool) -> float:
                late.clear()
                until, sent = time.monotonic() + seconds, 0
                while time.monotonic() < until:
                    orders.publish("good.topic", {"at": time.time()}, key=f"good-{next(_numbers)}")
                    sent += 1
                    if poison and sent % 50 == 1:
                        evil.publish("evil.topic", b"x" * 2 * _LIMIT_BYTES, key=f"evil-{next(_numbers)}")
                    time.sleep(_EVERY_S)
                eventually(lambda: len(late) >= sent, seconds=60)
                return max(late)

            with consumer:
                slowest(poison=False)  # warm up
                before = slowest(poison=False)
                after = slowest(poison=True)
                eventually(lambda: cluster.consumptions(evil_topic.number)["FAILED"], seconds=120)
        rows = cluster.consumptions(evil_topic.number)
    return {
        "poison_neighbour_delay_s": round(max(0.0, after - before), 3),
        "slowest_before_s": round(before, 3),
        "slowest_with_poison_s": round(after, 3),
        "poison_failed": rows["FAILED"],
    }


def hung_server_calls_share(seconds: float, threads: int = 8) -> dict[str, float]:
    """Two servers over one database, callers of one process that know both."""
    with Cluster(servers=2, lease_seconds=10) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe("order.paid", "coupons", topic_settings={"spread": 8}))
        with tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"]) as center:

            def calls() -> tuple[int, float]:
                """How many calls were answered, and the slowest."""
                answered: list[float] = []
                until = time.monotonic() + seconds

                def work() -> None:
                    while (began := time.monotonic()) < until:
                        center.publish("order.paid", b"x", key=f"k{next(_numbers)}")
                        answered.append(time.monotonic() - began)
                        time.sleep(_EVERY_S)

                workers = [threading.Thread(target=work) for _ in range(threads)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                return len(answered), max(answered)

            calls()  # warm up
            well, slowest_well = calls()
            os.kill(cluster.servers[1].pid, signal.SIGSTOP)
            hung, slowest_hung = calls()
            os.kill(cluster.servers[1].pid, signal.SIGCONT)
    return {
        "hung_server_calls_share": round(hung / well, 3),
        "calls_well": well,
        "calls_hung": hung,
        "slowest_call_well_s": round(slowest_well, 2),
        "slowest_call_hung_s": round(slowest_hung, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    result = poison_neighbour_delay_s(options.seconds) | hung_server_calls_share(options.seconds)
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
