"""Clients without our SDK, with many calls at once on one channel: all are answered.

HTTP/2 has a limit of its own on the calls of a connection. Clients keep to it, as long as both sides count the same calls.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tests.support.go_client import built, has_go
from tmc_common.protocol import message_pb2, message_pb2_grpc

WORKERS, EACH = 200, 225 if LONG else 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("plain")
    # Two hundred threads of the client share a process with the server: its look at the catalog may wait for its turn.
    with RunningCenter(f"sqlite:///{folder}/c.db", store={"change_delay_ms": 30_000}) as made:
        yield made


def _message(key: str) -> message_pb2.PublishRequest:
    return message_pb2.PublishRequest(topic="order.paid", key=key, body=b"{}", attempt_id=os.urandom(16))


def _statuses(running: RunningCenter, workers: int, each: int) -> Counter[str]:
    """Publish with this many threads on one channel. Returns: how often each status came, of errors with its text."""
    with grpc.insecure_channel(running.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = message_pb2_grpc.MessageServiceStub(channel)

        def publish(key: str) -> str:
            try:
                stub.Publish(_message(key), metadata=running.as_app("orders"), timeout=60)
            except grpc.RpcError as exc:
                return f"{exc.code().name}: {exc.details()}"
            return "OK"

        with ThreadPoolExecutor(workers) as pool:
            return Counter(pool.map(publish, (f"plain-{number}" for number in range(workers * each))))


def test_two_hundred_workers_on_one_channel_are_all_answered(running: RunningCenter) -> None:
    assert _statuses(running, WORKERS, EACH) == {"OK": WORKERS * EACH}


def test_calls_beyond_the_limit_of_a_connection_wait_in_the_client(tmp_path: Path) -> None:
    """A locked database keeps eight calls open; the server would refuse a ninth."""
    with (
        RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"calls_per_connection": 8, "open_calls": 8}) as small,
        grpc.insecure_channel(small.address, [("grpc.use_local_subchannel_pool", 1)]) as channel,
        closing(sqlite3.connect(tmp_path / "c.db", isolation_level=None)) as lock,
    ):
        stub, metadata = message_pb2_grpc.MessageServiceStub(channel), small.as_app("orders")
        stub.Publish(_message("before"), metadata=metadata, timeout=60)
        lock.execute("BEGIN IMMEDIATE")
        calls = [stub.Publish.future(_message(f"open-{n}"), metadata=metadata, timeout=60) for n in range(12)]
        with pytest.raises(grpc.RpcError) as caught:
            stub.Publish(_message("late"), metadata=metadata, timeout=1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        lock.execute("ROLLBACK")
        assert [call.exception() for call in calls] == [None] * 12


def _go_workers(running: RunningCenter) -> str:
    """Run the Go client. Returns: what it prints, statuses and how often each came."""
    command = [str(built()), "publish", running.address, "orders", running.keys["orders"]]
    done = subprocess.run([*command, str(WORKERS), str(EACH)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if has_go():

    def test_goroutines_share_a_stream(running: RunningCenter, tmp_path: Path) -> None:
        running.subscribe("bench.paid", "coupons")
        command = [
            str(built()),
            "stream",
            running.address,
            running.keys["orders"],
            "go",
            "64",
            "6400",
            str(tmp_path),
        ]
        done = subprocess.run(command, input="go\n", capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert len(set((tmp_path / "go.committed").read_text().split())) == 6400

    def test_a_go_client_with_two_hundred_workers_is_answered(running: RunningCenter) -> None:
        assert _go_workers(running) == f"OK {WORKERS * EACH}\n"
