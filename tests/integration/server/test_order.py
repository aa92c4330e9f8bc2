"""Ordered topics, pauses and cancellations, as producers, consumers and operators meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import sqlalchemy as sa
from google.protobuf.field_mask_pb2 import FieldMask
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client import errors
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_storm.eventually import eventually

ORDERED = {"topic_settings": {"ordered": True}}


_TOPICS = 11


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    """With ordered topics account-0, account-1, ..., made at once: each change takes a while to count everywhere."""
    folder: Path = tmp_path_factory.mktemp("order")
    with RunningCenter(f"sqlite:///{folder}/tmc.db") as made, ThreadPoolExecutor(_TOPICS) as pool:
        list(pool.map(lambda n: made.subscribe(f"account-{n}", "coupons", **ORDERED), range(_TOPICS)))
        yield made


@pytest.fixture(scope="module")
def orders(center: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as made:
        yield made


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    return (f"account-{n}" for n in range(_TOPICS))


@pytest.fixture
def topic(names: Iterator[str]) -> str:
    """An ordered topic that no other test uses."""
    return next(names)


def ask(center: RunningCenter, method: str, **fields: Any) -> Any:
    request = getattr(admin_pb2, f"{method}Request")(**fields)
    with grpc.insecure_channel(center.address) as channel:
        return getattr(center.admin(channel), method)(request, metadata=center.operator)


def refused(center: RunningCenter, method: str, **fields: Any) -> tuple[str, str]:
    """Returns: status and text of the refusal."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(center, method, **fields)
    error: Any = caught.value
    return error.code().name, error.details()


def _deliveries(center: RunningCenter, topic: str) -> list[Any]:
    return list(ask(center, "ListConsumptions", topic=topic).consumptions)


def _states(center: RunningCenter, topic: str) -> list[str]:
    return [types_pb2.ConsumptionState.Name(each.state).rpartition("STATE_")[2] for each in _deliveries(center, topic)]


class _Effects:
    """A consumer of coupons with an inbox. fails: keys whose handler raises."""

    def __init__(self, center: RunningCenter, folder: Path, topic: str) -> None:
        self.engine = sa.create_engine(f"sqlite:///{folder}/coupons.db")
        tmc.create_tables(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS effect (n INTEGER PRIMARY KEY, name TEXT)")
        self.fails: set[str] = set()
        self._center = tmc.connect(center.address, app="coupons", key=center.keys["coupons"])
        self._consumer = tmc.Consumer(self._center, concurrency=4)

        @self._consumer.listener(topic, inbox=tmc.SqlInbox(sessionmaker(self.engine)))
        def handle(body: bytes, session: Session, message: tmc.Message) -> None:
            if message.key in self.fails:
                raise tmc.Reject("it cannot be handled")
            session.execute(sa.text("INSERT INTO effect (name) VALUES (:name)"), {"name": message.key})

    @property
    def names(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.text("SELECT name FROM effect ORDER BY n")).scalars())

    def __enter__(self) -> _Effects:
        self._consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.stop()
        self._center.close()
        self.engine.dispose()


def test_effects_of_a_key_come_in_the_order_of_their_submits(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path
) -> None:
    expected: dict[str, list[str]] = {"alice": [], "bob": []}
    for n in range(30):
        account = ("alice", "bob")[n % 2]
        orders.publish(topic, b"", key=f"{account}-{n}", order_key=account)
        expected[account].append(f"{account}-{n}")
    with _Effects(center, tmp_path, topic) as effects:
        eventually(lambda: len(effects.names) == 30)
        for account, names in expected.items():
            assert [name for name in effects.names if name.startswith(account)] == names


