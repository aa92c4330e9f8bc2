"""Outages of everybody's neighbors, and no handler that fails: nothing is FAILED, nothing CHECK_FAILED, nothing lost or doubled.

Two banks send each other money, with few retries. Their databases go away for longer than these last, and so do servers, the
center's databases and the broker. With `--long`: ten minutes over three servers, two databases of the center and a RabbitMQ of
three nodes, of which one or two are stopped or killed at a time. STORM_SEED repeats a sequence.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.banks import Banks
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.faults import Machine, of_machine
from tmc_storm.plan import Fault
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitCluster

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


def _faults(banks: Banks, north: MariaDB, south: PostgreSQL) -> list[Fault]:
    """Everything that breaks here."""
    cluster = banks.cluster
    nodes = cluster.broker.nodes if isinstance(cluster.broker, RabbitCluster) else [cluster.broker]
    machines: list[tuple[str, Machine, float]] = [
        ("north's database", north, _AWAY_S),
        ("south's database", south, _AWAY_S),
    ]
    machines += [(f"server {number}", server, 6.0) for number, server in enumerate(cluster.servers)]
    machines += [(f"database {number}", database, 8.0) for number, database in enumerate(cluster.databases)]
    machines += [(f"broker {number}", node, 12.0) for number, node in enumerate(nodes)]
    return [
        fault
        for name, machine, longest_s in machines
        for fault in of_machine(machine, name, name, longest_s=longest_s, weight=1.0)
    ]


@pytest.mark.takes_turns("killed servers")
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
        first = [faults[0], faults[2]]  # whatever the dice say: both databases are killed
        while first or time.monotonic() < until:
            one = first.pop() if first else dice.choice(faults)
            others = [each for each in faults if each.part != one.part]
            both = [one, *dice.sample(others, dice.choice((0, 1)))]
            struck.update(fault.kind for fault in both)
            ends = {fault.part: fault.begin(dice) for fault in both}
            away_s = max(fault.longest_s for fault in both)
            time.sleep(away_s if away_s >= _AWAY_S else dice.uniform(0.2, away_s))  # its length is the experiment
            for part in sorted(ends, key=lambda part: part.startswith("server")):  # a server starts on what is there
                ends[part]()
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
