"""Consul, static and recorded addresses: who finds whom, and what happens while Consul is away or has forgotten."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import requests

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.rogue import RogueHttp
from tests.support.store import StoreUnderTest
from tmc_client.discovery import ConsulAddress, Registration, Watch
from tmc_common.protocol import admin_pb2
from tmc_server.discovery.consul import ConsulInstances
from tmc_server.discovery.static import RecordedInstances, StaticInstances
from tmc_server.domain.catalog import App
from tmc_server.domain.ports.checks import Instance, Instances
from tmc_server.errors import DiscoveryUnavailable, StoreUnavailable
from tmc_server.store.senders import MOST_ADDRESSES, MOST_TAGS, MOST_WAITING, SEEN_FOR_MS, SqlSeenSenders
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul
from tmc_storm.services.ports import free_port

ORDERS = App(
    number=1, id="orders", service_name="order-service", biz_id="orders", alert_email="", alert_phone="", key_hashes=()
)


def _http(port: int) -> threading.Thread:
    """A service that passes HTTP checks."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Fine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Fine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.server = server
    thread.start()
    return thread


@pytest.mark.services
class TestConsul:
    def test_a_registration_comes_back_by_itself_and_goes_at_the_end(self) -> None:
        agent = Consul()
        registration = Registration(agent.address, "tmc", "127.0.0.1:5000", tag="prod", check="tcp")
        assert (registration.run_once(), registration.run_once()) == (True, False)
        agent.kill()
        with pytest.raises(requests.RequestException):
            registration.run_once()
        agent.start()  # it has forgotten everything
        assert registration.run_once() is True
        registration.deregister()
        assert registration.run_once() is False  # and stays away
        services = requests.get(f"http://{agent.address}/v1/agent/services", timeout=5).json()
        assert services == {}
        agent.stop()

    def test_a_watch_follows_instances_and_keeps_the_last_ones_that_were_known(self) -> None:
        agent = Consul()
        seen: list[list[str]] = []
        watch = Watch(ConsulAddress.parse(f"consul://{agent.address}/tmc?tag=prod"), seen.append)
        assert watch.start() == []
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        first, second, third = (f"127.0.0.1:{server.getsockname()[1]}" for server in listening)
        one, other = (
            Registration(agent.address, "tmc", address, tag="prod", check="tcp") for address in (first, second)
        )
        stranger = Registration(agent.address, "tmc", third, tag="test", check="tcp")
        for registration in (stranger, one):
            registration.run_once()
        eventually(lambda: seen[-1:] == [[first]])
        other.run_once()
        eventually(lambda: seen[-1:] == [sorted([first, second])])
        agent.kill()
        agent.start()
        eventually(lambda: watch._away is False and watch._index > 0)
        assert seen[-1] == sorted([first, second])  # wiped: no reason to stop calling
        other.run_once()
        eventually(lambda: seen[-1:] == [[second]])
        watch.stop()
        for server in listening:
            server.close()
        agent.stop()

    def test_a_center_is_found_by_name_and_tag_and_calls_go_on_without_consul(self, tmp_path) -> None:
        agent = Consul()
        consul = {"agent": agent.address, "tag": "blue"}
        with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, consul=consul):
            with tmc.connect(f"consul://{agent.address}/tmc?tag=blue", app="orders") as orders:
                orders.publish("t", b"x", key="1")
                agent.kill()
                orders.publish("t", b"x", key="2")
                agent.start()

                def registered() -> bool:
                    return bool(requests.get(f"http://{agent.address}/v1/agent/services", timeout=5).json())

                eventually(registered)
                orders.publish("t", b"x", key="3")
            with tmc.connect(f"consul://{agent.address}/tmc?tag=green", app="orders") as nobody:
                with pytest.raises(tmc.Unavailable, match="no passing instance of 'tmc' with tag 'green'"):
                    nobody.publish("t", b"x", key="4")
        assert requests.get(f"http://{agent.address}/v1/agent/services", timeout=5).json() == {}  # it said goodbye
        agent.stop()

    def test_producers_register_their_endpoint_and_the_center_finds_them_by_tag(self, consul: Consul) -> None:
        port = free_port()
        serving = _http(port)
        instances = ConsulInstances(consul.address, "")
        check = f"http://127.0.0.1:{port}/health"
        with Registration(consul.address, "order-service", f"127.0.0.1:{port}", tag="prod", check=check):
            eventually(
                lambda: (
                    _addresses(ConsulInstances(consul.address, "").instances(ORDERS, "prod")) == [f"127.0.0.1:{port}"]
                )
            )
            assert _addresses(instances.instances(ORDERS, "test")) == []
        serving.server.shutdown()
        serving.server.server_close()

    def test_while_consul_is_away_the_last_answer_counts(self) -> None:
        agent, now = Consul(), [0.0]
        instances = ConsulInstances(agent.address, "", monotonic=lambda: now[0])
        Registration(agent.address, "order-service", "10.0.0.1:80", tag="prod", check="tcp").run_once()
        assert _addresses(instances.instances(ORDERS, "prod")) == ["10.0.0.1:80"]
        agent.kill()
        now[0] += 3600
        assert _addresses(instances.instances(ORDERS, "prod")) == ["10.0.0.1:80"]
        with pytest.raises(DiscoveryUnavailable):
            _addresses(instances.instances(ORDERS, "never asked"))
        agent.stop()


