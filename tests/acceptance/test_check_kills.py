"""kill -9 of the producer and of the server at every point around a check: each message ends as its transaction did."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.integration.server.test_checks import prepared_with
from tests.support.cluster import Cluster
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

ROOT = Path(__file__).parents[2]
STORY = ROOT / "tests" / "support" / "story"
RUNS = 20 if LONG else 1
COMMITTED, ROLLED_BACK = types_pb2.MESSAGE_STATE_COMMITTED, types_pb2.MESSAGE_STATE_ROLLED_BACK
PRODUCER_POINTS = ["before-prepare", "after-prepare", "after-commit", "after-submit"]
SERVER_POINTS = ["before-claim", "after-claim", "after-answer", "before-commit", "after-commit"]
_numbers = itertools.count(1)


class Shop:
    """A cluster of one server, a shop with a ledger in MariaDB, and an instance of the shop that answers checks."""

    def __init__(self) -> None:
        port = free_port()
        self.cluster = Cluster(
            lease_seconds=1,
            TMC_DISCOVERY__INSTANCES=f'{{"orders": ["127.0.0.1:{port}"]}}',
            TMC_CHECKS__ALLOW='["127.0.0.0/8:*"]',
            TMC_DELIVERY__SCAN_SECONDS="0.1",
        )
        self.cluster.register("orders", "coupons")
        made = self.cluster.subscribe("shop.paid", "coupons", topic_settings={"transaction_time_ms": 1500})
        quick = admin_pb2.CheckTarget(kind="grpc", deadline_ms=500)
        self.cluster.admin(
            "SetTopicCheck", admin_pb2.SetTopicCheckRequest(topic="shop.paid", targets=[quick], untried=True)
        )
        self.cluster.in_effect(made)
        self.engine = sa.create_engine(self.cluster.databases[0].create("tmc_shop"))
        tmc.create_tables(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE purchase (id BIGINT PRIMARY KEY)")
        self.center = tmc.connect(self.cluster.addresses, app="orders", key=self.cluster.keys["orders"])
        self.checks = self.center.checks(self.engine).serve(f"127.0.0.1:{port}")
        self.center.sender.flush(1)

    def purchases(self) -> set[int]:
        with self.engine.connect() as connection:
            return set(connection.exec_driver_sql("SELECT id FROM purchase").scalars())

    def state_of(self, key: str) -> int | None:
        try:
            return self.cluster.admin(
                "GetMessageDetail", admin_pb2.GetMessageDetailRequest(topic="shop.paid", key=key)
            ).message.state
        except Exception as exc:
            if "NOT_FOUND" in str(exc):
                return None
            raise

    def stop(self) -> None:
        self.checks.stop()
        self.center.close()
        self.engine.dispose()
        self.cluster.tell_errors()
        self.cluster.stop()


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.stop()


@pytest.mark.parametrize("point", PRODUCER_POINTS)
def test_a_producer_that_dies(shop: Shop, point: str) -> None:
    database = shop.engine.url.render_as_string(hide_password=False)
    for _ in range(RUNS):
        number = next(_numbers)
        command = [shop.cluster.addresses, shop.cluster.keys["orders"], database, str(number), point]
        died = subprocess.run([sys.executable, str(STORY / "dying_producer.py"), *command], check=False, cwd=ROOT)
        assert died.returncode == -signal.SIGKILL
        bought = number in shop.purchases()
        assert bought is (point in ("after-commit", "after-submit"))
        want = {"before-prepare": None, "after-prepare": ROLLED_BACK}.get(point, COMMITTED)
        eventually(lambda n=number, w=want: shop.state_of(f"purchase-{n}") == w)


@pytest.mark.parametrize("point", SERVER_POINTS)
def test_a_server_that_dies(shop: Shop, point: str) -> None:
    for _ in range(RUNS):
        numbers = [next(_numbers) for _ in range(20)]
        regular = shop.cluster.servers[0]
        dying = shop.cluster.new_server(90 + numbers[0], sys.executable, str(STORY / "dying_checker.py"), "serve")
        dying.environment = dying.environment | {
            "TMC_DIE_AT": point,
            "PYTHONPATH": str(ROOT),
            "TMC_SERVER__LISTEN": regular.environment["TMC_SERVER__LISTEN"],
        }
        regular.terminate()
        dying.start()
        committed = set(numbers[::2])
        for number in numbers:  # all of them within the transaction time: their producer fell silent after that
            prepared_with(shop.center, shop.engine, "shop.paid", f"die-{number}", committed=number in committed)
        eventually(lambda d=dying: d.process.poll() == -signal.SIGKILL)
        regular.start()
        want = {n: COMMITTED if n in committed else ROLLED_BACK for n in numbers}
        eventually(lambda w=want: {n: shop.state_of(f"die-{n}") for n in w} == w, seconds=60)
