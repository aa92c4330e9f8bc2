"""The proxies of deploy/proxies: the SDK works through them, and floods of HTTP/2 frames end at them."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tmc_client as tmc
from benchmarks import strangers
from tests.support.center import RunningCenter
from tests.support.eventually import eventually
from tests.support.fronts import Front


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("behind")
    with RunningCenter(f"sqlite:///{folder}/c.db") as made:
        yield made


@pytest.fixture(scope="module", params=["nginx", "envoy"])
def front(request: pytest.FixtureRequest, running: RunningCenter) -> Iterator[Front]:
    made = Front(request.param, running.address)
    yield made
    made.stop()


def _connect(front: Front, running: RunningCenter, app: str) -> tmc.Center:
    tls = tmc.Tls(authority=str(front.certificate))
    return tmc.connect(front.address, app=app, key=running.keys[app], tls=tls)


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


def _flood(front: Front, kind: str, connections: int) -> None:
    """From another address, until so many connections were opened: eight at a time, as they are closed."""
    tls = ssl.create_default_context(cafile=str(front.certificate))
    tls.check_hostname = False
    tls.set_alpn_protocols(["h2"])

    async def send() -> None:
        work = (strangers.keep_sending("127.0.0.1", front.port, kind, tls, "127.0.0.2") for _ in range(8))
        tasks = [asyncio.ensure_future(each) for each in work]
        while strangers.SENT[f"{kind}_connections"] < connections:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:  # readers whose connection was aborted
            await asyncio.sleep(0)

    strangers.SENT.clear()
    asyncio.run(send())


@pytest.mark.parametrize("kind", list(strangers.FRAMES))
def test_a_flood_of_frames_is_disconnected_and_neighbors_are_answered(
    front: Front, running: RunningCenter, kind: str
) -> None:
    flood = threading.Thread(target=_flood, args=(front, kind, 24))
    with _connect(front, running, "orders") as orders:
        flood.start()
        number = 0
        while flood.is_alive():
            orders.publish("order.paid", {}, key=f"{front.port}-{kind}-{number}")
            number += 1
        flood.join()
    assert number > 0
