"""Outages of everybody's neighbors, and no handler that fails: nothing is FAILED, nothing CHECK_FAILED, nothing lost or doubled.

Two banks send each other money, with few retries. Their databases go away for longer than these last, and so do servers, the
center's databases and the broker. With `--long`: ten minutes over three servers, two databases of the center and a RabbitMQ of
three nodes, of which one or two are stopped or killed at a time. STORM_SEED repeats a sequence.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.banks import Banks
from tests.support.dose import LONG
from tests.support.eventually import eventually
from tests.support.mariadb import MariaDB
from tests.support.postgresql import PostgreSQL
from tests.support.rabbitmq import RabbitCluster, RabbitMQ
from tests.support.storm import Fault
from tmc_common.protocol import admin_pb2, types_pb2

pytestmark = [pytest.mark.services, pytest.mark.postgresql, pytest.mark.timeout(1800 if LONG else 500)]
_SECONDS = 600 if LONG else 15
_AWAY_S = 30.0 if LONG else 9.0  # of a bank's database
_RETRY = types_pb2.RetryPolicy(interval_ms=1000, max_retry=3)


@pytest.fixture
def databases() -> Iterator[tuple[MariaDB, PostgreSQL]]:
    north, south = MariaDB(pool_mb=64), PostgreSQL()
    yield north, south
    south.stop()
    north.stop()


def _faults(banks: Banks, north: MariaDB, south: PostgreSQL) -> list[tuple[Fault, float]]:
    """What breaks, and for how long at most."""
    cluster = banks.cluster

    def stopped(name: str, process: Callable[[], int]) -> Fault:
        return Fault(
            name=f"{name}: stop and continue",
            part=name,
            begin=lambda: os.kill(process(), signal.SIGSTOP),
            end=lambda: os.kill(process(), signal.SIGCONT),
        )

    def killed(name: str, what: MariaDB | PostgreSQL | RabbitMQ) -> Fault:
        return Fault(name=f"{name}: kill", part=name, begin=what.kill, end=what.start)

    found = [(killed("north's database", north), _AWAY_S), (killed("south's database", south), _AWAY_S)]
    found.append((stopped("north's database", lambda: north.process.pid), _AWAY_S))  # type: ignore[union-attr]
    for number, server in enumerate(cluster.servers):
        name = f"server {number}"
        found.append((Fault(name=f"{name}: kill", part=name, begin=server.kill, end=server.start), 6.0))
        found.append((stopped(name, lambda server=server: server.pid), 6.0))
    for number, database in enumerate(cluster.databases):
        name = f"database {number}"
        found.append((killed(name, database), 8.0))
        found.append((stopped(name, lambda database=database: database.process.pid), 8.0))
    nodes = cluster.broker.nodes if isinstance(cluster.broker, RabbitCluster) else [cluster.broker]
    for number, node in enumerate(nodes):
        name = f"broker {number}"
        found.append((killed(name, node), 12.0))
        found.append((Fault(name=f"{name}: stop and continue", part=name, begin=node.suspend, end=node.resume), 12.0))
    return found


def test_no_outage_uses_up_retries(
    databases: tuple[MariaDB, PostgreSQL], tmp_path: Path, note: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("STORM_SEED", time.time_ns() % 1_000_000))
    dice, struck = random.Random(seed), Counter[str]()
    north, south = databases
    form = {"databases": 2, "servers": 3, "broker": RabbitCluster()} if LONG else {"own_broker": True}
    banks = Banks(lambda _: (north.create("tmc_north"), south.create("tmc_south")), tmp_path, _RETRY, **form)
    try:
        eventually(lambda: banks.count() >= 100, seconds=60)
        faults = _faults(banks, north, south)
        until = time.monotonic() + _SECONDS
        first: list[tuple[Fault, float]] = faults[:2]  # whatever the dice say
        while first or time.monotonic() < until:
            one = first.pop() if first else dice.choice(faults)
            others = [each for each in faults if each[0].part != one[0].part]
            both = [one, *dice.sample(others, dice.choice((0, 1)))]
            for fault, _ in both:
                struck[fault.name] += 1
                fault.begin()
            away_s = max(longest for _, longest in both)
            time.sleep(away_s if away_s >= _AWAY_S else dice.uniform(0.2, away_s))  # its length is the experiment
            for fault, _ in sorted(both, key=lambda each: each[0].part.startswith("server")):
                fault.end()
            time.sleep(dice.uniform(0.0, 3.0))
        calm = time.monotonic()
        banks.end()

        def settled() -> bool:
            open_ones = set(banks.cluster.messages()) - {"COMMITTED", "ROLLED_BACK"}
            return not open_ones and set(banks.cluster.consumptions()) == {"ACKED"} and banks.settled()

        def describe() -> str:
            return f"seed {seed}: {banks.cluster.messages()} {banks.cluster.consumptions()} {banks.count()}"

        eventually(settled, seconds=300, describe=describe)
        settled_s = time.monotonic() - calm
        transfers = banks.agree()
        raised = banks.cluster.admin("ListAlerts", admin_pb2.ListAlertsRequest(resolved=True))
        kinds = Counter(alert.kind for alert in raised.alerts)
        assert not {"delivery failed", "check failed", "contradiction"} & set(kinds), f"seed {seed}: {kinds}"
        note(
            f"outages, seed {seed}: {sum(struck.values())} faults of {len(struck)} kinds, {transfers} transfers, none FAILED, "
            f"settled {settled_s:.0f} s after the last one; alerts: {dict(kinds)}"
        )
    finally:
        banks.stop()
