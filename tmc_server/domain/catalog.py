"""Apps, topics and subscriptions as one immutable copy, and who may do what with them.

A subscription is in effect for a server as soon as its copy has it; no time is compared. A change is answered once no
server can submit with an older copy, see docs/decisions/0013-catalog-activation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from tmc_server.domain.alerts import Silence
from tmc_server.domain.checks import CheckPolicy
from tmc_server.domain.declared import setting
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.placement import MoveStep, is_among, shards_of
from tmc_server.domain.retry import DAY_MS, RetryPolicy
from tmc_server.errors import AppUnknown, CredentialsInvalid, SubscriptionUnknown, TopicUnknown


@dataclass(frozen=True, slots=True)
class TagKeys:
    """Keys that work in one environment only. key_hashes: SHA-256 of the one or two."""

    tag: str
    key_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitQueue:
    """A queue of a broker from which an app's messages are taken, of one environment.

    secrets: one of these signs what is in it, newest first; (): it is not signed, the broker's permissions are the only guard.
    """

    tag: str
    secrets: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewApp:
    """An app as it is registered. service_name: in service discovery.  biz_id: sent with each check."""

    id: str
    service_name: str = setting("", 0, 128)
    biz_id: str = setting("", 0, 128)
    alert_email: str = setting("", 0, 255)
    alert_phone: str = setting("", 0, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class App(NewApp):
    """A registered service. `key_hashes`: SHA-256 of its one or two keys for all environments.

    check_token: what checks show it.

    disabled: its calls are refused; its messages are still checked and deliveries to it are kept.
    tag_keys, submit_queues: in the order of the tags.
    """

    number: int
    key_hashes: tuple[bytes, ...]
    check_token: str = ""
    disabled: bool = False
    tag_keys: tuple[TagKeys, ...] = ()
    submit_queues: tuple[SubmitQueue, ...] = ()

    def submit_queue(self, tag: str) -> SubmitQueue | None:
        """Return the one of this environment. None: it is not open."""
        return next((each for each in self.submit_queues if each.tag == tag), None)


class QueueMode(IntEnum):
    """Which queue a subscriber of a topic reads. Numbers are stored and sent; never reuse one."""

    SINGLE = 1  #: one per consumer app and tag, for all its topics of this mode
    MULTI = 2  #: one per consumer app, tag and topic: a bulk topic does not hold up an urgent one


WEBHOOK, WEBHOOK_BATCH = WEBHOOKS = ("webhook", "webhook-batch")
"""Kinds of forwards: a request for each message, or for up to a hundred."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Where a forwarding subscription sends. kind: rabbitmq, a webhook, or the name of an entry point.

    target: the exchange or topic there.  key: routing key; "": the message's own key. A header FORWARD_KEY wins.
    """

    kind: str
    target: str
    key: str

    def may_become(self, other: Forward) -> bool:
        """Return whether a subscription may go there instead: a URL may move, what is in a broker stays there."""
        return self == other or (self.is_webhook and other.is_webhook)

    @property
    def is_webhook(self) -> bool:
        return self.kind in WEBHOOKS


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of a topic. signed: copies in queues are signed.  ordered: each message has an order key.

    open_limit: of undecided messages.  unacked_limit: of deliveries that are not acked, failed ones too; 0: none.

    Placement, tag, mode and these two are part of where messages are and what they look like: they never change.
    """

    default_tag: str = "default"
    table_index: int = setting(0, 0, 31)
    spread: int = setting(1, 1, 32)
    transaction_time_ms: int = setting(10_000, 1, DAY_MS, may_change=True)
    open_limit: int = setting(1_000_000, 1, 10_000_000, may_change=True)
    unacked_limit: int = setting(0, 0, 10_000_000, may_change=True)
    queue_mode: QueueMode = QueueMode.MULTI
    signed: bool = True
    ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic(TopicSettings):
    """A topic as it is registered. owner: app id; "": nobody yet."""

    name: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic(TopicSettings):
    """The owner, an app's number, prepares, submits and rolls back.  paused: nothing is delivered."""

    number: int
    name: str
    owner: int
    effective_ms: int
    paused: bool = False
    checks: CheckPolicy = field(default_factory=CheckPolicy)

    def may_be_on(self, shard: Shard) -> bool:
        """Return whether a message of this topic may be there: ids that say otherwise were made up, and cost no
        other shard time.
        """
        return is_among(shard, self.table_index, self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryKeys:
    """Keys that sign the copies for one subscription. 32 bytes each.

    signing: the one in use.  other: also accepted, the previous one or, during a rotation, the next; None: no other.
    """

    signing: bytes = field(repr=False)
    other: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """Topic x consumer app x consumer tag. A removal is final: the same three again get another number.

    effective_ms: every server knows it since then; 0: not known yet.  removed_ms None: it is active.
    keys: None: its topic is not signed.
    order: for topics with order keys.  paused: nothing is delivered, what is due stays due.
    """

    number: SubscriptionNumber
    topic: int
    app: int
    tag: str
    policy: RetryPolicy
    effective_ms: int
    removed_ms: int | None
    forward: Forward | None = None
    keys: DeliveryKeys | None = None
    order: OrderMode = OrderMode.STRICT
    paused: bool = False

    @property
    def is_removed(self) -> bool:
        return self.removed_ms is not None

    @property
    def name(self) -> tuple[int, int, str]:
        """Topic number, app number, tag."""
        return (self.topic, self.app, self.tag)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """One consistent copy. version: grows with every change.  shard_map: identity of the database by shard.

    moving: the step of shards that are on their way to another database.  silences: of alerts; some may be over.
    """

    version: int = 0
    apps: Mapping[int, App] = field(default_factory=dict)
    topics: Mapping[int, Topic] = field(default_factory=dict)
    subscriptions: Mapping[SubscriptionNumber, Subscription] = field(default_factory=dict)
    shard_map: Mapping[Shard, str] = field(default_factory=dict)
    moving: Mapping[Shard, MoveStep] = field(default_factory=dict)
    silences: Sequence[Silence] = ()

    @property
    def frozen(self) -> Collection[Shard]:
        """Shards that no duty may touch, since their tables may have other names."""
        return [shard for shard, step in self.moving.items() if step == MoveStep.FROZEN]

    @cached_property
    def app_by_id(self) -> Mapping[str, App]:
        return {app.id: app for app in self.apps.values()}

    @cached_property
    def topic_by_name(self) -> Mapping[str, Topic]:
        return {topic.name: topic for topic in self.topics.values()}

    @cached_property
    def subscriptions_of(self) -> Mapping[int, Sequence[Subscription]]:
        """Return subscriptions by topic number, in the order of their numbers."""
        found: dict[int, list[Subscription]] = {}
        for subscription in sorted(self.subscriptions.values(), key=lambda s: s.number):
            found.setdefault(subscription.topic, []).append(subscription)
        return found

    @cached_property
    def subscription_by_name(self) -> Mapping[tuple[int, int, str], Subscription]:
        """Return subscriptions by topic number, app number, and tag: the active one, or the last one removed."""
        in_turn = sorted(self.subscriptions.values(), key=lambda s: (not s.is_removed, s.number))
        return {s.name: s for s in in_turn}

    @cached_property
    def earlier_registrations(self) -> Mapping[SubscriptionNumber, Sequence[SubscriptionNumber]]:
        """Return, by subscription number, the other numbers its name has had, newest first. Only those that have any."""
        numbers: dict[tuple[int, int, str], list[SubscriptionNumber]] = {}
        for number in sorted(self.subscriptions, reverse=True):
            numbers.setdefault(self.subscriptions[number].name, []).append(number)
        return {n: [other for other in same if other != n] for same in numbers.values() if len(same) > 1 for n in same}

    @cached_property
    def superseded(self) -> frozenset[SubscriptionNumber]:
        """Numbers of removed subscriptions whose names were registered again."""
        latest = self.subscription_by_name
        return frozenset(n for n, s in self.subscriptions.items() if s.is_removed and not latest[s.name].is_removed)

    @cached_property
    def subscriptions_on(self) -> Mapping[Shard, Sequence[Subscription]]:
        """Return, by shard, the subscriptions whose rows it may hold."""
        found: dict[Shard, list[Subscription]] = {}
        for number, subscriptions in self.subscriptions_of.items():
            topic = self.topics[number]
            for shard in shards_of(topic.table_index, topic.spread):
                found.setdefault(shard, []).extend(subscriptions)
        return found

    @cached_property
    def topics_on(self) -> Mapping[Shard, Sequence[Topic]]:
        """Return, by shard, the topics whose messages it may hold."""
        found: dict[Shard, list[Topic]] = {}
        for topic in sorted(self.topics.values(), key=lambda t: t.number):
            for shard in shards_of(topic.table_index, topic.spread):
                found.setdefault(shard, []).append(topic)
        return found

    def is_paused(self, number: SubscriptionNumber) -> bool:
        """Return whether nothing is delivered to this subscription now: it or its topic is paused.

        A removed one is not: its deliveries are cancelled.
        """
        subscription = self.subscriptions[number]
        topic = self.topics.get(subscription.topic)
        return not subscription.is_removed and (subscription.paused or (topic is not None and topic.paused))

    def is_ordered(self, number: SubscriptionNumber) -> bool:
        """Return whether rows of this subscription may stand in lines."""
        subscription = self.subscriptions.get(number)
        topic = self.topics.get(subscription.topic) if subscription is not None else None
        return topic is not None and topic.ordered

    def subscribers(self, topic_number: int) -> Sequence[Subscription]:
        """The subscriptions that receive a message submitted with this copy of the catalog."""
        return [s for s in self.subscriptions_of.get(topic_number, ()) if not s.is_removed]

    def authenticated(self, app_id: str, key_hash: bytes) -> tuple[App, str]:
        """The app of this key. Unknown apps and wrong keys raise the same error: nobody learns which apps exist.

        Returns: the app, and the only tag that this key works for; "": all of them.
        """
        app = self.app_by_id.get(app_id)
        if app is None:
            raise CredentialsInvalid
        if key_hash in app.key_hashes:
            return app, ""
        for keys in app.tag_keys:
            if key_hash in keys.key_hashes:
                return app, keys.tag
        raise CredentialsInvalid

    def topic_named(self, name: str) -> Topic:
        """Raises TopicUnknown."""
        found = self.topic_by_name.get(name)
        if found is None:
            raise TopicUnknown.for_operators(name)
        return found

    def app_named(self, id_: str) -> App:
        """Raises AppUnknown."""
        found = self.app_by_id.get(id_)
        if found is None:
            raise AppUnknown.for_operators(id_)
        return found

    def subscription_named(self, topic: Topic, app: str, tag: str) -> Subscription:
        """tag "": the topic's default. Raises SubscriptionUnknown, also if there is no such app."""
        known = self.app_by_id.get(app)
        name = (topic.number, known.number, tag or topic.default_tag) if known is not None else None
        found = self.subscription_by_name.get(name) if name is not None else None
        if found is None:
            raise SubscriptionUnknown.for_operators()
        return found

    def producible(self, name: str, app: App) -> Topic:
        """The topic if the app owns it; the same error for foreign and missing ones."""
        topic = self.topic_by_name.get(name)
        if topic is None or topic.owner != app.number:
            raise TopicUnknown(
                f"There is no topic {name!r} that app {app.id!r} may use: register it as one of its own, or check the name."
            )
        return topic

    def consumable(self, topic_number: int, app: App, tag: str) -> Subscription:
        """The caller's subscription to a topic."""
        subscription = self.subscription_by_name.get((topic_number, app.number, tag))
        if subscription is None:
            raise SubscriptionUnknown
        return subscription
