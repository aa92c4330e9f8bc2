"""kill -9 of server, producer and consumer at every named point: each purchase has one effect, and nothing else has any.

One point of each program, chosen at random (TMC_TEST_SEED); with `--long` all of them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import KINDS, ROOT, TMC, Cluster, Kind
from tests.support.dose import LONG
from tests.support.story.kill_points import CONSUMER, PRODUCER, SERVER, KillPoint
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

STORY = ROOT / "tests" / "support" / "story"
KILL_POINTS = str(STORY / "kill_points.py")
SEED = int(os.environ.get("TMC_TEST_SEED", random.randrange(1 << 30)))


def _chosen(points: Mapping[str, KillPoint]) -> list[str]:
    """All of them, or one at random."""
    return list(points) if LONG else random.Random(SEED).sample(sorted(points), 1)


class Shop:
    """Two servers; a shop whose purchases and effects are in the database of this kind, and who answers checks; RabbitMQ."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder = folder
        port = free_port()
        self.cluster = Cluster(
            servers=2,
            kind=kind,
            lease_seconds=1,
            TMC_DISCOVERY__INSTANCES=f'{{"orders": ["127.0.0.1:{port}"]}}',
            TMC_CHECKS__ALLOW='["127.0.0.0/8:*"]',
            TMC_DELIVERY__SCAN_SECONDS="0.1",
        )
        self.cluster.register("orders", "coupons")
        retry = types_pb2.RetryPolicy(interval_ms=500, max_retry=200)
        settings = {"transaction_time_ms": 1000, "spread": 32}
        made = self.cluster.subscribe("shop.paid", "coupons", retry=retry, topic_settings=settings)
        quick = admin_pb2.CheckTarget(kind="grpc", deadline_ms=500)
        self.cluster.admin(
            "SetTopicCheck", admin_pb2.SetTopicCheckRequest(topic="shop.paid", targets=[quick], untried=True)
        )
        self.cluster.in_effect(made)
        self.engine = sa.create_engine(self.cluster.databases[0].create("tmc_kills"))
        tmc.create_tables(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE purchase (id BIGINT PRIMARY KEY)")
            connection.exec_driver_sql("CREATE TABLE effect (message_key VARCHAR(100))")  # two of them would show
        self.center = tmc.connect(self.cluster.addresses, app="orders", key=self.cluster.keys["orders"])
        self.checks = self.center.checks(self.engine).serve(f"127.0.0.1:{port}")
        self.center.sender.flush(1)

    @property
    def _database(self) -> str:
        return self.engine.url.render_as_string(hide_password=False)

    def buyer(self, **kill: str) -> subprocess.Popen[bytes]:
        (self.folder / "enough").unlink(missing_ok=True)
        arguments = [self.cluster.addresses, self.cluster.keys["orders"], self._database, str(self.folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | kill
        return subprocess.Popen([sys.executable, str(STORY / "buyer.py"), *arguments], env=environment, cwd=ROOT)

    def receiver(self, **kill: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "STORY_KEY": self.cluster.keys["coupons"],
            "STORY_ADDRESS": self.cluster.addresses,
            "STORY_DATABASE": self._database,
        }
        program = [sys.executable, KILL_POINTS] if kill else [TMC]
        with open(self.folder / "coupons.log", "ab") as log:
            return subprocess.Popen(
                [*program, "consume", "tests.support.story.receivers:consumer"],
                env=environment | kill,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def purchases(self) -> set[str]:
        with self.engine.connect() as connection:
            return {f"purchase-{id_}" for id_ in connection.exec_driver_sql("SELECT id FROM purchase").scalars()}

    def effects(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(connection.exec_driver_sql("SELECT message_key FROM effect").scalars())

    def end(self, buyer: subprocess.Popen[bytes], receiver: subprocess.Popen[bytes]) -> None:
        """No more purchases; wait until all of them have their effect."""
        (self.folder / "enough").touch()
        assert buyer.wait(60) == 0
        want = self.purchases()
        eventually(
            lambda: want <= set(self.effects()),
            describe=lambda: (sorted(want - set(self.effects()))[:10], self.cluster.consumptions()),
        )
        receiver.terminate()
        receiver.wait(60)
        assert Counter(want) == self.effects(), f"seed {SEED}"

    def stop(self) -> None:
        self.checks.stop()
        self.center.close()
        self.engine.dispose()
        self.cluster.tell_errors()
        self.cluster.stop()


@pytest.fixture(scope="module", params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("kills"), request.param)
    yield made
    made.stop()


def _kill(point: str) -> dict[str, str]:
    return {"TMC_KILL_POINT": point, "TMC_KILL_AT": "20" if "heartbeat" not in point and "leases" not in point else "3"}


def _has_died(process: subprocess.Popen[bytes]) -> None:
    assert eventually(lambda: process.poll() is not None, seconds=90)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("point", _chosen(SERVER))
def test_a_server_dies(shop: Shop, point: str) -> None:
    regular = shop.cluster.servers[0]
    regular.terminate()
    dying = shop.cluster.new_server(90, sys.executable, KILL_POINTS, "serve")
    listen = {"TMC_SERVER__LISTEN": regular.environment["TMC_SERVER__LISTEN"], "PYTHONPATH": str(ROOT)}
    dying.environment = dying.environment | listen | _kill(point)
    dying.start()
    receiver, buyer = shop.receiver(), shop.buyer()
    assert dying.process is not None
    _has_died(dying.process)
    regular.start()
    shop.end(buyer, receiver)


@pytest.mark.parametrize("point", _chosen(PRODUCER))
def test_a_producer_dies(shop: Shop, point: str) -> None:
    receiver = shop.receiver()
    _has_died(shop.buyer(**_kill(point)))
    shop.end(shop.buyer(), receiver)


@pytest.mark.parametrize("point", _chosen(CONSUMER))
def test_a_consumer_dies(shop: Shop, point: str) -> None:
    dying, buyer = shop.receiver(**_kill(point)), shop.buyer()
    _has_died(dying)
    shop.end(buyer, shop.receiver())


@pytest.mark.parametrize(
    "target", sorted({point.target for points in (SERVER, PRODUCER, CONSUMER) for point in points.values()})
)
def test_a_point_is_a_call_that_there_is(target: str) -> None:
    """Only one of each program is run, so a name that was left behind would be found by luck."""
    module, _, path = target.partition(":")
    found: object = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


def test_there_are_at_least_thirty_points() -> None:
    assert len(SERVER) + len(PRODUCER) + len(CONSUMER) >= 30
