"""What operators ask for: the one place under the admin RPCs, the command line and the console. Each change is audited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar

from tmc_common import fields
from tmc_common.eventlog import EventLog
from tmc_common.submission import DEAD
from tmc_server.domain.catalog import (
    App,
    Catalog,
    Forward,
    NewApp,
    NewTopic,
    SubmitQueue,
    Subscription,
    Topic,
    TopicSettings,
)
from tmc_server.domain.declared import changeable
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.ports.catalog import (
    Activation,
    CatalogEditor,
    CatalogSource,
    NewSubscription,
)
from tmc_server.domain.ports.checks import Instances
from tmc_server.domain.ports.delivery import Forwarding
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.ports.servers import ServerView, ShardPlace
from tmc_server.domain.queue_names import LONGEST, queue_name
from tmc_server.errors import (
    AppUnknown,
    InvalidField,
    StoreUnavailable,
    Unavailable,
)
from tmc_server.requests import validation

log = EventLog("tmc.admin")

_WAITS = 8  # changes that are awaited at once; the next ones wait for their turn

P = ParamSpec("P")
T = TypeVar("T")


class Administering:
    """refresh: makes this server's own copy of the catalog current.

    activation: a change is answered when it counts everywhere.  forwarding: what this server can forward to.
    """

    def __init__(
        self,
        editor: CatalogEditor,
        catalog: CatalogSource,
        reader: RowReader,
        refresh: Callable[[], object],
        activation: Activation,
        instances: Instances,
        forwarding: Forwarding,
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._reader = reader
        self._refresh = refresh
        self._activation = activation
        self._instances = instances
        self._forwarding = forwarding
        # Their own threads: a wait lasts seconds, and all other blocking work of the server shares the loop's few.
        self._waits = ThreadPoolExecutor(_WAITS, thread_name_prefix="tmc-activation")
        self._stopped = False

    def stop(self) -> None:
        """Stop, on the loop, once no call comes any more: nobody waits for a change. Does not block."""
        self._stopped = True
        self._activation.stop()
        self._waits.shutdown(wait=False, cancel_futures=True)

    @property
    def catalog(self) -> Catalog:
        return self._catalog.current

    async def change(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
        """Store a change of the catalog and wait until it counts everywhere.

        Returns: its result, and the time by which it counted. Raises StoreUnavailable: it may be stored, repeat it.
        """
        result = await asyncio.to_thread(change, *args, **kwargs)
        return result, await self._everywhere()

    async def _everywhere(self) -> int:
        if self._stopped:
            raise StoreUnavailable("The change is stored, but this server stops before all servers know it: repeat it.")
        return await asyncio.get_running_loop().run_in_executor(self._waits, self._activation.wait)

    async def change_with_key(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
        """Change as `change` does; the result holds a key that is shown only once, so it is answered even when the wait fails.

        Returns: its result, and the time by which it counted; 0: that is not known.
        """
        result = await asyncio.to_thread(change, *args, **kwargs)
        try:
            return result, await self._everywhere()
        except Unavailable as exc:
            log.warning("change_unconfirmed", "a stored change may not be known everywhere yet: %s", exc)
            return result, 0

    async def register_app(self, actor: str, new: NewApp) -> tuple[App, str, int]:
        """Register an app; empty names default to its id. Returns: app, key ("" if it existed), time of effect."""
        validation.app_id(new.id)
        validation.within_bounds(new)
        named = replace(new, service_name=new.service_name or new.id, biz_id=new.biz_id or new.id)
        (app, key), effective_ms = await self.change_with_key(self._editor.register_app, actor, named)
        return app, key, effective_ms

    async def add_app_key(self, actor: str, id_: str, replace_newest: bool, tag: str = "") -> tuple[str, int]:
        """tag: the key works in this environment only; "": in all of them."""
        validation.app_id(id_)
        return await self.change_with_key(self._editor.add_key, actor, id_, replace_newest, validation.tag(tag))

    async def drop_old_app_key(self, actor: str, id_: str, tag: str = "", drop_newest: bool = False) -> int:
        """tag: of the keys of this environment.  drop_newest: that one too; only with a tag."""
        validation.app_id(id_)
        validation.tag(tag, may_be_empty=not drop_newest)
        _, effective_ms = await self.change(self._editor.drop_old_key, actor, id_, tag, drop_newest)
        return effective_ms

    async def open_submit_queue(
        self, actor: str, id_: str, tag: str, *, unsigned: bool, replace_newest: bool
    ) -> tuple[SubmitQueue, str, int]:
        """tag "": default. Returns: the queue, its new secret, time of effect.

        Raises AppUnknown, RotationOpen, NameTaken, InvalidField.
        """
        validation.app_id(id_)
        tag = validation.tag(tag) or "default"
        if tag == DEAD:
            raise InvalidField("tag", f"be another one: the queue with {DEAD} in its name is for what is refused")
        opened = self._editor.open_submit_queue
        secret, effective_ms = await self.change_with_key(opened, actor, id_, tag, unsigned, replace_newest)
        await asyncio.to_thread(self._refresh)
        queue = self.catalog.app_by_id[id_].submit_queue(tag)
        if queue is None:
            raise AppUnknown("Its queue was closed meanwhile.")
        return queue, secret, effective_ms

    async def drop_old_submit_secret(self, actor: str, id_: str, tag: str) -> int:
        """tag "": default. Returns: time of effect. Raises AppUnknown, InvalidField."""
        validation.app_id(id_)
        _, effective_ms = await self.change(
            self._editor.drop_old_submit_secret, actor, id_, validation.tag(tag) or "default"
        )
        return effective_ms

    async def close_submit_queue(self, actor: str, id_: str, tag: str, reason: str) -> int:
        """tag "": default. Returns: time of effect. Raises AppUnknown, InvalidField."""
        validation.app_id(id_)
        validation.reason(reason)
        tag = validation.tag(tag) or "default"
        _, effective_ms = await self.change(self._editor.close_submit_queue, actor, id_, tag, reason)
        return effective_ms

    async def rotate_check_token(self, actor: str, id_: str, reason: str) -> int:
        """Checks show another token. Returns: time of effect. Raises AppUnknown, InvalidField."""
        validation.app_id(id_)
        validation.line(reason, "reason", 500, least=1)
        _, effective_ms = await self.change(self._editor.rotate_check_token, actor, id_, reason)
        return effective_ms

    async def set_app_disabled(self, actor: str, id_: str, disabled: bool, reason: str) -> int:
        """Refuse an app's calls, or accept them again. Returns: time of effect. Raises AppUnknown, InvalidField."""
        validation.app_id(id_)
        validation.line(reason, "reason", 500, least=1)
        _, effective_ms = await self.change(self._editor.set_disabled, actor, id_, disabled, reason)
        return effective_ms

    async def register_topic(self, actor: str, new: NewTopic) -> Topic:
        """Raises InvalidField, AppUnknown, NameTaken: it is there with other settings."""
        validation.topic(new.name, "name")
        validation.app_id(new.owner, "owner")
        validation.tag(new.default_tag, "default_tag")
        validation.within_bounds(new)
        if new.ordered and new.spread != 1:
            raise InvalidField("spread", "be 1: the messages of one order key are in one shard")
        made, effective_ms = await self.change(self._editor.register_topic, actor, new)
        if made.effective_ms:
            return made
        await asyncio.to_thread(self._editor.confirm, [made.number], [], effective_ms)
        return replace(made, effective_ms=effective_ms)

    async def update_topic(self, actor: str, name: str, changes: Mapping[str, int]) -> tuple[Topic, int]:
        """changes: new values by field. Returns: topic, time of effect. Raises TopicUnknown, InvalidField."""
        validation.topic(name, "name")
        limits = changeable(TopicSettings)
        for field, value in changes.items():
            validation.bounded(value, field, limits[field])
        return await self.change(self._editor.update_topic, actor, name, changes)

    async def register_subscription(
        self, actor: str, new: NewSubscription, change: Collection[str] | None = None, untried: bool = False
    ) -> Subscription:
        """Subscribe an app, or change the retry policy and order mode of a subscription that is there.

        change: the fields of the policy, and "order", that change when it is there; None: all.
        untried: do not look whether the target of a forward exists.  Raises ForwardRefused: it does not, or nobody can say.
        """
        if validation.topic(new.topic) not in self.catalog.topic_by_name:
            await asyncio.to_thread(self._refresh)  # another server may have registered it a moment ago
        place = self.catalog.topic_named(validation.topic(new.topic))
        validation.app_id(new.app, "app")
        tag = validation.tag(new.tag) or place.default_tag
        if new.order is not OrderMode.STRICT and not place.ordered:
            raise InvalidField("order", f"be left out: the messages of {place.name} have no order keys")
        if new.forward is not None:
            self._check_forward(new.forward)
            # The policy of one that is there may change while its target is away.
            if not untried and self._forward_of(place, new.app, tag) != new.forward:
                await asyncio.to_thread(self._forwarding.examine, new.forward)
        elif len(queue_name(new.app, tag, place.name, place.queue_mode)) > LONGEST:
            raise InvalidField("topic", f"leave the queue's name within {LONGEST} characters: use a shorter app or tag")
        made, effective_ms = await self.change(self._editor.register_subscription, actor, new, change)
        if made.effective_ms:
            return made
        await asyncio.to_thread(self._editor.confirm, [], [made.number], effective_ms)
        return replace(made, effective_ms=effective_ms)

    def _forward_of(self, topic: Topic, app: str, tag: str) -> Forward | None:
        """Return where a subscription sends that is there."""
        catalog = self.catalog
        known = catalog.app_by_id.get(app)
        found = catalog.subscription_by_name.get((topic.number, known.number, tag)) if known is not None else None
        return None if found is None or found.is_removed else found.forward

    def _check_forward(self, forward: Forward) -> None:
        kinds = self._forwarding.forwarder_kinds
        if forward.kind not in kinds:
            known = ", ".join(sorted(kinds)) or "none: set [rabbitmq] url"
            raise InvalidField("forward.kind", f"be one that this center can do ({known})")
        for field, value, least in (("forward.target", forward.target, 1), ("forward.key", forward.key, 0)):
            validation.line(value, field, fields.ROUTING_KEY_BYTES, least)
            if len(value.encode()) > fields.ROUTING_KEY_BYTES:
                raise InvalidField(field, f"be at most {fields.ROUTING_KEY_BYTES} bytes")

    async def servers(self) -> Sequence[ServerView]:
        return await asyncio.to_thread(self._reader.servers)

    async def drain(self, actor: str, server: str, drained: bool, reason: str) -> ServerView:
        """Let a server look after no shards, or take part again. Raises InvalidField: it is not alive, or the last one."""
        validation.line(server, "server", 128, least=1)
        validation.reason(reason)
        alive = [view for view in await self.servers() if view.alive]
        found = [view for view in alive if server in (view.run.name, str(view.run.incarnation))]
        if not found:
            raise InvalidField("server", "be the name or incarnation of a server that is alive: list the servers")
        run = max(found, key=lambda view: view.run.incarnation).run
        others = [view.run.incarnation for view in alive if view.run.incarnation != run.incarnation]
        await asyncio.to_thread(self._editor.drain_server, actor, run.incarnation, drained, reason, others)
        return next(view for view in await self.servers() if view.run.incarnation == run.incarnation)

    async def shard_places(self) -> Sequence[ShardPlace]:
        """Return which database holds which shard."""
        return await asyncio.to_thread(self._reader.shard_places)

    async def instances(self, app: str, tag: str) -> Sequence[str]:
        """Addresses at which a producer's service would be checked. Raises AppUnknown."""
        known = self.catalog.app_named(validation.app_id(app, "app"))
        found = await asyncio.to_thread(self._instances.instances, known, validation.tag(tag, may_be_empty=False))
        return [instance.address for instance in found]

    async def remove_subscription(self, actor: str, topic: str, app: str, tag: str) -> Subscription:
        validation.topic(topic)
        validation.app_id(app, "app")
        validation.tag(tag)
        leaving, _ = await self.change(self._editor.remove_subscription, actor, topic, app, tag)
        if leaving.is_removed:
            return leaving
        gone, removed_ms = await self.change(self._editor.finish_removal, actor, leaving.number)
        return replace(gone, removed_ms=removed_ms) if gone.is_removed else gone

    def subscriptions(self, topic: str) -> Collection[Subscription]:
        """Return those of one topic; "": all. Raises TopicUnknown."""
        if not topic:
            return self.catalog.subscriptions.values()
        return self.catalog.subscriptions_of.get(self.catalog.topic_named(validation.topic(topic)).number, ())
