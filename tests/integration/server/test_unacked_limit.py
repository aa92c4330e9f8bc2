"""A topic with a backlog limit: producers are refused while too much waits for its consumers, and nobody else is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_storm.eventually import eventually

_LIMIT = 20
_numbers = itertools.count()


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path_factory.mktemp('backlog')}/c.db") as made:
        yield made


@pytest.fixture
def orders(center: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"], timeout=timedelta(seconds=2)) as made:
        yield made


def _is_refused(orders: tmc.Center, topic: str) -> bool:
    try:
        orders.publish(topic, b"x", key=f"k{next(_numbers)}")
    except tmc.Overloaded as exc:
        return exc.reason == "UNACKED_LIMIT"
    return False


def test_producers_are_refused_until_consumers_have_caught_up(center: RunningCenter, orders: tmc.Center) -> None:
    center.subscribe("bulk.done", "coupons", topic_settings={"unacked_limit": _LIMIT})
    eventually(lambda: _is_refused(orders, "bulk.done"), seconds=60)
    with pytest.raises(tmc.Overloaded):
        orders.prepare("bulk.done", b"x", key="prepared")
    assert not _is_refused(orders, "order.paid")
    eventually(lambda: "unacked near limit" in center.run_admin("list-alerts").stdout)
    with tmc.connect(center.address, app="coupons", key=center.keys["coupons"]) as coupons:
        consumer = tmc.Consumer(coupons)
        consumer.listener("bulk.done")(lambda _body: None)
        with consumer:
            eventually(lambda: not _is_refused(orders, "bulk.done"), seconds=60)


def test_failed_deliveries_count_and_the_limit_may_change(center: RunningCenter, orders: tmc.Center) -> None:
    center.subscribe("bulk.bad", "coupons", topic_settings={"unacked_limit": _LIMIT})

    def reject(_body: bytes) -> None:
        raise tmc.Reject("no")

    with tmc.connect(center.address, app="coupons", key=center.keys["coupons"]) as coupons:
        consumer = tmc.Consumer(coupons)
        consumer.listener("bulk.bad")(reject)
        with consumer:
            eventually(lambda: _is_refused(orders, "bulk.bad"), seconds=60)
    changed = center.run_admin("update-topic", "bulk.bad", "--unacked-limit", "0")
    assert f"unacked_limit: {_LIMIT} -> unset" in changed.stderr
    eventually(lambda: not _is_refused(orders, "bulk.bad"), seconds=60)
    topics = json.loads(center.run_admin("list-topics").stdout)["topics"]
    assert {each["name"]: each.get("unacked_limit") for each in topics}["bulk.bad"] is None


def test_undecided_messages_count_for_each_subscriber(center: RunningCenter, orders: tmc.Center) -> None:
    """They become deliveries when they are submitted, which nobody refuses."""
    center.subscribe("bulk.open", "coupons", topic_settings={"unacked_limit": _LIMIT})
    center.subscribe("bulk.open", "mails", topic_settings={"unacked_limit": _LIMIT})
    taken: list[tmc.Prepared] = []
    with pytest.raises(tmc.Overloaded) as caught:
        while len(taken) < 10 * _LIMIT:
            taken.append(orders.prepare("bulk.open", b"x", key=f"k{next(_numbers)}"))
    assert (caught.value.reason, len(taken)) == ("UNACKED_LIMIT", _LIMIT // 2)


def test_a_block_with_a_fallback_goes_on_into_its_outbox(
    center: RunningCenter, orders: tmc.Center, tmp_path: Path
) -> None:
    center.subscribe("bulk.fallback", "coupons", topic_settings={"unacked_limit": 1})
    eventually(lambda: _is_refused(orders, "bulk.fallback"), seconds=60)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    outbox = tmc.Outbox(engine, orders)
    with Session(engine) as session, orders.transaction(session, fallback=outbox) as tx:
        tx.send("bulk.fallback", b"x", key="fallen back")
    assert outbox.store.standing().unsent == 1
    outbox.close()
    engine.dispose()
