"""Bulk jobs and replays over every store: each delivery once, whatever dies, and nothing that failed later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.store import StoreUnderTest, server_store, sqlite_store
from tmc_common.headers import REPLAY_OF, REPLAY_TO
from tmc_server.domain.bulk import BulkAction, BulkJob, BulkProgress, BulkState, ItemOutcome, Place, Selection
from tmc_server.domain.catalog import NewApp, Subscription
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.fingerprint import fingerprint
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import Shard
from tmc_server.domain.operations import Stored
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.ports.bulk import NewBulkJob
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.duties.bulk import BulkWorking
from tmc_server.errors import ConsumptionClosed, RowLocked, StoreUnavailable
from tmc_server.store.bulk_jobs import SqlBulkStore
from tmc_server.store.bulk_work import SqlBulkWork
from tmc_server.store.copies import parse_headers
from tmc_server.store.engines import ShardMap
from tmc_server.store.replays import SqlReplays
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.selecting import BEFORE_ALL, page_of
from tmc_server.store.tables import audit, bulk_item, bulk_progress, failed, shard_tables
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

C = ConsumptionState
REACTIVATE, CANCEL, REPLAY = BulkAction.REACTIVATE, BulkAction.CANCEL, BulkAction.REPLAY
DELIVER_NOW = BulkAction.DELIVER_NOW


class Bulk:
    """Jobs over the store's shard, by a desk and a duty of each server."""

    def __init__(self, store: StoreUnderTest) -> None:
        self.store = store
        self.desk = SqlBulkStore(ShardMap(store.database, [store.database] * 32))
        self.slept: list[float] = []
        self.seconds = 0.0
        self.duty = self.server()
        self.started = 0

    def server(self, **writer: Any) -> BulkWorking:
        work = SqlBulkWork(self.store.new_writer(**writer), self.store.leases, self.store.ids)
        return BulkWorking(self.desk, work, self._sleep, monotonic=lambda: self.seconds, page=20)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds

    def selection(self, state: ConsumptionState = C.FAILED, **changes: Any) -> Selection:
        store = self.store
        place = Place(shard=store.shard, topic=store.topic.number, subscription=store.subscription.number)
        values = {"places": (place,), "state": state, "from_ms": 0, "to_ms": 0, "fingerprint": ""}
        return Selection(**(values | {"as_of_ms": store.clock()} | changes))

    def start(self, action: BulkAction, state: ConsumptionState | None = None, **changes: Any) -> BulkJob:
        """A job that needs no wait, started from a dry run of this moment."""
        self.started += 1
        settings = {name: changes.pop(name) for name in ("hold_ms", "rate") if name in changes}
        selection = self.selection(state or action.states[0], **changes)
        count, _ = self.desk.dry_run(selection, 1_000, 10)
        values: dict[str, Any] = {"hold_ms": 0, "rate": 2_000} | settings
        return self.desk.start(
            NewBulkJob(
                dry_run=f"dry run {self.started}",
                action=action,
                selection=selection,
                count=count,
                actor="operator",
                reason="test",
                **values,
            )
        )

    def finish(self, job: BulkJob) -> BulkProgress:
        """Run the duty until the job is finished."""
        for _ in range(1_000):
            self.duty.run_once()
            known = self.desk.job(job.number)
            assert known is not None
            if known.finished_ms is not None:
                return self.desk.progress(job)
        raise AssertionError("the job does not end")

    def outcomes(self, job: BulkJob) -> dict[int, tuple[ItemOutcome, str]]:
        items = self.desk.items(job, (self.store.shard, 0), 1_000, failures_only=False)
        return {item.number: (item.outcome, item.detail) for item in items}


@pytest.fixture
def bulk(store: StoreUnderTest) -> Bulk:
    return Bulk(store)


def a_failure(store: StoreUnderTest, error: str = "broken", **changes: Any) -> int:
    number = store.submitted(room=1, **changes)
    fail(store, number, error)
    return number


def fail(store: StoreUnderTest, number: int, error: str = "broken") -> None:
    attempt = store.row(number).attempt
    nack = store.nack_of(number, attempt, reject=True)
    store.perform(type(nack)(**{**{name: getattr(nack, name) for name in FIELDS}, "error": error}))


FIELDS = ("shard", "app", "number", "subscription", "attempt", "policy", "reject")


