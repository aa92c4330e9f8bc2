"""The alert outbox on every database: alerts become few notices, each sent once over all servers."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.support.alerting import Server, Sink, rejected
from tests.support.store import StoreUnderTest
from tmc_server.domain.alerts import REMIND_AFTER_MS
from tmc_server.domain.numbers import NO_SUBSCRIPTION
from tmc_server.duties.alerting import CLAIM_MS
from tmc_server.store.alert_outbox import SqlAlertOutbox

MINUTE_S = REMIND_AFTER_MS[0] / 1000


def test_the_first_alert_is_sent_at_once_and_the_rest_of_the_minute_in_one_notice(store: StoreUnderTest) -> None:
    sink = Sink()
    server = Server(store, log=sink)
    first = rejected(store, 1)
    server.turn()
    assert sink.counts == [1]
    more = []
    for _ in range(10):
        store.clock.advance(5)
        more += rejected(store, 10)
        server.turn()
    assert sink.counts == [1]
    store.clock.advance(10)
    server.turn()
    assert sink.counts == [1, 100]
    notice = sink.got[1]
    assert (sink.got[0].number, notice.number) == (first[0], more[0])
    assert list(notice.samples) == [(store.shard, number) for number in more[:5]]
    assert notice.last_ms - notice.first_ms == 45_000
    assert (notice.kind, notice.subscription, notice.topic) == (
        "delivery failed",
        store.subscription.number,
        store.topic.number,
    )


def test_different_groups_do_not_wait_for_each_other(store: StoreUnderTest) -> None:
    sink = Sink()
    server = Server(store, log=sink)
    rejected(store, 3)
    store.alerts.add("no consumer", store.topic.number, store.subscription.number, 1, "nobody reads")
    server.turn()
    assert sorted((alert.kind, alert.count) for alert in sink.got) == [("delivery failed", 3), ("no consumer", 1)]


def test_alerts_of_two_topics_at_the_same_time_are_two(store: StoreUnderTest) -> None:
    for topic in (store.topic.number, store.topic.number + 1):
        for _ in range(2):  # of two servers
            store.alerts.add("submission refused", topic, NO_SUBSCRIPTION, 1, "a letter")
    raised = store.alerted("submission refused")
    assert [(alert.topic, alert.number) for alert in raised] == [(1, 0), (2, 0)]


def test_two_servers_send_each_alert_once(store: StoreUnderTest) -> None:
    log, webhook = Sink(), Sink()
    servers = [Server(store, log=log, webhook=webhook) for _ in range(2)]
    for _ in range(20):
        rejected(store, 5)
        for server in servers:
            server.turn()
        store.clock.advance(17)
    store.clock.advance(10 * MINUTE_S)
    for server in servers:
        server.turn()
    assert sum(log.counts) == sum(webhook.counts) == 100
    assert len(log.got) == len(webhook.got) == 3  # at once, after a minute, after ten more


def test_a_notice_that_one_server_sends_is_nobody_elses(store: StoreUnderTest) -> None:
    one, two = (
        SqlAlertOutbox(store.database, store.shard, store.watch),
        SqlAlertOutbox(store.database, store.shard, store.watch),
    )
    rejected(store, 1)
    one.group(["log"], 10)
    claimed = one.claim("log", 10, CLAIM_MS)
    assert (len(claimed), len(two.claim("log", 10, CLAIM_MS)), len(one.claim("log", 10, CLAIM_MS))) == (1, 0, 0)
    store.clock.advance(CLAIM_MS / 1000)
    assert len(two.claim("log", 10, CLAIM_MS)) == 1
    one.mark_sent(claimed)  # too late: it is not its own any more
    one.put_back(claimed, 0)
    assert one.claim("log", 10, CLAIM_MS) == []
    store.clock.advance(CLAIM_MS / 1000)
    assert len(one.claim("log", 10, CLAIM_MS)) == 1


def test_two_who_read_the_same_due_notice_do_not_both_get_it(store: StoreUnderTest) -> None:
    one, two = (
        SqlAlertOutbox(store.database, store.shard, store.watch),
        SqlAlertOutbox(store.database, store.shard, store.watch),
    )
    rejected(store, 1)
    one.group(["log"], 10)
    read = one.due("log", 10)
    assert [len(one.take(read, CLAIM_MS)), len(two.take(read, CLAIM_MS))] == [1, 0]


def test_an_alert_that_comes_between_look_and_claim_is_not_lost(store: StoreUnderTest) -> None:
    outbox = SqlAlertOutbox(store.database, store.shard, store.watch)
    rejected(store, 1)
    outbox.group(["log"], 10)
    read = outbox.due("log", 10)
    rejected(store, 1)
    outbox.group(["log"], 10)
    assert outbox.take(read, CLAIM_MS) == []
    assert [notice.count for notice in outbox.claim("log", 10, CLAIM_MS)] == [2]


def test_what_a_server_sent_and_did_not_mark_is_sent_again_by_another_one(store: StoreUnderTest) -> None:
    sink = Sink()
    dying, other = Server(store, log=sink), Server(store, log=sink)
    rejected(store, 3)
    dying.grouping.run_once()
    sink.dies = True
    dying.outbox.put_back = lambda notices, after_ms: None  # type: ignore[method-assign]  # the dead put nothing back
    with pytest.raises(KeyboardInterrupt):
        dying.alerting["log"].run_once()
    sink.dies = False
    other.turn()
    assert sink.counts == [3]
    store.clock.advance(CLAIM_MS / 1000)
    other.turn()
    assert sink.counts == [3, 3]
    store.clock.advance(3600)
    other.turn()
    assert sink.counts == [3, 3]


def test_a_dead_sink_delays_no_other_and_gets_everything_in_few_notices(store: StoreUnderTest) -> None:
    log, webhook = Sink(), Sink()
    server = Server(store, log=log, webhook=webhook)
    webhook.fails = True
    for _ in range(30):
        rejected(store, 4)
        while server.grouping.run_once():
            pass
        server.alerting["log"].run_once()
        with pytest.raises(OSError, match="away"):
            server.alerting["webhook"].run_once()
        store.clock.advance(MINUTE_S)
    assert (log.counts, webhook.counts) == ([4, 4, 40], [])
    webhook.fails = False
    server.turn()
    assert webhook.counts == [120]


def _told_of(store: StoreUnderTest, server: Server, subscriptions: Collection[int], kind: str = "") -> None:
    """One notice each, all due at once, in this order. kind "": each has its own."""
    for subscription in subscriptions:
        store.alerts.add(kind or f"kind {subscription}", store.topic.number, subscription, 1, "nobody reads")
    server.grouping.run_once()


def test_one_cause_with_sixty_subscriptions_is_one_notice(store: StoreUnderTest) -> None:
    sink = Sink()
    server = Server(store, webhook=sink)
    _told_of(store, server, range(100, 160), kind="no consumer")
    server.send()
    (sent,) = sink.got
    assert [sent.subscription, *(each.subscription for each in sent.alike)] == list(range(100, 160))
    server.send()
    assert len(sink.got) == 1


def test_what_is_refused_together_is_sent_one_by_one(store: StoreUnderTest) -> None:
    sink = Sink(refuses=[100])
    server = Server(store, webhook=sink)
    _told_of(store, server, range(100, 110), kind="no consumer")
    for asked in ([100], [100, 101]):  # then the first one alone, and the others together
        sink.asked.clear()
        with pytest.raises(OSError, match="refused"):
            server.send()
        assert sink.asked == asked
        store.clock.advance(5)
    (others,) = sink.got
    assert [others.subscription, *(each.subscription for each in others.alike)] == list(range(101, 110))


def test_a_notice_that_its_sink_refuses_holds_up_no_other_and_comes_less_and_less_often(store: StoreUnderTest) -> None:
    sink = Sink(refuses=[100])
    duty = (server := Server(store, webhook=sink)).alerting["webhook"]
    _told_of(store, server, range(100, 110))
    with pytest.raises(OSError, match="refused"):
        duty.run_once()
    assert sink.asked == list(range(100, 110))
    assert [alert.subscription for alert in sink.got] == list(range(101, 110))
    asked_at = []
    for seconds in range(5, 201, 5):
        store.clock.advance(5)
        sink.asked.clear()
        try:
            duty.run_once()
        except OSError:
            asked_at.append(seconds)
        assert len(sink.asked) <= 1
    assert asked_at == [5, 15, 35, 75, 135, 195]
    sink.refuses = []
    store.clock.advance(MINUTE_S)
    duty.run_once()
    assert sink.got[-1].subscription == 100


def test_three_refused_notices_at_the_front_delay_the_others_by_two_runs(store: StoreUnderTest) -> None:
    """Three in a row look like a sink that is away; then their own delays let the others pass."""
    sink = Sink(refuses=range(100, 103))
    duty = (server := Server(store, webhook=sink)).alerting["webhook"]
    _told_of(store, server, range(100, 110))
    for asked in ([100, 101, 102], [100, 101, 102]):
        sink.asked.clear()
        with pytest.raises(OSError, match="refused"):
            duty.run_once()
        assert sink.asked == asked
        store.clock.advance(5)
    sink.asked.clear()
    duty.run_once()
    assert sink.asked == list(range(103, 110))


def test_nothing_to_tell_costs_one_statement_per_duty_and_no_commit(store: StoreUnderTest) -> None:
    server = Server(store, log=Sink())
    with store.counting() as counted:
        server.turn()
    assert (len(counted.statements), counted.commits) == (3, 0)
