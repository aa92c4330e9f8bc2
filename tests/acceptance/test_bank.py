"""Two banks send each other money while senders, receivers and the center are killed: the total never changes.

12 kills in CI; with `--long` at least 200 kills and 20,000 transfers.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.cluster import ROOT, Cluster
from tests.support.dose import LONG
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.postgresql import PostgreSQL
from tests.support.story.bank import ACCOUNTS, FIRST, account, open_bank, put, taken
from tmc_common.protocol import admin_pb2, types_pb2

pytestmark = [pytest.mark.services, pytest.mark.postgresql]
_KILLS, _TRANSFERS = (200, 20_000) if LONG else (12, 600)
BANKS = ("north", "south")


class Banks:
    """Their databases, the center between them, and their processes."""

    def __init__(self, postgresql: PostgreSQL, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in BANKS}
        instances = ", ".join(f'"{name}": ["127.0.0.1:{port}"]' for name, port in self.ports.items())
        self.cluster = Cluster(
            lease_seconds=1,
            TMC_DISCOVERY__INSTANCES=f"{{{instances}}}",
            TMC_CHECKS__ALLOW='["127.0.0.0/8:*"]',
            TMC_DELIVERY__SCAN_SECONDS="0.1",
        )
        self.cluster.register(*BANKS)
        retry = types_pb2.RetryPolicy(interval_ms=2000, max_retry=100)
        made = [
            self.cluster.subscribe(
                f"{sender}.sent", receiver, owner=sender, retry=retry, topic_settings={"transaction_time_ms": 1500}
            )
            for sender, receiver in (BANKS, BANKS[::-1])
        ]
        for name in BANKS:
            target = admin_pb2.CheckTarget(kind="grpc", deadline_ms=1000)
            request = admin_pb2.SetTopicCheckRequest(topic=f"{name}.sent", targets=[target], untried=True)
            self.cluster.admin("SetTopicCheck", request)
        self.cluster.in_effect(*made)
        urls = (self.cluster.databases[0].create("tmc_north"), postgresql.create("tmc_south"))
        self.engines = {name: sa.create_engine(url) for name, url in zip(BANKS, urls, strict=True)}
        for engine in self.engines.values():
            open_bank(engine)
        self.running = {(what, name): self._start(what, name) for what in ("send", "receive") for name in BANKS}

    def _start(self, what: str, name: str) -> subprocess.Popen[bytes]:
        url = self.engines[name].url.render_as_string(hide_password=False)
        arguments = [what, name, self.cluster.addresses, self.cluster.keys[name], url, str(self.folder)]
        command = [sys.executable, "-m", "tests.support.story.bank", *arguments, str(self.ports[name])]
        with open(self.folder / f"{what}-{name}.log", "ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )

    def kill(self, victim: tuple[str, str] | None) -> None:
        """One of the processes; None: the center's server."""
        if victim is None:
            self.cluster.servers[0].kill()
            self.cluster.servers[0].start()
            return
        self.running[victim].kill()
        self.running[victim].wait()
        self.running[victim] = self._start(*victim)

    def transfers(self, name: str, table: sa.Table) -> Counter[str]:
        with self.engines[name].connect() as connection:
            return Counter(connection.execute(sa.select(table.c.transfer)).scalars())

    def count(self) -> int:
        return sum(len(self.transfers(name, put)) for name in BANKS)

    def money(self, name: str) -> tuple[int, int]:
        """In the accounts, and what the transfers say is in them: of one moment."""
        with self.engines[name].connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            held = connection.execute(sa.select(sa.func.sum(account.c.money))).scalar_one()
            out, into = (
                connection.execute(sa.select(sa.func.coalesce(sa.func.sum(table.c.money), 0))).scalar_one()
                for table in (taken, put)
            )
            return int(held), ACCOUNTS * FIRST - int(out) + int(into)

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        for engine in self.engines.values():
            engine.dispose()
        self.cluster.stop()


@pytest.fixture
def banks(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[Banks]:
    made = Banks(postgresql, tmp_path)
    yield made
    made.stop()


@pytest.mark.timeout(3600 if LONG else 300)
def test_the_total_never_changes(banks: Banks, note: Callable[[str], None]) -> None:
    dice = random.Random(11)
    victims: list[tuple[str, str] | None] = [*banks.running, None]
    for number in range(_KILLS):
        enough = _TRANSFERS * (number + 1) // _KILLS
        eventually(lambda enough=enough: banks.count() >= enough, seconds=120, describe=banks.count)
        victim = victims[number % len(victims)] if number < len(victims) else dice.choice(victims)
        banks.kill(victim)
        for name in BANKS:
            held, said = banks.money(name)
            assert held == said
    (banks.folder / "enough").touch()
    sent = {name: banks.transfers(name, taken) for name in BANKS}

    def settled() -> bool:
        sent.update({name: banks.transfers(name, taken) for name in BANKS})
        return all(
            banks.transfers(receiver, put).keys() >= sent[sender].keys() for sender, receiver in (BANKS, BANKS[::-1])
        )

    eventually(settled, seconds=180, describe=banks.count)
    assert sum(banks.money(name)[0] for name in BANKS) == 2 * ACCOUNTS * FIRST
    for sender, receiver in (BANKS, BANKS[::-1]):
        assert banks.transfers(receiver, put) == sent[sender]
        assert set(sent[sender].values()) == {1}
    note(f"bank: {_KILLS} kills, {sum(len(found) for found in sent.values())} transfers")
