"""`tmc doctor` and a real RabbitMQ: what its administrators set, by the management API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tmc_server.app.broker_fitness import examine_broker
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services
QUEUE = "tmc.sub.coupons.default.order.paid"


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    made = RabbitMQ(plugins=("rabbitmq_management",))
    connection = made.connect()
    for name in (QUEUE, "somebody.else"):
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()
    yield made
    made.stop()


def _bad(broker: RabbitMQ) -> list[str]:
    return [str(found) for found in examine_broker(broker.url, broker.management) if not found.ok]


def test_a_broker_with_settings_of_its_own_is_well(broker: RabbitMQ) -> None:
    found = list(map(str, examine_broker(broker.url, broker.management)))
    assert found == [
        f"ok   RabbitMQ, login = 127.0.0.1:{broker.port}",
        "ok   RabbitMQ, connection = of this machine, without TLS",
        "ok   RabbitMQ, policies = harmless for 1 queues",
    ]


def test_a_wrong_password_is_said_without_the_password(broker: RabbitMQ) -> None:
    login, *_ = map(str, examine_broker(broker.url.replace("guest:guest", "guest:wrong-one"), ""))
    assert login.startswith(
        "BAD  RabbitMQ, login = , must work ([rabbitmq] url). Check user, password and virtual host: "
    )
    assert "wrong-one" not in login
    away, *_ = map(str, examine_broker("amqp://guest:guest@127.0.0.1:1/%2F", ""))
    assert (away.startswith("BAD  RabbitMQ, login"), "Check user" in away) == (True, False)


@pytest.mark.parametrize(
    ("definition", "named"),
    [
        ('{"message-ttl": 60000}', "message-ttl = 60000"),
        ('{"max-length": 10}', "max-length = 10"),
        ('{"max-length-bytes": 10}', "max-length-bytes = 10"),
        ('{"expires": 60000}', "expires = 60000"),
        ('{"delivery-limit": 1}', "delivery-limit = 1"),
        ('{"max-length": 10, "overflow": "reject-publish"}', ""),
        ('{"delivery-limit": 5}', ""),
    ],
)
def test_a_policy_that_makes_copies_vanish_is_named(broker: RabbitMQ, definition: str, named: str) -> None:
    broker.control("set_policy", "cleaner", ".*", definition)
    expected = f"BAD  RabbitMQ, policy 'cleaner' = {named}, must leave out {QUEUE}"
    eventually(lambda: [line.partition(":")[0] for line in _bad(broker)] == ([expected] if named else []))
    broker.control("clear_policy", "cleaner")
    eventually(lambda: _bad(broker) == [])


def test_a_limit_of_the_virtual_host_is_named(broker: RabbitMQ) -> None:
    broker.control("set_vhost_limits", "-p", "/", '{"max-queues": 2}')
    (line,) = _bad(broker)
    assert "limit max-queues = 2" in line
    broker.control("clear_vhost_limits", "-p", "/")


def test_a_management_api_that_does_not_answer_is_said(broker: RabbitMQ) -> None:
    (wrong,) = [
        each for each in examine_broker(broker.url, broker.management.replace("guest:", "nobody:")) if not each.ok
    ]
    assert "401" in str(wrong)
    assert "nobody" not in str(wrong)
    assert [each.ok for each in examine_broker(broker.url, "")] == [True, True, True]
