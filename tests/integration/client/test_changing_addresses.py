"""A name whose addresses change, as with a headless service of Kubernetes: the SDK's channels go along."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.dns import Dns
from tmc_client.connecting.connection import CHANNEL_OPTIONS
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

APP = (("tmc-app", "orders"),)
OLD, NEW = "127.0.0.2", "127.0.0.3"


class Servers:
    """At addresses of loopback, with one port, behind one name."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._port = free_port()
        self.dns = Dns([OLD])
        stack.callback(self.dns.stop)
        target = f"dns://127.0.0.1:{self.dns.port}/center.test:{self._port}"
        self._channel = stack.enter_context(grpc.insecure_channel(target, CHANNEL_OPTIONS))
        self._numbers = itertools.count()
        self._running: dict[str, RunningCenter] = {}
        self._centers: dict[str, tmc.Center] = {}

    def start(self, address: str) -> None:
        sections: dict[str, Any] = {
            "server": {"listen": f"{address}:{self._port}"},
            "limits": {"connection_seconds": 1, "connection_grace_seconds": 1},
        }
        center = RunningCenter(f"sqlite:///{self._folder}/{address}.db", open_to_all=True, **sections)
        self._running[address] = center
        self._stack.callback(self.stop, address)
        self._centers[address] = self._stack.enter_context(
            closing(tmc.connect(f"{address}:{self._port}", app="orders"))
        )

    def stop(self, address: str) -> None:
        center = self._running.pop(address, None)
        if center is not None:
            center.stop()

    def publishes_to(self) -> str:
        """The address of the server that takes a message; "": none does."""
        key = f"k{next(self._numbers)}"
        request = message_pb2.PublishRequest(topic="order.paid", key=key, attempt_id=tmc.new_attempt_id())
        try:
            message_pb2_grpc.MessageServiceStub(self._channel).Publish(request, timeout=2, metadata=APP)
        except grpc.RpcError:
            return ""
        return next(address for address, center in reversed(self._centers.items()) if _has(center, key))


def _has(center: tmc.Center, key: str) -> bool:
    try:
        center.get_message(topic="order.paid", key=key)
    except tmc.NotFound:
        return False
    return True


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, tmp_path)


def test_after_a_rolling_update_calls_go_to_the_new_address(servers: Servers) -> None:
    servers.start(OLD)
    assert servers.publishes_to() == OLD
    servers.start(NEW)
    servers.dns.addresses = [NEW]
    servers.stop(OLD)
    eventually(lambda: servers.publishes_to() == NEW, seconds=15)  # gRPC alone would wait for half a minute


def test_a_server_that_was_added_gets_calls(servers: Servers) -> None:
    """Its connection to the first one never breaks, so it is renewed from time to time."""
    servers.start(OLD)
    assert servers.publishes_to() == OLD
    servers.start(NEW)
    servers.dns.addresses = [OLD, NEW]
    eventually(lambda: servers.publishes_to() == NEW, seconds=30)
    eventually(lambda: servers.publishes_to() == OLD, seconds=30)  # in turn


def test_the_service_config_of_the_page_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "surroundings.md").read_text()
    config = json.loads(page.partition("```json\n")[2].partition("```")[0])
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as center:
        with grpc.insecure_channel(center.address, [("grpc.service_config", json.dumps(config))]) as channel:
            request = message_pb2.PublishRequest(topic="order.paid", key="a", attempt_id=tmc.new_attempt_id())
            stub = message_pb2_grpc.MessageServiceStub(channel)
            assert stub.Publish(request, metadata=APP).message_id
    assert {policy["timeout"] for policy in config["methodConfig"]} == {"5s"}
