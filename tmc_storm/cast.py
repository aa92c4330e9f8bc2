"""The services that trade during a storm: their processes, and what they registered."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.scene import Scene
from tmc_storm.services.program import Program
from tmc_storm.shop import books
from tmc_storm.shop.settings import CLOSING_TIME, SETTINGS, ShopSettings, closed_file

_RETRY = types_pb2.RetryPolicy(interval_ms=500, max_retry=3)
"""Retries of deliveries and checks are used up after three seconds, before many outages of a storm are over."""
_WEBHOOK_RETRY = types_pb2.RetryPolicy(interval_ms=500, max_retry=10, cap_ms=1000)
"""A connection that ends without an answer is a failed attempt, and connections end often in a storm."""
_TRANSACTION_MS = 3000
_ACTIVATION_MS = 5000  # a registration counts that much later, by default


class Cast:
    """Producers of one service, consumers of two, and a receiver of webhooks, around a scene. They run from `start` on."""

    def __init__(
        self, scene: Scene, *, check_addresses: Sequence[str], consumers: int, per_second: float, seed: int
    ) -> None:
        """check_addresses: one for each producer; empty ones answer no checks.

        consumers: processes, for both services together, at least 2.  per_second: orders, by all producers together.
        """
        self._scene = scene
        self._keys = {app: self._register_app(app) for app in (books.ORDERS_APP, *scene.subscriptions)}
        self._register_topics([address for address in check_addresses if address])
        self._submit_secret = self._open_submit_queue() if scene.queue_hosts else ""
        for app in self._keys:
            books.open_books(scene.business_url(database_of(app), direct=True))
        settings = [
            self._of_producer(number, address, per_second / len(check_addresses), seed)
            for number, address in enumerate(check_addresses)
        ]
        self.ways = settings[0].ways
        self.producers = [
            self._module(f"producer {number}", "tmc_storm.shop.producer", each) for number, each in enumerate(settings)
        ]
        subscribers = list(books.SUBSCRIPTIONS)
        self.consumers = [self._consumer(number, subscribers[number % len(subscribers)]) for number in range(consumers)]
        self.receivers = [self._receiver()] if scene.webhook_port else []

    @property
    def programs(self) -> list[Program]:
        return [*self.producers, *self.consumers, *self.receivers]

    def _open_submit_queue(self) -> str:
        """Return the secret by which messages there are signed."""
        return str(self._scene.operator.call("OpenSubmitQueue", id=books.ORDERS_APP).secret)

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
            call("RegisterSubscription", topic=topic, app=app, **self._delivery_of(app, topic)).effective_ms
            for app, topics in self._scene.subscriptions.items()
            for topic in topics
        ]
        self.since_ms = min(effective_ms) - _ACTIVATION_MS

    def _delivery_of(self, app: str, topic: str) -> dict[str, Any]:
        """Return how a subscription gets its messages."""
        if app not in books.WEBHOOKS:
            return {"retry": _RETRY}
        kind = "webhook" if topic == books.ACCOUNT else "webhook-batch"
        forward = types_pb2.Forward(kind=kind, target=self._scene.webhook_urls[topic])
        return {"retry": _WEBHOOK_RETRY, "forward": forward, "untried": True}

    def _of_producer(self, number: int, check_address: str, per_second: float, seed: int) -> ShopSettings:
        hosts = self._scene.queue_hosts
        return self._settings(
            f"producer-{number}",
            books.ORDERS_APP,
            self._scene.addresses,
            check_address=check_address,
            per_second=per_second,
            seed=seed,
            http=self._scene.http_addresses,
            queue=f"amqp+submit://guest:guest@{hosts}/%2F" if hosts else "",
            submit_secret=self._submit_secret,
        )

    def _consumer(self, number: int, app: str) -> Program:
        settings = self._settings(f"consumer-{number}", app, self._scene.consumer_address)
        command = [sys.executable, "-m", "tmc_cli", "consume", "tmc_storm.shop.consumer:consumer"]
        broker = {each: value for each, value in os.environ.items() if each.startswith("TMC_BROKER_")}
        environment = broker | {SETTINGS: str(settings.write())}
        return Program(f"consumer {number}", command, environment, self._log(settings.name))

    def _receiver(self) -> Program:
        listen = f"127.0.0.1:{self._scene.webhook_port}"
        keys = {
            topic: self._scene.operator.call("GetDeliveryKeys", topic=topic, app=books.WEB_APP).key
            for topic in books.WEBHOOKS[books.WEB_APP]
        }
        settings = self._settings(
            "webhook-receiver", books.WEB_APP, self._scene.addresses, listen=listen, webhook_keys=keys
        )
        return self._module("webhook receiver", "tmc_storm.shop.webhook", settings)

    def _settings(self, name: str, app: str, address: str, **more: Any) -> ShopSettings:
        return ShopSettings(
            name=name,
            app=app,
            key=self._keys[app],
            address=address,
            authority=self._scene.authority,
            server_name=self._scene.server_name,
            database=self._scene.business_url(database_of(app)),
            folder=str(self._scene.folder),
            **more,
        )

    def _module(self, name: str, module: str, settings: ShopSettings) -> Program:
        return Program(name, [sys.executable, "-m", module, str(settings.write())], {}, self._log(settings.name))

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
