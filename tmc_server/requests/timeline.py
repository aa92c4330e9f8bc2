"""What happened to a message, in order: from its row, its deliveries, the journal, the audit trail and alerts.

Pure, except for `Timelines`, which reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tmc_common.headers import REPLAY_OF
from tmc_server.domain.bulk import ItemOutcome
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.checks import DECIDED_BY_CHECK
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_ATTEMPT, NO_SUBSCRIPTION, Attempt, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.views import (
    AttemptView,
    ConsumptionView,
    DeliveryJob,
    MessageDetail,
    MessageView,
    OperatorAct,
    RaisedAlert,
)
from tmc_server.requests.lookup import Lookup

_DECIDED_BY = "decided by"


class EventKind(IntEnum):
    """Numbers are sent; never reuse one. What one attempt went through in one millisecond is in this order."""

    PREPARED = 1
    CHECKED = 2  #: a check decided nothing
    OPERATOR = 3
    DECIDED = 4  #: submitted or rolled back
    HANDED_OVER = 5
    ATTEMPT_FAILED = 6
    UNANSWERED = 7
    CLOSED = 8  #: a delivery was acked, given up or cancelled
    ALERT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """subscription: NO_SUBSCRIPTION: about the message itself.  attempt: of the delivery, or of the check."""

    at_ms: int
    kind: EventKind
    sentence: str
    subscription: SubscriptionNumber = NO_SUBSCRIPTION
    attempt: Attempt = NO_ATTEMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that is known of a message. servers: names of server runs; catalog: for the names of apps."""

    detail: MessageDetail
    acts: Sequence[OperatorAct] = ()
    jobs: Sequence[DeliveryJob] = ()
    alerts: Sequence[RaisedAlert] = ()
    servers: Mapping[int, str]
    catalog: Catalog


class Timelines:
    """Reads what is known of a message."""

    def __init__(self, catalog: CatalogSource, lookup: Lookup, reader: RowReader) -> None:
        self._catalog = catalog
        self._lookup = lookup
        self._reader = reader

    async def timeline(self, message_id: str, topic: str, key: str) -> tuple[MessageView, Sequence[Event]]:
        """Return the timeline of a message by id, or of the newest one of topic and key. Raises as `Lookup.find`."""
        return await asyncio.to_thread(self._timeline, message_id, topic, key)

    def _timeline(self, message_id: str, topic: str, key: str) -> tuple[MessageView, Sequence[Event]]:
        message = self._lookup.find(message_id, topic, key)
        detail = self._reader.detail(message)
        subscriptions = [view.subscription for view in detail.consumptions]
        catalog = self._catalog.current
        history = History(
            detail=detail,
            acts=[
                *self._reader.acts(message, subscriptions),
                *_during(self._reader.pauses(_subjects(catalog, message, subscriptions), message.created_ms), detail),
            ],
            jobs=self._reader.bulk_items(message),
            alerts=self._reader.alerts(message),
            servers={each.run.incarnation: each.run.name for each in self._reader.servers()},
            catalog=catalog,
        )
        return message, timeline_of(history)


def timeline_of(history: History) -> Sequence[Event]:
    """Oldest first."""
    events = [
        *_of_message(history),
        *(event for attempt in history.detail.failed_attempts for event in _of_attempt(history, attempt)),
        *(event for view in history.detail.consumptions for event in _of_delivery(history, view)),
        *(_of_act(act) for act in history.acts),
        *(_of_job(job) for job in history.jobs),
        *(_of_alert(alert) for alert in history.alerts),
    ]
    return sorted(events, key=_order)


def _order(event: Event) -> tuple[int, bool, Attempt, EventKind]:
    return (event.at_ms, event.kind is EventKind.ALERT, event.attempt, event.kind)


def _subjects(catalog: Catalog, message: MessageView, subscriptions: Sequence[SubscriptionNumber]) -> Sequence[str]:
    """The message's topic and subscriptions as the audit trail names them."""
    topic = catalog.topics[message.topic].name
    known = [catalog.subscriptions[each] for each in subscriptions if each in catalog.subscriptions]
    return [topic, *(f"{topic} {catalog.apps[each.app].id} {each.tag}" for each in known)] if known else []


def _during(acts: Sequence[OperatorAct], detail: MessageDetail) -> Iterator[OperatorAct]:
    """Yield those before the last delivery was closed."""
    closed = [view.closed_ms for view in detail.consumptions]
    end = None if None in closed else max((each or 0 for each in closed), default=0)
    return (act for act in acts if end is None or act.at_ms <= end)


