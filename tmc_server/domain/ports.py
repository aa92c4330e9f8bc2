"""What requests and duties need from the outside, on one page."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.catalog import App, Catalog, Forward, QueueMode, Subscription, Topic
from tmc_server.domain.checks import CheckAnswer, CheckPolicy, CheckState, CheckTarget, Question
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.ids import MessageId
from tmc_server.domain.manifest import Manifest
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Operation
from tmc_server.domain.retry import RetryPolicy
from tmc_server.domain.views import ConsumptionView, MessageDetail, MessageView


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgress:
    """What one server saw come out of a queue.

    passed_ms: when the newest delivery attempt was made whose copy came out; 0: none yet.
    moves: grows with everything that comes out, so that a change shows that consumers get something done.
    """

    queue: str
    passed_ms: int
    moves: int


class SharedProgress(Protocol):
    """What all servers saw come out of queues: acks may reach any of them. Blocks. Raises StoreUnavailable."""

    def share(self, seen: Sequence[QueueProgress]) -> bool:
        """Publish what this server saw; replaces what it published for these queues before.

        Returns False: nothing was written, this server's heartbeat is over.
        """

    def of(self, queue: str) -> Mapping[int, QueueProgress]:
        """What other server runs published for this queue, by incarnation."""


class ForwardAnswers(Protocol):
    """What becomes of copies. Called from any thread; does not block."""

    def give_back(self, copies: Sequence[Copy], after_ms: int) -> None:
        """They reached nobody: due again after that time, uncounted."""

    def acknowledge(self, copies: Sequence[Copy]) -> None:
        """They were forwarded: that is all there was to do."""

    def refuse(self, copies: Sequence[Copy], error: str) -> None:
        """Forwarding failed: a try by the subscription's policy."""


class Forwarding(Protocol):
    """Where subscriptions can forward to, as this server sees it."""

    @property
    def forwarder_kinds(self) -> Collection[str]:
        """The kinds of forwarding that this server can do."""

    def examine(self, forward: Forward) -> None:
        """Look whether the target exists, for kinds that can tell. Blocks. Raises ForwardRefused: it does not, or nobody says."""


class DeliveryStream(Protocol):
    """One connected consumer of built-in delivery. On the loop only."""

    async def next_batch(self, most: int, most_bytes: int) -> list[Copy]:
        """Wait for copies: at most `most`, and no more than `most_bytes` but for a single one. Raises ShuttingDown.

        Calling it again says that the copies before were written. Raises ShuttingDown, too, when that took too long: the
        stream was closed meanwhile.
        """

    def put_back(self, copies: Sequence[Copy]) -> None:
        """These were taken and not written."""

    def add_credit(self, credit: int) -> None:
        """The consumer can take so many copies more; before its first credit it gets nothing, and a limit caps the sum."""

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

    def in_use(self) -> tuple[Catalog, bool]:
        """The newest copy, and whether it is stale: other servers may work with a newer one already.

        Both of one moment. Nothing final is decided with a stale copy.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicChange:
    """What changes of a topic; None: stays. Placement, tag and queue mode are part of where messages are: they never change."""

    transaction_time_ms: int | None = None
    open_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckChange:
    """What changes of a topic's checks: the targets that are given, these that go, and these fields of the policy."""

    policy: Collection[str]
    removed_targets: Collection[str] = ()


