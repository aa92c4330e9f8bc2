"""Who trades during a storm: the processes of three services, and what they registered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.services.program import Program
from tmc_storm.shop import books
from tmc_storm.shop.settings import CLOSING_TIME, SETTINGS, ShopSettings
from tmc_storm.world import World

_RETRY = types_pb2.RetryPolicy(interval_ms=1000, max_retry=5)
"""Of deliveries and checks: less than most outages of a storm."""
_TRANSACTION_MS = 3000


class Cast:
    """Producers of one service and consumers of two, around a world. They run from `start` on."""

    def __init__(
        self, world: World, *, check_ports: Sequence[int], consumers: int, per_second: float, seed: int
    ) -> None:
        """check_ports: one for each producer.  consumers: processes, for both services together, at least 2.

        per_second: orders, by all producers together.
        """
        self._world = world
        apps = (books.ORDERS_APP, *books.SUBSCRIPTIONS)
        self._keys = {app: world.operator.call("RegisterApp", id=app).key for app in apps}
        self._register()
        for name in ("orders", "stock", "mail"):
            books.open_books(world.business_url(name, direct=True))
        self.producers = [
            self._producer(number, port, per_second / len(check_ports), seed) for number, port in enumerate(check_ports)
        ]
        subscribers = list(books.SUBSCRIPTIONS)
        self.consumers = [self._consumer(number, subscribers[number % len(subscribers)]) for number in range(consumers)]

    @property
    def programs(self) -> list[Program]:
        return [*self.producers, *self.consumers]

    def _register(self) -> None:
        call = self._world.operator.call
        for topic in (books.PAID, books.SHIPPED, books.ACCOUNT):
            single = types_pb2.QUEUE_MODE_SINGLE if topic == books.SHIPPED else types_pb2.QUEUE_MODE_MULTI
            call(
                "RegisterTopic",
                name=topic,
                owner=books.ORDERS_APP,
                queue_mode=single,
                ordered=topic == books.ACCOUNT,
                transaction_time_ms=_TRANSACTION_MS,
                **({} if topic == books.ACCOUNT else {"spread": 16}),
            )
            target = admin_pb2.CheckTarget(kind="grpc", deadline_ms=1000)
            call("SetTopicCheck", topic=topic, targets=[target], retry=_RETRY, untried=True)
        for app, topics in books.SUBSCRIPTIONS.items():
            for topic in topics:
                call("RegisterSubscription", topic=topic, app=app, retry=_RETRY)

    def _producer(self, number: int, check_port: int, per_second: float, seed: int) -> Program:
        name = f"producer-{number}"
        settings = ShopSettings(
            name=name,
            app=books.ORDERS_APP,
            key=self._keys[books.ORDERS_APP],
            address=self._world.addresses,
            database=self._world.business_url("orders"),
            folder=str(self._world.folder),
            check_port=check_port,
            per_second=per_second,
            seed=seed,
        )
        command = [sys.executable, "-m", "tmc_storm.shop.producer", str(settings.write())]
        return Program(f"producer {number}", command, {}, self._log(name))

    def _consumer(self, number: int, app: str) -> Program:
        name = f"consumer-{number}"
        settings = ShopSettings(
            name=name,
            app=app,
            key=self._keys[app],
            address=self._world.consumer_address,
            database=self._world.business_url(database_of(app)),
            folder=str(self._world.folder),
        )
        command = [sys.executable, "-m", "tmc_cli", "consume", "tmc_storm.shop.consumer:consumer"]
        return Program(f"consumer {number}", command, {SETTINGS: str(settings.write())}, self._log(name))

    def _log(self, name: str) -> Path:
        return self._world.folder / f"{name}.log"

    def start(self) -> None:
        """Begin to trade."""
        for program in self.programs:
            program.start()

    def close_shop(self) -> None:
        """Take no further orders; those that were begun are finished, and checks answered."""
        (self._world.folder / CLOSING_TIME).touch()

    def stop(self) -> None:
        """End all processes."""
        for program in self.programs:
            program.kill()


def database_of(app: str) -> str:
    """Return the name of a service's database."""
    return app.removeprefix("storm-")
