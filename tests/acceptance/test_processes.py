"""Workers of one server, processes of one consumer, and a consumer that crashes again and again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import tmc_client as tmc
from tests.support.cluster import ROOT, TMC, Cluster
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

pytestmark = [pytest.mark.mariadb, pytest.mark.services]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _pair_of_ports() -> int:
    """The first of two free ports in a row."""
    import socket

    while True:
        port = free_port()
        with socket.socket() as probe:
            if port < 65_535 and probe.connect_ex(("127.0.0.1", port + 1)) != 0:
                return port


def test_two_workers_share_the_shards_and_one_that_dies_comes_back() -> None:
    with Cluster(servers=0) as cluster:
        workers = cluster.new_server(0, TMC, "serve", "--workers", "2")
        port = _pair_of_ports()
        workers.environment["TMC_SERVER__LISTEN"] = f"127.0.0.1:{port}"
        workers.port = port
        cluster.servers = [workers]
        workers.start()
        cluster.shared(2)
        names = {server.name for server in cluster.live_servers()}
        children = _children(workers.pid)
        assert {name.rpartition(":")[2] for name in names} == {str(child) for child in children}
        for offset in (0, 1):
            health = subprocess.run([TMC, "health", f"127.0.0.1:{port + offset}"], capture_output=True, check=False)
            assert health.returncode == 0
        os.kill(children[1], signal.SIGKILL)
        eventually(lambda: len(_children(workers.pid)) == 2 and _children(workers.pid) != children)
        cluster.shared(2)
        assert workers.terminate() == 0
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_workers_with_built_in_delivery_are_refused() -> None:
    done = subprocess.run([TMC, "serve", "--workers", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Built-in delivery is for one process" in done.stderr


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("nothing", "give MODULE:NAME"),
        ("no.such.module:consumer", "there is no module"),
        ("tests.support.clock:ManualClock", "is no tmc_client.Consumer"),
    ],
)
def test_a_reference_that_is_no_consumer(reference: str, complaint: str) -> None:
    done = subprocess.run([TMC, "consume", reference], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert complaint in done.stderr


_FACES = [("builtin", "plain"), ("rabbitmq", "asyncio"), ("builtin", "batch")]


@pytest.mark.parametrize(
    ("delivery", "listener"),
    list(itertools.product(["builtin", "rabbitmq"], ["plain", "asyncio", "batch"])) if LONG else _FACES,
)
def test_a_message_that_kills_its_consumers_fails_alone(tmp_path: Path, delivery: str, listener: str) -> None:
    """Thirty good ones were fetched with it, again and again: none of them loses a retry, and the alert names the crash."""
    with Cluster(servers=1, TMC_DELIVERY__SCAN_SECONDS="0.1", TMC_DELIVERY__KIND=delivery) as cluster:
        cluster.register("orders", "coupons")
        retry = types_pb2.RetryPolicy(interval_ms=1000, max_retry=1)
        cluster.in_effect(cluster.subscribe("order.paid", "coupons", retry=retry))
        with tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"]) as orders:
            for number in range(31):
                orders.publish("order.paid", b"x", key="bad" if number == 10 else f"good-{number}")
        environment = os.environ | {
            "STORY_ADDRESS": cluster.addresses,
            "STORY_KEY": cluster.keys["coupons"],
            "STORY_FOLDER": str(tmp_path),
            "STORY_LISTENER": listener,
        }
        command = [TMC, "consume", "tests.support.story.crashing:consumer"]
        with open(tmp_path / "log", "wb") as log:
            consumer = subprocess.Popen(
                [*command, "--processes", "2"], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        try:
            eventually(
                lambda: cluster.consumptions() == {"ACKED": 30, "FAILED": 1},
                seconds=100,
                describe=lambda: (cluster.consumptions(), (tmp_path / "copies").read_text()),
            )
        finally:
            consumer.send_signal(signal.SIGTERM)
            consumer.wait(60)
        crashes = Counter(line.split()[0] for line in (tmp_path / "copies").read_text().splitlines())["bad"]
        tries = 1 + retry.max_retry
        assert tries <= crashes <= 2 * tries + 1  # those that the center knew of, and one before each that it did not
        (detail,) = eventually(lambda: _failures_alerted(cluster))
        assert "a handler began and never answered" in detail


def _failures_alerted(cluster: Cluster) -> list[str]:
    """Details of the alerts about deliveries that failed: other alerts may come before them."""
    alerts = cluster.admin("ListAlerts", admin_pb2.ListAlertsRequest()).alerts
    return [alert.detail for alert in alerts if alert.kind == "delivery failed"]


def _consume_a_little(center: tmc.Center) -> None:
    """Stop as soon as the first handlers run, with the others waiting behind them."""
    consumer, handled = tmc.Consumer(center, concurrency=2, prefetch=40), threading.Event()

    @consumer.listener("order.paid")
    def handle(body: bytes) -> None:
        handled.set()
        time.sleep(0.02)

    consumer.start()
    handled.wait(30)
    consumer.stop()
    consumer.stop()  # a second one is free


@pytest.mark.parametrize("delivery", ["builtin", "rabbitmq"])
def test_restarts_alone_cost_nothing(tmp_path: Path, delivery: str) -> None:
    """SIGTERM while forty copies wait behind slow handlers, eight times, without a single retry allowed."""
    with Cluster(servers=1, TMC_DELIVERY__SCAN_SECONDS="0.1", TMC_DELIVERY__KIND=delivery) as cluster:
        cluster.register("orders", "coupons")
        retry = types_pb2.RetryPolicy(interval_ms=1000, max_retry=0)
        cluster.in_effect(cluster.subscribe("order.paid", "coupons", retry=retry))
        with tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"]) as orders:
            for number in range(40):
                orders.publish("order.paid", b"x", key=f"good-{number}")
        for _ in range(8):
            with tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"]) as center:
                _consume_a_little(center)
        assert set(cluster.consumptions()) <= {"ACKED", "SCHEDULED"}
        environment = os.environ | {
            "STORY_ADDRESS": cluster.addresses,
            "STORY_KEY": cluster.keys["coupons"],
            "STORY_FOLDER": str(tmp_path),
        }
        command = [sys.executable, "-m", "tmc_client.consume", "tests.support.story.crashing:consumer"]
        last = subprocess.Popen(command, env=environment, cwd=ROOT)
        eventually(lambda: cluster.consumptions() == {"ACKED": 40}, seconds=60)
        last.send_signal(signal.SIGTERM)
        assert last.wait(30) == 0


def test_a_stopping_consumer_ends_cleanly_and_its_supervisor_too(tmp_path: Path) -> None:
    with Cluster(servers=1) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe("order.paid", "coupons"))
        environment = os.environ | {
            "STORY_ADDRESS": cluster.addresses,
            "STORY_KEY": cluster.keys["coupons"],
            "STORY_FOLDER": str(tmp_path),
        }
        command = [sys.executable, "-m", "tmc_client.consume", "tests.support.story.crashing:consumer", "2"]
        consumer = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
        with tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"]) as orders:
            orders.publish("order.paid", b"x", key="good")
        eventually(lambda: cluster.consumptions() == {"ACKED": 1})
        os.killpg(consumer.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert consumer.wait(30) == 0
