"""The proxies of deploy/proxies: the SDK works through them, and floods of HTTP/2 frames end at them."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tmc_client as tmc
from benchmarks import strangers
from tests.support.center import RunningCenter
from tests.support.fronts import Front
from tmc_common.protocol import message_pb2, message_pb2_grpc
from tmc_storm.eventually import eventually


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("behind")
    with RunningCenter(f"sqlite:///{folder}/c.db") as made:
        yield made


@pytest.fixture(scope="module", params=["nginx", "envoy"])
def front(request: pytest.FixtureRequest, running: RunningCenter) -> Iterator[Front]:
    made = Front(request.param, running.address)
    yield made
    made.close()


def _connect(front: Front, running: RunningCenter, app: str) -> tmc.Center:
    tls = tmc.Tls(authority=str(front.certificate))
    return tmc.connect(front.address, app=app, key=running.keys[app], tls=tls, timeout=timedelta(seconds=60))


def test_messages_pass_in_both_directions(front: Front, running: RunningCenter) -> None:
    taken: list[str] = []
    with _connect(front, running, "orders") as orders, _connect(front, running, "coupons") as coupons:
        consumer = tmc.Consumer(coupons)

        @consumer.listener("order.paid")
        def on_paid(_body: dict[str, str], message: tmc.Message) -> None:
            taken.append(message.key)

        keys = [f"{front.port}-{number}" for number in range(50)]
        with consumer, ThreadPoolExecutor(25) as pool:
            list(pool.map(lambda key: orders.publish("order.paid", {"pad": "x" * 200_000}, key=key), keys))
            eventually(lambda: set(taken) >= set(keys))


def test_errors_keep_their_reason(front: Front, running: RunningCenter) -> None:
    with _connect(front, running, "orders") as orders, pytest.raises(tmc.NotFound) as caught:
        orders.publish("order.unknown", {}, key="k")
    assert caught.value.reason == "TOPIC_UNKNOWN"


def test_a_batch_of_megabytes_passes(front: Front, running: RunningCenter) -> None:
    request = message_pb2.PublishManyRequest(
        items=[
            message_pb2.PublishRequest(
                topic="order.paid", key=f"{front.port}-large-{number}", body=bytes(200_000), attempt_id=os.urandom(16)
            )
            for number in range(60)
        ]
    )
    assert request.ByteSize() > 10 << 20
    credentials = grpc.ssl_channel_credentials(front.certificate.read_bytes())
    with grpc.secure_channel(front.address, credentials) as channel:
        publish = message_pb2_grpc.MessageServiceStub(channel).PublishMany
        answer = publish(request, timeout=60, metadata=running.as_app("orders"))
    assert [result.HasField("error") for result in answer.results] == [False] * 60


class _Flood:
    """Frames of a kind from another address, eight connections at a time, which are opened again when they are closed."""

    def __init__(self, front: Front, kind: str) -> None:
        self._front, self._kind = front, kind
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True)

    async def _send(self) -> None:
        tls = ssl.create_default_context(cafile=str(self._front.certificate))
        tls.check_hostname = False
        tls.set_alpn_protocols(["h2"])
        work = (
            strangers.keep_sending(
                "127.0.0.1",
                self._front.port,
                self._kind,
                tls=tls,
                source="127.0.0.2",
                is_over=self._stopping.is_set,
            )
            for _ in range(8)
        )
        await asyncio.gather(*work)
        while len(asyncio.all_tasks()) > 1:  # readers whose connection was aborted
            await asyncio.sleep(0)

    @property
    def connections(self) -> int:
        return strangers.SENT[f"{self._kind}_connections"]

    def __enter__(self) -> _Flood:
        strangers.SENT.clear()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)


@pytest.mark.parametrize("kind", list(strangers.FRAMES))
def test_a_flood_of_frames_is_disconnected_and_neighbors_are_answered(
    front: Front, running: RunningCenter, kind: str
) -> None:
    numbers = itertools.count()
    with _connect(front, running, "orders") as orders, _Flood(front, kind) as flood:

        def answered_until_all_were_closed_twice() -> bool:
            orders.publish("order.paid", {}, key=f"{front.port}-{kind}-{next(numbers)}")
            return flood.connections >= 24

        eventually(answered_until_all_were_closed_twice, seconds=60)


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_an_address_over_its_rate_is_refused_whatever_it_says_of_others(running: RunningCenter, kind: Any) -> None:
    """As UNAVAILABLE, which clients repeat."""
    strict = Front(kind, running.address, strict=True)
    credentials = grpc.ssl_channel_credentials(strict.certificate.read_bytes())
    with closing(strict), grpc.secure_channel(strict.address, credentials) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        codes: list[grpc.StatusCode] = []
        for number in range(12):
            try:
                check(health_pb2.HealthCheckRequest(), timeout=30, metadata=[("x-forwarded-for", f"10.0.0.{number}")])
            except grpc.RpcError as exc:
                codes.append(exc.code())
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
