"""What stands and what failed, counted on every database without a look at closed rows."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest

from tests.support.metrics import series, value
from tests.support.store import INCARNATION, POLICY, StoreUnderTest
from tmc_server.domain.catalog import NewApp, NewTopic
from tmc_server.domain.checks import CheckAnswer, CheckReason, Verdict
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_SUBSCRIPTION
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.checks import Checked
from tmc_server.domain.ports.reading import Flow, Standing
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.counting import Gauging
from tmc_server.metrics import METRICS
from tmc_server.requests.overviewing import Overviewing
from tmc_server.store.batch import ShardWriter
from tmc_server.store.due import OpenCounts
from tmc_server.store.due_checks import SqlCheckStore
from tmc_server.store.engines import ShardMap
from tmc_server.store.standing import StandingCounts
from tmc_server.store.traffic import SqlTraffic, Traffic


@pytest.fixture
def counts(store: StoreUnderTest) -> StandingCounts:
    return StandingCounts(store.database, store.leases, store.watch)


def _of(store: StoreUnderTest, counts: StandingCounts) -> tuple[Standing, Standing]:
    """The topic's messages, and the subscription's deliveries."""
    _, found = counts.count(counts.shards())
    messages, deliveries = found[store.shard]
    assert (messages.subscription, deliveries.subscription) == (0, store.subscription.number)
    return messages, deliveries


def _failed_total(store: StoreUnderTest) -> float:
    return value(METRICS.failed, "order.paid", "coupons")


def test_messages_and_deliveries_by_state_with_the_age_of_the_oldest(
    store: StoreUnderTest, counts: StandingCounts
) -> None:
    began = store.clock()
    store.prepared()
    store.clock.advance(11)  # the topic's transaction time is 10 s
    store.prepared()
    store.submitted(room=1)
    store.submitted(room=0)
    store.submitted(delay_ms=3_600_000)
    store.perform(store.ack_of(store.submitted(room=1)))
    store.prepared(publish=True)
    messages, deliveries = _of(store, counts)
    assert (messages.open, messages.late, messages.failed) == (2, 1, 0)
    assert (messages.oldest_open_ms, messages.oldest_late_ms, messages.oldest_failed_ms) == (began, began, None)
    assert (deliveries.open, deliveries.late, deliveries.failed) == (4, 3, 0)
    assert (deliveries.oldest_open_ms, deliveries.oldest_late_ms) == (began + 11_000, began + 11_000)


@pytest.mark.parametrize("way", ["reject", "nack of the last try", "limit of redelivering"])
def test_each_way_into_failed_is_counted_by_topic_and_subscriber(
    store: StoreUnderTest, counts: StandingCounts, way: str
) -> None:
    before = _failed_total(store)
    numbers = [store.submitted(room=1) for _ in range(3)]
    if way == "reject":
        store.perform(*(store.nack_of(number, 1, reject=True) for number in numbers))
    elif way == "nack of the last try":
        for attempt in range(1, POLICY.max_retry + 2):
            store.perform(*(store.nack_of(number, attempt) for number in numbers))
            store.clock.advance(3600)
            store.redeliver(room=10)
    else:
        store.begin_handlers()
        for _ in range(POLICY.max_retry + 1):
            store.clock.advance(3600)
            store.redeliver(room=None)
    assert {store.consumption_state(number) for number in numbers} == {ConsumptionState.FAILED}
    assert _failed_total(store) - before == 3
    failed_ms = store.row(numbers[0]).closed_ms
    store.clock.advance(5)
    deliveries = _of(store, counts)[1]
    assert (deliveries.open, deliveries.failed, deliveries.oldest_failed_ms) == (0, 3, failed_ms)


def test_what_is_reactivated_or_acked_is_failed_no_longer(store: StoreUnderTest, counts: StandingCounts) -> None:
    before = _failed_total(store)
    one, two, three = numbers = [store.submitted(room=1) for _ in range(3)]
    store.perform(*(store.nack_of(number, 1, reject=True) for number in numbers))
    store.perform(store.reactivate_of(one), store.ack_of(two))
    deliveries = _of(store, counts)[1]
    assert (deliveries.open, deliveries.failed) == (1, 1)
    store.redeliver(room=1)
    store.perform(store.nack_of(one, 2, reject=True))  # FAILED a second time
    assert _of(store, counts)[1].failed == 2
    assert _failed_total(store) - before == 4
    assert store.consumption_state(three) is ConsumptionState.FAILED


def _check_failed(store: StoreUnderTest) -> int:
    store.set_checks(RetryPolicy(interval_ms=1_000, max_retry=0))
    number = store.prepared().number
    desk = SqlCheckStore(lambda _shard: store.writer)
    pending = desk.begin("ann", store.shard, number, 60_000)
    assert pending is not None
    desk.record(store.shard, [Checked(pending, CheckAnswer(Verdict.UNKNOWN, CheckReason.ANSWERED))])
    assert store.state_of(number) is MessageState.CHECK_FAILED
    return number


def test_check_failed_messages_until_somebody_decides(store: StoreUnderTest, counts: StandingCounts) -> None:
    before = value(METRICS.check_failed)
    submitted, rolled_back, reactivated, left = (_check_failed(store) for _ in range(4))
    assert value(METRICS.check_failed) - before == 4  # an operator's check counts like the duty's
    assert _of(store, counts)[0].failed == 4
    store.perform(store.submit_of(submitted), store.rollback_of(rolled_back))
    SqlCheckStore(lambda _shard: store.writer).reactivate("somebody", store.shard, [reactivated], "")
    messages = _of(store, counts)[0]
    assert (messages.open, messages.failed) == (1, 1)
    assert store.state_of(left) is MessageState.CHECK_FAILED


def test_a_count_stops_at_its_limit(store: StoreUnderTest) -> None:
    for _ in range(5):
        store.prepared()
        store.submitted()
    store.perform(*(store.nack_of(store.submitted(room=1), 1, reject=True) for _ in range(5)))
    messages, deliveries = _of(store, StandingCounts(store.database, store.leases, store.watch, limit=3))
    assert (messages.open, deliveries.open, deliveries.failed) == (3, 3, 3)


@pytest.mark.parametrize(("topics", "subscriptions"), [(1, 3), (2, 4), (3, 6)])
def test_counts_of_many_ordered_subscriptions(store: StoreUnderTest, topics: int, subscriptions: int) -> None:
    """Parts of several kinds are in one statement, in any order."""
    for app in range(subscriptions):
        store.catalog_store.register_app("test", NewApp(id=f"app{app}", service_name="", biz_id=""))
    for number in range(topics):
        name = f"ordered.{number}"
        store.catalog_store.register_topic(
            "test", NewTopic(name=name, owner="orders", default_tag="default", spread=32, ordered=True)
        )
        for app in range(subscriptions):
            store.catalog_store.register_subscription(
                "test", NewSubscription(topic=name, app=f"app{app}", tag="", policy=POLICY)
            )
    store.watch.run_once()
    counts = StandingCounts(store.database, store.leases, store.watch)
    _, found = counts.count(range(32))
    assert sum(map(len, found.values())) > 32


def test_a_count_reads_the_due_index_and_no_closed_row(store: StoreUnderTest, counts: StandingCounts) -> None:
    for _ in range(50):
        store.perform(store.ack_of(store.submitted(room=1)))
    if store.database.url.get_backend_name() == "postgresql":
        with store.database.transaction() as connection:  # or it may have counted the rows while there were few
            connection.exec_driver_sql("ANALYZE")
    with store.counting() as counted:
        counts.count(counts.shards())
    (statement,) = counted.statements
    with store.database.reading() as connection:
        if store.database.url.get_backend_name() == "postgresql":
            plan = connection.exec_driver_sql(f"EXPLAIN {statement}").scalars().all()
            indexes = {name for line in plan for name in re.findall(r"Index Scan (?:using|on) (\w+)", line)}
            assert not [line for line in plan if "Seq Scan on tmc_" in line]
            assert {f"tmc_message_{store.shard:02d}_due", f"tmc_consumption_{store.shard:02d}_due"} <= indexes
        elif store.database.dialect.has_one_writer:
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")]
            assert not [step for step in plan if step.startswith("SCAN tmc_")]
        else:
            plan = list(connection.exec_driver_sql(f"EXPLAIN {statement}").mappings())
            tables = {row["table"]: (row["key"], row["type"]) for row in plan if row["table"].startswith("tmc_")}
            assert {key for key, _ in tables.values()} == {
                f"tmc_message_{store.shard:02d}_due",
                f"tmc_consumption_{store.shard:02d}_due",
                "PRIMARY",
            }
            assert {access for _, access in tables.values()} <= {"range", "ref"}


def test_only_the_holder_of_a_shard_shows_it(store: StoreUnderTest) -> None:
    store.prepared()
    store.submitted(room=0)
    store.perform(store.nack_of(store.submitted(room=1), 1, reject=True))
    holder = Gauging([StandingCounts(store.database, store.leases, store.watch)], store.watch)
    holder.run_once()
    assert value(METRICS.messages_prepared, "order.paid") == 1
    assert value(METRICS.deliveries_scheduled, "order.paid", "coupons") == 1
    assert value(METRICS.backlog, "order.paid", "coupons") == 1
    assert value(METRICS.deliveries_failed, "order.paid", "coupons") == 1
    store.clock.advance(7)
    holder.run_once()
    assert value(METRICS.oldest_seconds, "backlog", "order.paid", "coupons") == 7
    store.leases.release()
    other = store.new_leases(INCARNATION + 1)
    with store.counting() as counted:
        holder.run_once()
    assert not counted.statements
    assert ("order.paid",) not in series(METRICS.messages_prepared)
    assert StandingCounts(store.database, other, store.watch).shards() == [store.shard]
    other.release()


def test_an_idle_center_is_counted_by_one_statement(store: StoreUnderTest) -> None:
    duty = Gauging([StandingCounts(store.database, store.leases, store.watch)], store.watch)
    duty.run_once()
    with store.counting() as counted:
        duty.run_once()
    assert (len(counted.statements), counted.commits) == (1, 0)


def _idle(store: StoreUnderTest) -> SqlTraffic:
    return SqlTraffic(store.database, Traffic(), lambda: INCARNATION)


def test_rates_are_those_of_all_servers_over_the_last_seconds(store: StoreUnderTest) -> None:
    submits, acks = Flow(store.topic.number, NO_SUBSCRIPTION), Flow(0, store.subscription.number)
    seconds = itertools.count(0, 10)  # at every look
    one, two = Traffic(), Traffic()
    writer = ShardWriter(store.database, store.watch, store.outlet, lambda: 1, traffic=one)
    servers = [
        SqlTraffic(store.database, one, lambda: 1, lambda: next(seconds)),
        SqlTraffic(store.database, two, lambda: 2, lambda: next(seconds)),
    ]
    for _ in range(20):
        number = store.prepared().number
        store.perform(store.submit_of(number), writer=writer)
        store.perform(store.ack_of(number), store.ack_of(number), writer=writer)  # a repeated ack is none
    two.add({submits: 40})
    for server in servers:
        server.run_once()
    assert dict(servers[0].per_second()) == {submits: 20 / 20 + 40 / 20, acks: 20 / 20}
    for server in servers:
        server.run_once()  # nothing moved since
    assert servers[0].per_second() == {}
    with store.counting() as counted:
        servers[0].run_once()
    assert not counted.statements


def test_rates_of_a_server_that_is_gone_fade_away(store: StoreUnderTest) -> None:
    traffic = Traffic()
    traffic.add({Flow(store.topic.number, NO_SUBSCRIPTION): 10})
    shared = SqlTraffic(store.database, traffic, lambda: INCARNATION)
    shared.run_once()
    assert shared.per_second()
    store.clock.advance(31)
    assert shared.per_second() == {}


def test_an_overview_adds_up_all_shards(store: StoreUnderTest, counts: StandingCounts) -> None:
    began = store.clock()
    store.prepared()
    store.clock.advance(11)
    store.submitted(room=1)
    store.perform(store.nack_of(store.submitted(room=1), 1, reject=True))
    overviewing = Overviewing(store.watch, [(counts, lambda: [store.shard])] * 2, _idle(store))  # two shards alike
    now, (found,) = asyncio.run(overviewing.overview())
    assert now == store.clock()
    assert found.topic.name == "order.paid"
    assert (found.messages.open, found.messages.late, found.messages.oldest_late_ms) == (2, 2, began)
    (delivery,) = found.deliveries
    assert delivery.subscription.number == store.subscription.number
    deliveries = delivery.standing
    assert (deliveries.open, deliveries.failed, deliveries.oldest_failed_ms) == (2, 2, store.clock())


def test_an_overview_shows_a_removed_subscription_while_it_has_deliveries(
    store: StoreUnderTest, counts: StandingCounts
) -> None:
    overviewing = Overviewing(store.watch, [(counts, lambda: [store.shard])], _idle(store))
    store.submitted()
    store.removed()
    _, (found,) = asyncio.run(overviewing.overview())
    assert [each.subscription.is_removed for each in found.deliveries] == [True]
    store.redeliver()
    _, (found,) = asyncio.run(overviewing.overview())
    assert found.deliveries == []


def test_scheduled_and_failed_deliveries_are_not_acked(store: StoreUnderTest) -> None:
    store.submitted()
    store.submitted(delay_ms=3_600_000)
    store.perform(store.nack_of(store.submitted(room=1), 1, reject=True), store.ack_of(store.submitted(room=1), 1))
    store.perform(store.cancel_of(store.submitted()))
    counts = OpenCounts(ShardMap(store.database, [store.database] * 32))
    assert counts.unacked([store.shard], store.subscription, 10) == 3
    assert counts.unacked([store.shard], store.subscription, 1) == 1
