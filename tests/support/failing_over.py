"""A primary database that is killed again and again, each time followed by its replica, under traffic that keeps count."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import tmc_client as tmc
from tests.support.cluster import Cluster
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.replicated import Replicated

_TOPIC = "order.paid"
_THREADS = 6
_BETWEEN = 100  # messages


@dataclass(kw_only=True)
class Failovers:
    """The observations of one run. away_s: by kill, from the promotion until a call was answered that began after the kill."""

    away_s: list[float] = field(default_factory=list)
    answered: int = 0
    missing: int = 0
    not_consumed: int = 0
    said_lost: int = 0
    failed: list[str] = field(default_factory=list)


def fail_over(database: Replicated, *, kills: int, promoted_after_s: float, silently: bool = False) -> Failovers:
    """Two servers; threads that prepare and submit, and repeat what has no answer; a consumer.

    promoted_after_s: how long nobody does anything about the dead primary.  silently: it keeps its connections open.
    """
    seen = Failovers()
    with Cluster(servers=2, replicated=database) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe(_TOPIC, "coupons"))
        orders = tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"])
        coupons = tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"])
        consumer, consumed = tmc.Consumer(coupons), set[str]()

        @consumer.listener(_TOPIC)
        def paid(body: bytes, message: tmc.Message) -> None:
            consumed.add(message.key)

        consumer.start()
        answered: list[tuple[str, float]] = []  # with the time at which its call began
        stopping = threading.Event()

        def produce(number: int) -> None:
            count = 0
            while not stopping.is_set():
                key, began = f"{number}-{count}", time.monotonic()
                try:
                    prepared = orders.prepare(_TOPIC, key.encode(), key=key, timeout=timedelta(seconds=60))
                    orders.submit(prepared, timeout=timedelta(seconds=60))
                except tmc.TmcError as exc:
                    seen.failed.append(f"{key}: {exc!r}")
                else:
                    answered.append((key, began))
                count += 1

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            done = len(answered)
            eventually(lambda done=done: len(answered) > done + _BETWEEN, seconds=60)
            killed = time.monotonic()
            if silently:
                database.silence_primary()
            else:
                database.kill()
            time.sleep(promoted_after_s)  # the outage is the experiment
            database.promote()
            promoted = time.monotonic()
            eventually(lambda killed=killed: any(began > killed for _, began in answered[-_BETWEEN:]), seconds=90)
            seen.away_s.append(time.monotonic() - promoted)
            database.rebuild()
        stopping.set()
        for thread in threads:
            thread.join()
        keys = [key for key, _ in answered]
        seen.answered = len(keys)
        for key in keys:
            found = orders.get_message(topic=_TOPIC, key=key)
            seen.missing += (found.state, found.body) != (types_pb2.MESSAGE_STATE_COMMITTED, key.encode())
        eventually(
            lambda: set(keys) <= consumed, seconds=60, describe=lambda: f"{len(set(keys) - consumed)} not consumed"
        )
        seen.not_consumed = len(set(keys) - consumed)
        seen.said_lost = sum(server.log.read_text().count('"commits_lost"') for server in cluster.servers)
        consumer.stop(timedelta(seconds=10))
        coupons.close()
        orders.close()
    return seen
