"""What every discovery promises: host:port of one app's instances in one environment, and of no other."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.support.store import StoreUnderTest
from tmc_client.discovery import Registration
from tmc_server.discovery.consul import ConsulInstances
from tmc_server.discovery.static import RecordedInstances, StaticInstances
from tmc_server.domain.catalog import App
from tmc_server.domain.ports.checks import Instance, Instances
from tmc_server.store.senders import SqlSeenSenders
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul


def _app(number: int, name: str) -> App:
    return App(number=number, id=name, service_name=name, biz_id=name, alert_email="", alert_phone="", key_hashes=())


ORDERS, SHOP = _app(1, "orders"), _app(2, "shop")


class InstancesContract(ABC):
    @pytest.fixture
    def ports(self) -> Iterator[list[int]]:
        """Of three instances that listen."""
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        yield [server.getsockname()[1] for server in listening]
        for server in listening:
            server.close()

    @abstractmethod
    def knowing(self, orders: list[str], orders_staging: list[str]) -> contextmanager[Instances]:
        """Instances of `orders` in the environments default and staging are known; of others none."""

    def test_addresses_are_those_of_the_app_and_the_environment(self, ports: list[int]) -> None:
        one, two, staging = (f"127.0.0.1:{port}" for port in ports)
        with self.knowing([one, two], [staging]) as instances:
            eventually(lambda: sorted(_addresses(instances.instances(ORDERS, "default"))) == sorted([one, two]))
            eventually(lambda: _addresses(instances.instances(ORDERS, "staging")) == [staging])

    def test_an_app_that_nobody_registered_has_no_addresses(self, ports: list[int]) -> None:
        with self.knowing([f"127.0.0.1:{ports[0]}"], []) as instances:
            assert _addresses(instances.instances(SHOP, "default")) == []


def _addresses(instances: Sequence[Instance]) -> list[str]:
    return [instance.address for instance in instances]


class TestStatic(InstancesContract):
    @contextmanager
    def knowing(self, orders: list[str], orders_staging: list[str]) -> Iterator[Instances]:
        yield StaticInstances({"orders@default": orders, "orders@staging": orders_staging})


class TestRecorded(InstancesContract):
    @pytest.fixture(autouse=True)
    def store_(self, store: StoreUnderTest) -> None:
        self.store = store

    @contextmanager
    def knowing(self, orders: list[str], orders_staging: list[str]) -> Iterator[Instances]:
        senders = SqlSeenSenders(self.store.database)
        for tag, addresses in (("default", orders), ("staging", orders_staging)):
            for address in addresses:
                senders.saw(ORDERS, tag, Instance(address))
        senders.run_once()
        yield RecordedInstances(senders)


@pytest.mark.services
class TestConsul(InstancesContract):
    @pytest.fixture(autouse=True)
    def agent(self, consul: Consul) -> None:
        self.consul = consul

    @contextmanager
    def knowing(self, orders: list[str], orders_staging: list[str]) -> Iterator[Instances]:
        made = [
            Registration(self.consul.address, "orders", address, tag=tag, check="tcp")
            for tag, addresses in (("default", orders), ("staging", orders_staging))
            for address in addresses
        ]
        for registration in made:
            registration.run_once()
        yield ConsulInstances(self.consul.address, "")
        for registration in made:
            registration.deregister()
