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
from tmc_server.domain.ordering import releases_next
from tmc_server.domain.views import AttemptView, CheckView, ConsumptionView, MessageView


class Why(Enum):
    """Reasons, by the names that programs see; docs/why.md lists them. The value is what an operator can do."""

    # A message
    IN_TRANSACTION = "Nothing: it is checked after the topic's transaction time."
    CHECK_SCHEDULED = "Nothing: it is checked then. `tmc admin check-now` checks it at once."
    PRODUCER_UNREACHABLE = (
        "Start the producer's service, with the database that it prepared the message with, or correct the target "
        "(`tmc admin get-check`)."
    )
    PRODUCER_RESTS = "Find out why the service fails: `tmc admin check-now` shows its answer."
    CHECK_TARGET_WRONG = "Correct the target (`tmc admin set-check`), or the service; docs/checks.md lists the reasons."
    CHECK_BROKEN = "Correct the check endpoint: `tmc admin check-now` shows its answer."
    CHECK_FAILED = "Decide by hand (`tmc admin decide`), or check it again (`tmc admin reactivate-check`)."
    ROLLED_BACK = "Nothing: its producer did not commit."
    NO_SUBSCRIBER = "Subscribe before messages are sent; send this one again if somebody needs it."
    # A delivery
    DELAYED = "Nothing: its producer asked for the delay. `tmc admin deliver-now` ends it."
    DUE = (
        "Nothing, for a second. If it stays due, its consumers are busy, or no server works (`tmc admin list-servers`)."
    )
    RETRY_SCHEDULED = "Read the error; the message is delivered again then, or at once by `tmc admin deliver-now`."
    AWAITS_ACK = "Nothing: a consumer has it, or gets it from the queue. Without an ack it is delivered again then."
    EXTENDED = "Nothing: it is in a handler, or waits for a free one. If this lasts, read the consumer's log."
    NO_CONSUMER = "Start the consumer, and check its app, tag and topics."
    BROKER_AWAY = "Look at the broker, or the webhook: it is away, blocks, or does not answer. An alert says more."
    NO_FORWARDER = "Install and configure the forwarder on all servers; docs/operating.md says how."
    TOPIC_PAUSED = "`tmc admin resume-topic`."
    SUBSCRIPTION_PAUSED = "`tmc admin resume-subscription`."
    BEHIND = "Whatever helps the message that it waits for."
    BLOCKED = "`tmc admin reactivate` or `cancel` the message that it waits for."
    TO_BE_RELEASED = "Nothing: servers release it within seconds. `tmc admin repair-order` does it at once."
    REMOVED = "Nothing: it is not delivered any more. Subscribe again for later messages."
    FAILED = "Correct the cause, then `tmc admin reactivate`; or `tmc admin cancel`."
    ACKED = "Nothing: it is done."
    CANCELLED = "Nothing: it is not delivered any more."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """delivery: None: about the message itself.  next_ms: when something happens by itself; None: never, or not known.

    waits_for: id of the message that must be acked first; "": none.
    """

    why: Why
    sentence: str
    next_ms: int | None = None
    delivery: ConsumptionView | None = None
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is known of one delivery. look: at its queue; None: unknown, or it does not matter.

    error: of its last failed attempt, if any.  waits_for, head: while it waits, the id of the message that must be acked
    first, and its delivery to the same subscription; None: it has none, or it is gone.  unforwardable: what the server
    that looks after it says it cannot do; "": nothing.
    """

    view: ConsumptionView
    topic: Topic
    subscription: Subscription
    look: QueueLook | None
    error: AttemptView | None
    waits_for: str = ""
    head: Delivery | None = None
    unforwardable: str = ""


_END_OF_TIME_S = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def at(ms: int) -> str:
    """A time for people, to the second; what is beyond the year 9999 is the end of that."""
    return datetime.fromtimestamp(min(ms / 1000, _END_OF_TIME_S), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def explain_message(message: MessageView, topic: Topic, deliveries: int, now: int) -> Explanation | None:
    """Explain a message; None if its deliveries explain it."""
    match message.state:
        case MessageState.PREPARED:
            return _explain_undecided(message.check, message.created_ms, now)
        case MessageState.CHECK_FAILED:
            answer = _quoted(message.check.last_answer)
            checks = _counted(message.check.checked, "check")
            return Explanation(
                why=Why.CHECK_FAILED,
                sentence=f"Its producer has not decided, and {checks} did not decide it either. The last answer: {answer}.",
            )
        case MessageState.ROLLED_BACK:
            return Explanation(why=Why.ROLLED_BACK, sentence=f"It was rolled back{_when(message.decided_ms)}.")
        case MessageState.COMMITTED:
            if deliveries:
                return None
            nobody = f"Nobody was subscribed to {topic.name} when it was submitted{_when(message.decided_ms)}."
            return Explanation(why=Why.NO_SUBSCRIBER, sentence=nobody)
        case _:
            assert_never(message.state)


_OF_TARGET = {
    CheckReason.NO_TARGET,
    CheckReason.REFUSED_TARGET,
    CheckReason.WRONG_PROTOCOL,
    CheckReason.DENIED,
    CheckReason.NO_METHOD,
    CheckReason.NO_REFLECTION,
    CheckReason.BAD_DESCRIPTION,
}
"""Starting the service does not help."""


def _explain_undecided(check: CheckView, created_ms: int, now: int) -> Explanation:
    due_ms = check.due_ms or now
    again = f"It is checked again at {at(due_ms)}."
    if check.unreached_ms is not None:
        reason = _reason_of(check.last_answer)
        if reason in _OF_TARGET:
            why, what = Why.CHECK_TARGET_WRONG, "its service cannot be asked as its topic says, since"
        elif reason is CheckReason.NOT_NOW:
            why, what = Why.CHECK_SCHEDULED, "its service has been unable to know since"
        elif reason is CheckReason.WRONG_LEDGER:
            why, what = Why.PRODUCER_UNREACHABLE, "no instance that was asked has its ledger, since"
        elif reason is not None and not reason.of_service:
            why, what = Why.CHECK_BROKEN, "its check endpoint has given no valid answer since"
        elif reason is CheckReason.NOT_ASKED:
            why, what = Why.PRODUCER_RESTS, "its service could not be asked since"
        else:
            why, what = Why.PRODUCER_UNREACHABLE, "its service could not be asked since"
        answer = _quoted(check.last_answer)
        sentence = f"Its producer has not decided, and {what} {at(check.unreached_ms)}: {answer}. {again}"
        return Explanation(why=why, sentence=sentence, next_ms=due_ms)
    if check.attempt == 0:
        after = f"{(due_ms - created_ms) / 1000:g} s after it was prepared"
        first = (
            f"It is checked at {at(due_ms)}, {after}."
            if due_ms > now
            else f"It has been due for a check since {at(due_ms)}."
        )
        sentence = f"Its producer has not decided yet. {first}"
        return Explanation(why=Why.IN_TRANSACTION, sentence=sentence, next_ms=due_ms)
    begun = _counted(check.attempt, "check")
    answer = f"the last answer: {_quoted(check.last_answer)}" if check.last_answer else "there is no answer yet"
    sentence = f"Its producer has not decided. {begun} begun; {answer}. {again}"
    return Explanation(why=Why.CHECK_SCHEDULED, sentence=sentence, next_ms=due_ms)


def explain_delivery(of: Delivery, now: int) -> Explanation:
    """Return why one delivery is where it is."""
    view = of.view
    removed_ms = of.subscription.removed_ms
    match view.state:
        case ConsumptionState.ACKED:
            return _because(
                of, Why.ACKED, f"It was acked{_when(view.closed_ms)}, after {_counted(view.attempt, 'attempt')}."
            )
        case ConsumptionState.CANCELLED:
            by = "by an operator, or because the subscription was removed"
            return _because(of, Why.CANCELLED, f"It was cancelled{_when(view.closed_ms)}, {by}.")
        case ConsumptionState.SCHEDULED | ConsumptionState.WAITING | ConsumptionState.FAILED if removed_ms is not None:
            then = (
                "it stays FAILED"
                if view.state is ConsumptionState.FAILED
                else "this delivery is cancelled when it is due"
            )
            return _because(of, Why.REMOVED, f"The subscription was removed at {at(removed_ms)}: {then}.")
        case ConsumptionState.FAILED:
            return _because(of, Why.FAILED, _given_up(of))
        case ConsumptionState.WAITING:
            return _explain_waiting(of, now)
        case ConsumptionState.SCHEDULED:
            return _explain_scheduled(of, now)
        case _:
            assert_never(view.state)


def _because(of: Delivery, why: Why, sentence: str, next_ms: int | None = None) -> Explanation:
    return Explanation(why=why, sentence=sentence, next_ms=next_ms, delivery=of.view, waits_for=of.waits_for)


def _given_up(of: Delivery) -> str:
    start = f"It was given up{_when(of.view.closed_ms)}, after {_counted(of.view.attempt, 'attempt')}"
    if of.error is None:
        return f"{start}: none was acked."
    if of.error.attempt == of.view.attempt:
        return f"{start}: {_quoted(of.error.error)}."
    return f"{start}. The last one was not answered; attempt {of.error.attempt} failed: {_quoted(of.error.error)}."


def _explain_waiting(of: Delivery, now: int) -> Explanation:
    head = of.head
    if head is None or releases_next(head.view.state, of.subscription.order):
        return _because(
            of, Why.TO_BE_RELEASED, "It no longer has to wait, and is released when its order key is examined."
        )
    wait = f"It waits for message {of.waits_for} of its order key"
    if head.view.state is ConsumptionState.FAILED:
        return _because(of, Why.BLOCKED, f"{wait}, which has FAILED.")
    of_head = explain_delivery(head, now)
    return _because(of, Why.BEHIND, f"{wait}. About that one: {of_head.sentence} {of_head.why.value}", of_head.next_ms)


def _explain_scheduled(of: Delivery, now: int) -> Explanation:
    view, look = of.view, of.look
    due_ms = view.due_ms or now
    again = f"Without an ack it is delivered again at {at(due_ms)}."
    with_consumer = ""
    if view.tried_ms is not None or view.extended:
        with_consumer = f" Attempt {view.attempt} is on its way or with a consumer; its ack counts."
    if of.topic.paused:
        also = ", and so is the subscription" if of.subscription.paused else ""
        return _because(of, Why.TOPIC_PAUSED, f"Topic {of.topic.name} is paused{also}.{with_consumer}")
    if of.subscription.paused:
        return _because(of, Why.SUBSCRIPTION_PAUSED, f"The subscription is paused.{with_consumer}")
    if view.attempt == 0 and due_ms > now:
        return _because(of, Why.DELAYED, f"It is delayed until {at(due_ms)}.", due_ms)
    if of.unforwardable and due_ms <= now:
        return _because(of, Why.NO_FORWARDER, f"It cannot be forwarded: {of.unforwardable}.")
    if look is None:
        forward = of.subscription.forward
        where = (
            "webhook is away or busy, or rests after that"
            if forward and forward.is_webhook
            else "Kafka is away or refuses it, or rests after that"
            if forward and forward.kind == "kafka"
            else "broker cannot be reached"
        )
        return _because(of, Why.BROKER_AWAY, f"Nothing can be delivered now: its {where}.")
    handed_over = view.tried_ms is not None
    if look.consumers == 0 and of.subscription.forward is None and (look.messages or not handed_over):
        queued = f" {_counted(look.messages, 'message')} in its queue." if look.messages else ""
        since = f" Its copy was handed over at {at(view.tried_ms)}." if view.tried_ms is not None else ""
        return _because(of, Why.NO_CONSUMER, f"Nobody reads this subscription's messages.{queued}{since}")
    if due_ms <= now:
        return _because(of, Why.DUE, f"It has been due since {at(due_ms)}.")
    if view.extended:
        times = "once" if view.extended == 1 else f"{view.extended} times"
        sentence = f"A consumer has it, and asked for more time {times} in attempt {view.attempt}. {again}"
        return _because(of, Why.EXTENDED, sentence, due_ms)
    if view.tried_ms is not None:
        sentence = f"Attempt {view.attempt} was handed over at {at(view.tried_ms)}. {again}"
        return _because(of, Why.AWAITS_ACK, sentence, due_ms)
    if of.error is not None and of.error.attempt == view.attempt:
        most = of.subscription.policy.max_retry + 1
        failed = f"Attempt {view.attempt} failed ({view.tried} of {most} that count): {_quoted(of.error.error)}."
    else:
        failed = f"Attempt {view.attempt} did not reach a consumer and is not counted."
    return _because(of, Why.RETRY_SCHEDULED, f"{failed} It is delivered again at {at(due_ms)}.", due_ms)


def _reason_of(answer: str) -> CheckReason | None:
    """The reason that an answer to a check begins with; None: it begins with a verdict."""
    return CheckReason.__members__.get(answer.partition(":")[0])


def _quoted(text: str) -> str:
    return text.rstrip(". ")


def _when(ms: int | None) -> str:
    return f" at {at(ms)}" if ms else ""


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"
