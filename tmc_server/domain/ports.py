"""What requests and duties need from the outside, on one page."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.catalog import App, Catalog, Subscription, Topic
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Operation
from tmc_server.domain.retry import RetryPolicy
from tmc_server.domain.views import ConsumptionView, MessageDetail, MessageView


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a message for one subscription, ready to be handed over. shard, number, subscription name its row."""

    shard: int
    number: int
    subscription: int
    attempt: int
    topic: int
    producer: int
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class Outlet(Protocol):
    """Where copies leave the center. Called from lane and duty threads; must not block and must not raise."""

    def reserve(self, subscription: int, wanted: int) -> int:
        """How many copies (0..wanted) may be handed over now. Each must be followed by `deliver` or `release`."""

    def release(self, subscription: int, count: int) -> None:
        """Give reserved room back: the transaction did not commit."""

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Hand over reserved copies after their rows were committed. What cannot be delivered comes back as GiveBack."""


class DeliveryStream(Protocol):
    """One connected consumer of built-in delivery. On the loop only."""

    async def next_batch(self, most: int, most_bytes: int) -> list[Copy]:
        """Wait for copies: at most `most`, and no more than `most_bytes` but for a single one. Raises ShuttingDown."""

    def put_back(self, copies: Sequence[Copy]) -> None:
        """These were taken and not written."""

    def add_credit(self, credit: int) -> None:
        """The consumer can take so many copies more; before its first credit it gets nothing."""

    def close(self) -> None:
        """The consumer is gone: what was not written is given back."""


class DeliveryStreams(Protocol):
    """Built-in delivery as the RPC sees it."""

    def open(self, subscriptions: Iterable[int]) -> DeliveryStream:
        """A consumer connected. On the loop."""


class Performer(Protocol):
    """Durable execution of operations: the group commit."""

    def perform(self, operations: Sequence[tuple[int, Operation]]) -> Awaitable[object]:
        """Run (shard, operation) pairs; done when every operation has its answer. Raises QueueFull, ShuttingDown.

        Cancelling the awaiting task leaves the operations running; call from the event loop's thread only.
        """


class CatalogSource(Protocol):
    """The server's copy of the catalog."""

    @property
    def current(self) -> Catalog:
        """The newest copy that was read."""

    def is_stale(self, now: int) -> bool:
        """True: a subscription could be in effect at `now` (milliseconds, the database's clock) that the copy lacks."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    """What a topic is registered with. owner: app id.  Placement is fixed for ever."""

    name: str
    owner: str
    default_tag: str
    table_index: int
    spread: int
    transaction_time_ms: int
    open_limit: int


class CatalogEditor(Protocol):
    """Changes to the catalog; each is one transaction with its audit row. All block. `actor`: the operator's name."""

    def register_app(
        self, actor: str, id_: str, service_name: str, biz_id: str, alert_email: str, alert_phone: str
    ) -> tuple[App, str, int]:
        """Returns: app, key ("" if it existed), time of effect. Raises NameTaken."""

    def add_key(self, actor: str, id_: str, replace_newest: bool) -> tuple[str, int]:
        """Returns: key, time of effect. Raises AppUnknown, RotationOpen."""

    def drop_old_key(self, actor: str, id_: str) -> int:
        """Returns: time of effect. Raises AppUnknown."""

    def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """Raises AppUnknown, NameTaken."""

    def register_subscription(
        self, actor: str, topic_name: str, app_id: str, tag: str, policy: RetryPolicy
    ) -> Subscription:
        """Raises TopicUnknown, AppUnknown."""

    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """Raises TopicUnknown, AppUnknown, SubscriptionUnknown."""


class RowReader(Protocol):
    """Look-ups; nothing locks or changes a row. All block."""

    def message(self, shard: int, number: int) -> MessageView | None: ...
    def message_by_key(
        self, shard: int, topic: int, key: str, tag: str | None, live_only: bool
    ) -> MessageView | None: ...
    def detail(self, message: MessageView) -> MessageDetail: ...
    def messages(
        self,
        shards: Sequence[int],
        topic: int,
        state: MessageState | None,
        from_ms: int,
        to_ms: int,
        after: tuple[int, int],
        limit: int,
    ) -> list[MessageView]: ...
    def consumptions(
        self,
        shards: Sequence[int],
        subscriptions: Sequence[int],
        state: ConsumptionState | None,
        after: tuple[int, int],
        limit: int,
    ) -> list[ConsumptionView]: ...
    def consumption(self, shard: int, number: int, subscription: int) -> ConsumptionView | None: ...


class DueWork(Protocol):
    """Due consumptions of the shards of one database, for the redelivering duty. All block."""

    def due(self) -> list[tuple[int, int]]:
        """(shard, subscription number) with at least one row that is due by the database's clock."""

    def claim(self, shard: int, subscription: int, limit: int, exhausted_only: bool) -> Mapping[ConsumptionState, int]:
        """Move up to `limit` due rows on and deliver copies of what was claimed, as far as the outlet has room.

        exhausted_only: look only for rows whose budget is used up. Returns: rows moved, by their new state.
        """

    def rescue(self) -> int:
        """Make due, uncounted, what earlier server runs had handed out. For a center of one process."""


class AlertOutbox(Protocol):
    """Alerts written with the changes they tell of."""

    def unsent(self, limit: int) -> Sequence[Alert]: ...
    def mark_sent(self, alerts: Sequence[Alert]) -> None: ...


@dataclass(frozen=True, slots=True)
class Alert:
    """id: within its outbox."""

    id: int
    kind: str
    topic: int
    shard: int
    number: int
    subscription: int
    attempt: int
    detail: str
    created_ms: int


class AlertSink(Protocol):
    """Where alerts go. May raise: the alert is then sent again later."""

    def send(self, alert: Alert, catalog: Catalog) -> None: ...