def states(store: StoreUnderTest, numbers: Sequence[int]) -> list[ConsumptionState]:
    return [store.consumption_state(number) for number in numbers]


def actions(store: StoreUnderTest) -> Counter[str]:
    with store.database.reading() as connection:
        return Counter(connection.execute(sa.select(audit.c.action)).scalars())


def test_what_failed_is_reactivated_with_a_fresh_budget_and_an_outcome_each(bulk: Bulk) -> None:
    store = bulk.store
    numbers = [a_failure(store) for _ in range(45)]
    job = bulk.start(REACTIVATE)
    assert job.count == 45
    assert bulk.finish(job) == BulkProgress(done=45, finished=1)
    assert set(states(store, numbers)) == {C.SCHEDULED}
    assert {(store.row(each).tried, store.row(each).due_ms) for each in numbers} == {(0, store.clock())}
    assert bulk.outcomes(job) == dict.fromkeys(numbers, (ItemOutcome.DONE, ""))
    with store.database.reading() as connection:
        assert connection.execute(sa.select(failed)).fetchall() == []
    assert sum(bulk.slept) == pytest.approx(45 / 2_000)
    noted = actions(store)
    assert (noted["start bulk job"], noted["reactivate consumption"]) == (1, 0)


def test_progress_that_a_move_left_behind_is_not_counted(bulk: Bulk, tmp_path: Path) -> None:
    store = bulk.store
    (tmp_path / "other").mkdir()
    other = sqlite_store(tmp_path / "other")  # it had the shard before, and has another one of the job
    held = [other.database if shard == 20 else store.database for shard in range(32)]
    bulk.desk = SqlBulkStore(ShardMap(store.database, held))
    place = Place(shard=store.shard, topic=store.topic.number, subscription=store.subscription.number)
    elsewhere = replace(place, shard=Shard(20))
    job = bulk.start(BulkAction.REACTIVATE, places=(place, elsewhere))
    row = {"job_id": job.number, "subscription_no": 1, "message_id": 0, "done": 3, "unchanged": 0, "refused": 0}
    for database in (store.database, other.database):
        with database.transaction() as connection:
            connection.execute(bulk_progress.insert().values(**row, shard=store.shard, finished=1, updated_ms=0))
    assert bulk.desk.progress(job) == BulkProgress(done=3, finished=1)
    assert not bulk.desk.finish(job)
    other.close()


def test_what_waits_is_delivered_now_and_what_is_under_way_is_not(bulk: Bulk) -> None:
    store = bulk.store
    failing, delayed = store.submitted(room=1), store.submitted(delay_ms=3_600_000)
    store.perform(store.nack_of(failing, attempt=1, retry_after_ms=3_600_000))
    under_way = store.submitted(room=1)
    store.clock.advance(0.001)
    job = bulk.start(DELIVER_NOW)
    assert bulk.finish(job) == BulkProgress(done=2, unchanged=1, finished=1)
    assert store.redeliver(room=None).delivered == 2
    assert [store.row(number).attempt for number in (failing, delayed, under_way)] == [2, 1, 1]
    assert "on its way" in bulk.outcomes(job)[under_way][1]


def test_only_what_the_filter_names(bulk: Bulk) -> None:
    store = bulk.store
    early = a_failure(store, "Timeout after 3 s")
    store.clock.advance(10)
    middle, other = a_failure(store, "Timeout after 17 s"), a_failure(store, "KeyError: 'x'")
    store.clock.advance(10)
    late = a_failure(store, "Timeout after 5 s")
    from_ms, to_ms = store.clock() - 15_000, store.clock() - 5_000
    job = bulk.start(REACTIVATE, fingerprint=fingerprint("Timeout after 99 s"), from_ms=from_ms, to_ms=to_ms)
    assert job.count == 1
    bulk.finish(job)
    assert states(store, [early, middle, other, late]) == [C.FAILED, C.SCHEDULED, C.FAILED, C.FAILED]
    count, samples = bulk.desk.dry_run(bulk.selection(fingerprint=fingerprint("KeyError: 'y'")), 10, 10)
    assert count == 1
    assert [(each.number, each.error) for each in samples] == [(other, "KeyError: 'x'")]


def test_what_fails_after_the_dry_run_is_left_alone(bulk: Bulk) -> None:
    store = bulk.store
    before = a_failure(store)
    job = bulk.start(REACTIVATE)
    store.clock.advance(0.001)
    after = a_failure(store)
    bulk.finish(job)
    assert states(store, [before, after]) == [C.SCHEDULED, C.FAILED]


