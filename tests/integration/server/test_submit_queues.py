"""Submit queues on a real RabbitMQ: who answers, what is kept, what administrators and strangers do to them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pika
import pytest

from tests.support.center import RunningCenter
from tests.support.doors import RabbitDoor, Step, attributes_of, has_queue, open_queue
from tests.support.metrics import value
from tmc_common.signatures import sign
from tmc_common.submission import queue_of, signed
from tmc_server.metrics import METRICS
from tmc_storm.eventually import eventually
from tmc_storm.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.services


@pytest.fixture
def connection(rabbitmq: RabbitMQ) -> Iterator[pika.BlockingConnection]:
    made = rabbitmq.connect()
    with made.channel() as channel:
        for name in ("default", "dead", "prod"):
            channel.queue_delete(queue_of("orders", name))
    yield made
    if made.is_open:
        made.close()


@pytest.fixture
def center(tmp_path: Path, rabbitmq: RabbitMQ, connection: pika.BlockingConnection) -> Iterator[RunningCenter]:
    with RunningCenter(
        f"sqlite:///{tmp_path}/c.db", rabbitmq={"url": rabbitmq.url}, submission={"rabbitmq": True}
    ) as running:
        yield running


def _door(
    center: RunningCenter, connection: pika.BlockingConnection, tag: str = "", unsigned: bool = False
) -> RabbitDoor:
    secret = open_queue(center, "orders", tag, unsigned)
    queue = queue_of("orders", tag or "default")
    eventually(lambda: has_queue(connection, queue))
    return RabbitDoor(connection, "orders", secret, tag or "default")


def _state(center: RunningCenter, key: str) -> str:
    state = center.detail("order.paid", key).message.state
    return {1: "PREPARED", 2: "COMMITTED", 3: "ROLLED_BACK"}.get(state, str(state))


def _new(op: str, key: str, **fields: Any) -> Step:
    return Step(op=op, key=key, attempt=fields.pop("attempt", os.urandom(16)), **fields)


def test_without_an_answer_it_is_stored_all_the_same(
    center: RunningCenter, connection: pika.BlockingConnection
) -> None:
    door, attempt = _door(center, connection), os.urandom(16)
    door.publish(_new("prepare", "a", attempt=attempt))
    door.publish(_new("submit", "a", attempt=attempt))
    eventually(lambda: door.channel.queue_declare(door.queue, passive=True).method.message_count == 0)
    door.publish(_new("publish", "b", headers={"shop": "1"}, content_type="text/plain"))
    eventually(lambda: _found(center, "b"))
    assert _state(center, "a") == "COMMITTED"
    message = center.detail("order.paid", "b").message
    assert (message.headers, message.content_type, message.producer_tag) == ({"shop": "1"}, "text/plain", "default")


def _found(center: RunningCenter, key: str) -> bool:
    try:
        return bool(center.detail("order.paid", key).message.message_id)
    except grpc.RpcError:  # not there yet
        return False


def test_what_is_refused_without_an_answer_is_kept_and_alerted(
    center: RunningCenter, connection: pika.BlockingConnection
) -> None:
    door = _door(center, connection)
    step = _new("prepare", "", body=b"the body", headers={"shop": "1"}, content_type="text/plain")
    door.publish(step)
    (properties, body) = eventually(door.dead)[0]
    assert body == b"the body"
    assert properties.content_type == "text/plain"
    assert (properties.headers["tmc-reason"], properties.headers["shop"]) == ("FIELD_INVALID", "1")
    assert properties.headers["tmc-error"].startswith("key must be ")
    assert properties.headers["cloudEvents:tmcop"] == "prepare"
    eventually(lambda: "submission refused" in center.run_admin("list-alerts").stdout)


def test_who_cannot_sign_gets_no_answer(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    forged = RabbitDoor(connection, "orders", "00" * 32)
    forged.publish(_new("publish", "forged"), "amq.rabbitmq.reply-to", "1")
    (properties, _) = eventually(door.dead)[0]
    assert properties.headers["tmc-reason"] == "CREDENTIALS_INVALID"
    assert door.send(_new("publish", "real"))[0].outcome == "COMMITTED"
    connection.process_data_events(0.05)
    assert forged.answers == {}
    assert not _found(center, "forged")


def test_answers_go_only_to_the_apps_own_queues(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    """The center may write where the app may not: into the submit queue of another app, say."""
    door = _door(center, connection)
    with connection.channel() as channel:
        mine = "tmc.reply.orders.mine"
        channel.queue_declare(mine, exclusive=True)
        channel.queue_declare("tmc.submit.coupons.default", exclusive=True)
        door.publish(_new("publish", "a"), "tmc.submit.coupons.default", "1")
        (properties, _) = eventually(door.dead)[0]
        assert (properties.headers["tmc-reason"], properties.headers["tmc-error"][:8]) == (
            "FIELD_INVALID",
            "reply_to",
        )
        door.publish(_new("publish", "b"), mine, "2")
        got = eventually(lambda: channel.basic_get(mine, auto_ack=True)[1:] if _ready(channel, mine) else None)
        assert (got[0].correlation_id, json.loads(got[1])["state"]) == ("2", "MESSAGE_STATE_COMMITTED")
        assert not _ready(channel, "tmc.submit.coupons.default")


@pytest.mark.parametrize(
    "name",
    [
        "!!!.x",
        "abcd.x",
        # As the broker makes them, but of a node that it does not know.
        base64.b64encode(b"\x83Xv\x00\x0freply@999999999\0\0\2\xbf\0\0\0\0k\r\xb1n").decode()
        + ".p7T30R/rh61+VcFCU72cRQ==",
    ],
)
def test_a_name_that_ends_the_brokers_connection_ends_no_other_answers(
    center: RunningCenter, connection: pika.BlockingConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = _door(center, connection)
    door.publish(_new("publish", f"bad {name}"), f"amq.rabbitmq.reply-to.{name}", "1")
    neighbor = _door(center, connection, "prod")
    assert neighbor.send(_new("publish", f"good {name}"))[0].outcome == "COMMITTED"
    eventually(lambda: door.channel.queue_declare(door.queue, passive=True).method.message_count == 0)
    assert "submit queues are not read" not in caplog.text


def _ready(channel: Any, queue: str) -> bool:
    return bool(channel.queue_declare(queue, passive=True).method.message_count)


def test_a_refusal_that_reaches_nobody_is_kept(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    door.publish(_new("publish", "taken"), "tmc.reply.orders.nobody", "1")  # no queue: the answer is lost, nothing else
    door.publish(_new("publish", ""), "tmc.reply.orders.nobody", "2")
    ((properties, _),) = eventually(door.dead)
    assert properties.headers["tmc-reason"] == "FIELD_INVALID"
    assert _found(center, "taken")


def test_a_refusal_that_is_answered_is_not_kept(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    """RabbitMQ returns what it delivers to direct replies, as if nobody had got it."""
    door = _door(center, connection)
    assert [answer.outcome for answer in door.send(_new("publish", ""), _new("publish", "a"))] == [
        "FIELD_INVALID",
        "COMMITTED",
    ]
    assert door.send(_new("publish", "b"))[0].outcome == "COMMITTED"
    assert door.dead() == []


def test_a_queue_is_closed_before_it_changes_its_kind(
    center: RunningCenter, connection: pika.BlockingConnection
) -> None:
    _door(center, connection)
    refused = center.run_admin("open-submit-queue", "orders", "--unsigned")
    assert (refused.returncode, "close it first" in refused.stderr) == (1, True)
    assert center.run_admin("close-submit-queue", "orders", "--reason", "old clients").returncode == 0
    opened = center.run_admin("open-submit-queue", "orders", "--unsigned")
    assert (opened.returncode, "secret" in opened.stdout) == (0, False)
    assert center.run_admin("open-submit-queue", "orders").returncode == 1


def test_rights_at_the_exchange_limit_an_app_to_its_own_queue(
    center: RunningCenter, connection: pika.BlockingConnection, rabbitmq: RabbitMQ
) -> None:
    """As docs/submit-queues.md gives them."""
    secret = _door(center, connection).secret.hex()
    rabbitmq.control("add_user", "orders", "secret")
    mine = r"^tmc\.reply\.orders\."
    rabbitmq.control("set_permissions", "orders", mine, r"^(tmc\.submit|tmc\.reply\.orders\..*)$", mine)
    rabbitmq.control("set_topic_permissions", "orders", "tmc.submit", r"^orders\.default$", "^$")
    theirs = pika.BlockingConnection(pika.URLParameters(rabbitmq.url.replace("guest:guest", "orders:secret")))
    try:
        door = RabbitDoor(theirs, "orders", secret, exchange="tmc.submit")
        assert door.send(_new("publish", "through-the-exchange"))[0].outcome == "COMMITTED"
        other = RabbitDoor(theirs, "coupons", secret, exchange="tmc.submit")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"):
            other.publish(_new("publish", "elsewhere"))
        past = RabbitDoor(theirs, "coupons", secret)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"):
            past.publish(_new("publish", "elsewhere"))
    finally:
        theirs.close()
        rabbitmq.control("delete_user", "orders")


def test_an_early_submit_finds_its_prepare(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door, attempt = _door(center, connection), os.urandom(16)
    answers = door.send(
        _new("submit", "a", attempt=attempt), _new("publish", "b"), _new("prepare", "a", attempt=attempt)
    )
    assert [answer.outcome for answer in answers] == ["COMMITTED", "COMMITTED", "PREPARED"]


def test_environments_have_queues_of_their_own(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection, tag="prod")
    assert door.send(_new("publish", "a"))[0].outcome == "COMMITTED"
    assert center.detail("order.paid", "a").message.producer_tag == "prod"


def test_an_unsigned_queue_takes_the_json_of_trust_message(
    center: RunningCenter, connection: pika.BlockingConnection
) -> None:
    door = _door(center, connection, unsigned=True)
    for status in (1, 2):
        given = {
            "forwardTopic": "order.paid",
            "messageKey": "t",
            "messageStatus": status,
            "message": "text",
            "bizID": 0,
        }
        given.pop("bizID")
        door.publish_raw({}, Step(op="", body=json.dumps(given).encode()))
    eventually(lambda: _found(center, "t") and _state(center, "t") == "COMMITTED")
    message = center.detail("order.paid", "t").message
    assert (message.content_type, message.body) == ("text/plain", b"text")


def test_secrets_are_changed_without_a_gap(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    old = _door(center, connection)
    new = RabbitDoor(connection, "orders", open_queue(center, "orders"))
    assert old.send(_new("publish", "a"))[0].outcome == new.send(_new("publish", "b"))[0].outcome == "COMMITTED"
    refused = center.run_admin("open-submit-queue", "orders")
    assert refused.returncode == 1
    assert "drop the old one first" in refused.stderr
    assert center.run_admin("drop-old-submit-secret", "orders").returncode == 0
    old.publish(_new("publish", "c"))
    assert eventually(old.dead)[0][0].headers["tmc-reason"] == "CREDENTIALS_INVALID"
    assert new.send(_new("publish", "d"))[0].outcome == "COMMITTED"
    shown = center.run_admin("list-apps").stdout
    assert "tmc.submit.orders.default" in shown


def test_a_closed_queue_keeps_what_is_in_it(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    assert center.run_admin("close-submit-queue", "orders", "--reason", "moved").returncode == 0
    eventually(lambda: door.channel.queue_declare(door.queue, passive=True).method.consumer_count == 0)
    door.publish(_new("publish", "a"))
    assert not _found(center, "a")
    again = RabbitDoor(connection, "orders", open_queue(center, "orders"))
    assert again.send(_new("publish", "b"))[0].outcome == "COMMITTED"
    assert eventually(again.dead)[0][0].headers["tmc-reason"] == "CREDENTIALS_INVALID"  # signed with the secret before


def test_a_disabled_apps_queue_rests(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    assert center.run_admin("disable-app", "orders", "--reason", "stolen").returncode == 0
    eventually(lambda: door.channel.queue_declare(door.queue, passive=True).method.consumer_count == 0)
    door.publish(_new("publish", "a"), "amq.rabbitmq.reply-to", "1")
    assert center.run_admin("enable-app", "orders", "--reason", "again").returncode == 0
    assert door.wait_for(["1"])[0].outcome == "COMMITTED"


@pytest.mark.parametrize("name", ["default", "dead"])
def test_a_queue_that_an_administrator_made_is_used_as_it_is(
    center: RunningCenter, connection: pika.BlockingConnection, name: str
) -> None:
    with connection.channel() as channel:
        channel.queue_declare(queue_of("orders", name), durable=True, arguments={"x-max-length": 100_000})
    door = _door(center, connection)
    assert door.send(_new("publish", "a"))[0].outcome == "COMMITTED"
    door.publish(_new("publish", ""))
    eventually(door.dead)


def test_a_deleted_queue_is_declared_again(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    assert door.send(_new("publish", "a"))[0].outcome == "COMMITTED"
    with connection.channel() as channel:
        channel.queue_delete(queue_of("orders", "dead"))
        channel.queue_delete(door.queue)
    eventually(lambda: has_queue(connection, door.queue))
    assert door.send(_new("publish", "b"))[0].outcome == "COMMITTED"
    with connection.channel() as channel:
        channel.queue_delete(queue_of("orders", "dead"))
    door.publish(_new("publish", ""))  # its copy is returned: both are declared again, and it comes again
    with connection.channel() as channel:
        eventually(
            lambda: has_queue(connection, queue_of("orders", "dead")) and _ready(channel, queue_of("orders", "dead"))
        )
    assert len(door.dead()) == 1


def test_what_a_policy_takes_out_is_kept(
    center: RunningCenter, connection: pika.BlockingConnection, rabbitmq: RabbitMQ
) -> None:
    door = _door(center, connection)
    assert center.run_admin("close-submit-queue", "orders", "--reason", "test").returncode == 0
    eventually(lambda: door.channel.queue_declare(door.queue, passive=True).method.consumer_count == 0)
    rabbitmq.control("set_policy", "ttl", "^tmc.submit.orders.default$", '{"message-ttl":1}')
    try:
        door.publish(_new("publish", "a"))
        ((properties, _),) = eventually(door.dead)
    finally:
        rabbitmq.control("clear_policy", "ttl")
    assert properties.headers["x-first-death-reason"] == "expired"


def test_damaged_headers_are_refused(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    step = _new("publish", "a")
    given = attributes_of(step)
    given["tmcsignature"] = sign(bytes.fromhex(door.secret.hex()), signed(door.queue, given, "", step.body, {}))
    door.publish_raw(given, replace(step, headers={"table": {"a": 1}}))
    assert eventually(door.dead)[0][0].headers["tmc-reason"] == "FIELD_INVALID"


def test_the_services_learn_their_check_token(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)
    given = {"specversion": "1.0", "tmcop": "describe"}
    given["tmcsignature"] = sign(door.secret, signed(door.queue, given, "", b"", {}))
    with connection.channel() as channel:
        channel.queue_declare("tmc.reply.orders.token", exclusive=True)
        door.publish_raw(given, Step(op="", body=b""), "tmc.reply.orders.token", "1")
        eventually(lambda: _ready(channel, "tmc.reply.orders.token"))
        body = channel.basic_get("tmc.reply.orders.token", auto_ack=True)[2]
    app = center.server.store.watch.current.app_by_id["orders"]
    assert json.loads(body) == {"checkToken": app.check_token}


def test_the_metrics_count_them(center: RunningCenter, connection: pika.BlockingConnection) -> None:
    door = _door(center, connection)

    def counts() -> tuple[float, float]:
        refused = value(METRICS.submission_refused, "rabbitmq", "FIELD_INVALID")
        return value(METRICS.submission_taken, "rabbitmq"), refused

    before = counts()
    door.send(_new("publish", "a"), _new("publish", ""))
    assert counts() == (before[0] + 1, before[1] + 1)


def test_the_tag_of_refused_messages_is_none(center: RunningCenter) -> None:
    refused = center.run_admin("open-submit-queue", "orders", "--tag", "dead")
    assert refused.returncode == 1
    assert "tag must be another one" in refused.stderr