def _of_message(history: History) -> Iterator[Event]:
    message = history.detail.message
    owner = history.catalog.apps.get(message.producer)
    name = owner.id if owner is not None else f"app {message.producer}"
    delay = f", to be delivered {message.delay_ms / 1000:g} s after the submit" if message.delay_ms else ""
    original = message.headers.get(REPLAY_OF)
    replay = f", a replay of {original}" if original else ""
    yield Event(
        at_ms=message.created_ms,
        kind=EventKind.PREPARED,
        sentence=f"Stored for {name} ({message.producer_tag}){replay}{delay}.",
    )
    if message.decided_ms is None:
        return
    answer = message.check.last_answer
    by = answer if answer.startswith(_DECIDED_BY) else f"{_DECIDED_BY} its producer"
    by = f"{_DECIDED_BY} a check" if answer == DECIDED_BY_CHECK else by
    if message.state is MessageState.ROLLED_BACK:
        what = "Rolled back"
    else:
        count = len(history.detail.consumptions)
        whom = "nobody was subscribed" if not count else f"{count} subscriber{'' if count == 1 else 's'}"
        what = f"Submitted ({whom})"
    yield Event(at_ms=message.decided_ms, kind=EventKind.DECIDED, sentence=f"{what}, {by}.")


def _of_attempt(history: History, view: AttemptView) -> Iterator[Event]:
    if view.subscription == NO_SUBSCRIPTION:
        sentence = f"Check {view.attempt} decided nothing: {_quoted(view.error)}."
        yield Event(at_ms=view.at_ms, kind=EventKind.CHECKED, sentence=sentence, attempt=view.attempt)
        return
    if view.tried_ms is not None:
        yield _handed_over(history, view.subscription, view.attempt, view.tried_ms, view.tried_by)
    what = "was not answered" if view.unanswered else "failed"
    yield Event(
        at_ms=view.at_ms,
        kind=EventKind.UNANSWERED if view.unanswered else EventKind.ATTEMPT_FAILED,
        sentence=f"Attempt {view.attempt} {what}: {_quoted(view.error)}.",
        subscription=view.subscription,
        attempt=view.attempt,
    )


def _of_delivery(history: History, view: ConsumptionView) -> Iterator[Event]:
    """Yield what its row knows: the last attempt, and how it ended."""
    journaled = {
        (each.subscription, each.attempt, each.tried_ms)
        for each in history.detail.failed_attempts
        if each.tried_ms is not None
    }
    if view.tried_ms is not None and (view.subscription, view.attempt, view.tried_ms) not in journaled:
        yield _handed_over(history, view.subscription, view.attempt, view.tried_ms, view.tried_by)
    ends = {
        ConsumptionState.ACKED: "Acked",
        ConsumptionState.FAILED: "Given up",
        ConsumptionState.CANCELLED: "Cancelled",
    }
    if view.closed_ms is not None and view.state in ends:
        attempts = "1 attempt" if view.attempt == 1 else f"{view.attempt} attempts"
        yield Event(
            at_ms=view.closed_ms,
            kind=EventKind.CLOSED,
            sentence=f"{ends[view.state]} after {attempts}.",
            subscription=view.subscription,
            attempt=view.attempt,
        )


def _handed_over(
    history: History, subscription: SubscriptionNumber, attempt: Attempt, at_ms: int, by: int | None
) -> Event:
    server = f" by server {history.servers.get(by, f'run {by}')}" if by is not None else ""
    return Event(
        at_ms=at_ms,
        kind=EventKind.HANDED_OVER,
        sentence=f"Attempt {attempt} was handed over{server}.",
        subscription=subscription,
        attempt=attempt,
    )


def _of_act(act: OperatorAct) -> Event:
    reason = f" Reason: {_quoted(act.reason)}." if act.reason else ""
    _, _, named = act.subject.partition(" subscription ")
    return Event(
        at_ms=act.at_ms,
        kind=EventKind.OPERATOR,
        sentence=f"Operator {act.actor}: {act.action}.{reason}",
        subscription=SubscriptionNumber(int(named)) if named.isdecimal() else NO_SUBSCRIPTION,
    )


def _of_job(job: DeliveryJob) -> Event:
    outcomes = {
        ItemOutcome.DONE: "acted on it",
        ItemOutcome.UNCHANGED: "left it as it was",
        ItemOutcome.REFUSED: "could not act on it",
    }
    detail = f": {_quoted(job.detail)}" if job.detail else ""
    return Event(
        at_ms=job.at_ms,
        kind=EventKind.OPERATOR,
        sentence=f"Bulk job {job.job} {outcomes[job.outcome]}{detail} (`tmc admin get-bulk {job.job}`).",
        subscription=job.subscription,
    )


def _of_alert(alert: RaisedAlert) -> Event:
    return Event(
        at_ms=alert.at_ms,
        kind=EventKind.ALERT,
        sentence=f"Alert, {alert.kind}: {_quoted(alert.detail)}.",
        subscription=alert.subscription,
    )


def _quoted(text: str) -> str:
    return text.rstrip(". ")