def test_two_jobs_at_once_reactivate_each_failure_once(bulk: Bulk) -> None:
    store = bulk.store
    numbers = [a_failure(store) for _ in range(20)]
    first, second = bulk.start(REACTIVATE), bulk.start(REACTIVATE, hold_ms=5_000)
    store.clock.advance(1)
    assert bulk.finish(first).done == 20
    assert store.redeliver(room=None).delivered == 20
    for number in numbers:
        fail(store, number)
    store.clock.advance(5)
    assert bulk.finish(second) == BulkProgress(finished=1)
    assert set(states(store, numbers)) == {C.FAILED}


@pytest.mark.parametrize("point", ["read", "locked", "written"])
def test_a_server_that_dies_leaves_whole_pages(bulk: Bulk, point: str) -> None:
    store = bulk.store
    numbers = [a_failure(store) for _ in range(25)]
    job = bulk.start(REACTIVATE)
    assert bulk.duty.run_once()
    store.clock.advance(1)
    assert store.redeliver(room=None, limit=1_000).delivered == 20
    for number in numbers[:20]:
        fail(store, number)

    def die(reached: str) -> None:
        if reached == point:
            raise SystemExit

    with pytest.raises(SystemExit):
        bulk.server(hook=die).run_once()
    assert set(states(store, numbers)) == {C.FAILED}
    assert bulk.finish(job) == BulkProgress(done=25, finished=1)
    assert states(store, numbers) == [C.FAILED] * 20 + [C.SCHEDULED] * 5


def test_a_delivery_that_moved_meanwhile_is_unchanged(bulk: Bulk) -> None:
    store = bulk.store
    acked, cancelled, open_ = (store.submitted() for _ in range(3))
    job = bulk.start(CANCEL, C.SCHEDULED)
    assert job.count == 3
    store.perform(store.ack_of(acked))
    store.perform(store.cancel_of(cancelled))
    bulk.finish(job)
    assert states(store, [acked, cancelled, open_]) == [C.ACKED, C.CANCELLED, C.CANCELLED]
    assert bulk.outcomes(job) == {open_: (ItemOutcome.DONE, "")}


def test_a_change_between_reading_and_locking_is_recorded(bulk: Bulk) -> None:
    store = bulk.store
    number = a_failure(store)
    job = bulk.start(REACTIVATE)
    with store.database.transaction() as connection:  # as if the record of the failure were read before its ack
        table = shard_tables(store.shard).consumption
        connection.execute(table.update().values(state=int(C.ACKED)))
    assert bulk.finish(job) == BulkProgress(unchanged=1, finished=1)
    outcome, detail = bulk.outcomes(job)[number]
    assert outcome is ItemOutcome.UNCHANGED
    assert "ACKED" in detail
    assert bulk.desk.items(job, (store.shard, 0), 10, failures_only=True)[0].number == number


def test_stopped_in_its_hold_nothing_has_happened(bulk: Bulk) -> None:
    store = bulk.store
    number = a_failure(store)
    job = bulk.start(REACTIVATE, hold_ms=5_000)
    assert job.state(store.clock()) is BulkState.HELD
    store.clock.advance(4.999)
    assert not bulk.duty.run_once()
    stopped = bulk.desk.stop("operator", job.number, "a mistake")
    assert stopped is not None
    assert stopped.state(store.clock()) is BulkState.STOPPED
    store.clock.advance(60)
    assert not bulk.duty.run_once()
    assert store.consumption_state(number) is C.FAILED
    bulk.desk.stop("operator", job.number, "again")
    assert actions(store)["stop bulk job"] == 1


def test_stopped_at_work_it_ends_behind_its_page(bulk: Bulk) -> None:
    numbers = [a_failure(bulk.store) for _ in range(25)]
    job = bulk.start(REACTIVATE)
    assert bulk.duty.run_once()
    bulk.desk.stop("operator", job.number, "enough")
    assert not bulk.duty.run_once()
    assert Counter(states(bulk.store, numbers)) == {C.SCHEDULED: 20, C.FAILED: 5}
    assert bulk.desk.progress(job) == BulkProgress(done=20)


