"""Why a message is where it is: every reason, from the situation that causes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.support.asking import AWAY, UNKNOWN, ScriptedAsking
from tests.support.store import POLICY, StoreUnderTest
from tmc_server.domain.catalog import Forward, NewTopic
from tmc_server.domain.checks import CheckAnswer, CheckReason
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.retry import RetryPolicy
from tmc_server.errors import MessageGone, MessageUnknown
from tmc_server.requests.explaining import Explaining
from tmc_server.requests.explanations import Explanation, Why
from tmc_server.requests.lookup import Lookup
from tmc_server.store.alert_outbox import SqlAlertOutbox
from tmc_server.store.engines import ShardMap
from tmc_server.store.episodes import SqlEpisodeStore
from tmc_server.store.reading import Reader
from tmc_server.store.retention import ClosedMessages

READ = QueueLook(consumers=1)
Explain = Callable[[int], Sequence[Explanation]]


@pytest.fixture
def explain(store: StoreUnderTest) -> Explain:
    reader = Reader(ShardMap(store.database, [store.database] * 32))
    alerted = SqlEpisodeStore(store.database, store.shard).open_detail
    explaining = Explaining(store.watch, Lookup(store.watch, reader), reader, store.outlet.look, alerted)
    store.outlet.looks_like = READ

    def ask(number: int) -> Sequence[Explanation]:
        message_id = MessageId(store.topic.number, store.orders.number, store.shard, MessageNumber(number))
        return asyncio.run(explaining.explain(str(message_id), "", ""))[1]

    return ask


def _only(found: Sequence[Explanation]) -> Explanation:
    (explanation,) = found
    return explanation


def _at(ms: int) -> str:
    """As people read it in an explanation: hours and minutes are enough here."""
    return f"{ms // 3_600_000 % 24:02d}:{ms // 60_000 % 60:02d}:{ms // 1_000 % 60:02d} UTC"


def test_a_message_in_its_transaction(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    found = _only(explain(number))
    due_ms = store.clock() + 10_000
    assert (found.why, found.next_ms, found.delivery) == (Why.IN_TRANSACTION, due_ms, None)
    assert _at(due_ms) in found.sentence
    assert "10 s" in found.sentence


def test_a_check_that_decided_nothing(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    store.clock.advance(10)
    store.checking(ScriptedAsking(UNKNOWN)).run_once()
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.CHECK_SCHEDULED, store.message_row(number).due_ms)
    assert "1 check begun; the last answer: ANSWERED" in found.sentence


def test_a_check_that_is_running(store: StoreUnderTest, explain: Explain) -> None:
    number, seen = store.prepared().number, []
    asking = ScriptedAsking(UNKNOWN)
    asking.meanwhile = lambda: seen.append(_only(explain(number)))
    store.clock.advance(10)
    store.checking(asking).run_once()
    assert seen[0].why is Why.CHECK_SCHEDULED
    assert "1 check begun; there is no answer yet" in seen[0].sentence


def test_an_endpoint_that_answers_nonsense(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    store.clock.advance(10)
    store.checking(ScriptedAsking(CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "'MAYBE'"))).run_once()
    found = _only(explain(number))
    assert found.why is Why.CHECK_BROKEN
    assert "'MAYBE'" in found.sentence


@pytest.mark.parametrize(
    "reason", [CheckReason.WRONG_PROTOCOL, CheckReason.NO_TARGET, CheckReason.DENIED, CheckReason.NO_METHOD]
)
def test_a_target_that_does_not_fit_its_service(store: StoreUnderTest, explain: Explain, reason: CheckReason) -> None:
    """Starting the service, which is up, would not help."""
    number = store.prepared().number
    store.clock.advance(10)
    store.checking(ScriptedAsking(CheckAnswer.unknown(reason, "what it said"))).run_once()
    found = _only(explain(number))
    assert found.why is Why.CHECK_TARGET_WRONG
    assert f"{reason.name}: what it said" in found.sentence
    assert "tmc admin set-check" in found.why.value


def test_no_instance_has_the_ledger(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    store.clock.advance(10)
    store.checking(ScriptedAsking(CheckAnswer.unknown(CheckReason.WRONG_LEDGER))).run_once()
    found = _only(explain(number))
    assert found.why is Why.PRODUCER_UNREACHABLE
    assert "no instance that was asked has its ledger" in found.sentence


def test_a_producer_that_cannot_be_reached(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    store.clock.advance(10)
    since = store.clock()
    duty = store.checking(ScriptedAsking(AWAY))
    duty.run_once()
    found = _only(explain(number))
    assert found.why is Why.PRODUCER_UNREACHABLE
    assert _at(since) in found.sentence
    assert "connection refused" in found.sentence


def test_a_service_that_is_left_alone_for_a_moment(store: StoreUnderTest, explain: Explain) -> None:
    """It becomes due while its service, which failed the check of another message, is not asked."""
    store.prepared()
    duty = store.checking(ScriptedAsking(AWAY))
    store.clock.advance(10)
    duty.run_once()
    waits = store.prepared().number
    found: set[Why] = set()
    for _ in range(200):
        store.clock.advance(0.25)
        duty.run_once()
        found.add(_only(explain(waits)).why)
    assert Why.PRODUCER_RESTS in found


def test_checks_that_gave_up(store: StoreUnderTest, explain: Explain) -> None:
    store.set_checks(RetryPolicy(interval_ms=1_000, max_retry=0))
    number = store.prepared().number
    duty = store.checking(ScriptedAsking(UNKNOWN))
    for _ in range(30):
        store.clock.advance(1)
        duty.run_once()
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.CHECK_FAILED, None)
    assert "tmc admin decide" in found.why.value


def test_a_message_that_was_rolled_back(store: StoreUnderTest, explain: Explain) -> None:
    number = store.prepared().number
    store.perform(store.rollback_of(number))
    assert _only(explain(number)).why is Why.ROLLED_BACK


def test_a_message_without_subscribers(store: StoreUnderTest, explain: Explain) -> None:
    store.topic = store.catalog_store.register_topic(
        "test",
        NewTopic(
            name="nobody.listens",
            owner="orders",
            default_tag="default",
            table_index=5,
            spread=1,
            transaction_time_ms=10_000,
            open_limit=1_000,
        ),
    )
    store.watch.run_once()
    found = _only(explain(store.submitted()))
    assert found.why is Why.NO_SUBSCRIBER
    assert "nobody.listens" in found.sentence


def test_a_delayed_delivery(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(delay_ms=60_000)
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.DELAYED, store.clock() + 60_000)


def test_a_delivery_that_is_due(store: StoreUnderTest, explain: Explain) -> None:
    assert _only(explain(store.submitted(room=0))).why is Why.DUE


def test_a_copy_that_was_handed_over(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.AWAITS_ACK, store.row(number).due_ms)
    assert "Attempt 1" in found.sentence


@pytest.mark.parametrize(("times", "words"), [(1, "once"), (3, "3 times")])
def test_a_handler_that_takes_its_time(store: StoreUnderTest, explain: Explain, times: int, words: str) -> None:
    number = store.submitted(room=1)
    for _ in range(times):
        store.perform(store.extend_of(number, 1))
    found = _only(explain(number))
    assert found.why is Why.EXTENDED
    assert words in found.sentence


def test_extensions_are_those_of_the_current_attempt(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.extend_of(number, 1))
    store.clock.advance(3_600)
    store.redeliver(room=1)
    assert _only(explain(number)).why is Why.AWAITS_ACK
    store.perform(store.extend_of(number, 2))
    store.perform(store.nack_of(number, 2))
    assert store.row(number).extended == 0


def test_a_failed_attempt(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1))
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.RETRY_SCHEDULED, store.row(number).due_ms)
    assert "Attempt 1 failed (1 of 4 that count): broken." in found.sentence


@pytest.mark.parametrize("room", [0, 1])
def test_a_queue_that_nobody_reads(store: StoreUnderTest, explain: Explain, room: int) -> None:
    number = store.submitted(room=room)
    store.outlet.looks_like = QueueLook(consumers=0, messages=room)
    found = _only(explain(number))
    assert found.why is Why.NO_CONSUMER
    assert ("1 message in its queue" in found.sentence) == bool(room)


def test_a_broker_that_is_away(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted()
    store.outlet.looks_like = None
    found = _only(explain(number))
    assert (found.why, found.next_ms) == (Why.BROKER_AWAY, None)


def test_a_server_without_the_forwarder(store: StoreUnderTest, explain: Explain) -> None:
    """The server that is asked may have it: what the one says that looks after the message is in its alert."""
    new = NewSubscription(
        topic=store.topic.name, app="coupons", tag="kafka", policy=POLICY, forward=Forward("kafka", "events", "")
    )
    forwarding = store.catalog_store.register_subscription("test", new).number
    store.watch.run_once()
    number = store.submitted()
    assert [each.why for each in explain(number)] == [Why.DUE, Why.DUE]
    outbox = SqlAlertOutbox(store.database, store.shard, store.watch)
    outbox.add("no forwarder", store.topic.number, forwarding, 1, "[kafka] bootstrap is not set")
    outbox.group(["log"], 10)
    to_queue, to_kafka = explain(number)
    assert (to_queue.why, to_kafka.why) == (Why.DUE, Why.NO_FORWARDER)
    assert "[kafka] bootstrap is not set" in to_kafka.sentence


@pytest.mark.parametrize("what", ["topic", "subscription"])
def test_a_pause(store: StoreUnderTest, explain: Explain, what: str) -> None:
    number = store.submitted()
    if what == "topic":
        store.catalog_store.pause_topic("test", store.topic.name, True, "test")
    else:
        store.catalog_store.pause_subscription("test", store.topic.name, "coupons", "", True, "test")
    store.watch.run_once()
    found = _only(explain(number))
    assert found.why is (Why.TOPIC_PAUSED if what == "topic" else Why.SUBSCRIPTION_PAUSED)
    assert what in found.sentence.lower()


def test_a_line(store: StoreUnderTest, explain: Explain) -> None:
    store.take_ordered_topic(OrderMode.STRICT)
    head, follower = store.sent("a", room=1), store.sent("a")
    found = _only(explain(follower))
    head_id = str(MessageId(store.topic.number, store.orders.number, store.shard, MessageNumber(head)))
    assert (found.why, found.waits_for) == (Why.BEHIND, head_id)
    assert f"It waits for message {head_id} of its order key. About that one: Attempt 1" in found.sentence
    store.perform(store.nack_of(head, 1, reject=True))
    blocked = _only(explain(follower))
    assert (blocked.why, blocked.waits_for) == (Why.BLOCKED, head_id)
    store.set_order(OrderMode.SKIP)
    assert _only(explain(follower)).why is Why.TO_BE_RELEASED


def test_a_removed_subscription(store: StoreUnderTest, explain: Explain) -> None:
    scheduled, failed = store.submitted(delay_ms=60_000), store.submitted(room=1)
    store.perform(store.nack_of(failed, 1, reject=True))
    store.catalog_store.pause_subscription("test", store.topic.name, "coupons", "", True, "test")
    store.removed()
    assert {_only(explain(number)).why for number in (scheduled, failed)} == {Why.REMOVED}
    assert "stays FAILED" in _only(explain(failed)).sentence


def test_a_copy_that_reached_nobody(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.give_back_of(number, 1, after_ms=5_000))
    found = _only(explain(number))
    assert found.why is Why.RETRY_SCHEDULED
    assert "did not reach a consumer" in found.sentence


def test_a_delivery_that_was_given_up(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, reject=True))
    found = _only(explain(number))
    assert found.why is Why.FAILED
    assert "after 1 attempt: broken" in found.sentence


def test_one_that_was_given_up_without_a_word(store: StoreUnderTest, explain: Explain) -> None:
    store.begin_handlers()
    number = store.submitted(room=1)
    for _ in range(POLICY.max_retry + 1):
        store.clock.advance(3_600)
        store.redeliver(room=1)
    assert "a handler began and never answered" in _only(explain(number)).sentence


def test_an_error_is_that_of_its_attempt(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1))
    store.set_policy(replace(POLICY, max_age_ms=3_600_000))
    for _ in range(2):
        store.clock.advance(1_800)
        store.redeliver(room=1)
    assert "The last one was not answered; attempt 1 failed: broken." in _only(explain(number)).sentence


def test_what_is_done(store: StoreUnderTest, explain: Explain) -> None:
    acked, cancelled = store.submitted(room=1), store.submitted(room=1)
    store.perform(store.ack_of(acked), store.cancel_of(cancelled))
    assert _only(explain(acked)).why is Why.ACKED
    assert _only(explain(cancelled)).why is Why.CANCELLED


def test_a_message_that_retention_removed(store: StoreUnderTest, explain: Explain) -> None:
    number = store.submitted(room=1)
    store.perform(store.ack_of(number))
    store.clock.advance(86_400)
    closed = ClosedMessages(store.database, store.leases)
    assert closed.remove(store.shard, [MessageNumber(number)], store.clock()) == 1
    with pytest.raises(MessageGone, match="archive"):
        explain(number)


def test_a_message_that_never_was(store: StoreUnderTest, explain: Explain) -> None:
    with pytest.raises(MessageUnknown):
        explain(1 << 60)


def test_every_reason_has_its_situation_here() -> None:
    with open(__file__) as file:
        text = file.read()
    assert [why.name for why in Why if f"Why.{why.name}" not in text] == []