class CatalogEditor(Protocol):
    """Changes to the catalog; each is one transaction with its audit row. All block. `actor`: the operator's name.

    Stored when they return; Activation says when they count everywhere.
    """

    def register_app(
        self, actor: str, id_: str, service_name: str, biz_id: str, alert_email: str, alert_phone: str
    ) -> tuple[App, str]:
        """Returns: app, key ("" if it existed). Raises NameTaken."""

    def add_key(self, actor: str, id_: str, replace_newest: bool, tag: str = "") -> str:
        """tag: the key works in this environment only. Returns: key. Raises AppUnknown, RotationOpen."""

    def make_check_token(self, actor: str, id_: str) -> str:
        """For an app without one. Returns: its token."""

    def drop_old_key(self, actor: str, id_: str, tag: str = "", drop_newest: bool = False) -> None:
        """tag: of the keys of this environment.  drop_newest: all of them. Raises AppUnknown."""

    def rotate_check_token(self, actor: str, id_: str, reason: str) -> None:
        """Another token for checks, at once. Raises AppUnknown."""

    def set_disabled(self, actor: str, id_: str, disabled: bool, reason: str) -> None:
        """Refuse an app's calls, or accept them again. Raises AppUnknown."""

    def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """Raises AppUnknown, NameTaken."""

    def update_topic(self, actor: str, topic_name: str, changes: TopicChange) -> Topic:
        """Raises TopicUnknown."""

    def set_topic_check(
        self, actor: str, topic_name: str, checks: CheckPolicy, change: CheckChange | None = None
    ) -> Topic:
        """change None: all targets and the policy, instead of those it had. Raises TopicUnknown."""

    def register_subscription(
        self,
        actor: str,
        topic_name: str,
        app_id: str,
        tag: str,
        policy: RetryPolicy,
        forward: Forward | None = None,
        change: Collection[str] | None = None,
    ) -> Subscription:
        """Again: another policy, and a removal that is not finished is taken back. After a removal: a new number.

        change: the fields of the policy that change when it is there; None: all.
        Raises TopicUnknown, AppUnknown, NameTaken: where it sends cannot be changed.
        """

    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """Ask for its removal: nothing changes for it before finish_removal, and registering it again takes this back.

        Raises TopicUnknown, AppUnknown, SubscriptionUnknown.
        """

    def finish_removal(self, actor: str, number: int) -> Subscription:
        """Remove it for good, unless its removal was taken back. Returns: it, with removed_ms when it is gone."""

    def make_delivery_keys(self, actor: str, numbers: Collection[int]) -> None:
        """For those subscriptions that have none. The others keep theirs."""

    def announce_delivery_key(
        self, actor: str, topic_name: str, app_id: str, tag: str, drop_previous: bool
    ) -> Subscription:
        """A further key, which is accepted but not used yet: `sign_with` is called once every server tells of it.

        Raises TopicUnknown, AppUnknown, SubscriptionUnknown (or it has no key), RotationOpen: it has a further one.
        """

    def sign_with(self, actor: str, number: int, announced: bytes) -> Subscription:
        """The announced key signs, the one before is accepted; nothing changes if another one was announced meanwhile."""

    def confirm(self, topics: Collection[int], subscriptions: Collection[int], effective_ms: int) -> None:
        """Write down since when every server knows these, by number; those that have a time keep it."""


class Activation(Protocol):
    """Tells when a stored change of the catalog counts everywhere."""

    def wait(self) -> int:
        """Make this server's copy current, then wait until no server can submit with one from before this call.

        Returns: the catalog database's time, milliseconds. Blocks. Raises StoreUnavailable: repeat the change.
        """

    def stop(self) -> None:
        """End the waits under way and all later ones with StoreUnavailable. Does not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where consumers find RabbitMQ."""

    host: str
    port: int
    virtual_host: str
    tls: bool