def test_a_dry_run_starts_one_job(bulk: Bulk) -> None:
    a_failure(bulk.store)
    job = bulk.start(REACTIVATE)
    bulk.started -= 1
    assert bulk.start(CANCEL) == job
    assert [each.number for each in bulk.desk.jobs(None, 10)] == [job.number]
    assert actions(bulk.store)["start bulk job"] == 1


def test_a_slow_job_takes_small_pages(bulk: Bulk) -> None:
    for _ in range(12):
        a_failure(bulk.store)
    bulk.start(REACTIVATE, rate=10)
    bulk.duty.run_once()
    assert bulk.slept == [0.5]  # five of them


def test_a_slow_job_does_not_delay_another_one(bulk: Bulk) -> None:
    for _ in range(20):
        a_failure(bulk.store)
    slow, quick = bulk.start(REACTIVATE, rate=1), bulk.start(CANCEL, rate=10_000)
    bulk.duty.run_once()
    bulk.duty.run_once()
    assert bulk.seconds < 1
    assert (bulk.desk.progress(slow).done, bulk.desk.progress(quick).done) == (1, 19)


def a_second_subscriber(store: StoreUnderTest) -> Subscription:
    store.catalog_store.register_app("test", NewApp(id="invoices", service_name="invoices", biz_id="invoices"))
    made = store.catalog_store.register_subscription(
        "test", NewSubscription(topic=store.topic.name, app="invoices", tag="", policy=store.policy)
    )
    store.watch.run_once()
    return made


def test_all_subscriptions_of_a_shard_are_worked_through(bulk: Bulk) -> None:
    store = bulk.store
    first, second = store.subscription, a_second_subscriber(store)
    for _ in range(12):
        store.submitted()
    places = tuple(
        Place(shard=store.shard, topic=store.topic.number, subscription=each.number) for each in (first, second)
    )
    job = bulk.start(CANCEL, C.SCHEDULED, places=places, rate=10)
    assert job.count == 24
    assert bulk.finish(job) == BulkProgress(done=24, finished=1)


def test_few_matches_among_many_rows_are_found_in_bounded_pages(bulk: Bulk) -> None:
    store = bulk.store
    second = a_second_subscriber(store)
    numbers = [store.submitted() for _ in range(40)]
    store.perform(*(store.cancel_of(number) for number in numbers[:37]))
    selection = bulk.selection(C.SCHEDULED)
    with store.database.reading() as connection:
        found, after, pages = [], BEFORE_ALL, 0
        while after is not None:
            page = page_of(connection, selection, selection.places[0], after, most=2, now=store.clock(), rows=10)
            found, after, pages = found + list(page.numbers), page.after, pages + 1
    assert found == numbers[37:]
    assert pages >= 8  # of ten rows each, those of the second subscriber included
    assert second.number


def test_cancelling_heads_does_not_cancel_what_they_release(bulk: Bulk) -> None:
    store = bulk.store
    store.take_ordered_topic()
    lines = [[store.sent(key) for _ in range(3)] for key in ("alice", "bob")]
    job = bulk.start(CANCEL, C.SCHEDULED, rate=2)  # a page each
    assert job.count == 2
    store.clock.advance(1)
    assert bulk.finish(job) == BulkProgress(done=2, finished=1)
    assert [states(store, line) for line in lines] == [[C.CANCELLED, C.SCHEDULED, C.WAITING]] * 2


def test_delayed_deliveries_are_cancelled(bulk: Bulk) -> None:
    number = bulk.store.submitted(delay_ms=60_000)
    job = bulk.start(CANCEL, C.SCHEDULED)
    bulk.store.clock.advance(1)
    assert bulk.finish(job).done == 1
    assert bulk.store.consumption_state(number) is C.CANCELLED


def test_what_moved_between_the_page_and_its_locks_is_unchanged(database_server: MariaDB | PostgreSQL) -> None:
    """Another operator reactivated it and it failed again: a younger failure than the dry run."""
    store = server_store(database_server)
    bulk = Bulk(store)
    number = a_failure(store)
    job = bulk.start(REACTIVATE)
    store.clock.advance(1)

    def meanwhile(point: str) -> None:
        if point == "read" and store.row(number).attempt == 1:
            store.perform(store.reactivate_of(number))
            store.redeliver(room=1)
            fail(store, number)

    bulk.duty = bulk.server(hook=meanwhile)
    assert bulk.finish(job) == BulkProgress(unchanged=1, finished=1)
    assert store.consumption_state(number) is C.FAILED
    store.close()


