"""The catalog: reading it, changing it, and waiting until every server uses the change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from tmc_server.domain.alerts import Silence
from tmc_server.domain.catalog import App, Catalog, Forward, NewApp, NewTopic, Subscription, Topic
from tmc_server.domain.checks import CheckPolicy
from tmc_server.domain.numbers import NO_SUBSCRIPTION, SubscriptionNumber
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.retry import RetryPolicy

P = ParamSpec("P")
T = TypeVar("T")


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
class NewSubscription:
    """What a subscription is registered with. topic, app: by name and id.  tag "": the topic's default."""

    topic: str
    app: str
    tag: str
    policy: RetryPolicy
    forward: Forward | None = None
    order: OrderMode = OrderMode.STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckChange:
    """What changes of a topic's checks: the targets that are given, these that go, and these fields of the policy."""

    policy: Collection[str]
    removed_targets: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class NewSilence:
    """Of which alerts, and for how long. kind, topic "", subscription 0: any.  app, tag: of the subscription, for the audit."""

    kind: str = ""
    topic: str = ""
    subscription: SubscriptionNumber = NO_SUBSCRIPTION
    app: str = ""
    tag: str = ""
    for_ms: int
    reason: str


class CatalogEditor(Protocol):
    """Changes to the catalog; each is one transaction with its audit row. All block. `actor`: the operator's name.

    Stored when they return; Activation says when they count everywhere.
    """

    def register_app(self, actor: str, new: NewApp) -> tuple[App, str]:
        """Returns: app, key ("" if it existed). Raises NameTaken."""

    def add_key(self, actor: str, id_: str, replace_newest: bool, tag: str = "") -> str:
        """tag: the key works in this environment only. Returns: key. Raises AppUnknown, RotationOpen."""

    def drop_old_key(self, actor: str, id_: str, tag: str = "", drop_newest: bool = False) -> None:
        """tag: of the keys of this environment.  drop_newest: all of them. Raises AppUnknown."""

    def open_submit_queue(self, actor: str, id_: str, tag: str, unsigned: bool, replace_newest: bool) -> str:
        """Take messages from this queue, or give it another secret; the one before still works.

        unsigned: it has no secret.  Returns: the secret, 32 bytes in hexadecimal.
        Raises AppUnknown, RotationOpen; NameTaken: it is open in the other way.
        """

    def drop_old_submit_secret(self, actor: str, id_: str, tag: str) -> None:
        """Take only what the newest secret signed. Raises AppUnknown."""

    def close_submit_queue(self, actor: str, id_: str, tag: str, reason: str) -> None:
        """Take nothing from it any more. Raises AppUnknown."""

    def rotate_check_token(self, actor: str, id_: str, reason: str) -> None:
        """Another token for checks, at once. Raises AppUnknown."""

    def set_disabled(self, actor: str, id_: str, disabled: bool, reason: str) -> None:
        """Refuse an app's calls, or accept them again. Raises AppUnknown."""

    def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """Raises AppUnknown, NameTaken."""

    def update_topic(self, actor: str, topic_name: str, changes: Mapping[str, int]) -> Topic:
        """changes: new values by field. Raises TopicUnknown."""

    def set_topic_check(
        self, actor: str, topic_name: str, checks: CheckPolicy, change: CheckChange | None = None
    ) -> Topic:
        """change None: all targets and the policy, instead of those it had. Raises TopicUnknown."""

    def register_subscription(
        self, actor: str, new: NewSubscription, change: Collection[str] | None = None
    ) -> Subscription:
        """Register it, or change its policy and order and take back an unfinished removal. After a removal: a new number.

        change: the fields of the policy, and "order", that change when it is there; None: all.
        Raises TopicUnknown, AppUnknown, NameTaken: where it sends cannot be changed.
        """

    def drain_server(self, actor: str, incarnation: int, drained: bool, reason: str, others: Collection[int]) -> None:
        """Drain a server; audited. others: the other runs that are alive.

        Raises InvalidField: none of them would look after shards.
        """

    def silence_alerts(self, actor: str, new: NewSilence) -> Silence:
        """Send no notices of some alerts for a while; silences that are over are forgotten. Raises TopicUnknown."""

    def end_silence(self, actor: str, id_: int, reason: str) -> Silence:
        """End a silence before its time. Raises AlertUnknown."""

    def pause_topic(self, actor: str, topic_name: str, paused: bool, reason: str) -> Topic:
        """Deliver nothing of it, or deliver again. Raises TopicUnknown."""

    def pause_subscription(
        self, actor: str, topic_name: str, app_id: str, tag: str, paused: bool, reason: str
    ) -> Subscription:
        """Deliver nothing to it, or deliver again. Raises TopicUnknown, AppUnknown, SubscriptionUnknown."""

    def remove_subscription(self, actor: str, topic_name: str, app_id: str, tag: str) -> Subscription:
        """Ask for its removal: nothing changes for it before finish_removal, and registering it again takes this back.

        Raises TopicUnknown, AppUnknown, SubscriptionUnknown.
        """

    def finish_removal(self, actor: str, number: SubscriptionNumber) -> Subscription:
        """Remove it for good, unless its removal was taken back. Returns: it, with removed_ms when it is gone."""

    def show_delivery_keys(self, actor: str, number: SubscriptionNumber) -> None:
        """Nothing changes, but it is audited."""

    def announce_delivery_key(
        self, actor: str, topic_name: str, app_id: str, tag: str, drop_previous: bool
    ) -> Subscription:
        """Add a key that is accepted but does not sign yet: `sign_with` follows once every server announces it.

        Raises TopicUnknown, AppUnknown, SubscriptionUnknown (or it has no key), RotationOpen: it has a further one.
        """

    def sign_with(self, actor: str, number: SubscriptionNumber, announced: bytes) -> Subscription:
        """The announced key signs, the one before is accepted; nothing changes if another one was announced meanwhile."""

    def confirm(
        self, topics: Collection[int], subscriptions: Collection[SubscriptionNumber], effective_ms: int
    ) -> None:
        """Write down since when every server knows these, by number; those that have a time keep it."""


class ChangeEverywhere(Protocol):
    """Stores a change of the catalog, and returns when it counts at every server."""

    async def __call__(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
        """Returns: the change's result, and the time by which it counted. Raises StoreUnavailable: repeat it."""


class Activation(Protocol):
    """Tells when a stored change of the catalog counts everywhere."""

    def wait(self) -> int:
        """Make this server's copy current, then wait until no server can submit with one from before this call.

        Returns: the catalog database's time, milliseconds. Blocks. Raises StoreUnavailable: repeat the change.
        """

    def stop(self) -> None:
        """End the waits under way and all later ones with StoreUnavailable. Does not block."""
