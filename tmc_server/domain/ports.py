"""What requests and duties need from the outside, on one page."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.catalog import App, Catalog, Forward, QueueMode, Subscription, Topic
from tmc_server.domain.consumption import ConsumptionState, QueueLook
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

    def came_out(self, subscription: int, tried_ms: int) -> None:
        """A consumer answered for a try made at tried_ms: whatever was handed over before it is out of the queue too."""

    def look(self, subscription: int) -> QueueLook | None:
        """What waits for this subscription where copies go. None: cannot be told now. Blocks; for duty threads only."""


class ForwardAnswers(Protocol):
    """What becomes of copies. Called from any thread; does not block."""

    def give_back(self, copies: Sequence[Copy], after_ms: int) -> None:
        """They reached nobody: due again after that time, uncounted."""

    def acknowledge(self, copies: Sequence[Copy]) -> None:
        """They were forwarded: that is all there was to do."""

    def refuse(self, copies: Sequence[Copy], error: str) -> None:
        """Forwarding failed: a try by the subscription's policy."""


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
    queue_mode: QueueMode = QueueMode.MULTI


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
        self, actor: str, topic_name: str, app_id: str, tag: str, policy: RetryPolicy, forward: Forward | None = None
    ) -> Subscription:
        """Raises TopicUnknown, AppUnknown, NameTaken: where it sends cannot be changed."""

    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """Raises TopicUnknown, AppUnknown, SubscriptionUnknown."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where consumers find RabbitMQ."""

    host: str
    port: int
    virtual_host: str
    tls: bool


class Instances(Protocol):
    """Where the instances of a producer's service are."""

    def addresses(self, app: App, tag: str) -> Sequence[str]:
        """host:port of each instance that runs in the environment `tag`, in no order. Blocks. Raises Unavailable."""


class SeenSenders(Protocol):
    """Addresses that producers give with their calls, for centers without service discovery."""

    def saw(self, app: App, tag: str, address: str) -> None:
        """Does not block."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """shards: those it looks after."""

    run: ServerRun
    alive: bool
    shards: Sequence[int]


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
    def servers(self) -> Sequence[ServerView]: ...


@dataclass(frozen=True, slots=True)
class Claimed:
    """Rows that one pass moved on, by what became of them. held: an earlier copy may still wait in its queue."""

    delivered: int = 0
    failed: int = 0
    cancelled: int = 0
    held: int = 0

    @property
    def moved(self) -> int:
        return self.delivered + self.failed + self.cancelled + self.held

    def __add__(self, other: Claimed) -> Claimed:
        return Claimed(
            self.delivered + other.delivered,
            self.failed + other.failed,
            self.cancelled + other.cancelled,
            self.held + other.held,
        )


class DueWork(Protocol):
    """Due consumptions of the shards of one database that this server holds, for the redelivering duty. All block."""

    def due(self) -> list[tuple[int, int]]:
        """(shard, subscription number) with at least one row that is due by the database's clock."""

    def claim(self, shard: int, subscription: int, limit: int, look: QueueLook, exhausted_only: bool) -> Claimed:
        """Move up to `limit` due rows on and deliver copies of what was claimed, as far as the outlet has room.

        exhausted_only: look only for rows whose budget is used up.
        """

    def held_shards(self) -> Mapping[int, int]:
        """Epoch of the lease by shard."""

    def rescue(self, shard: int, incarnation: int, since_ms: int) -> int | None:
        """Make due, uncounted, what a server run that is gone handed over since then.

        Returns: how many rows; None: the lease of the shard is over, nothing was done.
        """


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One run of a server, as its heartbeat tells. expires_ms: gone after that, by the catalog database's clock."""

    incarnation: int
    name: str
    started_ms: int
    expires_ms: int


class Members(Protocol):
    """The servers of this center, as of the last heartbeat."""

    @property
    def alive(self) -> Sequence[ServerRun]: ...
    @property
    def gone(self) -> Sequence[ServerRun]: ...


class AlertOutbox(Protocol):
    """Alerts written with the changes they tell of."""

    def add(self, kind: str, topic: int, subscription: int, episode: int, detail: str) -> None:
        """An alert about a subscription as a whole; the same episode is told once."""

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