def _addresses(instances: Sequence[Instance]) -> list[str]:
    return [instance.address for instance in instances]


def _static(_store: StoreUnderTest) -> Instances:
    return StaticInstances({"orders@prod": ["10.0.0.1:80", "10.0.0.2:80"], "orders": ["10.0.0.9:80"]})


def _recorded(store: StoreUnderTest) -> Instances:
    senders = SqlSeenSenders(store.database)
    for tag, address in (("prod", "10.0.0.1:80"), ("prod", "10.0.0.2:80"), ("test", "10.0.0.9:80")):
        senders.saw(ORDERS, tag, Instance(address))
    senders.run_once()
    return RecordedInstances(senders)


@pytest.mark.parametrize("made", [_static, _recorded])
def test_instances_of_one_environment_never_those_of_another(
    store: StoreUnderTest, made: Callable[[StoreUnderTest], Instances]
) -> None:
    instances = made(store)
    assert sorted(_addresses(instances.instances(ORDERS, "prod"))) == ["10.0.0.1:80", "10.0.0.2:80"]
    assert _addresses(instances.instances(ORDERS, "test")) == ["10.0.0.9:80"]
    mail = App(number=2, id="mail", service_name="mail", biz_id="mail", alert_email="", alert_phone="", key_hashes=())
    assert _addresses(instances.instances(mail, "prod")) == []


def test_a_sender_that_was_not_seen_for_an_hour_is_forgotten(store: StoreUnderTest) -> None:
    senders = SqlSeenSenders(store.database)
    senders.saw(ORDERS, "prod", Instance("10.0.0.1:80"))
    senders.run_once()
    store.clock.now_ms += SEEN_FOR_MS
    senders.saw(ORDERS, "prod", Instance("10.0.0.2:80"))
    senders.run_once()
    assert _addresses(senders.seen_at(ORDERS.number, "prod")) == ["10.0.0.2:80", "10.0.0.1:80"]
    store.clock.now_ms += 1
    senders.saw(ORDERS, "prod", Instance("10.0.0.2:80"))
    senders.run_once()
    assert _addresses(senders.seen_at(ORDERS.number, "prod")) == ["10.0.0.2:80"]


def test_an_app_that_floods_addresses_is_bounded_and_takes_no_room_from_another(store: StoreUnderTest) -> None:
    mail = App(number=2, id="mail", service_name="mail", biz_id="mail", alert_email="", alert_phone="", key_hashes=())
    senders = SqlSeenSenders(store.database)
    senders.saw(ORDERS, "prod", Instance("10.1.0.0:80"))
    for second in range(20):
        for number in range(200):
            senders.saw(ORDERS, f"env-{second}-{number}", Instance(f"10.0.{second}.{number}:80"))
            senders.saw(ORDERS, "prod", Instance(f"10.1.{second}.{number}:80"))
        senders.saw(mail, f"blue-{second}", Instance(f"10.9.0.{second}:80"))
        store.clock.advance(1)
        senders.run_once()
    with store.database.reading() as connection:
        rows = connection.exec_driver_sql("SELECT app_no, tag, address FROM tmc_sender").fetchall()
    tags = Counter((app, tag) for app, tag, _ in rows)
    assert len([app for app, _ in tags if app == ORDERS.number]) == MOST_TAGS
    assert max(tags.values()) == MOST_ADDRESSES
    assert len([app for app, _ in tags if app == mail.number]) == 20
    prod = _addresses(senders.seen_at(ORDERS.number, "prod"))
    assert len(prod) == MOST_ADDRESSES
    assert all(address.startswith("10.1.19.") for address in prod)  # the newest


