"""The SDK over TLS: several servers, names in certificates, client certificates; and keys that stay out of the clear."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tmc_client as tmc
import tmc_client.aio
from tests.integration.server.test_api import Api, refusal
from tests.support.center import RunningCenter
from tests.support.certificates import Authority
from tmc_client.connecting.connection import Connection, Identity
from tmc_common.protocol import consumption_pb2
from tmc_storm.tcp_proxy import TcpProxy


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
        with TcpProxy("127.0.0.1", center.server.port) as one, TcpProxy("127.0.0.1", center.server.port) as two:
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


def test_certificates_that_are_replaced_are_used_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("center", "IP:127.0.0.1")
    tls = {"certificate": str(certificate), "key": str(key)}
    settings = {"open_to_all": True, "tls": tls, "http": {"listen": "127.0.0.1:0"}}
    with RunningCenter(f"sqlite:///{tmp_path}/tmc.db", **settings) as center:
        http = center.server.parts.http
        assert http is not None
        doors = [("127.0.0.1", port) for port in (center.server.port, http.port)]

        def shown() -> list[bool]:
            """Return which doors show the certificate that is in the file."""
            return [ssl.get_server_certificate(door).strip() in certificate.read_text() for door in doors]

        assert shown() == [True, True]
        renewed = authority.issue("renewed", "IP:127.0.0.1")
        for new, old in zip(renewed, (certificate, key), strict=True):
            new.replace(old)
        assert shown() == [True, True]


class Bound:
    """A center that binds apps to certificates."""

    def __init__(self, center: RunningCenter, folder: Path) -> None:
        self.center = center
        self._folder = folder

    @contextmanager
    def _channel(self, name: str) -> Iterator[grpc.Channel]:
        read = [(self._folder / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem")]
        with grpc.secure_channel(self.center.address, grpc.ssl_channel_credentials(*read)) as channel:
            yield channel

    def ask(self, certificate: str, path: str, metadata: list[tuple[str, str]]) -> str:
        """Returns: OK or the reason."""
        with self._channel(certificate) as channel:
            answer = Api(self.center, channel)(path, b"", metadata)
            return str(answer[1]) if isinstance(answer, tuple) else "OK"

    def stream(self, certificate: str, app: str) -> str:
        request = consumption_pb2.SubscribeRequest(topics=["order.paid"], credit=1)
        with self._channel(certificate) as channel:
            call = channel.stream_stream(
                "/tmc.v1.ConsumptionService/Subscribe",
                request_serializer=lambda each: each.SerializeToString(),
                response_deserializer=consumption_pb2.SubscribeResponse.FromString,
            )(iter([request]), metadata=self.center.as_app(app), timeout=20)
            try:
                return f"OK {len(list(call))}"
            except grpc.RpcError as exc:
                return refusal(exc)[1]

    def health(self, certificate: str) -> bool:
        with self._channel(certificate) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bound]:
    folder = tmp_path_factory.mktemp("bound")
    authority = Authority(folder)
    certificate, key = authority.issue("center", "DNS:localhost", "IP:127.0.0.1")
    for name, other in (("orders", "orders.test"), ("host", "orders"), ("mail", "coupons"), ("nobody", "ops.test")):
        authority.issue(name, f"DNS:{other}")
    tls = {"certificate": str(certificate), "key": str(key), "client_authority": str(authority.certificate)}
    path = folder / "tmc.db"
    with RunningCenter(f"sqlite:///{path}") as plain:
        keys, token = plain.keys, plain.token
    with RunningCenter(f"sqlite:///{path}", registered=(keys, token), tls={**tls, "bind_apps": True}) as center:
        yield Bound(center, folder)


def test_a_certificate_is_good_for_the_app_that_it_names_and_for_no_other(bound: Bound) -> None:
    path = "MessageService/DescribeChecks"
    certificates = ("orders", "host", "mail", "nobody", "center")
    outcomes = {name: bound.ask(name, path, bound.center.as_app("orders")) for name in certificates}
    refused = "CERTIFICATE_OF_ANOTHER"
    assert outcomes == {"orders": "OK", "host": "OK", "mail": refused, "nobody": refused, "center": refused}
    assert (
        bound.ask("orders", path, [("tmc-app", "orders"), ("authorization", "Bearer wrong")]) == "CREDENTIALS_INVALID"
    )
    assert bound.ask("orders", path, bound.center.as_app("coupons")) == refused
    assert (bound.stream("mail", "coupons"), bound.stream("orders", "coupons")) == ("OK 0", refused)


def test_operators_and_health_checks_are_bound_to_no_app(bound: Bound) -> None:
    for name in ("nobody", "orders"):
        assert bound.ask(name, "AdminService/ListApps", bound.center.operator) == "OK"
        assert bound.ask(name, "AdminService/ListApps", bound.center.as_app("orders")) == "ADMIN_ONLY"
        assert bound.health(name)


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
    connection = Connection("127.0.0.1:50051", Identity(app="orders", key="secret"))
    with pytest.raises(tmc.InvalidRequest, match="in the clear to 10"):
        connection._new_channel("10.0.0.7:50051")
