"""Measures the cost of a tenant that is busy in all shards, to a neighbor that prepares and submits one message after another.

    hostile_shards.py          prints the figures as JSON
    hostile_shards.py KIND ADDRESS KEY MESSAGE_ID SECONDS          is that tenant, in a process of its own

Within the default limits it keeps twelve batches of 1,000 under way: messages for a topic with 32 shards (publishes), or acks
of ids that it made up, in all shards (acks) or in that topic's first (acks_in_one). Rounds alternate with quiet ones; figures
are medians of the rounds, of MariaDB and of SQLite.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import grpc

from benchmarks.serving import TOPIC, Served, serving
from tmc_common.protocol import consumption_pb2, message_pb2, message_pb2_grpc
from tmc_storm.services.mariadb import MariaDB

KINDS = ("publishes", "acks", "acks_in_one")
_SHARDS, _BATCH, _UNDER_WAY, _CHANNELS = 32, 1000, 12, 8
_ROUNDS, _SECONDS, _PAUSE_S = 3, 6.0, 0.01
_LEAST = 20  # batches that are answered in a round: fewer are no greed


def _channel(address: str) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    return grpc.insecure_channel(address, options)


def _metadata(app: str, key: str) -> list[tuple[str, str]]:
    return [("tmc-app", app), ("authorization", f"Bearer {key}")]


def _publishes() -> bytes:
    items = [
        message_pb2.PublishRequest(topic=TOPIC, key=os.urandom(8).hex(), body=b"x" * 100, attempt_id=os.urandom(16))
        for _ in range(_BATCH)
    ]
    return message_pb2.PublishManyRequest(items=items).SerializeToString()


def _acks(message_id: str, shards: int) -> bytes:
    topic, app, first, _ = message_id.split("-")
    items = [
        consumption_pb2.AckRequest(
            message_id=f"{topic}-{app}-{(int(first) + random.randrange(shards)) % _SHARDS:02d}-{random.randrange(1 << 52)}",
            attempt=1,
        )
        for _ in range(_BATCH)
    ]
    return consumption_pb2.AckManyRequest(items=items).SerializeToString()


def be_greedy(kind: str, address: str, key: str, message_id: str, seconds: float) -> None:
    """Whatever is answered is followed by the next one at once, also after a refusal."""
    app, path = (
        ("orders", "MessageService/PublishMany") if kind == "publishes" else ("coupons", "ConsumptionService/AckMany")
    )
    ready = [_acks(message_id, _SHARDS if kind == "acks" else 1) for _ in range(6)]
    make: Callable[[], bytes] = _publishes if kind == "publishes" else lambda: random.choice(ready)
    calls = [_channel(address).unary_unary(f"/tmc.v1.{path}") for _ in range(_CHANNELS)]
    under_way: list[grpc.Future] = []
    until, answered = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        while len(under_way) < _UNDER_WAY:
            under_way.append(random.choice(calls).future(make(), metadata=_metadata(app, key), timeout=20))
        answered += under_way.pop(0).exception() is None
    os._exit(0 if answered > _LEAST else 1)


def _neighbor(served: Served, seconds: float) -> Iterator[float]:
    """Milliseconds from the prepare to the answer to the submit."""
    with _channel(served.address) as channel:
        messages, metadata = message_pb2_grpc.MessageServiceStub(channel), _metadata("polite", served.keys["polite"])
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            request = message_pb2.PrepareRequest(
                topic="polite.paid", key=os.urandom(8).hex(), body=b"x" * 256, attempt_id=os.urandom(16)
            )
            began = time.monotonic()
            prepared = messages.Prepare(request, metadata=metadata, timeout=30)
            messages.Submit(message_pb2.SubmitRequest(message_id=prepared.message_id), metadata=metadata, timeout=30)
            yield (time.monotonic() - began) * 1000
            time.sleep(_PAUSE_S)


def _round(served: Served, kind: str, message_id: str) -> tuple[float, float]:
    """Milliseconds: the median and the 99th percentile. kind "": quiet."""
    greedy = None
    if kind:
        key = served.orders_key if kind == "publishes" else served.coupons_key
        command = [sys.executable, "-m", "benchmarks.hostile_shards", kind, served.address, key, message_id]
        greedy = subprocess.Popen([*command, str(_SECONDS + 2)])
        time.sleep(1.5)
    found = sorted(_neighbor(served, _SECONDS))
    if greedy is not None and greedy.wait(60):
        raise SystemExit(f"the greedy tenant ({kind}) was not answered: the figures say nothing")
    return statistics.median(found), found[int(len(found) * 0.99)]


def _over(database: str, url: str) -> dict[str, object]:
    with serving(url, spread=_SHARDS, environment={"TMC_LIMITS__ITEMS_PER_SECOND": "50000"}, polite=True) as served:
        with _channel(served.address) as channel:
            request = message_pb2.PublishRequest(topic=TOPIC, key="first", body=b"", attempt_id=os.urandom(16))
            messages = message_pb2_grpc.MessageServiceStub(channel)
            message_id = messages.Publish(request, metadata=_metadata("orders", served.orders_key)).message_id
        list(_neighbor(served, 2))
        rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ("quiet", *KINDS)}
        for _ in range(_ROUNDS):
            for kind in KINDS:
                rounds["quiet"].append(_round(served, "", message_id))
                rounds[kind].append(_round(served, kind, message_id))
    p50, p99 = ({kind: statistics.median(each[i] for each in of) for kind, of in rounds.items()} for i in (0, 1))
    return {
        **{f"{database}_{kind}_neighbour_p50_ratio": round(p50[kind] / p50["quiet"], 2) for kind in KINDS},
        **{f"{database}_{kind}_neighbour_p50_ms": round(p50[kind], 1) for kind in ("quiet", *KINDS)},
        **{f"{database}_{kind}_neighbour_p99_ms": round(p99[kind], 1) for kind in ("quiet", *KINDS)},
    }


def measure() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        result = _over("sqlite", f"sqlite:///{folder}/tmc.db")
    server = MariaDB(pool_mb=1024)
    try:
        return result | _over("mariadb", server.url("tmc_shards"))
    finally:
        server.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_greedy(*sys.argv[1:5], float(sys.argv[5]))
    print(json.dumps(measure()))
