"""Which addresses are on this machine: the guard in front of every key and token that could travel in the clear."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tmc_client.discovery import ConsulAddress
from tmc_common.addresses import HostPort, each_host, is_loopback
from tmc_common.consul import agent_client, passing

HERE = [
    "127.0.0.1:50051",
    "127.0.0.2:50051",
    "127.255.255.254:1",
    "localhost:50051",
    "LOCALHOST:50051",
    "[::1]:50051",
    "[0:0:0:0:0:0:0:1]:50051",
]
ELSEWHERE = [
    "",
    "127.0.0.1",
    "localhost",
    "::1",
    "[::1]",
    ":50051",
    "127.0.0.1:",
    "127.0.0.1:port",
    "0.0.0.0:50051",
    "[::]:50051",
    "128.0.0.1:50051",
    "10.0.0.7:50051",
    "[fe80::1]:50051",
    "[2001:db8::1]:50051",
    "center.example:50051",
    "localhost.evil.com:50051",
    "127.0.0.1.evil.com:50051",
    "evil.com/127.0.0.1:50051",
    "localhost@evil.com:50051",
    "127.0.0.1:50051@evil.com:50051",
    "xlocalhost:50051",
    "127.1:50051",  # some resolvers read it as 127.0.0.1, others look the name up
    "0x7f.0.0.1:50051",
    "[127.0.0.1]:50051",
    "[localhost]:50051",
    "::1:5005",  # without brackets gRPC reads this as the host 0:0:0:0:0:0:1:5005, on another machine
    "ipv4:127.0.0.1.evil.com:50051",
]


@pytest.mark.parametrize("address", HERE)
def test_it_is_on_this_machine(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ELSEWHERE)
def test_it_is_not_known_to_be_on_this_machine(address: str) -> None:
    assert not is_loopback(address)


def test_nobody_decides_it_in_another_way() -> None:
    root = Path(__file__).parents[3]
    files = [path for package in root.glob("tmc_*") for path in package.rglob("*.py")]
    own = [path.name for path in files if re.search(r"\.is_loopback\b|def _?is_loopback", path.read_text())]
    assert own == ["addresses.py"]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("center.example:50051", "center.example", 50051), ("[::1]:0", "::1", 0), ("10.0.0.7:65535", "10.0.0.7", 65535)],
)
def test_host_and_port_are_read_and_written_alike(text: str, host: str, port: int) -> None:
    assert HostPort.parse(text) == (host, port)
    assert str(HostPort.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "[]:1", "::1:1", "[host]:1", "host:65536", "host:-1", "host:1\u0661"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        HostPort.parse(text)


def test_consul_and_its_instances_may_have_ipv6_addresses() -> None:
    assert ConsulAddress.parse("consul://[fd00::5]:8501/tmc").agent == "[fd00::5]:8501"
    assert agent_client("[fd00::5]:8501", "", 1).http.base_uri == "http://[fd00::5]:8501"
    instances = ["fd00::7", "[fd00::8]", "10.0.0.9"]
    nodes = [{"Service": {"Address": host, "Port": 50051}} for host in instances]
    assert passing(nodes) == ["10.0.0.9:50051", "[fd00::7]:50051", "[fd00::8]:50051"]


def test_a_url_with_several_hosts() -> None:
    one, two = each_host("amqps://user:p%2Cw@one:5671,[::1]:5672/%2F?heartbeat=5")
    assert one == "amqps://user:p%2Cw@one:5671/%2F?heartbeat=5"
    assert two == "amqps://user:p%2Cw@[::1]:5672/%2F?heartbeat=5"
    assert each_host("amqp://one") == ["amqp://one"]


def test_several_addresses() -> None:
    assert HostPort.parse_all("one:1, [::1]:2") == [HostPort("one", 1), HostPort("::1", 2)]
    with pytest.raises(ValueError, match="HOST:PORT"):
        HostPort.parse_all("one:1,two")
