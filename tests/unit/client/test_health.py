"""/healthz of a consumer, and what a consumer says of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx
import pytest

import tmc_client as tmc
from tests.support.handlers import AnswersTaken
from tmc_client.consuming.health import HealthEndpoint
from tmc_common.protocol import consumption_pb2


@pytest.fixture
def wrong() -> list[str]:
    return []


@pytest.fixture
def endpoint(wrong: list[str]) -> Iterator[HealthEndpoint]:
    made = HealthEndpoint("127.0.0.1", 0, lambda: wrong)
    yield made
    made.close()


def _get(endpoint: HealthEndpoint, path: str = "/healthz") -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{endpoint.port}{path}", timeout=30)
    return answer.status_code, answer.text


def test_a_consumer_is_healthy_while_nothing_is_wrong(endpoint: HealthEndpoint, wrong: list[str]) -> None:
    assert _get(endpoint) == (200, "ok\n")
    wrong += ["queue a cannot be read", "the listener of t is paused: its inbox is down"]
    assert _get(endpoint) == (503, "queue a cannot be read\nthe listener of t is paused: its inbox is down\n")
    wrong.clear()
    assert _get(endpoint, "/healthz?verbose") == (200, "ok\n")
    assert _get(endpoint, "/") == (404, "")


def test_a_consumer_that_has_not_started_says_why_it_receives_nothing() -> None:
    consumer = tmc.Consumer(AnswersTaken())  # type: ignore[arg-type]
    assert consumer.health() == ["the center has not said yet how copies are delivered"]


def test_a_consumer_without_the_library_of_the_broker_ends_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask again for ever: no answer of the center changes what is installed."""
    plan = consumption_pb2.DescribeSubscriptionsResponse(broker=consumption_pb2.BrokerAddress(host="127.0.0.1", port=1))
    center = tmc.connect("127.0.0.1:1", app="coupons")
    monkeypatch.setattr(center.connection, "unary", lambda *_: lambda *_, **__: plan)
    monkeypatch.setitem(sys.modules, "pika", None)
    monkeypatch.delitem(sys.modules, "tmc_client.consuming.transports.rabbitmq", raising=False)
    monkeypatch.delattr("tmc_client.consuming.transports.rabbitmq", raising=False)
    consumer = tmc.Consumer(center)
    consumer.listener("order.paid")(lambda body: None)
    with pytest.raises(RuntimeError, match=r"RabbitMQ needs pika, .* 'tmc-client\[rabbitmq\]'"):
        consumer.run()
    center.close()