def test_services_of_one_app_with_a_ledger_each_keep_their_places(store: StoreUnderTest) -> None:
    """One of A, seen every ten minutes, beside many of B, which are seen with every message."""
    senders = SqlSeenSenders(store.database)
    senders.saw(ORDERS, "prod", Instance("10.0.0.1:80", b"A" * 16))
    senders.run_once()
    for number in range(MOST_ADDRESSES + 4):
        store.clock.advance(1)
        senders.saw(ORDERS, "prod", Instance(f"10.2.0.{number}:80", b"B" * 16))
        senders.saw(ORDERS, "prod", Instance(f"10.2.0.{number}:80"))  # a call that does not say so changes nothing
        senders.run_once()
    known = senders.seen_at(ORDERS.number, "prod")
    assert known[-1] == Instance("10.0.0.1:80", b"A" * 16)
    assert [each.ledger_id for each in known[:-1]] == [b"B" * 16] * MOST_ADDRESSES


def test_an_address_that_the_table_cannot_hold_spoils_no_other(store: StoreUnderTest) -> None:
    senders = SqlSeenSenders(store.database)
    senders.saw(ORDERS, "prod", Instance("h" * 256))
    senders.saw(ORDERS, "t" * 65, Instance("10.0.0.1:80"))
    senders.saw(ORDERS, "prod", Instance("10.0.0.1:80"))
    senders.run_once()
    assert _addresses(senders.seen_at(ORDERS.number, "prod")) == ["10.0.0.1:80"]


def test_addresses_wait_for_a_database_that_does_not_answer(
    store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are known after its return, within the bound of one second's places."""
    senders = SqlSeenSenders(store.database)
    mail = App(number=2, id="mail", service_name="mail", biz_id="mail", alert_email="", alert_phone="", key_hashes=())
    senders.saw(ORDERS, "prod", Instance("10.0.0.1:80"))
    senders.saw(mail, "prod", Instance("10.0.0.2:80"))
    numbers = itertools.count()

    def unavailable() -> NoReturn:
        for number in itertools.islice(numbers, MOST_WAITING):
            senders.saw(ORDERS, f"env-{number % MOST_WAITING}", Instance(f"10.1.0.{number}:80"))
        raise StoreUnavailable

    with monkeypatch.context() as away:
        away.setattr(store.database, "transaction", unavailable)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                senders.run_once()
    senders.run_once()
    assert _addresses(senders.seen_at(ORDERS.number, "prod")) == ["10.0.0.1:80"]
    assert _addresses(senders.seen_at(mail.number, "prod")) == ["10.0.0.2:80"]
    with store.database.reading() as connection:
        assert len(connection.exec_driver_sql("SELECT address FROM tmc_sender").fetchall()) <= MOST_WAITING + 1


def test_consul_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor with credentials of a .netrc: the agent's address is in the configuration, and its token is a secret."""
    agent, proxy = RogueHttp(), RogueHttp()
    answer = b"HTTP/1.1 200 OK\r\nX-Consul-Index: 1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"
    agent.answers["v1/health/service/order-service"] = lambda connection, _asked: connection.sendall(answer)
    for variable in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"http://{proxy.address}")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    assert _addresses(ConsulInstances(agent.address, "t0ken").instances(ORDERS, "prod")) == []
    assert proxy.asked == []
    assert b"authorization: basic" not in agent.heads[0].lower()
    agent.stop()
    proxy.stop()


def test_tags_without_instances_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    instances = ConsulInstances("127.0.0.1:1", "", lambda: now[0])
    monkeypatch.setattr(instances, "_ask", lambda _app, tag: ["10.0.0.1:80"] if tag == "prod" else [])
    for number in range(5_000):
        now[0] += 0.01
        _addresses(instances.instances(ORDERS, "prod" if number == 0 else f"env-{number}"))
    assert len(instances._known) <= 1_001
    assert _addresses(instances.instances(ORDERS, "prod")) == ["10.0.0.1:80"]


def test_the_sender_says_where_it_answers_and_operators_see_it(tmp_path) -> None:
    import grpc

    with RunningCenter(f"sqlite:///{tmp_path}/c.db", discovery={"kind": "recorded"}) as center:
        with tmc.connect(
            center.address, app="orders", key=center.keys["orders"], tag="blue", check_address="10.1.2.3:8080"
        ) as orders:
            orders.publish("order.paid", b"x", key="1")
        request = admin_pb2.ListInstancesRequest(app="orders", tag="blue")
        with grpc.insecure_channel(center.address) as channel:
            admin = center.admin(channel)
            eventually(lambda: admin.ListInstances(request, metadata=center.operator).addresses == ["10.1.2.3:8080"])
            request.tag = "green"
            assert admin.ListInstances(request, metadata=center.operator).addresses == []


@pytest.mark.parametrize(
    "address", ["consul://", "consul://host:8500", "consul://host:8500/tmc?tga=prod", "consul:///tmc"]
)
def test_addresses_in_consul_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="consul://HOST:PORT/SERVICE"):
        tmc.connect(address, app="orders")