def test_messages_of_one_transaction_keep_their_order(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn: list[list[str]] = []
    submit_in_turn = orders.producer.submit_in_turn

    def note(messages: Sequence[tmc.Prepared], timeout: timedelta) -> list[Future[Any]]:
        in_turn.append([message.key for message in messages])
        return submit_in_turn(messages, timeout)

    monkeypatch.setattr(orders.producer, "submit_in_turn", note)
    shop = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(shop)
    with Session(shop) as session, orders.transaction(session) as tx:
        for n in (3, 1, 2):
            tx.send(topic, b"", key=f"message-{n}", order_key="alice")
    with _Effects(center, tmp_path, topic) as effects:
        eventually(lambda: len(effects.names) == 3)
        assert effects.names == ["message-3", "message-1", "message-2"]
    assert in_turn == [["message-3", "message-1", "message-2"]]
    shop.dispose()


def test_operators_see_who_waits_for_whom_and_unblock_a_key(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path
) -> None:
    with _Effects(center, tmp_path, topic) as effects:
        effects.fails.add("broken")
        head = orders.publish(topic, b"", key="broken", order_key="alice")
        orders.publish(topic, b"", key="next", order_key="alice")
        eventually(lambda: _states(center, topic) == ["FAILED", "WAITING"])
        failed, waiting = _deliveries(center, topic)
        assert waiting.waits_for == failed.message_id == head
        assert not failed.waits_for
        assert 0 < failed.sequence < waiting.sequence
        assert center.detail(topic, "next").consumptions[0].waits_for == head
        assert center.detail(topic, "next").message.order_key == "alice"
        done = ask(center, "CancelConsumption", message_id=head, app="coupons", reason="it is broken")
        assert done.state == types_pb2.CONSUMPTION_STATE_CANCELLED
        eventually(lambda: effects.names == ["next"])


def test_a_skipped_message_has_no_effect_when_its_copy_comes_late(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path
) -> None:
    mode = {"order": types_pb2.ORDER_MODE_SKIP, "update_mask": FieldMask(paths=["order"])}
    ask(center, "RegisterSubscription", topic=topic, app="coupons", **mode)
    with _Effects(center, tmp_path, topic) as effects:
        effects.fails.add("broken")
        head = orders.publish(topic, b"", key="broken", order_key="alice")
        orders.publish(topic, b"", key="next", order_key="alice")
        eventually(lambda: effects.names == ["next"])
        effects.fails.clear()
        ask(center, "ReactivateConsumption", message_id=head, app="coupons", reason="mended")
        eventually(lambda: effects.names == ["next", "broken"])  # out of order, as an operator asked for it
        eventually(lambda: _states(center, topic) == ["ACKED", "ACKED"])


def test_an_order_key_is_demanded_where_it_counts_and_refused_elsewhere(
    center: RunningCenter, orders: tmc.Center, topic: str
) -> None:
    with pytest.raises(tmc.InvalidRequest, match="order_key must be given") as lacking:
        orders.publish(topic, b"", key="a")
    with pytest.raises(tmc.InvalidRequest, match="order_key must be left out") as needless:
        orders.publish("order.paid", b"", key="a", order_key="alice")
    with pytest.raises(tmc.InvalidRequest, match="128 characters") as long:
        orders.prepare(topic, b"", key="a", order_key="x" * 129)
    assert {caught.value.field for caught in (lacking, needless, long)} == {"order_key"}
    with pytest.raises(tmc.InvalidRequest, match="order_key=7 is no str"):
        orders.publish(topic, b"", key="a", order_key=cast("Any", 7))


def test_nobody_sets_the_headers_of_the_center(center: RunningCenter, orders: tmc.Center, topic: str) -> None:
    for name in ("tmc-order-key", "tmc-sequence"):
        with pytest.raises(tmc.InvalidRequest, match="do not begin with tmc-"):
            orders.publish(topic, b"", key="a", order_key="alice", headers={name: "1"})


def test_another_order_key_is_another_content(center: RunningCenter, orders: tmc.Center, topic: str) -> None:
    attempt = orders.prepare(topic, b"", key="a", order_key="alice").attempt_id
    with pytest.raises(errors.ContentDiffers):
        orders.prepare(topic, b"", key="a", order_key="bob", attempt_id=attempt)


def test_an_ordered_topic_is_in_one_shard(center: RunningCenter) -> None:
    status, text = refused(center, "RegisterTopic", name="spread-out", owner="orders", ordered=True, spread=4)
    assert (status, "spread must be 1" in text) == ("INVALID_ARGUMENT", True)


def test_the_order_mode_changes_by_its_name(center: RunningCenter) -> None:
    where = {"topic": "moded", "app": "coupons"}
    made = center.subscribe("moded", "coupons", retry={"max_retry": 4}, **ORDERED)
    assert (made.order, made.retry.max_retry) == (types_pb2.ORDER_MODE_STRICT, 4)
    mask = FieldMask(paths=["order"])
    skip = ask(center, "RegisterSubscription", **where, order=types_pb2.ORDER_MODE_SKIP, update_mask=mask)
    assert (skip.order, skip.retry.max_retry) == (types_pb2.ORDER_MODE_SKIP, 4)
    mask = FieldMask(paths=["retry.max_retry"])
    more = ask(center, "RegisterSubscription", **where, retry={"max_retry": 9}, update_mask=mask)
    assert (more.order, more.retry.max_retry) == (types_pb2.ORDER_MODE_SKIP, 9)
    plain = refused(center, "RegisterSubscription", topic="order.paid", app="coupons", order=types_pb2.ORDER_MODE_SKIP)
    assert (plain[0], "have no order keys" in plain[1]) == ("INVALID_ARGUMENT", True)
    status, text = refused(center, "RegisterSubscription", **where, order=9)
    assert (status, "STRICT, SKIP or OFF" in text) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("what", ["Topic", "Subscription"])
def test_what_is_paused_is_delivered_when_it_is_resumed(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path, what: str
) -> None:
    place = {"name": topic} if what == "Topic" else {"topic": topic, "app": "coupons"}
    with _Effects(center, tmp_path, topic) as effects:
        assert ask(center, f"Pause{what}", **place, reason="maintenance").paused
        orders.publish(topic, b"", key="one", order_key="alice")
        orders.publish(topic, b"", key="two", order_key="alice")
        head = _deliveries(center, topic)[0]
        assert (head.attempt, head.tried) == (0, 0)
        assert not ask(center, f"Resume{what}", **place, reason="done").paused
        eventually(lambda: effects.names == ["one", "two"])


def test_pauses_name_what_is_there_and_say_why(center: RunningCenter) -> None:
    assert refused(center, "PauseTopic", name="nothing", reason="x")[0] == "NOT_FOUND"
    assert refused(center, "PauseTopic", name="order.paid")[0] == "INVALID_ARGUMENT"
    assert refused(center, "PauseSubscription", topic="order.paid", app="stranger", reason="x")[0] == "NOT_FOUND"
    assert refused(center, "RepairOrder", topic="nothing", app="coupons", reason="x")[0] == "NOT_FOUND"
    assert refused(center, "RepairOrder", topic="account-0", app="stranger", reason="x")[0] == "NOT_FOUND"
    assert refused(center, "RepairOrder", topic="account-0", app="coupons")[0] == "INVALID_ARGUMENT"
    assert "no order keys" in refused(center, "RepairOrder", topic="order.paid", app="coupons", reason="x")[1]
    message = {"message_id": "1-1-05-1", "app": "coupons", "reason": "x"}
    assert "There is no such delivery" in refused(center, "ReactivateConsumption", **message)[1]
    assert refused(center, "CancelConsumption", **message)[0] == "NOT_FOUND"


def test_a_repair_of_what_is_whole_changes_nothing(center: RunningCenter, orders: tmc.Center, topic: str) -> None:
    for n in range(3):
        orders.publish(topic, b"", key=f"m{n}", order_key="alice")
    done = ask(center, "RepairOrder", topic=topic, app="coupons", reason="to be sure")
    assert (done.scheduled, done.released, done.cancelled, done.dropped) == (0, 0, 0, 0)
    assert _states(center, topic) == ["SCHEDULED", "WAITING", "WAITING"]


def test_a_delivery_of_a_removed_subscription_cannot_be_reactivated(
    center: RunningCenter, orders: tmc.Center, topic: str, tmp_path: Path
) -> None:
    """It would be cancelled at once."""
    with _Effects(center, tmp_path, topic) as effects:
        effects.fails.add("broken")
        message_id = orders.publish(topic, b"", key="broken", order_key="alice")
        eventually(lambda: _states(center, topic) == ["FAILED"])
    ask(center, "RemoveSubscription", topic=topic, app="coupons")
    refusal = refused(center, "ReactivateConsumption", message_id=message_id, app="coupons", reason="x")
    assert (refusal[0], "was removed" in refusal[1]) == ("FAILED_PRECONDITION", True)
    assert _states(center, topic) == ["FAILED"]