def test_replays_of_large_messages_are_cut_into_small_pages(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.store.bulk_work._REPLAY_BYTES", 2_500)
    store = bulk.store
    numbers = [store.submitted(body=b"x" * 1_000) for _ in range(7)]
    store.perform(*(store.ack_of(number) for number in numbers))
    job = bulk.start(REPLAY)
    bulk.duty.run_once()
    assert bulk.desk.progress(job).done == 2
    assert bulk.finish(job).done == 7


def test_a_replay_job_leaves_replays_out(bulk: Bulk) -> None:
    store = bulk.store
    number = store.submitted()
    store.perform(store.ack_of(number))
    bulk.finish(bulk.start(REPLAY))
    store.perform(store.ack_of(replayed(store, number).id))
    assert bulk.finish(bulk.start(REPLAY)) == BulkProgress(done=1, unchanged=1, finished=1)


def test_replays_of_an_order_key_keep_the_order_of_their_submits(bulk: Bulk) -> None:
    store = bulk.store
    store.take_ordered_topic()
    late, early = (store.perform(p := store.a_keyed("alice")) and p for _ in range(2))
    store.perform(store.submit_of(early.number))
    store.perform(store.submit_of(late.number))
    store.perform(store.ack_of(early.number), store.ack_of(late.number))
    bulk.finish(bulk.start(REPLAY))
    copies = [replayed(store, each.number).id for each in (early, late)]
    assert states(store, copies) == [C.SCHEDULED, C.WAITING]


def test_a_replay_of_a_locked_or_removed_delivery(database_server: MariaDB | PostgreSQL) -> None:
    store = server_store(database_server)
    replays = SqlReplays(lambda _shard: store.writer, store.ids)
    number = store.submitted()
    store.perform(store.ack_of(number))
    table = shard_tables(store.shard).consumption
    with store.database.transaction() as connection:
        connection.execute(sa.select(table).where(table.c.message_id == number).with_for_update()).fetchall()
        assert isinstance(replays.replay("operator", store.shard, number, store.subscription.number, "test"), Stored)
    store.removed()
    answer = replays.replay("operator", store.shard, number, store.subscription.number, "test")
    assert isinstance(answer, ConsumptionClosed)
    assert "removed" in str(answer)
    store.close()


def test_waiting_deliveries_of_an_order_key_are_cancelled_and_nothing_waits(bulk: Bulk) -> None:
    store = bulk.store
    store.take_ordered_topic()
    head, *behind = [store.sent("alice") for _ in range(5)]
    bulk.finish(bulk.start(CANCEL, C.WAITING))
    assert states(store, [head, *behind]) == [C.SCHEDULED, *[C.CANCELLED] * 4]
    store.perform(store.ack_of(head))
    assert store.consumption_state(store.sent("alice")) is C.SCHEDULED


def test_a_locked_delivery_is_not_passed_over(database_server: MariaDB | PostgreSQL) -> None:
    store = server_store(database_server)
    bulk = Bulk(store)
    first, second = a_failure(store), a_failure(store)
    job = bulk.start(REACTIVATE)
    sql = sa.select(shard_tables(store.shard).consumption).where(
        shard_tables(store.shard).consumption.c.message_id == first
    )
    with store.database.transaction() as connection:
        connection.execute(sql.with_for_update()).fetchall()
        with pytest.raises(RowLocked):
            bulk.duty.run_once()
        assert store.consumption_state(second) is C.FAILED
    assert bulk.finish(job) == BulkProgress(done=2, finished=1)
    store.close()


def replayed(store: StoreUnderTest, number: int) -> Any:
    """The message that was made from this one."""
    message = store.message_row(number)
    original = str(MessageId(message.topic_no, message.producer_no, store.shard, number))
    table = shard_tables(store.shard).message
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(table).where(table.c.message_key.like(f"replay.{original}.%"))).fetchall()
    (row,) = rows
    return row


