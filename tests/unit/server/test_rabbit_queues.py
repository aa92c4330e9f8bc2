"""Queues that do not answer: what they cost those that do."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pika.exceptions import AMQPConnectionError

from tests.support.outlet import ProgressInMemory, RecordedAnswers, SomeCatalog
from tmc_server.delivery import rabbitmq_queues
from tmc_server.delivery.rabbitmq import RabbitOutlet
from tmc_server.delivery.rabbitmq_queues import RabbitQueues
from tmc_server.domain.queue_names import queue_of
from tmc_storm.eventually import eventually


class _Broker:
    """Takes any number of connections. A declaration of a silent queue ends after three seconds, with its connection."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.silent: set[str] = set()
        self.leaderless: set[str] = set()
        self.declared: list[str] = []
        self.connections = 0

    def connect(self, _parameters: object) -> Any:
        self.connections += 1
        connection = SimpleNamespace(is_open=True, process_data_events=lambda _limit: None, close=lambda: None)
        channel = SimpleNamespace(is_open=True, queue_declare=self.declare, basic_get=self.get)
        connection.channel = lambda: channel
        return connection

    def declare(self, name: str, **_: Any) -> Any:
        if name in self.silent:
            self.now += 3
            raise AMQPConnectionError
        self.declared.append(name)
        return SimpleNamespace(method=SimpleNamespace(consumer_count=0, message_count=0))

    def get(self, name: str) -> Any:
        if name in self.leaderless:
            self.now += 3
            raise AMQPConnectionError
        return None, None, None


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> _Broker:
    made = _Broker()

    @contextmanager
    def nobody_is_hung_up(_connection: object, _seconds: float) -> Iterator[None]:
        yield

    monkeypatch.setattr(rabbitmq_queues, "connect", made.connect)
    monkeypatch.setattr(rabbitmq_queues, "answered_within", nobody_is_hung_up)
    monkeypatch.setattr(rabbitmq_queues.time, "monotonic", lambda: made.now)
    return made


def test_a_broker_that_takes_the_connection_and_says_nothing_is_away() -> None:
    """The library's error for that is of a family of its own."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        queues = RabbitQueues(
            f"amqp://127.0.0.1:{silent.getsockname()[1]}", SomeCatalog("coupons"), "quorum", lambda *_: None
        )
        (node,) = queues._nodes.each
        node.socket_timeout = node.stack_timeout = 0.2
        assert queues.look("tmc.sub.coupons.default.t1") is None


@pytest.fixture
def resetting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a broker whose connections are reset in the instant they are accepted."""

    def gone(_socket: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(socket.socket, "getpeername", gone, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"amqp://127.0.0.1:{server.getsockname()[1]}"


def test_a_broker_that_resets_what_it_accepts_is_away_for_the_queues(resetting: str) -> None:
    assert RabbitQueues(resetting, SomeCatalog("coupons"), "quorum", lambda *_: None).look("some.queue") is None


def test_a_broker_that_resets_what_it_accepts_is_away_for_the_publisher(
    resetting: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = SomeCatalog("coupons")
    queues = RabbitQueues(resetting, catalog, "quorum", lambda *_: None)
    outlet = RabbitOutlet(
        url=resetting,
        catalog=catalog,
        queues=queues,
        answers=RecordedAnswers(),
        wake=lambda: None,
        raise_alert=lambda *_: None,
        progress=ProgressInMemory().of_server(1),
    )
    outlet.start()
    eventually(lambda: "the broker is away" in caplog.text)
    outlet.stop()
    assert not [record for record in caplog.records if record.name.startswith("tmc") and record.exc_info]


def _run(queues: RabbitQueues, times: int) -> None:
    """As the duty does: an error ends a run, the next one comes a second later."""
    for _ in range(times):
        try:
            queues.run_once()
        except AMQPConnectionError:
            continue


def test_thirty_silent_queues_do_not_keep_the_others_from_being_declared(broker: _Broker) -> None:
    """Each costs a few seconds and the connection, and is asked again a minute later: the others come first then."""
    catalog = SomeCatalog("coupons", count=60)
    queues = RabbitQueues("amqp://localhost", catalog, "quorum", lambda *_: None)
    names = [queue_of(subscription, catalog.current) for subscription in catalog.current.subscriptions.values()]
    broker.silent, well = set(names[:30]), names[30:]
    _run(queues, 31)
    assert all(queues.is_known(name) for name in well)
    for _ in range(30):
        queues.heal(well[-1])
        broker.declared.clear()
        _run(queues, 1)
        assert well[-1] in broker.declared
    assert not any(queues.is_known(name) for name in broker.silent)
    broker.silent.clear()
    broker.now += 60
    _run(queues, 1)
    assert all(queues.is_known(name) for name in names)


def test_no_messages_and_no_consumers_of_a_queue_without_a_leader_means_unknown(broker: _Broker) -> None:
    catalog = SomeCatalog("coupons", 2)
    queues = RabbitQueues("amqp://localhost", catalog, "quorum", lambda *_: None)
    first, second = (queue_of(each, catalog.current) for each in catalog.current.subscriptions.values())
    broker.leaderless = {first}
    assert (queues.look(first), queues.look(second)) == (None, (0, 0))
    broker.leaderless = set()
    broker.now += 2
    assert queues.look(first) is None  # it is left alone for a while
    broker.now += 2
    assert queues.look(first) == (0, 0)
