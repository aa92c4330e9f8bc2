"""What came out of a queue, shared between servers: lost copies come again by the policy, waiting ones are left alone."""

from __future__ import annotations

import pytest

from tests.support.outlet import ProgressInMemory
from tests.support.store import StoreUnderTest
from tmc_server.delivery.window import Destination, Window
from tmc_server.domain.consumption import ConsumptionState, QueueLook, Row, decide_held
from tmc_server.domain.ports.delivery import Claimed, QueueProgress
from tmc_server.domain.retry import RetryPolicy
from tmc_server.store.progress import SqlQueueProgress


def test_a_server_reads_what_the_others_published_and_not_its_own(store: StoreUnderTest) -> None:
    one, two = (SqlQueueProgress(store.database, lambda run=run: run) for run in (1, 2))
    first = QueueProgress(queue="q", passed_ms=10, moves=1)
    one.share([first, QueueProgress(queue="other", passed_ms=5, moves=1)])
    two.share([QueueProgress(queue="q", passed_ms=7, moves=4)])
    later = QueueProgress(queue="q", passed_ms=20, moves=2)
    one.share([later])
    assert two.of("q") == {1: later}
    assert one.of("q") == {2: QueueProgress(queue="q", passed_ms=7, moves=4)}
    assert two.of("nothing") == {}


def test_a_server_whose_heartbeat_is_over_publishes_nothing(store: StoreUnderTest) -> None:
    silent = SqlQueueProgress(store.database, lambda: None)
    assert silent.share([QueueProgress(queue="q", passed_ms=10, moves=1)]) is False
    assert SqlQueueProgress(store.database, lambda: 2).of("q") == {}


def test_progress_of_a_day_ago_is_forgotten_by_the_next_server(store: StoreUnderTest) -> None:
    SqlQueueProgress(store.database, lambda: 1).share([QueueProgress(queue="q", passed_ms=10, moves=1)])
    store.clock.advance(86_401)
    SqlQueueProgress(store.database, lambda: 2).share([QueueProgress(queue="p", passed_ms=10, moves=1)])
    assert SqlQueueProgress(store.database, lambda: 3).of("q") == {}


class TwoServers:
    """`acks` takes all acks of a queue, `holder` looks after its shard; both on the store's clock."""

    def __init__(self, store: StoreUnderTest) -> None:
        self.store = store
        shared = ProgressInMemory()
        self.windows = {
            name: Window(2000, 1 << 26, lambda: None, lambda: store.clock() / 1000) for name in ("acks", "holder")
        }
        self.queues = {name: Destination("q") for name in self.windows}
        self.progress = {name: shared.of_server(run) for run, name in enumerate(self.windows, 1)}

    def drained_until(self, tried_ms: int) -> None:
        self.windows["acks"].passed(self.queues["acks"], tried_ms)
        seen = self.windows["acks"].unshared([self.queues["acks"]])
        self.progress["acks"].share(seen)
        self.windows["acks"].was_shared({"q": self.queues["acks"]}, seen)

    def look(self) -> QueueLook:
        window, queue = self.windows["holder"], self.queues["holder"]
        window.hear(queue, self.progress["holder"].of("q"))
        return QueueLook(
            consumers=1, messages=5000, passed_ms=queue.passed_ms, still_ms=window.looked(queue, consumers=1)
        )

    def redeliver(self) -> Claimed:
        self.store.leases.run_once()
        self.store.outlet.looks_like = self.look()
        return self.store.redeliver(room=100)


def test_a_long_backlog_is_not_given_up_by_a_server_that_sees_no_acks(store: StoreUnderTest) -> None:
    """It was sent again every ten minutes and FAILED after 200 minutes and 17 copies."""
    servers = TwoServers(store)
    behind_ms = store.clock() - 6 * 3_600_000
    number = store.submitted(room=1)
    for step in range(5 * 60):
        store.clock.advance(60)
        servers.drained_until(behind_ms + step * 60_000)  # copies of hours ago come out, one after the other
        servers.redeliver()
    row = store.row(number)
    assert (row.state, row.attempt, row.tried) == (ConsumptionState.SCHEDULED, 1, 1)


def test_a_lost_copy_comes_again_when_a_later_one_came_out_elsewhere(store: StoreUnderTest) -> None:
    """A server that saw no acks held it back for ten minutes."""
    servers = TwoServers(store)
    number = store.submitted(room=1)
    due_ms = store.row(number).due_ms
    attempts = []
    while not attempts:
        store.clock.advance(1)
        servers.drained_until(
            store.clock() - 500
        )  # the queue keeps up: what was handed over half a second ago comes out
        if servers.redeliver().delivered:
            attempts = store.delivered_attempts(number)
    assert attempts == [1, 2]
    assert store.clock() == due_ms  # by the policy, to the second


def test_a_queue_that_stands_still_is_looked_at_with_increasing_delay(store: StoreUnderTest) -> None:
    servers = TwoServers(store)
    servers.drained_until(store.clock() - 1)
    number = store.submitted(room=1)
    submitted_ms, looked = store.clock(), []
    while len(looked) < 6:
        store.clock.now_ms = store.row(number).due_ms
        assert servers.redeliver() == Claimed(held=1)
        looked.append((store.clock() - submitted_ms) // 1000)
    assert looked == [10, 12, 14, 18, 26, 42]  # from when the holder first looked: 2, 2, 4, 8, 16 seconds


@pytest.mark.parametrize("policy", [RetryPolicy(interval_ms=2_000), RetryPolicy(interval_ms=60_000)])
def test_a_copy_a_little_behind_is_looked_at_again_as_soon_as_it_can_be_out(policy: RetryPolicy) -> None:
    row = Row(ConsumptionState.SCHEDULED, attempt=1, tried=1, due_ms=100_000)
    look = QueueLook(consumers=1, messages=9, passed_ms=98_500, still_ms=100)
    assert decide_held(row, policy, tried_ms=98_000, look=look, now=100_000).due_ms == 101_500