class Instances(Protocol):
    """Where the instances of a producer's service are."""

    def addresses(self, app: App, tag: str) -> Sequence[str]:
        """host:port of each instance in the environment `tag`, in the order to try them in. Blocks. Raises Unavailable."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that may be connected to. host: the name it stands for, or itself.  address: the one it resolved to."""

    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return self.authority

    @property
    def authority(self) -> str:
        return _joined(self.host, self.port)

    @property
    def pinned(self) -> str:
        return _joined(self.address, self.port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Asker(Protocol):
    """One kind of check. All methods block and are called from several threads at once.

    token: the check token of the app, shown to the endpoint with each call.
    """

    def accept(self, target: CheckTarget) -> None:
        """Raises CheckRefused: the options are not what this kind needs."""

    def examine(self, target: CheckTarget, endpoint: Endpoint, token: str) -> None:
        """Try it out without a message. Raises CheckRefused: it cannot work, with the reason."""

    def render(self, target: CheckTarget, question: Question) -> str:
        """What would be asked, as text."""

    def ask(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        """One answer per question, in order. Never raises for anything that the other side does, and never guesses.

        until: monotonic seconds; what cannot be asked within the deadline before that is NOT_ASKED.
        """

    def close(self) -> None:
        """Nobody will ask any more."""


class Asking(Protocol):
    """All kinds of checks, with discovery and the allow-list in front of them. Blocks."""

    def ask(
        self, target: CheckTarget, app: App, tag: str, questions: Sequence[Question], seconds: float
    ) -> list[CheckAnswer]:
        """One answer per question, in order, after so many seconds at most."""

    def describe(self, target: CheckTarget, app: App, tag: str, question: Question) -> tuple[str, str]:
        """Who would be asked, and what, as text."""

    def examine(self, target: CheckTarget, app: App, tag: str, untried: bool) -> None:
        """Raises CheckRefused: a target like this cannot work. untried: nobody may be there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A PREPARED message whose check is due, as read. state: before or after the claim, as the caller knows."""

    shard: int
    number: int
    topic: int
    producer: int
    producer_tag: str
    key: str
    attempt_id: bytes
    ledger_id: bytes
    created_ms: int
    target: str
    state: CheckState

    def question(self, app: App, topic: str) -> Question:
        """What the producer is told. topic: its name."""
        message_id = str(MessageId(self.topic, self.producer, self.shard, self.number))
        return Question(
            message_id=message_id,
            topic=topic,
            key=self.key,
            biz_id=app.biz_id,
            attempt_id=self.attempt_id,
            ledger_id=self.ledger_id,
            created_ms=self.created_ms,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one check. pause_ms: how long to leave the service alone if it could not be asked."""

    pending: Pending
    answer: CheckAnswer
    pause_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a page of answers did to its messages."""

    committed: int = 0
    rolled_back: int = 0
    failed: int = 0
    undecided: int = 0
    overtaken: int = 0
    overdue: bool = False  # nobody was reached for too long, and the owner was told


class DueChecks(Protocol):
    """Messages of one database whose checks are due, as far as this server holds their shards. All block."""

    def due(self) -> list[tuple[int, int]]:
        """(shard, topic number) with at least one message that is due by the database's clock."""

    def read(self, shard: int, topic: int, limit: int) -> list[Pending]:
        """The messages that are due longest. No locks."""

    def claim(self, shard: int, pending: Sequence[Pending], until_ms: int) -> list[Pending]:
        """Begin a check of each: its number is one higher, and it is not due before so many milliseconds are over.

        Returns those that are ours now, as they are afterwards.
        """

    def hold(self, shard: int, pending: Sequence[Pending], pause_ms: int, detail: str) -> int:
        """Their service cannot be asked now: due again later, uncounted. Returns: how many."""

    def settle(self, shard: int, answers: Sequence[Checked], tell_overdue: bool) -> Settled:
        """Write down what came of claimed checks: decisions with their consumption rows, alerts with their cause.

        tell_overdue: the owner was not told yet that his service cannot be reached.
        """


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


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where the catalog says a shard is. place: address of its database when that was stored, without credentials."""

    shard: int
    identity: str
    place: str


class CheckDesk(Protocol):
    """What operators do with undecided messages; each change with its audit row. All block."""

    def begin(self, shard: int, number: int, until_ms: int) -> Pending | None:
        """Begin a check now, whether it is due or not. None: the message is decided, or there is none."""

    def settle(self, shard: int, answers: Sequence[Checked]) -> Settled: ...

    def reactivate(self, actor: str, shard: int, numbers: Sequence[int], reason: str) -> int:
        """CHECK_FAILED -> PREPARED, due at once. Returns: how many."""

    def failed_checks(
        self, shards: Sequence[int], topic: int, from_ms: int, to_ms: int, limit: int
    ) -> list[tuple[int, int]]:
        """(shard, number) of CHECK_FAILED messages, oldest first in each shard."""

    def decide(self, actor: str, shard: int, number: int, commit: bool, reason: str) -> None:
        """Raises MessageUnknown, AlreadyCommitted, AlreadyRolledBack."""


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
    def shard_places(self) -> Sequence[ShardPlace]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
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
            delivered=self.delivered + other.delivered,
            failed=self.failed + other.failed,
            cancelled=self.cancelled + other.cancelled,
            held=self.held + other.held,
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
class Position:
    """How far the lists of an archive were worked off. run: "": none yet.  number: the last one looked at; 0: none."""

    run: str
    number: int


class ClosedWork(Protocol):
    """Closed messages of the shards of one database that this server holds, for the retention duty. All block."""

    def held_shards(self) -> Sequence[int]: ...
    def now(self) -> int:
        """Milliseconds by the database's clock."""

    def position(self, shard: int) -> Position: ...
    def old(self, shard: int, after: int, before_ms: int, limit: int) -> Sequence[int]:
        """Numbers above `after` of messages closed before that moment, ascending, at most `limit`."""

    def remove(self, shard: int, numbers: Sequence[int], before_ms: int, then: Position | None = None) -> int:
        """Remove these, as far as they are closed and were before that moment, with all that belongs to them; keep `then`.

        One commit. Returns: how many messages went; who was not closed stays, and is nobody's error.
        """

    def forget(self, before_ms: int, limit: int) -> int:
        """Remove what is kept for late callers only and is older, at most `limit` of each kind. Returns: how many."""


class RemovalLists(Protocol):
    """What archive runs say may be removed. Blocks; raises ListUnreadable."""

    def runs(self) -> Sequence[Manifest]:
        """Published runs in the order of their names."""

    def numbers(self, run: str, shard: int) -> Sequence[int]:
        """Of one run and shard, ascending."""


class ListUnreadable(Exception):
    """A manifest, or a list that it promises, is missing or damaged: nothing of that run is removed. The text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """One run of a server, as its heartbeat tells. expires_ms: gone after that, by the catalog database's clock.

    catalog_version: of the copy of the catalog it uses, as far as it said so.
    """

    incarnation: int
    name: str
    started_ms: int
    expires_ms: int
    catalog_version: int = 0


class Members(Protocol):
    """The servers of this center, as of the last heartbeat."""

    @property
    def alive(self) -> Sequence[ServerRun]: ...
    @property
    def gone(self) -> Sequence[ServerRun]: ...


class AlertOutbox(Protocol):
    """Alerts written with the changes they tell of, and the notices made of them. Shared by all servers. All block."""

    def add(self, kind: str, topic: int, subscription: int, episode: int, detail: str) -> None:
        """An alert about a subscription as a whole; the same episode is told once."""

    def group(self, sinks: Sequence[str], limit: int) -> int:
        """Make notices of at most `limit` alerts, one per sink and group: kind, topic and subscription.

        A group whose notice was sent within the last minute waits for the minute to end, and its alerts add up meanwhile.
        Returns: how many alerts.
        """

    def claim(self, sink: str, limit: int, for_ms: int) -> Sequence[Alert]:
        """Notices that are due for this sink, longest due first; nobody else gets them for so long."""

    def mark_sent(self, notices: Sequence[Alert]) -> None:
        """The sink has them."""

    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        """The sink did not take them: due again after that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert, or a notice of several alike: then message, attempt and detail are those of the first.

    id: within its outbox.  count: alerts.  first_ms, last_ms: when they were written.  samples: (shard, message number) of
    the first few that are about a message.
    """

    id: int
    kind: str
    topic: int
    shard: int
    number: int
    subscription: int
    attempt: int
    detail: str
    created_ms: int
    count: int = 1
    first_ms: int = 0
    last_ms: int = 0
    samples: Sequence[tuple[int, int]] = ()


class AlertSink(Protocol):
    """Where alerts go. May raise: the alert is then sent again later."""

    def send(self, alert: Alert, catalog: Catalog) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How many rows of one topic or subscription are in which state, and since when the oldest is; None: none is.

    subscription: 0: messages of the topic.  open: PREPARED, or SCHEDULED.  late: of these, past their transaction time; or due
    or tried.  failed: CHECK_FAILED, or FAILED.
    """

    topic: int
    subscription: int = 0
    open: int = 0
    late: int = 0
    failed: int = 0
    oldest_open_ms: int | None = None
    oldest_late_ms: int | None = None
    oldest_failed_ms: int | None = None


class StandingReader(Protocol):
    """Counts in the shards of one database that this server holds. Blocks."""

    def shards(self) -> Sequence[int]:
        """Those that are held now."""

    def count(self, shards: Sequence[int]) -> tuple[int, Mapping[int, Sequence[Standing]]]:
        """Returns: the time by the database's clock, and what is there, by shard."""
