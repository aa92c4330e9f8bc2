"""Starts a center as a user does, registers what a benchmark needs, and stops it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tmc_common.protocol import admin_pb2, admin_pb2_grpc
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

TMC = str(Path(sys.executable).parent / "tmc")
TOPIC = "bench.paid"


@dataclass
class Served:
    """A running center with apps `orders` and `coupons`, the topic, and one subscription."""

    address: str
    orders_key: str
    coupons_key: str
    pid: int
    keys: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def serving(
    url: str, spread: int = 1, environment: dict[str, str] | None = None, polite: bool = False
) -> Iterator[Served]:
    """A `tmc serve` on `url`. polite: with another app of that name, whose topic `polite.paid` has the first shard alone."""
    port = free_port()
    log = tempfile.NamedTemporaryFile(prefix="tmc-bench-", suffix=".log", delete=False)  # noqa: SIM115
    values = (
        os.environ
        | {
            "TMC_SERVER__LISTEN": f"127.0.0.1:{port}",
            "TMC_STORE__CATALOG": url,
            "TMC_STORE__CHANGE_DELAY_MS": "1500",
            "TMC_LIMITS__ITEMS_PER_SECOND": "0",
        }
        | (environment or {})
    )
    token = subprocess.run([TMC, "init"], env=values, check=True, capture_output=True, text=True).stdout.strip()
    process = subprocess.Popen([TMC, "serve"], env=values, stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(30)
            admin, metadata = admin_pb2_grpc.AdminServiceStub(channel), [("authorization", f"Bearer {token}")]
            orders = admin.RegisterApp(admin_pb2.RegisterAppRequest(id="orders"), metadata=metadata)
            coupons = admin.RegisterApp(admin_pb2.RegisterAppRequest(id="coupons"), metadata=metadata)
            topic = admin.RegisterTopic(
                admin_pb2.RegisterTopicRequest(name=TOPIC, owner="orders", spread=spread, open_limit=10_000_000),
                metadata=metadata,
            )
            keys = {"orders": orders.key, "coupons": coupons.key}
            if polite:
                keys["polite"] = admin.RegisterApp(admin_pb2.RegisterAppRequest(id="polite"), metadata=metadata).key
                beside = admin_pb2.RegisterTopicRequest(
                    name="polite.paid", owner="polite", table_index=topic.table_index
                )
                admin.RegisterTopic(beside, metadata=metadata)
            subscription = admin.RegisterSubscription(
                admin_pb2.RegisterSubscriptionRequest(topic=TOPIC, app="coupons"), metadata=metadata
            )
            eventually(lambda: time.time() * 1000 > subscription.effective_ms + 200)
        yield Served(f"127.0.0.1:{port}", orders.key, coupons.key, process.pid, keys)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)
        if process.returncode != 0:
            print(Path(log.name).read_text(), file=sys.stderr)
        Path(log.name).unlink()
