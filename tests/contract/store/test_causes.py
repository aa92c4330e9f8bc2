"""Every cause by which a copy can end, and what it costs: only a handler's own failure uses up a retry.

CAUSES is data. A new way for a copy to end needs a new row: what happens, on which delivery, to which kind of handler, and
what is expected of the row in the store. What a consumer does is done by the real SDK; its requests reach the store as
operations, as over the wire.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

import tmc_client as tmc
from tests.support.handlers import HandlerBench
from tests.support.messages import a_message
from tests.support.store import DONE, POLICY, StoreUnderTest
from tmc_client.consuming.inbox import Effects
from tmc_client.consuming.turns import BatchSize
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.operations import Consume
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import AttemptStale
from tmc_server.store.claims import claim_due
from tmc_server.store.statements import statements_of
from tmc_server.store.tables import shard_tables
from tmc_storm.eventually import eventually

NO_RETRIES = replace(POLICY, max_retry=0)
"""One failure of a handler, and the message is FAILED."""


class Consumer:
    """Handlers of the SDK behind one copy of one message; `report` brings what they said to the store."""

    def __init__(self, store: StoreUnderTest, number: int, handler: str, redelivered: bool) -> None:
        self.store, self.number, self.handler, self.redelivered = store, number, handler, redelivered
        self.bench = HandlerBench(max_handling=timedelta(seconds=1))
        self.entered, self.may_end = threading.Event(), threading.Event()
        self._reported = 0

    def handles(self, outcome: Callable[[], object], inbox: Any = None, waits: bool = False) -> Consumer:
        def run(_body: Any) -> None:
            self.entered.set()
            assert not waits or self.may_end.wait(30)
            outcome()

        async def run_async(body: Any) -> None:
            run(body)

        def run_batch(bodies: list[Any]) -> None:
            run(bodies)

        size = BatchSize(max_messages=1, max_wait_s=0.0) if self.handler == "batch" else None
        handlers = {"asyncio": run_async, "batch": run_batch}
        if inbox is not None:
            inbox.is_async = self.handler == "asyncio"
        self.bench.start(handlers.get(self.handler, run), inbox, batch=size)
        return self

    def receives(self) -> Consumer:
        body = {"content_type": "application/json", "body": b"1"}
        self.bench.arrive(
            a_message(self.number, attempt=self.store.row(self.number).attempt, redelivered=self.redelivered, **body)
        )
        return self

    def report(self) -> None:
        """All that was said until now reaches the center."""
        said = self.bench.center.sent[self._reported :]
        self._reported += len(said)
        self.store.perform(*(self._operation(name, request) for name, request in said))

    def answers(self) -> None:
        eventually(lambda: self.bench.handling.wait_idle(0) and len(self.bench.center.sent) > self._reported)
        self.report()

    def _operation(self, name: str, request: Any) -> Consume:
        if name == "AckMany":
            return self.store.ack_of(self.number, request.attempt)
        if name == "ExtendMany":
            return self.store.extend_of(self.number, request.attempt, request.extend_ms, request.run)
        if request.not_begun:
            return self.store.give_back_of(self.number, request.attempt)
        after_ms = request.retry_after_ms if request.HasField("retry_after_ms") else None
        return self.store.nack_of(self.number, request.attempt, reject=request.reject, retry_after_ms=after_ms)

    def close(self) -> None:
        self.may_end.set()
        self.bench.stop()


class Inbox:
    """Fails when it is opened, or when it is committed."""

    stays_in_thread = is_async = False

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at

    @contextmanager
    def once_each(self, messages: Sequence[tmc.Message]) -> Iterator[Effects]:
        if self.fails_at == "open":
            raise OSError("the database is down")
        yield Effects(handle=None, messages=messages)
        raise tmc.errors.InboxDown("the connection is lost")

    @asynccontextmanager
    async def once_async(self, messages: Sequence[tmc.Message]) -> AsyncIterator[Effects]:
        with self.once_each(messages) as effects:
            yield effects


def _nothing() -> None:
    """The handler does its work."""


def _raise(exc: BaseException) -> Callable[[], object]:
    def outcome() -> None:
        raise exc

    return outcome


# -- what happens --------------------------------------------------------------------------------------------------------

Happens = Callable[[StoreUnderTest, Consumer], None]


def it_raises(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_raise(RuntimeError("broken"))).receives().answers()


def it_rejects(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_raise(tmc.Reject("never"))).receives().answers()


def it_says_later(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_raise(tmc.Later(timedelta(seconds=5)))).receives().answers()


def it_cannot_read_the_body(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_raise(tmc.CodecError("no JSON"))).receives().answers()


def it_exits_the_interpreter(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_raise(tmc.errors.CenterFault("as any error of ours"))).receives().answers()


def it_runs_too_long(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing, waits=True).receives()
    assert consumer.entered.wait(30)
    consumer.bench.clock.now += 2
    consumer.bench.handling.give_up_overdue()
    consumer.answers()


def its_inbox_cannot_be_opened(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing, Inbox("open")).receives().answers()


def its_inbox_is_lost_at_the_commit(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing, Inbox("commit")).receives().answers()


def it_stops_before_a_handler_began(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing)
    consumer.bench.handling.begin_no_more()
    consumer.receives()
    consumer.bench.handling.give_back_waiting()
    consumer.answers()


def it_stops_and_its_handler_finishes(_store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing, waits=True).receives()
    assert consumer.entered.wait(30)
    consumer.bench.handling.begin_no_more()
    consumer.bench.handling.give_back_waiting()
    consumer.may_end.set()
    consumer.answers()


def it_dies_before_a_handler_began(store: StoreUnderTest, _consumer: Consumer) -> None:
    store.clock.advance(3_600)
    store.redeliver(room=None)


def it_dies_with_the_copy_in_its_prefetch(store: StoreUnderTest, consumer: Consumer) -> None:
    store.perform(store.extend_of(consumer.number, store.row(consumer.number).attempt, 20_000))
    store.clock.advance(3_600)
    store.redeliver(room=None)


def it_dies_in_its_handler(store: StoreUnderTest, consumer: Consumer) -> None:
    """A copy that was delivered before is begun at the center first; others once their handlers have run for a second."""
    consumer.handles(_nothing, waits=True).receives()
    assert consumer.entered.wait(30)
    consumer.bench.clock.now += 10
    consumer.bench.handling.keeper.run_once()
    consumer.report()
    store.clock.advance(3_600)
    store.redeliver(room=None)


def it_dies_at_once_in_its_handler(store: StoreUnderTest, consumer: Consumer) -> None:
    consumer.handles(_nothing, waits=True).receives()
    assert consumer.entered.wait(30)
    consumer.report()
    store.clock.advance(3_600)
    store.redeliver(room=None)


def another_run_of_it_is_under_way(store: StoreUnderTest, consumer: Consumer) -> None:
    attempt = store.row(consumer.number).attempt
    store.perform(store.extend_of(consumer.number, attempt, 60_000, run=1))
    consumer.handles(_nothing)
    consumer.bench.center.hold = True
    consumer.receives()
    eventually(lambda: consumer.bench.center.open)
    ((_, asked),) = consumer.bench.center.sent
    (refusal,) = store.perform(store.extend_of(consumer.number, asked.attempt, asked.extend_ms, asked.run))
    assert isinstance(refusal, AttemptStale)
    consumer.bench.center.open[0].set_exception(tmc.Decided(str(refusal)))
    assert consumer.bench.handling.wait_idle(30)
    assert not consumer.entered.is_set()
    store.perform(store.ack_of(consumer.number))  # by the other run


def the_outlet_gives_it_back(store: StoreUnderTest, consumer: Consumer) -> None:
    store.perform(store.give_back_of(consumer.number, store.row(consumer.number).attempt, 1_000))


def it_is_given_back_while_a_handler_runs(store: StoreUnderTest, consumer: Consumer) -> None:
    attempt = store.row(consumer.number).attempt
    store.perform(store.extend_of(consumer.number, attempt, 60_000, run=1))
    before = store.row(consumer.number)
    store.perform(store.give_back_of(consumer.number, attempt))
    assert store.row(consumer.number) == before


def a_consumer_that_stops_leaves_it_to_the_run_that_has_begun(store: StoreUnderTest, consumer: Consumer) -> None:
    attempt = store.row(consumer.number).attempt
    store.perform(store.extend_of(consumer.number, attempt, 60_000, run=1))
    before = store.row(consumer.number)
    (refusal,) = store.perform(store.nack_of(consumer.number, attempt, retry_after_ms=0, run=2))
    assert isinstance(refusal, AttemptStale)
    assert store.row(consumer.number) == before
    assert store.perform(store.nack_of(consumer.number, attempt, retry_after_ms=0, run=1)) == [DONE]


def _twenty_hours_of(store: StoreUnderTest, number: int, look: QueueLook) -> int:
    """Redeliver every hour while the queue looks like this. Returns: how many copies there were."""
    store.outlet.looks_like = look
    for _ in range(20):
        store.clock.advance(3_600)
        store.redeliver(room=None)
    return len(store.delivered_attempts(number))


def the_copy_vanishes(store: StoreUnderTest, consumer: Consumer) -> None:
    assert _twenty_hours_of(store, consumer.number, QueueLook(consumers=1)) == 21


def the_copy_vanishes_and_nobody_consumes(store: StoreUnderTest, consumer: Consumer) -> None:
    assert _twenty_hours_of(store, consumer.number, QueueLook(consumers=0)) == 21


def it_is_not_confirmed(store: StoreUnderTest, consumer: Consumer) -> None:
    on_their_way = {(store.shard, MessageNumber(consumer.number))}
    assert _twenty_hours_of(store, consumer.number, QueueLook(consumers=1, unwritten=on_their_way)) == 1


def it_waits_in_its_queue(store: StoreUnderTest, consumer: Consumer) -> None:
    assert _twenty_hours_of(store, consumer.number, QueueLook(consumers=0, messages=1)) == 1


def nothing_has_room(store: StoreUnderTest, _consumer: Consumer) -> None:
    for _ in range(20):
        store.clock.advance(3_600)
        store.redeliver(room=0)


def its_server_dies(store: StoreUnderTest, _consumer: Consumer) -> None:
    assert store.due.rescue(store.shard, {7: 0}) == 1


def its_target_refuses_it(store: StoreUnderTest, consumer: Consumer) -> None:
    store.perform(store.nack_of(consumer.number, store.row(consumer.number).attempt, error="the exchange refuses"))


def its_target_can_never_take_it(store: StoreUnderTest, consumer: Consumer) -> None:
    store.perform(store.nack_of(consumer.number, store.row(consumer.number).attempt, error="too large", reject=True))


# -- the table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cause:
    """delivery: stream, rabbitmq, forward or any.  handler: of which kind; "": there is none.  counts: uses up a retry.

    redelivered: the copy was with a consumer before.  state: afterwards, of a message that has one attempt.
    """

    happens: Happens
    delivery: str
    handler: str = ""
    state: C
    counts: bool
    redelivered: bool = False

    def __str__(self) -> str:
        again = "-redelivered" if self.redelivered else ""
        return "-".join(filter(None, (self.happens.__name__, self.delivery, self.handler))) + again


HANDLERS = ("blocking", "asyncio", "batch")
_OF_HANDLERS: tuple[tuple[Happens, C, bool], ...] = (
    (it_raises, C.FAILED, True),
    (it_rejects, C.FAILED, True),
    (it_cannot_read_the_body, C.FAILED, True),
    (it_exits_the_interpreter, C.FAILED, True),
    (it_runs_too_long, C.FAILED, True),
    (it_dies_in_its_handler, C.FAILED, True),
    (it_dies_at_once_in_its_handler, C.SCHEDULED, False),
    (it_says_later, C.SCHEDULED, False),
    (its_inbox_cannot_be_opened, C.SCHEDULED, False),
    (its_inbox_is_lost_at_the_commit, C.SCHEDULED, False),
    (it_stops_before_a_handler_began, C.SCHEDULED, False),
    (it_stops_and_its_handler_finishes, C.ACKED, False),
)
CAUSES = (
    *(
        Cause(happens=happens, delivery="any", handler=handler, state=state, counts=counts)
        for happens, state, counts in _OF_HANDLERS
        for handler in HANDLERS
        if not (handler == "asyncio" and happens is it_runs_too_long)  # its coroutine is cancelled: test_consumer
    ),
    *(
        Cause(
            happens=it_dies_at_once_in_its_handler,
            delivery=delivery,
            handler=handler,
            state=C.FAILED,
            counts=True,
            redelivered=True,
        )
        for delivery in ("stream", "rabbitmq")
        for handler in HANDLERS
    ),
    *(
        Cause(
            happens=another_run_of_it_is_under_way,
            delivery="rabbitmq",
            handler=handler,
            state=C.ACKED,
            counts=False,
            redelivered=True,
        )
        for handler in HANDLERS
    ),
    Cause(happens=it_dies_before_a_handler_began, delivery="stream", state=C.SCHEDULED, counts=False),
    Cause(happens=it_dies_before_a_handler_began, delivery="rabbitmq", state=C.SCHEDULED, counts=False),
    Cause(happens=it_dies_with_the_copy_in_its_prefetch, delivery="stream", state=C.SCHEDULED, counts=False),
    Cause(happens=it_dies_with_the_copy_in_its_prefetch, delivery="rabbitmq", state=C.SCHEDULED, counts=False),
    Cause(
        happens=the_outlet_gives_it_back, delivery="stream", state=C.SCHEDULED, counts=False
    ),  # ended before it was written
    Cause(
        happens=the_outlet_gives_it_back, delivery="rabbitmq", state=C.SCHEDULED, counts=False
    ),  # returned, nacked, cut off
    Cause(happens=the_outlet_gives_it_back, delivery="forward", state=C.SCHEDULED, counts=False),  # its broker is down
    Cause(happens=it_is_given_back_while_a_handler_runs, delivery="rabbitmq", state=C.SCHEDULED, counts=True),
    Cause(
        happens=a_consumer_that_stops_leaves_it_to_the_run_that_has_begun,
        delivery="rabbitmq",
        state=C.SCHEDULED,
        counts=False,
    ),
    Cause(
        happens=the_copy_vanishes, delivery="rabbitmq", state=C.SCHEDULED, counts=False
    ),  # purge, TTL, drop-head, its limit
    Cause(happens=the_copy_vanishes_and_nobody_consumes, delivery="rabbitmq", state=C.SCHEDULED, counts=False),
    Cause(
        happens=it_is_not_confirmed, delivery="rabbitmq", state=C.SCHEDULED, counts=True
    ),  # no majority: it may arrive
    Cause(happens=it_is_not_confirmed, delivery="forward", state=C.SCHEDULED, counts=True),
    Cause(happens=it_is_not_confirmed, delivery="stream", state=C.SCHEDULED, counts=True),  # a slow reader
    Cause(happens=it_waits_in_its_queue, delivery="rabbitmq", state=C.SCHEDULED, counts=True),
    Cause(happens=nothing_has_room, delivery="any", state=C.SCHEDULED, counts=True),
    Cause(happens=its_server_dies, delivery="stream", state=C.SCHEDULED, counts=False),
    Cause(happens=its_server_dies, delivery="rabbitmq", state=C.SCHEDULED, counts=False),
    Cause(happens=its_target_refuses_it, delivery="forward", state=C.FAILED, counts=True),
    Cause(happens=its_target_can_never_take_it, delivery="forward", state=C.FAILED, counts=True),
)
"""counts of a row that is still with its first copy: that copy would count if a handler failed on it."""


@pytest.fixture
def consumers() -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(*arguments: Any) -> Consumer:
        made.append(Consumer(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_only_a_failure_of_a_handler_uses_up_a_retry(
    store: StoreUnderTest, consumers: Callable[..., Consumer], cause: Cause
) -> None:
    store.set_policy(NO_RETRIES)
    number = store.submitted(room=1)
    cause.happens(store, consumers(store, number, cause.handler, cause.redelivered))
    row = store.row(number)
    assert row.state == cause.state
    if row.state == C.SCHEDULED:
        handed_over_again = row.attempt > 1
        assert row.tried == int(cause.counts or handed_over_again)
        assert [alert.kind for alert in store.alerted("delivery failed")] == []
    elif row.state == C.FAILED:
        assert cause.counts
        assert len(store.alerted("delivery failed")) == 1


def test_the_table_is_about_every_delivery_and_every_kind_of_handler() -> None:
    assert len(CAUSES) >= 40
    assert {cause.delivery for cause in CAUSES} == {"stream", "rabbitmq", "forward", "any"}
    assert {cause.handler for cause in CAUSES} == {"", *HANDLERS}
    assert len(set(map(str, CAUSES))) == len(CAUSES)


def test_an_age_limit_ends_what_uses_up_no_retries(store: StoreUnderTest) -> None:
    store.set_policy(RetryPolicy(interval_ms=10_000, max_retry=100, max_age_ms=60_000))
    postponed, lost = store.submitted(room=1), store.submitted(room=1)
    for attempt in range(1, 7):
        store.perform(store.nack_of(postponed, attempt, retry_after_ms=10_000))
        store.clock.advance(10)
        store.redeliver(room=None)
    assert store.consumption_state(postponed) is C.FAILED
    for _ in range(3):
        store.clock.advance(60)
        store.redeliver(room=None)
    assert store.consumption_state(lost) is C.FAILED


def test_the_alert_names_the_crash(store: StoreUnderTest) -> None:
    store.set_policy(NO_RETRIES)
    number = store.submitted(room=1)
    store.begin_handlers()
    store.clock.advance(10)
    store.redeliver(room=1)
    (alert,) = store.alerted("delivery failed")
    assert alert.number == number
    assert alert.detail == (
        "given up after attempt 1: a handler began and never answered: its process ended, or lost the center"
    )


def test_copies_that_vanish_are_alerted_once_they_are_a_minute_old(store: StoreUnderTest) -> None:
    first, second = store.submitted(room=1), store.submitted(room=1)
    for _ in range(2):
        store.clock.advance(20)
        store.redeliver(room=None)
    assert store.alerted("copies vanish") == []
    store.clock.advance(120)
    store.redeliver(room=None)
    (alert,) = store.alerted("copies vanish")
    assert alert.number in (first, second)
    assert "policy of the broker" in alert.detail


def test_a_message_that_cannot_be_read_stops_no_other(store: StoreUnderTest) -> None:
    numbers = [store.submitted() for _ in range(3)]
    table = shard_tables(store.shard).message
    with store.database.transaction() as connection:
        connection.execute(table.update().where(table.c.id == numbers[1]).values(headers='{"trail": "xx'))
    for _ in range(6):
        store.clock.advance(120)
        store.redeliver(room=None)
        for copy in store.outlet.delivered:
            store.perform(store.ack_of(copy.number))
    assert {copy.number for copy in store.outlet.delivered} == {numbers[0], numbers[2]}
    assert numbers[1] in {alert.number for alert in store.alerted("copies vanish")}
    assert store.consumption_state(numbers[1]) is C.SCHEDULED  # not given up


def test_failures_of_a_claim_that_is_partly_won_are_alerted(store: StoreUnderTest) -> None:
    """Nacked rows are past their age; one of them is acked between the look and the claim."""
    store.set_policy(replace(POLICY, max_age_ms=60_000))
    numbers = [store.submitted(room=1) for _ in range(3)]
    for number in numbers:
        store.perform(store.nack_of(number, 1))
    store.clock.advance(3_600)
    which = {"subscription": store.subscription.number, "now": store.clock(), "limit": 10}
    with store.database.reading() as connection:
        read = connection.execute(statements_of(store.shard).due_consumptions, which).fetchall()
    store.perform(store.ack_of(numbers[0]))
    lease = store.leases.held()[store.shard]
    with store.database.connection() as connection, store.writer.transaction(connection, store.shard) as tx:
        assert claim_due(tx, store.subscription, read, QueueLook(), lease.guard).failed == 2
    assert {alert.number for alert in store.alerted("delivery failed")} == set(numbers[1:])
