"""Proxies of the environment are for browsers: calls to the center, and the key with them, do not go there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.connect_proxy import ConnectProxy
from tmc_client import aio
from tmc_storm.services.ports import free_port

VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy", "all_proxy")
SHORT = timedelta(seconds=2)


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    made = RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('proxies')}/tmc.db")
    yield made
    made.stop()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    """A proxy that nobody asked us to use."""
    made = ConnectProxy()
    for name in VARIABLES:
        monkeypatch.setenv(name, made.url)
    yield made
    made.close()


def _publish(center: RunningCenter, **settings: str) -> None:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"], timeout=SHORT, **settings) as connection:
        connection.publish("order.paid", b"x", key=f"by proxy {settings}")


def _publish_async(center: RunningCenter, **settings: str) -> None:
    async def publish() -> None:
        found = aio.connect(center.address, app="orders", key=center.keys["orders"], timeout=SHORT, **settings)
        async with found as connection:
            await connection.publish("order.paid", b"x", key=f"by proxy, asyncio {settings}")

    asyncio.run(publish())


def _list(center: RunningCenter, **settings: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if settings:
            patch.setenv("TMC_PROXY", settings["proxy"])
        done = center.run_admin("list-topics")
    assert done.returncode == 0, done.stderr


FACES = pytest.mark.parametrize("call", [_publish, _publish_async, _list])


@FACES
def test_proxies_of_the_environment_are_not_used(
    center: RunningCenter, proxy: ConnectProxy, call: Callable[..., None]
) -> None:
    call(center)
    assert proxy.asked == []


@FACES
def test_one_that_was_asked_for_is(center: RunningCenter, proxy: ConnectProxy, call: Callable[..., None]) -> None:
    call(center, proxy=proxy.url)
    assert set(proxy.asked) == {center.address}


def test_a_failure_names_the_proxy(center: RunningCenter, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("TMC_PROXY", f"http://user:secret@{address}")
    with pytest.raises(tmc.Unavailable) as caught:
        _publish(center)
    assert "calls go through the proxy http://" in str(caught.value)
    assert f"http://{address}" in str(caught.value)  # beside those that this process used earlier
    assert "secret" not in str(caught.value)


def test_what_is_no_proxy_is_refused_at_once(center: RunningCenter) -> None:
    with pytest.raises(tmc.InvalidRequest, match="is no proxy: give http://HOST:PORT"):
        tmc.connect(center.address, app="orders", proxy="proxy.example:3128")
