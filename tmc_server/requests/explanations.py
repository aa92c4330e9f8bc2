"""Why a message is where it is: one explanation for the message, or one for each of its deliveries.

Pure: what is known of rows, catalog and queues goes in, sentences come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import assert_never

from tmc_server.domain.catalog import Subscription, Topic
from tmc_server.domain.checks import CheckReason
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.message import MessageState
from tmc_server.domain.views import AttemptView, ConsumptionView, MessageView


class Why(Enum):
    """Reasons, by the names that programs see; docs/why.md lists them. The value is what an operator can do."""

    # A message
    IN_TRANSACTION = "Nothing: it is checked after the topic's transaction time."
    CHECK_SCHEDULED = "Nothing: it is checked then. `tmc admin check-now` checks it at once."
    PRODUCER_UNREACHABLE = "Start the producer's service, or correct the target (`tmc admin get-check`)."
    PRODUCER_RESTS = "Find out why the service fails: `tmc admin check-now` shows its answer."
    CHECK_FAILED = "Decide by hand (`tmc admin decide`), or check it again (`tmc admin reactivate-check`)."
    ROLLED_BACK = "Nothing: its producer did not commit."
    NO_SUBSCRIBER = "Subscribe before messages are sent; send this one again if somebody needs it."
    # A delivery
    DELAYED = "Nothing: its producer asked for the delay."
    DUE = "Nothing: it is delivered with the next pass. If this lasts, look at `tmc admin list-servers`."
    RETRY_SCHEDULED = "Read the error; the message is delivered again at that time."
    AWAITS_ACK = "Nothing: a consumer has it, or gets it from the queue. Without an ack it is delivered again then."
    IN_HANDLER = "Nothing: the handler keeps asking for more time."
    NO_CONSUMER = "Start the consumer, and check its app, tag and topics."
    BROKER_AWAY = "Look at RabbitMQ: it is away, blocks publishers, or does not answer."
    PAUSED = "`tmc admin resume-subscription` or `resume-topic`."
    BEHIND = "Nothing: it is delivered after the ack of that message."
    BLOCKED = "`tmc admin reactivate` or `cancel` the message that it waits for."
    FAILED = "Mend the cause, then `tmc admin reactivate`; or `tmc admin cancel`."
    ACKED = "Nothing: it is done."
    CANCELLED = "Nothing: it is not delivered any more."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """delivery: None: about the message itself.  next_ms: when something happens by itself; None: never, or not known."""

    delivery: ConsumptionView | None
    why: Why
    sentence: str
    next_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is known of one delivery. look: at its queue; None: unknown.  error: of its last failed attempt, if any.

    head: of its line, while it waits; None: not found.
    """

    view: ConsumptionView
    subscription: Subscription
    look: QueueLook | None
    error: AttemptView | None
    head: ConsumptionView | None


