"""Exactly what a message costs: statements and commits, asserted here and told in docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec import structs

from tests.support.store import POLICY, StoreUnderTest, server_store
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.operations import Ack, Done
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.errors import SubscriptionUnknown
from tmc_server.store.statements import statements_of
from tmc_storm.services.mariadb import MariaDB

# Statements of one transaction, whatever the number of operations in it; commits are one per transaction.
STATEMENTS = {"prepare": 2, "submit": 3, "publish": 3, "ack": 2, "rollback": 4}


def _operations(store: StoreUnderTest, what: str, count: int) -> list:
    if what == "prepare":
        return [store.a_prepare() for _ in range(count)]
    if what == "publish":
        return [store.a_prepare(publish=True) for _ in range(count)]
    numbers = [store.prepared().number for _ in range(count)]
    if what == "ack":
        store.perform(*(store.submit_of(number) for number in numbers))
    make = {"submit": store.submit_of, "rollback": store.rollback_of, "ack": store.ack_of}[what]
    return [make(number) for number in numbers]


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("what", STATEMENTS)
def test_statements_and_commits(store: StoreUnderTest, what: str, count: int) -> None:
    operations = _operations(store, what, count)
    with store.counting() as counter:
        store.perform(*operations)
    assert (len(counter.statements), counter.commits) == (STATEMENTS[what], 1), list(counter.statements)


def _acks_of_many(store: StoreUnderTest, count: int) -> list[Ack]:
    """The acks of six subscribers for `count` messages each."""
    subscriptions = [store.subscription]
    for number in range(5):
        wanted = NewSubscription(topic="order.paid", app="coupons", tag=f"tag{number}", policy=POLICY)
        subscriptions.append(store.catalog_store.register_subscription("test", wanted))
    store.watch.run_once()
    numbers = [store.submitted() for _ in range(count)]
    return [
        structs.replace(store.ack_of(number), subscription=each.number) for number in numbers for each in subscriptions
    ]


def test_acks_of_many_subscribers_cost_as_many_statements_as_those_of_one(store: StoreUnderTest) -> None:
    acks = _acks_of_many(store, 5)
    unknown = [structs.replace(each, number=MessageNumber(each.number + 1_000_000)) for each in acks[:2]]
    with store.counting() as counter:
        answers = store.perform(*acks[:-1])
    assert [type(each) for each in answers] == [Done] * 29
    assert len(counter.statements) == STATEMENTS["ack"]
    assert [type(each) for each in store.perform(*unknown, acks[-1])] == [
        SubscriptionUnknown,
        SubscriptionUnknown,
        Done,
    ]
    with store.database.reading() as connection:
        table = statements_of(store.shard).tables.consumption
        states = connection.execute(sa.select(table.c.state)).scalars().all()
    assert states == [ConsumptionState.ACKED] * 30


def test_the_happy_path_costs_two_commits_before_delivery_and_one_for_the_ack(store: StoreUnderTest) -> None:
    store.outlet.room = 1
    operation = store.a_prepare()
    with store.counting() as before:
        store.perform(operation)
        store.perform(store.submit_of(operation.number))
        assert len(store.outlet.delivered) == 1
    with store.counting() as after:
        store.perform(store.ack_of(operation.number))
    assert (before.commits, after.commits) == (2, 1)


def test_an_idle_scan_is_one_statement_and_no_commit(store: StoreUnderTest) -> None:
    store.perform(store.ack_of(store.submitted(room=1)))
    with store.counting() as counter:
        assert store.due.due() == []
    assert (len(counter.statements), counter.commits) == (1, 0)


def test_a_pass_over_due_rows_costs_the_same_for_1_and_200(store: StoreUnderTest) -> None:
    costs = []
    for count in (1, 200):
        for _ in range(count):
            store.submitted()
        store.outlet.room = None
        with store.counting() as counter:
            ((shard, subscription),) = store.due.due()
            store.due.claim(shard, subscription, 200, QueueLook(), exhausted_only=False)
        costs.append((len(counter.statements), counter.commits))
    assert costs == [(4, 1), (4, 1)]


def test_a_look_for_what_dead_servers_left_is_one_statement(store: StoreUnderTest) -> None:
    """The number of dead servers and of subscriptions does not matter: the thread that renews the leases does this."""
    _acks_of_many(store, 1)
    with store.counting() as counter:
        assert store.due.rescue(store.shard, dict.fromkeys(range(1_000, 1_200), 0)) == 0
    assert len(counter.statements) == 1


def test_the_performance_page_tells_these_numbers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    told = {
        name: (int(one), int(many)) for name, one, many in re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", page, re.M)
    }
    assert told == {name: (count, count) for name, count in STATEMENTS.items()}


@pytest.mark.mariadb
def test_looks_at_due_rows_use_the_index(mariadb) -> None:
    """MIN(due) is answered from the index alone; a claim locks by primary key."""
    store = server_store(mariadb)
    for _ in range(30):
        store.submitted(room=1)
    with store.counting() as counter:
        store.due.due()
        store.clock.advance(3600)
        store.redeliver(room=5)
    statements = [s for s in counter.statements if "tmc_consumption" in s]
    looks = [s for s in statements if "MIN(" in s]
    claims = [s for s in statements if s.startswith("UPDATE")]
    assert looks
    assert claims
    assert all("FORCE INDEX (PRIMARY)" in s for s in claims)
    table = statements_of(store.shard).tables.consumption.name
    with store.database.reading() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN SELECT MIN(due_ms) FROM {table} WHERE subscription_no = 1").one()
    assert "optimized away" in plan._mapping["Extra"]
    store.close()


@pytest.mark.mariadb
def test_acks_of_many_subscribers_read_ranges_of_the_key(mariadb: MariaDB) -> None:
    store = server_store(mariadb)
    acks = _acks_of_many(store, 40)
    for _ in range(200):
        store.submitted()
    asked: list[tuple[str, Any]] = []
    sa.event.listen(
        store.database.engine,
        "before_cursor_execute",
        lambda _connection, _cursor, statement, parameters, *_: asked.append((statement, parameters)),
    )
    store.perform(*acks)
    with store.database.reading() as connection:
        plans = [
            connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).one()._mapping
            for statement, parameters in asked[:2]
        ]
    assert [(plan["type"], plan["key"], int(plan["rows"])) for plan in plans] == [("range", "PRIMARY", len(acks))] * 2
    store.close()
