"""What operators do about alerts: list, acknowledge and silence them. Changes are audited."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tmc_server.domain.alerts import KINDS, Silence, silenced_until
from tmc_server.domain.catalog import Subscription, Topic
from tmc_server.domain.numbers import NO_SUBSCRIPTION, Shard
from tmc_server.domain.ports.alerts import Episode, EpisodeStore
from tmc_server.domain.ports.catalog import CatalogEditor, CatalogSource, ChangeEverywhere, NewSilence
from tmc_server.domain.ports.reading import RowReader
from tmc_server.errors import AlertUnknown, InvalidField
from tmc_server.requests import validation
from tmc_server.requests.listing import Covers, Listing, in_order, listed

LONGEST_SILENCE_MS = 30 * 86_400_000
_MOST = 1_000  # episodes of one database in a list
_LAST_MS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """silenced_until_ms: None: its notices are sent."""

    episode: Episode
    silenced_until_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceFilter:
    """Which alerts: of a topic, an app's subscriptions to it, a kind; "": any."""

    topic: str = ""
    app: str = ""
    tag: str = ""
    kind: str = ""


class Alerts:
    """desks: of each database, by its number in ids.  change: stores a change of the catalog everywhere."""

    def __init__(
        self,
        catalog: CatalogSource,
        editor: CatalogEditor,
        reader: RowReader,
        desks: Mapping[int, EpisodeStore],
        change: ChangeEverywhere,
    ) -> None:
        self._catalog = catalog
        self._editor = editor
        self._reader = reader
        self._desks = desks
        self._change = change

    async def episodes(self, resolved: bool, page_size: int, page_token: str, covers: Covers) -> Listing[EpisodeView]:
        """Newest first; at most the newest 1,000 of each database. resolved: those that are over as well."""
        return await asyncio.to_thread(self._episodes, resolved, page_size, page_token, covers)

    def _episodes(self, resolved: bool, page_size: int, page_token: str, covers: Covers) -> Listing[EpisodeView]:
        topics = self._catalog.current.topics
        found = [
            each
            for desk in self._desks.values()
            for each in desk.episodes(not resolved, _MOST)
            if covers(topics[each.topic].name if each.topic in topics else "")
        ]
        now = self._reader.now(Shard(0))
        page = listed(found, _newest_first, page_size, page_token)
        return Listing(rows=[self._view(each, now) for each in page.rows], next_token=page.next_token)

    async def acknowledge(self, actor: str, alert_id: str, reason: str) -> EpisodeView:
        """Send no further reminders of it. Raises InvalidField, AlertUnknown."""
        validation.reason(reason)
        match = re.fullmatch(r"([0-9]{1,2})-([0-9]{1,18})", alert_id, re.ASCII)
        if match is None:
            raise InvalidField("alert_id", "be one that a notice or a list of alerts shows, such as 0-17")
        desk, number = self._desks.get(int(match[1])), int(match[2])
        found = await asyncio.to_thread(desk.acknowledge, actor, number, reason) if desk is not None else None
        if found is None:
            raise AlertUnknown
        return self._view(found, await asyncio.to_thread(self._reader.now, Shard(0)))

    async def silence(self, actor: str, wanted: SilenceFilter, for_ms: int, reason: str) -> Silence:
        """Raises InvalidField, TopicUnknown, AppUnknown, SubscriptionUnknown."""
        if wanted.kind and wanted.kind not in KINDS:
            raise InvalidField("kind", f"be one of {', '.join(sorted(KINDS))}")
        if (wanted.app or wanted.tag) and not (wanted.topic and wanted.app):
            raise InvalidField("topic", "be given with an app: a silence is for all, a topic, or one subscription")
        topic = self._topic(wanted.topic) if wanted.topic else None
        subscription = self._subscription(topic, wanted) if topic is not None and wanted.app else None
        new = NewSilence(
            kind=wanted.kind,
            topic=wanted.topic,
            subscription=subscription.number if subscription is not None else NO_SUBSCRIPTION,
            app=wanted.app,
            tag=subscription.tag if subscription is not None else "",
            for_ms=validation.between(for_ms, "for_ms", 1_000, LONGEST_SILENCE_MS),
            reason=validation.reason(reason),
        )
        made, _ = await self._change(self._editor.silence_alerts, actor, new)
        return made

    async def end_silence(self, actor: str, number: int, reason: str) -> Silence:
        """Raises InvalidField, AlertUnknown."""
        ended, _ = await self._change(self._editor.end_silence, actor, number, validation.reason(reason))
        return ended

    async def silences(self) -> Sequence[Silence]:
        """Return those in effect."""
        now = await asyncio.to_thread(self._reader.now, Shard(0))
        return [each for each in self._catalog.current.silences if each.until_ms > now]

    def _view(self, episode: Episode, now: int) -> EpisodeView:
        silences = self._catalog.current.silences
        until_ms = silenced_until(silences, episode.kind, episode.topic, episode.subscription, now)
        return EpisodeView(episode=episode, silenced_until_ms=until_ms)

    def _topic(self, name: str) -> Topic:
        return self._catalog.current.topic_named(validation.topic(name))

    def _subscription(self, topic: Topic, wanted: SilenceFilter) -> Subscription:
        catalog = self._catalog.current
        app = catalog.app_named(validation.app_id(wanted.app, "app"))
        return catalog.subscription_named(topic, app.id, validation.tag(wanted.tag))


def _newest_first(episode: Episode) -> str:
    return f"{in_order(_LAST_MS - episode.first_ms)}-{episode.shard:02d}-{in_order(episode.number)}"
