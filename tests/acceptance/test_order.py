"""Order under kills: two servers submit at once, consumers, a server and the broker are killed, handlers fail.

Effects come in the order of the center's sequences for every order key; none is lost, none doubled.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import ROOT, TMC, Cluster
from tests.support.dose import LONG
from tests.support.store import in_thread
from tmc_common.protocol import types_pb2
from tmc_server.domain.ids import MessageId
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.mariadb, pytest.mark.services, pytest.mark.timeout(1800)]

KEYS, MESSAGES, KILLS = (200, 200, 30) if LONG else (40, 40, 6)
PATIENCE = timedelta(seconds=120)


class _Consumers:
    """Three processes of one app."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.path = folder / "coupons.db"
        self._folder = folder
        engine = sa.create_engine(f"sqlite:///{self.path}")
        tmc.create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE effect (n INTEGER PRIMARY KEY, line TEXT, message TEXT)")
        engine.dispose()
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "STORY_KEY": cluster.keys["coupons"],
            "STORY_ADDRESS": cluster.addresses,
            "STORY_DATABASE": f"sqlite:///{self.path}",
        }
        self.processes = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [TMC, "consume", "tests.support.story.ordered:consumer"]
        with open(self._folder / f"coupons{number}.log", "ab") as log:
            return subprocess.Popen(
                command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, number: int) -> None:
        os.killpg(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].wait()
        self.processes[number] = self._start(number)

    def effects(self) -> dict[str, list[str]]:
        """Messages by order key, in the order of their effects."""
        connection = sqlite3.connect(self.path, timeout=60)
        found: dict[str, list[str]] = {}
        for line, message in connection.execute("SELECT line, message FROM effect ORDER BY n"):
            found.setdefault(line, []).append(message)
        connection.close()
        return found

    def count(self) -> int:
        return sum(map(len, self.effects().values()))

    def stop(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            process.wait(60)


def _publish(cluster: Cluster, name: str, first: int, ids: dict[str, str]) -> None:
    """One message after the other for each key, by way of server `first` while it is there. Half of the keys are shared."""
    servers = [server.address for server in cluster.servers]
    addresses = ",".join(servers[first:] + servers[:first])
    with tmc.connect(addresses, app="orders", key=cluster.keys["orders"]) as orders:
        for n in range(MESSAGES // 2):
            for key in range(KEYS):
                message = f"{name}-{key}-{n:04d}"
                ids[message] = orders.publish("account", b"x", key=message, order_key=f"line-{key}", timeout=PATIENCE)


def _in_order(cluster: Cluster, subscription: int, ids: dict[str, str]) -> dict[str, list[str]]:
    """Messages by order key, in the order of the sequences that the center gave."""
    sequences = {row.message_id: row.sequence for row in cluster.rows(subscription)}
    lines: dict[str, list[tuple[int, str]]] = {}
    for message, id_ in ids.items():
        parsed = MessageId.parse(id_)
        assert parsed is not None
        lines.setdefault(f"line-{message.split('-')[1]}", []).append((sequences[parsed.number], message))
    return {line: [message for _, message in sorted(found)] for line, found in lines.items()}


def _each_in_turn(messages: Sequence[str], producer: str) -> bool:
    mine = [message for message in messages if message.startswith(producer)]
    return mine == sorted(mine)


@pytest.mark.takes_turns("killed services")
def test_effects_of_each_key_come_in_order_whatever_is_killed(tmp_path: Path, note: Callable[[str], None]) -> None:
    seed = int(os.environ.get("TMC_TEST_SEED", random.randrange(1 << 30)))
    print(f"TMC_TEST_SEED={seed}")
    dice = random.Random(seed)
    with Cluster(servers=2, own_broker=True) as cluster:
        cluster.register("orders", "coupons")
        retry = types_pb2.RetryPolicy(kind=types_pb2.RETRY_KIND_EXPONENTIAL, interval_ms=300, max_retry=50, cap_ms=2000)
        subscription = cluster.subscribe("account", "coupons", retry=retry, topic_settings={"ordered": True})
        cluster.in_effect(subscription)
        consumers = _Consumers(cluster, tmp_path)
        ids: dict[str, str] = {}
        total = KEYS * MESSAGES
        faults: list[tuple[str, Callable[[], None]]] = [
            (f"consumer {n}", lambda n=n: consumers.kill(n)) for n in (dice.randrange(3) for _ in range(KILLS))
        ]
        faults += [("broker", lambda: (cluster.broker.kill(), cluster.broker.start())[0])]
        faults += [("server 1", lambda: (cluster.servers[1].kill(), cluster.servers[1].start())[0])]
        dice.shuffle(faults)
        try:
            producers = [
                in_thread(partial(_publish, cluster, name, first, ids)) for first, name in enumerate(("p0", "p1"))
            ]
            for number, (_name, strike) in enumerate(faults):
                moment = total * (number + 1) // (len(faults) + 2)
                eventually(lambda moment=moment: consumers.count() >= moment, seconds=600)
                strike()
            for thread, result in producers:
                thread.join(600)
                assert result == [None]
            eventually(
                lambda: cluster.consumptions() == {"ACKED": total},
                seconds=600,
                describe=lambda: f"{cluster.consumptions()}, {cluster.open_rows(subscription.number)}",
            )
        finally:
            consumers.stop()
        effects = consumers.effects()
        expected = _in_order(cluster, subscription.number, ids)
        assert sum(map(len, expected.values())) == total
        assert effects == expected, f"seed {seed}"
        assert all(_each_in_turn(line, producer) for line in expected.values() for producer in ("p0", "p1"))
        copies = sum(row.attempt for row in cluster.rows(subscription.number))
        note(f"{KEYS} keys x {MESSAGES} messages in order, {len(faults)} kills, {copies} attempts; seed {seed}")
