"""Look-ups and counts; nothing here locks or changes a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_SUBSCRIPTION, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.servers import ServerView, ShardPlace
from tmc_server.domain.views import (
    ConsumptionView,
    DeliveryJob,
    MessageDetail,
    MessageView,
    OperatorAct,
    RaisedAlert,
    SealReport,
)


class RowReader(Protocol):
    """Look-ups; nothing locks or changes a row. All block."""

    def message(self, shard: Shard, number: MessageNumber) -> MessageView | None: ...
    def message_by_key(
        self, shard: Shard, topic: int, key: str, tag: str | None, live_only: bool
    ) -> MessageView | None: ...
    def detail(self, message: MessageView) -> MessageDetail: ...
    def consumption(
        self, shard: Shard, number: MessageNumber, subscription: SubscriptionNumber
    ) -> ConsumptionView | None: ...
    def acts(self, message: MessageView, subscriptions: Sequence[SubscriptionNumber]) -> Sequence[OperatorAct]:
        """Return what operators did to this message and its deliveries, one by one, in order."""

    def pauses(self, subjects: Sequence[str], since_ms: int) -> Sequence[OperatorAct]:
        """Return when these topics and subscriptions, named as in the audit trail, were paused and resumed.

        since_ms: not before that, unless they still were.
        """

    def bulk_items(self, message: MessageView) -> Sequence[DeliveryJob]: ...
    def alerts(self, message: MessageView) -> Sequence[RaisedAlert]: ...
    def now(self, shard: Shard) -> int:
        """Milliseconds by the clock of the shard's database."""

    def is_gone(self, shard: Shard, number: MessageNumber) -> bool:
        """Return whether a message that is not there may have been removed by the retention duty."""

    def servers(self) -> Sequence[ServerView]: ...
    def shard_places(self) -> Sequence[ShardPlace]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Which page of a list by age.

    from_ms, to_ms: rows of messages made at from_ms or later and before to_ms, milliseconds since the epoch; 0: open end.
    after: place of the last row of the page before; None: from the beginning.  limit: rows.
    """

    from_ms: int = 0
    to_ms: int = 0
    newest_first: bool = False
    after: tuple[Shard, MessageNumber] | None = None
    limit: int = 100


class KeySearch(Protocol):
    """Messages by key. All block."""

    def messages(
        self, topics: Mapping[Shard, Sequence[int]], key: str, is_beginning: bool, after: str, limit: int
    ) -> Sequence[MessageView]:
        """Return messages without bodies, by key, the newest of a key first; those of one key stay together.

        topics: numbers, by the shard to look into.  after: the last key of the page before; "": from the beginning.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures of one topic or subscription with the same error. shard, number, error: of one of them.

    subscription: 0: messages whose checks failed.  per_minute: of the last hour, the oldest first.
    """

    topic: int
    subscription: SubscriptionNumber
    fingerprint: str
    count: int
    first_ms: int
    last_ms: int
    per_minute: Sequence[int]
    shard: Shard
    number: MessageNumber
    error: str


class FailureReader(Protocol):
    """What waits for an operator. Blocks."""

    def groups(
        self, topics: Collection[int], subscriptions: Collection[SubscriptionNumber], limit: int
    ) -> tuple[int, Sequence[FailureGroup], bool]:
        """Returns: now, milliseconds since the epoch; the largest groups; whether there are more."""


class RowLister(Protocol):
    """Pages of rows by the age of their messages, over all shards. All block."""

    def messages(
        self, shards: Sequence[Shard], topics: Collection[int] | None, state: MessageState | None, span: Span
    ) -> Sequence[MessageView]:
        """Return messages without bodies. topics, state None: any."""

    def consumptions(
        self,
        shards: Sequence[Shard],
        subscriptions: Mapping[SubscriptionNumber, int],
        state: ConsumptionState | None,
        fingerprint: str,
        span: Span,
    ) -> Sequence[ConsumptionView]:
        """Return up to about `span.limit` rows: those of a message stay on one page.

        subscriptions: with their topics.  state None:
        any.  fingerprint: of the error that they are FAILED with; "": any.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """ "" and 0: any. subject: the whole one, or its first words.  Times: from_ms included, to_ms excluded."""

    actor: str = ""
    action: str = ""
    subject: str = ""
    from_ms: int = 0
    to_ms: int = 0


class AuditTrail(Protocol):
    """The audit rows of all databases as one list, the newest first. All block."""

    def add(self, actor: str, action: str, subject: str, reason: str) -> None:
        """Note what changes nothing, such as a look at a body."""

    def verify(self) -> Sequence[SealReport]:
        """Return whether sealed rows were changed or removed, for each database."""

    def page(
        self, wanted: AuditFilter, after: Sequence[int], limit: int
    ) -> tuple[Sequence[OperatorAct], Sequence[int]]:
        """after: where the page before ended, one number per database; empty: from the newest.

        Returns: up to `limit` rows, and where they end; empty: there are no more. Raises InvalidField.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How many rows of one topic or subscription are in which state, and since when the oldest is; None: none is.

    subscription: 0: messages of the topic.  open: PREPARED, or SCHEDULED.  late: of these, past their transaction time; or due
    or tried.  failed: CHECK_FAILED, or FAILED.  waiting: WAITING deliveries.
    """

    topic: int
    subscription: SubscriptionNumber = NO_SUBSCRIPTION
    open: int = 0
    late: int = 0
    failed: int = 0
    waiting: int = 0
    oldest_open_ms: int | None = None
    oldest_late_ms: int | None = None
    oldest_failed_ms: int | None = None

    def __add__(self, other: Standing) -> Standing:
        """Add those of the same topic or subscription in another shard."""
        return Standing(
            topic=self.topic,
            subscription=self.subscription,
            open=self.open + other.open,
            late=self.late + other.late,
            failed=self.failed + other.failed,
            waiting=self.waiting + other.waiting,
            oldest_open_ms=_earlier(self.oldest_open_ms, other.oldest_open_ms),
            oldest_late_ms=_earlier(self.oldest_late_ms, other.oldest_late_ms),
            oldest_failed_ms=_earlier(self.oldest_failed_ms, other.oldest_failed_ms),
        )

    @property
    def is_any(self) -> bool:
        """Return whether there are rows in any of these states."""
        return bool(self.open or self.failed or self.waiting)


class Flow(NamedTuple):
    """Messages submitted to a topic (subscription 0), or acked by a subscription (topic 0)."""

    topic: int
    subscription: SubscriptionNumber


class TrafficReader(Protocol):
    """Blocks."""

    def per_second(self) -> Mapping[Flow, float]:
        """Return rates over the last seconds, of all servers."""


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


class StandingReader(Protocol):
    """Counts in the shards of one database. Blocks."""

    def shards(self) -> Sequence[Shard]:
        """Return those that this server looks after now."""

    def count(self, shards: Sequence[Shard]) -> tuple[int, Mapping[Shard, Sequence[Standing]]]:
        """Returns: the time by the database's clock, and what is there, by shard."""
