"""From an earlier state to this one and back, server by server, under traffic of services with the old SDK and the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import steady_shop
from tests.support.cluster import ROOT, TMC, Cluster, Server
from tests.support.earlier import unpack
from tmc_common.protocol import admin_pb2
from tmc_storm.eventually import eventually

pytestmark = [pytest.mark.services, pytest.mark.mariadb, pytest.mark.timeout(600)]
_BETWEEN = 150  # messages


class Shop:
    """One process of steady_shop. sources: the folder of its SDK; None: this one."""

    def __init__(self, cluster: Cluster, name: str, sources: Path | None) -> None:
        keys = (cluster.keys["orders"], cluster.keys["coupons"])
        self._process = subprocess.Popen(
            [sys.executable, steady_shop.__file__, cluster.addresses, *keys, name],
            env=os.environ | ({"PYTHONPATH": str(sources)} if sources else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert Path(self._say("")).is_relative_to(sources or ROOT)

    def _say(self, text: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def end_producing(self) -> int:
        """Returns: how many messages were answered."""
        return int(self._say("\n"))

    def end(self) -> Any:
        saw, _ = self._process.communicate("\n", timeout=60)
        assert self._process.returncode == 0
        return json.loads(saw)


def _program_of(environment: dict[str, str]) -> Path:
    ask = [sys.executable, "-c", "import tmc_server; print(tmc_server.__file__)"]
    done = subprocess.run(ask, env=environment, cwd="/", capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _replace(cluster: Cluster, server: Server, sources: Path | None) -> None:
    """Drain and stop it, start the other program on its port, and wait until it works and messages have passed."""
    (mine,) = [each for each in cluster.live_servers() if each.name.endswith(f":{server.pid}")]
    cluster.admin("DrainServer", admin_pb2.DrainServerRequest(server=mine.incarnation, reason="upgrade"))
    assert server.terminate() == 0
    server.environment.pop("PYTHONPATH", None)
    if sources is not None:
        server.environment["PYTHONPATH"] = str(sources)
    server.start()
    cluster.shared(2)
    before = cluster.messages().total()
    eventually(lambda: cluster.messages().total() >= before + _BETWEEN, seconds=60)


def test_upgrading_and_going_back_under_traffic(tmp_path: Path, note: Callable[[str], None]) -> None:
    earlier = tmp_path / "earlier"
    commit = unpack(earlier)
    with Cluster(servers=2, PYTHONPATH=str(earlier)) as cluster:
        assert _program_of(cluster.servers[0].environment).is_relative_to(earlier)
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe("order.paid", "coupons"))
        shops = [Shop(cluster, "old", earlier), Shop(cluster, "new", None)]
        del cluster.settings["PYTHONPATH"]
        subprocess.run([TMC, "init"], env=os.environ | cluster.settings, check=True, capture_output=True)
        for server in cluster.servers:
            _replace(cluster, server, None)
            assert not _program_of(server.environment).is_relative_to(earlier)
        for server in cluster.servers:
            _replace(cluster, server, earlier)
        count = sum([shop.end_producing() for shop in shops])
        eventually(lambda: cluster.consumptions() == Counter(ACKED=count), seconds=60)
        saw = [shop.end() for shop in shops]
    assert [each["failed"] for each in saw] == [[], []]
    answered = {key for each in saw for key in each["answered"]}
    assert answered == {key for each in saw for key in each["consumed"]}
    note(f"upgrade from {commit} and back: {len(answered)} messages, none failed, none lost")
