"""The services that trade during a storm: their processes, and what they registered."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.scene import Scene
from tmc_storm.services.program import Program
from tmc_storm.shop import books
from tmc_storm.shop.settings import CLOSING_TIME, SETTINGS, ShopSettings, closed_file

_RETRY = types_pb2.RetryPolicy(interval_ms=500, max_retry=3)
"""Retries of deliveries and checks are used up after three seconds, before many outages of a storm are over."""
_TRANSACTION_MS = 3000
_ACTIVATION_MS = 5000  # a registration counts that much later, by default


class Cast:
    """Producers of one service and consumers of two, around a scene. They run from `start` on."""

    def __init__(
        self, scene: Scene, *, check_addresses: Sequence[str], consumers: int, per_second: float, seed: int
    ) -> None:
        """check_addresses: one for each producer; empty ones answer no checks.

        consumers: processes, for both services together, at least 2.  per_second: orders, by all producers together.
        """
        self._scene = scene
        apps = (books.ORDERS_APP, *books.SUBSCRIPTIONS)
        self._keys = {app: self._register_app(app) for app in apps}
        self._register_topics([address for address in check_addresses if address])
        for name in ("orders", "stock", "mail"):
            books.open_books(scene.business_url(name, direct=True))
        self.producers = [
            self._producer(number, address, per_second / len(check_addresses), seed)
            for number, address in enumerate(check_addresses)
        ]
        subscribers = list(books.SUBSCRIPTIONS)
        self.consumers = [self._consumer(number, subscribers[number % len(subscribers)]) for number in range(consumers)]

    @property
    def programs(self) -> list[Program]:
        return [*self.producers, *self.consumers]

    def _register_app(self, app: str) -> str:
        """Return a key of this app, which an earlier storm may have registered."""
        call = self._scene.operator.call
        if key := str(call("RegisterApp", id=app).key):
            return key
        call("EnableApp", id=app, reason="tmc storm")
        key = str(call("AddAppKey", id=app, replace_newest=True).key)
        call("DropOldAppKey", id=app)  # of an earlier storm
        return key

    def _register_topics(self, check_addresses: Sequence[str]) -> None:
        call = self._scene.operator.call
        for topic in books.TOPICS:
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
            if check_addresses:
                address = check_addresses[0] if len(check_addresses) == 1 else ""  # several: those that discovery knows
                target = admin_pb2.CheckTarget(kind="grpc", address=address, deadline_ms=1000)
                call("SetTopicCheck", topic=topic, targets=[target], retry=_RETRY, untried=True)
        effective_ms = [
            call("RegisterSubscription", topic=topic, app=app, retry=_RETRY).effective_ms
            for app, topics in books.SUBSCRIPTIONS.items()
            for topic in topics
        ]
        self.since_ms = min(effective_ms) - _ACTIVATION_MS

    def _producer(self, number: int, check_address: str, per_second: float, seed: int) -> Program:
        name = f"producer-{number}"
        settings = ShopSettings(
            name=name,
            app=books.ORDERS_APP,
            key=self._keys[books.ORDERS_APP],
            address=self._scene.addresses,
            authority=self._scene.authority,
            server_name=self._scene.server_name,
            database=self._scene.business_url("orders"),
            folder=str(self._scene.folder),
            check_address=check_address,
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
            address=self._scene.consumer_address,
            authority=self._scene.authority,
            server_name=self._scene.server_name,
            database=self._scene.business_url(database_of(app)),
            folder=str(self._scene.folder),
        )
        command = [sys.executable, "-m", "tmc_cli", "consume", "tmc_storm.shop.consumer:consumer"]
        broker = {each: value for each, value in os.environ.items() if each.startswith("TMC_BROKER_")}
        environment = broker | {SETTINGS: str(settings.write())}
        return Program(f"consumer {number}", command, environment, self._log(name))

    def _log(self, name: str) -> Path:
        return self._scene.folder / f"{name}.log"

    def start(self) -> None:
        """Begin to trade."""
        for program in self.programs:
            program.start()

    def close_shop(self) -> None:
        """Take no further orders; those that were begun are finished, and checks answered."""
        (self._scene.folder / CLOSING_TIME).touch()

    def unfinished(self) -> list[str]:
        """Return the producers that have not finished yet, after closing time."""
        names = [producer.name.replace(" ", "-") for producer in self.producers]
        return [name for name in names if not closed_file(self._scene.folder, name).exists()]

    def stop(self) -> None:
        """End all processes; they finish what they have begun."""
        for program in self.programs:
            program.stop(seconds=15)


def database_of(app: str) -> str:
    """Return the name of a service's database."""
    return app.removeprefix("storm-")
