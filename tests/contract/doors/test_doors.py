"""The same steps through calls, a stream, HTTP, a queue of RabbitMQ and a topic of Kafka: the same states, the same reasons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.center import RunningCenter
from tests.support.doors import (
    Answer,
    Door,
    GrpcDoor,
    HttpDoor,
    KafkaDoor,
    RabbitDoor,
    Step,
    StreamDoor,
    has_queue,
    open_queue,
)
from tests.support.kafka import Kafka
from tmc_common.submission import queue_of
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services

PREPARE, SUBMIT = Step(op="prepare"), Step(op="submit")
ROLLBACK, PUBLISH = Step(op="rollback"), Step(op="publish")
_FIELDS = {"id": "attempt_id", "tmcdelay": "delay_ms", "tmcledger": "ledger_id", "tmctime": "transaction_time_ms"}
"""Names in the protos of attributes of queues."""


@pytest.fixture(scope="module")
def center(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitMQ, kafka: Kafka
) -> Iterator[tuple[RunningCenter, dict[str, str]]]:
    path: Path = tmp_path_factory.mktemp("doors")
    with RunningCenter(
        f"sqlite:///{path}/c.db",
        http={"listen": "127.0.0.1:0"},
        rabbitmq={"url": rabbitmq.url},
        kafka={"bootstrap": kafka.bootstrap},
        submission={"rabbitmq": True, "kafka": True},
    ) as running:
        running.subscribe("order.lines", "coupons", topic_settings={"ordered": True})
        running.subscribe("order.quick", "coupons", topic_settings={"transaction_time_ms": 300})
        running.subscribe("of.strangers", "coupons", topic_settings={"owner": "stranger"})
        secret = open_queue(running, "orders")
        with rabbitmq.connect() as connection:
            eventually(lambda: has_queue(connection, queue_of("orders", "default")))
        yield running, {"orders": secret}


@pytest.fixture(scope="module", params=["grpc", "stream", "http", "rabbitmq", "kafka"])
def door(request: pytest.FixtureRequest, center: tuple[RunningCenter, dict[str, str]]) -> Iterator[Door]:
    running, secrets = center
    made: Door
    if request.param == "grpc":
        made = GrpcDoor(running)
    elif request.param == "stream":
        made = StreamDoor(running)
    elif request.param == "http":
        made = HttpDoor(running)
    elif request.param == "rabbitmq":
        broker: RabbitMQ = request.getfixturevalue("rabbitmq")
        made = RabbitDoor(broker.connect(), "orders", secrets["orders"])
    else:
        made = KafkaDoor(request.getfixturevalue("kafka").bootstrap, "orders", secrets["orders"])
    yield made
    made.close()


def _of(steps: list[Step]) -> list[Step]:
    """Give them a key of their own, and attempt ids: of steps without one the same, otherwise by its first byte."""
    key, attempts = os.urandom(8).hex(), {}
    return [
        replace(
            step,
            key=f"{step.key[:-1]}{key}" if step.key.endswith("k") else step.key,
            attempt=step.attempt
            if len(step.attempt) not in (0, 1)
            else attempts.setdefault(step.attempt, os.urandom(16)),
        )
        for step in steps
    ]


def _other(step: Step) -> Step:
    return replace(step, attempt=b"2")


RIGHT: dict[str, tuple[list[Step], list[str]]] = {
    "prepare": ([PREPARE], ["PREPARED"]),
    "submit": ([PREPARE, SUBMIT], ["PREPARED", "COMMITTED"]),
    "roll back": ([PREPARE, ROLLBACK], ["PREPARED", "ROLLED_BACK"]),
    "publish": ([PUBLISH], ["COMMITTED"]),
    "empty body": ([replace(PREPARE, body=b"")], ["PREPARED"]),
    "binary body": ([replace(PUBLISH, body=bytes(range(256)))], ["COMMITTED"]),
    "largest body": ([replace(PUBLISH, body=b"x" * 262_144)], ["COMMITTED"]),
    "content type": ([replace(PUBLISH, content_type="application/json")], ["COMMITTED"]),
    "headers": ([replace(PUBLISH, headers={"shop": "1", "grüße".encode().hex(): "Grüße 你好"})], ["COMMITTED"]),
    "own forward key": ([replace(PUBLISH, headers={"tmc-forward-key": "there"})], ["COMMITTED"]),
    "delay": ([replace(PUBLISH, delay_ms=60_000)], ["COMMITTED"]),
    "ledger": ([replace(PREPARE, ledger=b"l" * 16), SUBMIT], ["PREPARED", "COMMITTED"]),
    "transaction time": ([replace(PREPARE, time_ms=60_000)], ["PREPARED"]),
    "key with spaces": ([replace(PUBLISH, key="a key with spaces, ümläuts and 漢字 k")], ["COMMITTED"]),
    "order key": ([replace(PUBLISH, topic="order.lines", order_key="alice")], ["COMMITTED"]),
    "ordered transaction": (
        [replace(PREPARE, topic="order.lines", order_key="bob"), replace(SUBMIT, topic="order.lines")],
        ["PREPARED", "COMMITTED"],
    ),
    "prepared again": ([PREPARE, PREPARE], ["PREPARED"] * 2),
    "submitted again": ([PREPARE, SUBMIT, SUBMIT], ["PREPARED", "COMMITTED", "COMMITTED"]),
    "rolled back again": ([PREPARE, ROLLBACK, ROLLBACK], ["PREPARED", "ROLLED_BACK", "ROLLED_BACK"]),
    "published again": ([PUBLISH, PUBLISH], ["COMMITTED"] * 2),
    "prepared late": ([PREPARE, SUBMIT, PREPARE], ["PREPARED", "COMMITTED", "COMMITTED"]),
    "all at once, twice": ([PREPARE, SUBMIT, PREPARE, SUBMIT], ["PREPARED", "COMMITTED", "COMMITTED", "COMMITTED"]),
    "rolled back first": ([ROLLBACK, PREPARE], ["ROLLED_BACK", "ALREADY_ROLLED_BACK"]),
    "rolled back first, submitted": (
        [replace(step, topic="order.quick") for step in (ROLLBACK, PREPARE, SUBMIT)],
        ["ROLLED_BACK", "ALREADY_ROLLED_BACK", "MESSAGE_UNKNOWN"],
    ),
    "another attempt after a rollback": (
        [PREPARE, ROLLBACK, _other(PREPARE), _other(SUBMIT)],
        ["PREPARED", "ROLLED_BACK", "PREPARED", "COMMITTED"],
    ),
    "published after a rollback": (
        [PREPARE, ROLLBACK, _other(PUBLISH)],
        ["PREPARED", "ROLLED_BACK", "COMMITTED"],
    ),
}
REFUSED: dict[str, tuple[list[Step], str, str]] = {
    "submitted, then rolled back": ([PREPARE, SUBMIT, ROLLBACK], "ALREADY_COMMITTED", ""),
    "rolled back, then submitted": ([PREPARE, ROLLBACK, SUBMIT], "ALREADY_ROLLED_BACK", ""),
    "rolled back, then prepared": ([PREPARE, ROLLBACK, PREPARE], "ALREADY_ROLLED_BACK", ""),
    "published, then rolled back": ([PUBLISH, ROLLBACK], "ALREADY_COMMITTED", ""),
    "key in progress": ([PREPARE, _other(PREPARE)], "KEY_IN_PROGRESS", ""),
    "publish of a key in progress": ([PREPARE, _other(PUBLISH)], "KEY_IN_PROGRESS", ""),
    "publish of what is prepared": ([PREPARE, PUBLISH], "KEY_IN_PROGRESS", ""),
    "key committed": ([PREPARE, SUBMIT, _other(PREPARE)], "KEY_COMMITTED", ""),
    "publish of a key committed": ([PUBLISH, _other(PUBLISH)], "KEY_COMMITTED", ""),
    "other body": ([PREPARE, replace(PREPARE, body=b"other")], "CONTENT_DIFFERS", ""),
    "other headers": ([PUBLISH, replace(PUBLISH, headers={"a": "b"})], "CONTENT_DIFFERS", ""),
    "other delay": ([PUBLISH, replace(PUBLISH, delay_ms=1)], "CONTENT_DIFFERS", ""),
    "unknown topic": ([replace(PREPARE, topic="nowhere")], "TOPIC_UNKNOWN", ""),
    "publish to an unknown topic": ([replace(PUBLISH, topic="nowhere")], "TOPIC_UNKNOWN", ""),
    "submit of an unknown topic": ([replace(SUBMIT, topic="nowhere")], "TOPIC_UNKNOWN", ""),
    "another app's topic": ([replace(PREPARE, topic="of.strangers")], "TOPIC_UNKNOWN", ""),
    "decides on another app's topic": ([replace(ROLLBACK, topic="of.strangers")], "TOPIC_UNKNOWN", ""),
    "no topic": ([replace(PREPARE, topic="")], "FIELD_INVALID", "topic"),
    "topic with a space": ([replace(PREPARE, topic="order paid")], "FIELD_INVALID", "topic"),
    "no key": ([replace(PREPARE, key="")], "FIELD_INVALID", "key"),
    "long key": ([replace(PREPARE, key="x" * 129)], "FIELD_INVALID", "key"),
    "key with a line": ([replace(PREPARE, key="a\nb")], "FIELD_INVALID", "key"),
    "key with outer spaces": ([replace(SUBMIT, key=" a ")], "FIELD_INVALID", "key"),
    "key of replays": ([replace(PREPARE, key="replay.1")], "FIELD_INVALID", "key"),
    "short attempt id": ([replace(PREPARE, attempt=b"short")], "FIELD_INVALID", "attempt_id"),
    "long attempt id": ([replace(SUBMIT, attempt=b"x" * 17)], "FIELD_INVALID", "attempt_id"),
    "large body": ([replace(PREPARE, body=b"x" * 262_145)], "FIELD_INVALID", "body"),
    "long content type": ([replace(PREPARE, content_type="x" * 101)], "FIELD_INVALID", "content_type"),
    "many headers": ([replace(PREPARE, headers={f"h{i}": "" for i in range(65)})], "FIELD_INVALID", "headers"),
    "large headers": ([replace(PREPARE, headers={"a": "x" * 8_192})], "FIELD_INVALID", "headers"),
    "the center's header": ([replace(PREPARE, headers={"tmc-message-id": "1"})], "FIELD_INVALID", "headers"),
    "header with a line": ([replace(PREPARE, headers={"a": "b\nc"})], "FIELD_INVALID", "headers"),
    "negative delay": ([replace(PREPARE, delay_ms=-1)], "FIELD_INVALID", "delay_ms"),
    "delay of two years": ([replace(PUBLISH, delay_ms=2 * 365 * 86_400_000)], "FIELD_INVALID", "delay_ms"),
    "short ledger id": ([replace(PREPARE, ledger=b"l")], "FIELD_INVALID", "ledger_id"),
    "transaction of two days": ([replace(PREPARE, time_ms=2 * 86_400_000)], "FIELD_INVALID", "transaction_time_ms"),
    "unknown check target": ([replace(PREPARE, target="nobody")], "FIELD_INVALID", "check_target"),
    "no order key": ([replace(PUBLISH, topic="order.lines")], "FIELD_INVALID", "order_key"),
    "order key without order": ([replace(PUBLISH, order_key="alice")], "FIELD_INVALID", "order_key"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_has_the_same_states(door: Door, name: str) -> None:
    steps, expected = RIGHT[name]
    answers = door.send(*_of(steps))
    assert [answer.outcome for answer in answers] == expected, answers
    stored = {answer.message_id for answer in answers if answer.outcome in ("PREPARED", "COMMITTED")}
    assert len(stored) == len({step.attempt for step in steps if step.op in ("prepare", "publish")}) - (
        "ALREADY_ROLLED_BACK" in expected
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_has_the_same_reason(door: Door, name: str) -> None:
    steps, reason, field = REFUSED[name]
    answer: Answer = door.send(*_of(steps))[-1]
    assert (answer.outcome, _FIELDS.get(answer.field, answer.field)) == (reason, field), answer
    assert answer.text.endswith(".")


def test_each_door_had_these_cases() -> None:
    assert len(RIGHT) + len(REFUSED) >= 60
