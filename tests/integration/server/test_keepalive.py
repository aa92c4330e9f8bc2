"""Idle connections with the usual keepalive of 10 s stay up, and every channel option is one that gRPC knows."""

from __future__ import annotations

import ast
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tests.support.go_client import built, has_go

ROOT = Path(__file__).parents[3]
IDLE_S = 60 if LONG else 1  # strikes are counted when pings come: only a long run proves that they are tolerated


def _options(path: Path) -> set[str]:
    """First elements of pairs that look like ("grpc.some_option", value); service names have capitals."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            name = node.elts[0].value
            if isinstance(name, str) and name.startswith("grpc.") and name.islower():
                found.add(name)
    return found


def test_every_channel_option_is_one_that_the_installed_grpc_knows() -> None:
    known = Path(str(cygrpc.__file__)).read_bytes()
    used = {
        (path.relative_to(ROOT), name)
        for package in ("tmc_client", "tmc_server")
        for path in (ROOT / package).rglob("*.py")
        for name in _options(path)
    }
    names = {name for _, name in used}
    assert {"grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms", "grpc.so_reuseport"} <= names
    assert [(str(path), name) for path, name in sorted(used) if name.encode() + b"\0" not in known] == []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("keepalive")
    with RunningCenter(f"sqlite:///{folder}/c.db", open_to_all=True) as made:
        yield made


def _python_client(address: str, _folder: Path) -> None:
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    ready, left = threading.Event(), threading.Event()

    def changed(state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            ready.set()
        elif ready.is_set():
            left.set()

    with grpc.insecure_channel(address, options) as channel:
        channel.subscribe(changed, try_to_connect=True)
        assert ready.wait(30)
        assert not left.wait(IDLE_S), "the server ended a connection that only pinged"
        channel.unsubscribe(changed)


def _go_client(address: str, folder: Path) -> None:
    command = [str(built()), "keepalive", address, str(IDLE_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "the connection stayed up\n"), done.stderr


CLIENTS = [_python_client, *([_go_client] if LONG and has_go() else [])]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_with_a_keepalive_of_ten_seconds_idles_without_losing_its_connection(
    running: RunningCenter, tmp_path: Path, client: Callable[[str, Path], None]
) -> None:
    client(running.address, tmp_path)
