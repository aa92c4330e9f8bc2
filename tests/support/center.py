"""A real server inside the test process: its own loop in a thread, its real port."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from typer.testing import CliRunner

import tmc_client as tmc
from tests.support.store import migrated_sqlite
from tmc_cli.admin import app
from tmc_client.embedded import Hold
from tmc_common.protocol import admin_pb2, admin_pb2_grpc, types_pb2
from tmc_server.app import DEV, SERVER, Server, initialize
from tmc_server.config import Config
from tmc_storm.eventually import eventually


def _prepare(url: str) -> None:
    """An SQLite file that is not there yet begins as a copy of one with empty tables, which holds all shards."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        shutil.copy(migrated_sqlite(), path)


class RunningCenter:
    """open_to_all: as `tmc dev`, names made at first use. Otherwise apps `orders` and `coupons`, topic `order.paid`, one
    subscription.  registered: keys and token of another one, which made these in the same database."""

    def __init__(
        self,
        url: str,
        open_to_all: bool = False,
        registered: tuple[dict[str, str], str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        if "shards" not in sections.get("store", {}):
            _prepare(url)
        store = {"catalog": url, "change_delay_ms": 1500} | sections.pop("store", {})
        self.config = Config.model_validate({"server": {"listen": "127.0.0.1:0"}, "store": store, **sections})
        self.token = "" if open_to_all else initialize(self.config) or ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: Server = self._run(Server.started(self.config, DEV if open_to_all else SERVER))
        self.address = f"127.0.0.1:{self.server.port}"
        self.keys: dict[str, str] = {}
        if registered is not None:
            self.keys, self.token = registered
        elif not open_to_all:
            self._register()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def subscribed(self) -> None:
        """Wait for the first subscription, where names are made at first use: what was submitted before reaches nobody."""
        eventually(lambda: self.server.store.watch.current.subscriptions)

    def admin(self, channel: grpc.Channel) -> Any:
        return admin_pb2_grpc.AdminServiceStub(channel)

    @property
    def operator(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")]

    def as_app(self, app: str, tag: str = "") -> list[tuple[str, str]]:
        metadata = [("tmc-app", app), ("authorization", f"Bearer {self.keys.get(app, '')}")]
        return [*metadata, ("tmc-tag", tag)] if tag else metadata

    def subscribe(self, topic: str, app: str, **settings: Any) -> Any:
        """Register a topic of `orders` when it is new, and a subscription that is in effect when this returns.

        settings: of RegisterSubscription; topic_settings: of RegisterTopic.
        """
        topic_settings = settings.pop("topic_settings", {})
        with grpc.insecure_channel(self.address) as channel:
            admin = self.admin(channel)
            if app not in self.keys:
                self.keys[app] = admin.RegisterApp(admin_pb2.RegisterAppRequest(id=app), metadata=self.operator).key
            admin.RegisterTopic(
                admin_pb2.RegisterTopicRequest(**{"name": topic, "owner": "orders"} | topic_settings),
                metadata=self.operator,
            )
            request = admin_pb2.RegisterSubscriptionRequest(topic=topic, app=app, **settings)
            made = admin.RegisterSubscription(request, metadata=self.operator)
        eventually(lambda: time.time() * 1000 >= made.effective_ms + 100)
        queues = self.server.parts.outlets.queues
        if queues is not None and not made.HasField("forward"):
            eventually(lambda: queues.is_known(made.queue))
        return made

    def run_admin(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`tmc admin` with these arguments, as its operator; in this process: a new one would spend its time on imports."""
        environment = {"TMC_ADDRESS": self.address, "TMC_ADMIN_TOKEN": self.token}
        done = CliRunner().invoke(app, arguments, env=environment, prog_name="tmc admin")
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    def rejected(self, key: str) -> str:
        """Publish a message of `order.paid` that its consumer rejects: no stock. Returns its id when that is an alert."""
        with (
            tmc.connect(self.address, app="coupons", key=self.keys["coupons"]) as coupons,
            tmc.connect(self.address, app="orders", key=self.keys["orders"]) as orders,
        ):
            consumer = tmc.Consumer(coupons)

            @consumer.listener("order.paid")
            def refuse(body: bytes) -> None:
                raise tmc.Reject(f"no stock for {key}")

            with consumer:
                message_id = orders.publish("order.paid", b"", key=key)
                eventually(lambda: message_id in self.run_admin("list-alerts").stdout)
        return message_id

    def detail(self, topic: str, key: str) -> Any:
        """A message with its consumptions, as an operator sees it."""
        with grpc.insecure_channel(self.address) as channel:
            request = admin_pb2.GetMessageDetailRequest(topic=topic, key=key)
            return self.admin(channel).GetMessageDetail(request, metadata=self.operator)

    def _register(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            admin = self.admin(channel)
            for app in ("orders", "coupons", "stranger"):
                self.keys[app] = admin.RegisterApp(admin_pb2.RegisterAppRequest(id=app), metadata=self.operator).key
            admin.RegisterTopic(
                admin_pb2.RegisterTopicRequest(name="order.paid", owner="orders", open_limit=100_000),
                metadata=self.operator,
            )
            made = admin.RegisterSubscription(
                admin_pb2.RegisterSubscriptionRequest(
                    topic="order.paid", app="coupons", retry=types_pb2.RetryPolicy(interval_ms=1000, max_retry=3)
                ),
                metadata=self.operator,
            )
        eventually(lambda: time.time() * 1000 >= made.effective_ms)

    def stop(self) -> None:
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> RunningCenter:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class CenterInThisProcess:
    """The library form: address is what `tmc.connect` takes, server what runs behind it."""

    def __init__(self, url: str) -> None:
        _prepare(url)
        self.address = f"embedded+{url}"
        self._held = Hold(url)
        self._running: Any = self._held.open()
        self.server: Server = self._running.server
        self.listens_on: str = self._running.address

    def fail(self) -> None:
        """The server ends while its users are there, as one that cannot continue does."""
        self._running.stop()

    def stop(self) -> None:
        self._held.close()

    def __enter__(self) -> CenterInThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