def test_acked_deliveries_are_sent_again_to_one_subscriber_only(bulk: Bulk) -> None:
    store = bulk.store
    a_second_subscriber(store)
    numbers = [store.submitted(body=b"%d" % index, headers={"kind": "x"}) for index in range(3)]
    store.perform(*(store.ack_of(number) for number in numbers[:2]))
    job = bulk.start(REPLAY)
    assert job.count == 2
    store.clock.advance(1)
    assert bulk.finish(job) == BulkProgress(done=2, finished=1)
    for index, number in enumerate(numbers[:2]):
        copy, original = replayed(store, number), store.message_row(number)
        assert (copy.body, copy.content_type, copy.topic_no) == (
            b"%d" % index,
            original.content_type,
            original.topic_no,
        )
        made = str(MessageId(copy.topic_no, copy.producer_no, store.shard, copy.id))
        assert bulk.outcomes(job)[number] == (ItemOutcome.DONE, made)
        source = str(MessageId(original.topic_no, original.producer_no, store.shard, number))
        assert parse_headers(copy.headers) == {
            "kind": "x",
            REPLAY_OF: source,
            REPLAY_TO: str(store.subscription.number),
        }
        table = shard_tables(store.shard).consumption
        with store.database.reading() as connection:
            rows = connection.execute(sa.select(table).where(table.c.message_id == copy.id)).fetchall()
        assert [row.subscription_no for row in rows] == [store.subscription.number]
        assert store.consumption_state(number) is C.ACKED
    assert bulk.finish(bulk.start(REPLAY, to_ms=store.clock())) == BulkProgress(
        done=2, finished=1
    )  # on purpose, once more


def test_a_single_replay_is_repeated_safely_and_can_be_replayed_itself(store: StoreUnderTest) -> None:
    replays = SqlReplays(lambda _shard: store.writer, store.ids)
    number = store.submitted()
    again = (store.shard, number, store.subscription.number)
    refused = replays.replay("operator", *again, "test")
    assert isinstance(refused, ConsumptionClosed)
    assert "SCHEDULED" in str(refused)
    store.perform(store.ack_of(number))
    first, second = replays.replay("operator", *again, "test"), replays.replay("operator", *again, "test")
    assert isinstance(first, Stored)
    assert first == second
    assert actions(store)["replay delivery"] == 1
    copy = replayed(store, number)
    store.perform(store.ack_of(copy.id))
    third = replays.replay("operator", store.shard, copy.id, store.subscription.number, "test")
    assert isinstance(third, Stored)
    assert third != first


def test_a_replay_of_an_ordered_message_stands_at_the_end_of_its_key(store: StoreUnderTest) -> None:
    store.take_ordered_topic(OrderMode.STRICT)
    replays = SqlReplays(lambda _shard: store.writer, store.ids)
    first, second = store.sent("alice"), store.sent("alice")
    store.perform(store.ack_of(first))
    replays.replay("operator", store.shard, first, store.subscription.number, "test")
    copy = replayed(store, first)
    assert store.consumption_state(copy.id) is C.WAITING
    store.perform(store.ack_of(second))
    assert store.consumption_state(copy.id) is C.SCHEDULED
    assert store.row(copy.id).sequence > store.row(second).sequence


def test_outcomes_are_forgotten_after_the_window(bulk: Bulk) -> None:
    store = bulk.store
    for _ in range(5):
        a_failure(store)
    job = bulk.start(REACTIVATE)
    bulk.finish(job)
    closed = ClosedMessages(store.database, store.leases)
    assert closed.forget(store.clock(), 3) == 0
    store.clock.advance(1)
    assert [closed.forget(store.clock(), 3) for _ in range(4)] == [3, 2, 0, 0]
    with store.database.reading() as connection:
        assert connection.execute(sa.select(bulk_item)).fetchall() == []
    assert bulk.finish(job) == BulkProgress(done=5, finished=1)  # known for good: a job never begins a shard again


def test_rows_in_tables_of_all_shards_are_not_written_while_their_shard_is_frozen(bulk: Bulk) -> None:
    store = bulk.store
    a_failure(store)
    finished = bulk.start(REACTIVATE)
    bulk.finish(finished)
    begun = bulk.start(CANCEL, C.SCHEDULED)
    work = SqlBulkWork(store.new_writer(), store.leases, store.ids)
    closed = ClosedMessages(store.database, store.leases)
    with store.frozen():
        for write in (
            lambda: work.step(begun, store.shard, 10),
            lambda: closed.remove(store.shard, [], store.clock()),
            lambda: closed.forget(store.clock() + 1, 10),
        ):
            with pytest.raises(StoreUnavailable) as refused:
                write()
            assert refused.value.lacks_table
    assert closed.forget(store.clock() + 1, 10) >= 1
