"""Creates apps, topics and subscriptions when they are first named: for `tmc dev` on loopback only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tmc_server.domain.catalog import App, NewApp, NewTopic
from tmc_server.domain.placement import table_index_for
from tmc_server.domain.ports.catalog import CatalogEditor, CatalogSource, NewSubscription
from tmc_server.domain.retry import RetryPolicy
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller

ACTOR = "first use"


EnsureTopic = Callable[[Caller, str], None]
EnsureProducible = Callable[[Caller, str, bool], None]


def topics_exist(_caller: Caller, _name: str) -> None:
    """Do nothing: in production, naming a topic does not create it."""


def topics_to_produce_exist(_caller: Caller, _name: str, _ordered: bool) -> None:
    """The same for producers."""


class DevEditor(CatalogEditor, Protocol):
    """The editor, and taking over a topic that a consumer named first."""

    def claim_topic(self, topic_name: str, app_id: str, ordered: bool) -> None: ...


class FirstUse:
    """Blocks for a moment on the loop, once per new name. say: tells the developer what was made."""

    def __init__(
        self,
        editor: DevEditor,
        catalog: CatalogSource,
        refresh: Callable[[], object],
        policy: RetryPolicy,
        transaction_time_ms: int,
        say: Callable[[str], None],
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._refresh = refresh
        self._policy = policy
        self._transaction_time_ms = transaction_time_ms
        self._say = say

    def app(self, id_: str) -> App:
        validation.app_id(id_, "tmc-app")
        found = self._catalog.current.app_by_id.get(id_)
        if found is None:
            self._editor.register_app(ACTOR, NewApp(id=id_, service_name=id_, biz_id=id_))
            self._made(f"app {id_}")
            found = self._catalog.current.app_by_id[id_]
        return found

    def topic_to_produce(self, caller: Caller, name: str, ordered: bool) -> None:
        """ordered: its first message has an order key, so all will have."""
        found = self._catalog.current.topic_by_name.get(name)
        if found is None:
            self._make_topic(name, caller.app.id, ordered)
        elif found.owner == 0:
            self._editor.claim_topic(name, caller.app.id, ordered)
            self._made(f"{caller.app.id} as owner of topic {name}")

    def topic_to_consume(self, caller: Caller, name: str) -> None:
        if name not in self._catalog.current.topic_by_name:
            self._make_topic(name, "")
            self._say(f"nobody has produced {name} yet, {caller.app.id} only consumes it: is the name spelled right?")
        topic = self._catalog.current.topic_by_name[name]
        tag = caller.tag or topic.default_tag
        if (topic.number, caller.app.number, tag) not in self._catalog.current.subscription_by_name:
            new = NewSubscription(topic=name, app=caller.app.id, tag=tag, policy=self._policy)
            self._editor.register_subscription(ACTOR, new)
            self._made(f"subscription of {caller.app.id} ({tag}) to {name}")

    def _make_topic(self, name: str, owner: str, ordered: bool = False) -> None:
        new = NewTopic(
            name=name,
            owner=owner,
            table_index=table_index_for(name),
            transaction_time_ms=self._transaction_time_ms,
            ordered=ordered,
        )
        self._editor.register_topic(ACTOR, new)
        self._made(f"topic {name}")

    def _made(self, what: str) -> None:
        self._refresh()
        self._say(f"made {what}")
