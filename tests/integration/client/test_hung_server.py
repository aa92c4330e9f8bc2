"""Two servers, one of which stops answering: stopped by a signal, or behind a network that swallows everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client.connecting.connection import Connection
from tmc_client.connecting.servers import Server
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.tcp_proxy import TcpProxy

_TMC = str(Path(sys.executable).parent / "tmc")
_LIMIT = timedelta(seconds=60)  # of each call: longer than any test machine takes


class _Dev:
    """One `tmc dev` on a port of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TMC_")}
        log = folder / "log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [_TMC, "dev", "--port", self.address.rpartition(":")[2]],
                cwd=folder,
                env=clean,
                stdout=output,
                stderr=output,
            )
        center = tmc.connect(self.address, app="probe")
        eventually(lambda: _answers(center), seconds=60, describe=log.read_text)
        center.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


def _answers(center: tmc.Center) -> bool:
    try:
        center.publish("started", b"", key=os.urandom(4).hex())
    except tmc.TmcError:
        return False
    return True


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tries of batch calls by address."""
    counted: Counter[str] = Counter()
    real = Connection._method

    def method(self: Connection, server: Server, path: str, response_class: object) -> tuple[object, object]:
        counted[server.address] += 1
        return real(self, server, path, response_class)

    monkeypatch.setattr(Connection, "_method", method)
    return counted


def _publish_from_eight_threads(center: tmc.Center, name: str) -> int:
    """Returns: how many of 100 calls were answered."""
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(center.publish, "paid", b"", key=f"{name}-{i}") for i in range(100)]
        return sum(1 for call in calls if call.result(60))


def test_a_stopped_server_of_two_costs_a_try_and_every_call_is_answered(tmp_path: Path, tries: Counter[str]) -> None:
    well, hung = _Dev(tmp_path / "well"), _Dev(tmp_path / "hung")
    try:
        with tmc.connect(f"{well.address},{hung.address}", app="orders", timeout=_LIMIT) as center:
            assert _publish_from_eight_threads(center, "both") == 100
            assert tries[well.address]
            assert tries[hung.address]
            hung.process.send_signal(signal.SIGSTOP)
            tries.clear()
            assert _publish_from_eight_threads(center, "one") == 100
            assert tries[hung.address] <= 4
            hung.process.send_signal(signal.SIGCONT)
            tries.clear()
            eventually(lambda: center.publish("paid", b"", key=os.urandom(4).hex()) and tries[hung.address], seconds=60)
    finally:
        well.stop()
        hung.stop()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("hung")
    with RunningCenter(f"sqlite:///{folder}/c.db", open_to_all=True) as made:
        yield made


def test_a_black_hole_before_one_server_costs_a_try_and_its_end_is_noticed(
    running: RunningCenter, tries: Counter[str]
) -> None:
    host, _, port = running.address.rpartition(":")
    with (
        TcpProxy(host or "127.0.0.1", int(port)) as proxy,
        tmc.connect(f"{running.address},{proxy.address}", app="orders", timeout=_LIMIT) as center,
    ):
        assert _publish_from_eight_threads(center, "clear") == 100
        proxy.black_hole()
        tries.clear()
        assert _publish_from_eight_threads(center, "hole") == 100
        assert tries[proxy.address] <= 4
        proxy.pass_through()
        tries.clear()
        eventually(lambda: center.publish("paid", b"", key=os.urandom(4).hex()) and tries[proxy.address], seconds=60)


def test_connections_that_are_cut_or_reset_lose_no_call(running: RunningCenter) -> None:
    host, _, port = running.address.rpartition(":")
    with (
        TcpProxy(host or "127.0.0.1", int(port)) as one,
        TcpProxy(host or "127.0.0.1", int(port)) as other,
        tmc.connect(f"{one.address},{other.address}", app="orders", timeout=_LIMIT) as center,
        ThreadPoolExecutor(4) as pool,
    ):
        calls = []
        for i in range(40):
            calls += [pool.submit(center.publish, "paid", b"", key=f"cut-{i}-{j}") for j in range(5)]
            (one.cut, other.reset, one.reset, other.cut)[i % 4]()
            calls[-1].result(60)
        assert all(call.result(60) for call in calls)


def test_while_every_server_is_silent_a_call_waits_for_the_first_that_answers(
    running: RunningCenter, tries: Counter[str]
) -> None:
    host, _, port = running.address.rpartition(":")
    with (
        TcpProxy(host or "127.0.0.1", int(port)) as one,
        TcpProxy(host or "127.0.0.1", int(port)) as other,
        tmc.connect(f"{one.address},{other.address}", app="orders", timeout=_LIMIT) as center,
        ThreadPoolExecutor(1) as pool,
    ):
        assert _publish_from_eight_threads(center, "before") == 100
        one.black_hole()
        other.black_hole()
        tries.clear()
        call = pool.submit(center.publish, "paid", b"", key="silence")
        eventually(lambda: tries[one.address] == tries[other.address] == 2, seconds=60)
        assert not call.done()
        other.pass_through()
        assert call.result(60)
        assert tries.total() <= 8