def at(ms: int) -> str:
    """A time for people, to the second."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def explain_message(message: MessageView, topic: Topic, deliveries: int, now: int) -> Explanation | None:
    """None: its deliveries explain it."""
    check = message.check

    def because(why: Why, sentence: str, next_ms: int | None = None) -> Explanation:
        return Explanation(delivery=None, why=why, sentence=sentence, next_ms=next_ms)

    match message.state:
        case MessageState.PREPARED:
            due_ms = check.due_ms or now
            if check.unreached_ms is not None:
                rests = check.last_answer.startswith(CheckReason.NOT_ASKED.name)
                return because(
                    Why.PRODUCER_RESTS if rests else Why.PRODUCER_UNREACHABLE,
                    f"Its producer has not decided, and could not be asked since {at(check.unreached_ms)}:"
                    f" {check.last_answer}. It is asked again at {at(due_ms)}.",
                    due_ms,
                )
            if check.attempt == 0:
                return because(
                    Why.IN_TRANSACTION,
                    f"Its producer has not decided yet. It is checked at {at(due_ms)},"
                    f" {topic.transaction_time_ms / 1000:g} s after it was prepared.",
                    due_ms,
                )
            return because(
                Why.CHECK_SCHEDULED,
                f"Its producer has not decided. Check {check.attempt} was answered: {check.last_answer}."
                f" It is checked again at {at(due_ms)}.",
                due_ms,
            )
        case MessageState.CHECK_FAILED:
            return because(
                Why.CHECK_FAILED,
                f"Its producer has not decided, and {check.checked} checks were not answered with a decision:"
                f" {check.last_answer}.",
            )
        case MessageState.ROLLED_BACK:
            return because(Why.ROLLED_BACK, f"It was rolled back at {at(message.decided_ms or 0)}.")
        case MessageState.COMMITTED:
            if deliveries:
                return None
            return because(
                Why.NO_SUBSCRIBER,
                f"Nobody was subscribed to {topic.name} when it was submitted at {at(message.decided_ms or 0)}.",
            )
        case _:
            assert_never(message.state)


def explain_delivery(of: Delivery, topic: Topic, now: int) -> Explanation:
    view = of.view

    def because(why: Why, sentence: str, next_ms: int | None = None) -> Explanation:
        return Explanation(delivery=view, why=why, sentence=sentence, next_ms=next_ms)

    match view.state:
        case ConsumptionState.ACKED:
            return because(Why.ACKED, f"It was acked at {at(view.closed_ms or 0)}, after {_attempts(view.attempt)}.")
        case ConsumptionState.CANCELLED:
            return because(
                Why.CANCELLED,
                f"It was cancelled at {at(view.closed_ms or 0)}: by an operator, or the subscription was removed.",
            )
        case ConsumptionState.FAILED:
            error = of.error.error if of.error is not None else "no attempt was acked"
            return because(
                Why.FAILED,
                f"It was given up at {at(view.closed_ms or 0)}, after {_attempts(view.attempt)}: {error}.",
            )
        case ConsumptionState.WAITING:
            blocked = of.head is not None and of.head.state is ConsumptionState.FAILED
            return because(
                Why.BLOCKED if blocked else Why.BEHIND,
                f"It waits for message {view.waits_for} of its order key, which "
                + ("has FAILED." if blocked else "is not acked yet."),
            )
        case ConsumptionState.SCHEDULED:
            return _explain_scheduled(of, topic, now)
        case _:
            assert_never(view.state)


def _explain_scheduled(of: Delivery, topic: Topic, now: int) -> Explanation:
    view, look = of.view, of.look
    due_ms = view.due_ms or now

    def because(why: Why, sentence: str, next_ms: int | None = due_ms) -> Explanation:
        return Explanation(delivery=view, why=why, sentence=sentence, next_ms=next_ms)

    if topic.paused or of.subscription.paused:
        what = f"topic {topic.name}" if topic.paused else "the subscription"
        return because(Why.PAUSED, f"Nothing is delivered: {what} is paused.", None)
    if view.attempt == 0 and due_ms > now:
        return because(Why.DELAYED, f"It is delayed until {at(due_ms)}.")
    if look is None:
        return because(Why.BROKER_AWAY, "Nothing can be delivered now: the broker cannot be reached.", None)
    handed_over = view.tried_ms is not None
    if look.consumers == 0 and of.subscription.forward is None and (look.messages or not handed_over):
        queued = f" {look.messages} messages wait in its queue." if look.messages else ""
        since = f" Its copy was handed over at {at(view.tried_ms)}." if view.tried_ms is not None else ""
        return because(Why.NO_CONSUMER, f"Nobody reads this subscription's messages.{queued}{since}")
    if due_ms <= now:
        return because(Why.DUE, f"It has been due since {at(due_ms)}.")
    if view.extended:
        return because(
            Why.IN_HANDLER,
            f"A handler has it; its consumer extended attempt {view.attempt} {_times(view.extended)}."
            f" Without an ack it is delivered again at {at(due_ms)}.",
        )
    if view.tried_ms is not None:
        return because(
            Why.AWAITS_ACK,
            f"Attempt {view.attempt} was handed over at {at(view.tried_ms)}. Without an ack it is delivered again at"
            f" {at(due_ms)}.",
        )
    error = f": {of.error.error}" if of.error is not None and of.error.attempt == view.attempt else ""
    return because(Why.RETRY_SCHEDULED, f"Attempt {view.attempt} failed{error}. It is delivered again at {at(due_ms)}.")


def _attempts(count: int) -> str:
    return "1 attempt" if count == 1 else f"{count} attempts"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
