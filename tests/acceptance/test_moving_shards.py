"""A shard moves between databases of two kinds under traffic, and the command that moves it is killed again and again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import grpc
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import TMC, Cluster
from tests.support.dose import LONG
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.store.engines import Database
from tmc_server.store.tables import shard_tables
from tmc_storm.eventually import eventually
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(900)]

SHARD = 7
THREADS = 4
KILLS = 30 if LONG else 4


class _Traffic:
    """Threads that publish, one message after another, each under an order key of its own; and a consumer."""

    def __init__(self, cluster: Cluster) -> None:
        self.failed: list[Exception] = []
        self.sent: list[list[str]] = [[] for _ in range(THREADS)]
        self.got: list[str] = []
        self._stopping = threading.Event()
        self._coupons = tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"])
        self._consumer = tmc.Consumer(self._coupons)

        @self._consumer.listener("order.paid")
        def paid(body: bytes, message: tmc.Message) -> None:
            self.got.append(message.key)

        self._consumer.start()
        self._channel = cluster.channel("ipv4:" + cluster.addresses)
        self._call = message_pb2_grpc.MessageServiceStub(self._channel).Publish  # it repeats nothing
        self._metadata = [("tmc-app", "orders"), ("authorization", f"Bearer {cluster.keys['orders']}")]
        self._threads = [threading.Thread(target=self._publish, args=(number,)) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _publish(self, number: int) -> None:
        while not self._stopping.is_set():
            key = f"{number}-{len(self.sent[number])}"
            request = message_pb2.PublishRequest(
                topic="order.paid", key=key, body=b"x" * 200, order_key=str(number), attempt_id=uuid.uuid4().bytes
            )
            try:
                self._call(request, metadata=self._metadata, timeout=30)
            except grpc.RpcError as exc:
                self.failed.append(exc)
            self.sent[number].append(key)
            time.sleep(0.005)

    @property
    def count(self) -> int:
        return sum(map(len, self.sent))

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        with suppress(AssertionError):
            eventually(lambda: len(set(self.got)) == self.count)
        self._consumer.stop(timedelta(seconds=10))
        self._channel.close()
        self._coupons.close()


@pytest.fixture
def cluster(postgresql: PostgreSQL) -> Iterator[Cluster]:
    with Cluster(servers=2, TMC_STORE__SPARE=f'["{postgresql.create("tmc_spare")}"]') as made:
        made.shared(2)
        made.register("orders", "coupons")
        paid = made.subscribe("order.paid", "coupons", topic_settings={"table_index": SHARD, "ordered": True})
        made.in_effect(paid)
        yield made


def _move(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    command = [TMC, "move-shard", str(SHARD), *arguments]
    environment = os.environ | cluster.settings
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def _moved(cluster: Cluster, *arguments: str) -> str:
    process = _move(cluster, *arguments)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def _states(url: str) -> Counter[str] | None:
    """None: the shard is not there."""
    database = Database(url)
    consumption = shard_tables(SHARD).consumption
    with database.reading() as connection:
        if not sa.inspect(connection).has_table(consumption.name):
            states = None
        else:
            states = connection.execute(sa.select(consumption.c.state)).scalars().all()
    database.close()
    return None if states is None else Counter(ConsumptionState(state).name for state in states)


def test_a_shard_moves_there_and_back_under_traffic(cluster: Cluster, note: Callable[[str], None]) -> None:
    there = cluster.settings["TMC_STORE__SPARE"][2:-2]
    traffic = _Traffic(cluster)
    killed = 0
    try:
        for number in range(KILLS):
            begun = traffic.count
            process = _move(cluster, "--to", "tmc_spare")
            time.sleep(random.Random(number).uniform(0.5, 3.0))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            killed += process.returncode == -signal.SIGKILL
            if number % 4 == 3:
                undone = _move(cluster, "--undo")
                undone.communicate(timeout=60)
            eventually(lambda begun=begun: traffic.count > begun + 20)
        said = _moved(cluster, "--to", "tmc_spare")
        begun = traffic.count
        eventually(lambda: traffic.count > begun + 100)
        _moved(cluster, "--confirm")
        back = _moved(cluster, "--to", "tmc_cluster")
        begun = traffic.count
        eventually(lambda: traffic.count > begun + 100)
    finally:
        traffic.stop()
    note(f"{traffic.count} messages, {killed} kills. {said.strip()} {back.strip()}")
    assert traffic.failed == []
    assert _states(cluster.databases[0].url("tmc_cluster")) == {"ACKED": traffic.count}
    assert _states(there) is None
    assert len(traffic.got) >= traffic.count
    for number, sent in enumerate(traffic.sent):
        first = list(dict.fromkeys(key for key in traffic.got if key.startswith(f"{number}-")))
        assert first == sent, f"order key {number}"
