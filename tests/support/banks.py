"""Two banks with databases of their own, the center between them, and their processes; see `story.bank`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.cluster import ROOT, Cluster
from tests.support.story.bank import ACCOUNTS, FIRST, account, open_bank, put, taken
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.services.ports import free_port

BANKS = ("north", "south")


class Banks:
    """urls: of their databases, MariaDB and PostgreSQL.  retry: of deliveries and checks.  form: of the cluster."""

    def __init__(
        self, urls: Callable[[Cluster], Sequence[str]], folder: Path, retry: types_pb2.RetryPolicy, **form: Any
    ) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in BANKS}
        instances = ", ".join(f'"{name}": ["127.0.0.1:{port}"]' for name, port in self.ports.items())
        self.cluster = Cluster(
            lease_seconds=1,
            TMC_DISCOVERY__INSTANCES=f"{{{instances}}}",
            TMC_CHECKS__ALLOW='["127.0.0.0/8:*"]',
            TMC_DELIVERY__SCAN_SECONDS="0.1",
            **form,
        )
        self.cluster.register(*BANKS)
        made = [
            self.cluster.subscribe(
                f"{sender}.sent", receiver, owner=sender, retry=retry, topic_settings={"transaction_time_ms": 1500}
            )
            for sender, receiver in (BANKS, BANKS[::-1])
        ]
        for name in BANKS:
            target = admin_pb2.CheckTarget(kind="grpc", deadline_ms=1000)
            request = admin_pb2.SetTopicCheckRequest(topic=f"{name}.sent", targets=[target], retry=retry, untried=True)
            self.cluster.admin("SetTopicCheck", request)
        self.cluster.in_effect(*made)
        self.engines = {
            name: sa.create_engine(url, pool_pre_ping=True) for name, url in zip(BANKS, urls(self.cluster), strict=True)
        }
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

    def end(self) -> None:
        """No further transfer."""
        (self.folder / "enough").touch()

    def settled(self) -> bool:
        """Whether whatever was taken has arrived. Call `end` before."""
        return all(
            self.transfers(receiver, put).keys() >= self.transfers(sender, taken).keys()
            for sender, receiver in (BANKS, BANKS[::-1])
        )

    def agree(self) -> int:
        """Nothing was lost, invented or doubled. Returns: transfers."""
        assert sum(self.money(name)[0] for name in BANKS) == 2 * ACCOUNTS * FIRST
        total = 0
        for sender, receiver in (BANKS, BANKS[::-1]):
            sent = self.transfers(sender, taken)
            assert self.transfers(receiver, put) == sent
            assert set(sent.values()) == {1}
            total += len(sent)
        return total

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        for engine in self.engines.values():
            engine.dispose()
        self.cluster.stop()
