"""The SDK over TLS: several servers, names in certificates, client certificates; and keys that stay out of the clear."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import tmc_client as tmc
import tmc_client.aio
from tests.support.center import RunningCenter
from tests.support.certificates import Authority
from tests.support.tcp_proxy import TcpProxy
from tmc_client.connection import Connection, Identity


class Doors:
    """One center whose certificate names center.test, behind two addresses."""

    def __init__(self, center: RunningCenter, addresses: str, folder: Path) -> None:
        self.center = center
        self.addresses = addresses
        self.folder = folder

    def connect(self, **tls: str) -> tmc.Center:
        found = tmc.Tls(authority=str(self.folder / "ca.pem"), **tls)
        return tmc.connect(self.addresses, app="orders", tls=found)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    certificate, key = authority.issue("center", "DNS:center.test")
    authority.issue("orders", "DNS:orders.test")
    tls = {"certificate": str(certificate), "key": str(key), "client_authority": str(authority.certificate)}
    with RunningCenter(f"sqlite:///{folder}/tmc.db", open_to_all=True, tls=tls) as center:
        with TcpProxy("127.0.0.1", center.center.port) as one, TcpProxy("127.0.0.1", center.center.port) as two:
            yield Doors(center, f"{one.address},{two.address}", folder)


def test_servers_are_verified_by_the_name_that_is_given(doors: Doors) -> None:
    ours = {"certificate": str(doors.folder / "orders.pem"), "key": str(doors.folder / "orders.key")}
    with doors.connect(server_name="center.test", **ours) as center:
        for number in range(4):  # both addresses take their turn
            center.publish("order.paid", b"x", key=f"k{number}")


@pytest.mark.parametrize("missing", ["server_name", "certificate"])
def test_another_name_or_no_client_certificate_is_refused(doors: Doors, missing: str) -> None:
    options = {
        "server_name": "center.test",
        "certificate": str(doors.folder / "orders.pem"),
        "key": str(doors.folder / "orders.key"),
    }
    for name in {"server_name": ("server_name",), "certificate": ("certificate", "key")}[missing]:
        del options[name]
    with doors.connect(**options) as center:
        with pytest.raises(tmc.Unavailable):
            center.publish("order.paid", b"x", key=missing, timeout=timedelta(seconds=2))


@pytest.mark.parametrize("address", ["center.example:50051", "127.0.0.1:50051,10.0.0.7:50051", "127.example.com:50051"])
def test_a_key_does_not_travel_in_the_clear_to_other_machines(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for connect in (tmc.connect, tmc.aio.connect):
        with pytest.raises(tmc.InvalidRequest, match=r"would travel in the clear .*tls=tmc\.Tls"):
            connect(address, app="orders", key="secret")
        connect(address, app="orders", key="secret", insecure=True)
        connect(address, app="orders")  # without a key there is nothing to protect
    monkeypatch.setenv("TMC_INSECURE", "1")
    tmc.connect(address, app="orders", key="secret")


@pytest.mark.parametrize("address", ["localhost:50051", "127.0.0.1:50051", "[::1]:50051"])
def test_on_this_machine_it_may(address: str) -> None:
    tmc.connect(address, app="orders", key="secret")


def test_an_address_that_consul_gives_is_looked_at_too() -> None:
    connection = Connection("127.0.0.1:50051", Identity("orders", "secret"))
    with pytest.raises(tmc.InvalidRequest, match="in the clear to 10"):
        connection._new_channel("10.0.0.7:50051")
