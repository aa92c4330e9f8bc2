"""Find messages by id or key, and failures by their errors. Nothing here changes a row."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence

from tmc_server.domain.catalog import Catalog, Topic
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import NO_SUBSCRIPTION, Shard, SubscriptionNumber
from tmc_server.domain.placement import shard_of, shards_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import FailureGroup, FailureReader, KeySearch
from tmc_server.domain.views import MessageView
from tmc_server.errors import InvalidField, MessageGone, MessageUnknown
from tmc_server.requests import validation
from tmc_server.requests.listing import Covers, Listing, topics_seen
from tmc_server.requests.lookup import Lookup

_ANY_FURTHER = "*"
_MOST_GROUPS = 1_000


class Searching:
    """covers: whether the caller may see a topic, by its name."""

    def __init__(self, catalog: CatalogSource, lookup: Lookup, search: KeySearch, failures: FailureReader) -> None:
        self._catalog = catalog
        self._lookup = lookup
        self._search = search
        self._failures = failures

    async def messages(
        self, text: str, topic: str, covers: Covers, page_size: int, page_token: str
    ) -> Listing[MessageView]:
        """text: an id, a key, or the beginning of one with `*`. Raises InvalidField, TopicUnknown."""
        if MessageId.parse(text) is not None:
            return Listing(rows=await self._by_id(text, topic, covers), next_token="")
        is_beginning = text.endswith(_ANY_FURTHER)
        key = text.removesuffix(_ANY_FURTHER) if is_beginning else text
        validation.key(key, "text")
        limit, after = validation.page_size(page_size), _place_of(page_token)
        topics = topics_seen(self._catalog.current, topic, covers)
        if is_beginning and len(topics) > 1:
            raise InvalidField("topic", "be given: the beginning of a key is searched in one topic only")
        places = _by_shard((shard, each.number) for each in topics for shard in _shards(each, key, is_beginning))
        rows = await asyncio.to_thread(self._search.messages, places, key, is_beginning, after, limit)
        more = is_beginning and len(rows) >= limit
        return Listing(rows=rows, next_token=_token(rows[-1].key) if more else "")

    async def _by_id(self, text: str, topic: str, covers: Covers) -> Sequence[MessageView]:
        try:
            found = await asyncio.to_thread(self._lookup.find, text, "", "")
        except (MessageUnknown, MessageGone):
            return ()
        name = self._catalog.current.topics[found.topic].name
        return [found] if covers(name) and topic in ("", name) else ()

    async def failures(
        self, topic: str, app: str, tag: str, covers: Covers, limit: int
    ) -> tuple[int, Sequence[FailureGroup], bool]:
        """app "": of all subscribers, and checks. Returns: now, the largest groups, whether there are more.

        Raises InvalidField, TopicUnknown, AppUnknown.
        """
        most = validation.between(limit or 100, "limit", 1, _MOST_GROUPS)
        validation.tag(tag)
        if tag and not app:
            raise InvalidField("tag", "be left out, or app be given: the environment is that of a subscriber")
        catalog = self._catalog.current
        topics = {each.number for each in topics_seen(catalog, topic, covers)}
        subscriptions = _subscriptions(catalog, topics, app, tag)
        return await asyncio.to_thread(self._failures.groups, topics, subscriptions, most)


def _subscriptions(catalog: Catalog, topics: set[int], app: str, tag: str) -> set[SubscriptionNumber]:
    subscriber = catalog.app_named(validation.app_id(app, "app")) if app else None
    found = {
        each.number
        for each in catalog.subscriptions.values()
        if each.topic in topics and subscriber in (None, catalog.apps.get(each.app)) and tag in ("", each.tag)
    }
    return found if app else {NO_SUBSCRIPTION, *found}


def _shards(topic: Topic, key: str, is_beginning: bool) -> Sequence[Shard]:
    if is_beginning:
        return shards_of(topic.table_index, topic.spread)
    return [shard_of(topic.table_index, topic.spread, key)]


def _by_shard(places: Iterable[tuple[Shard, int]]) -> Mapping[Shard, Sequence[int]]:
    found: dict[Shard, list[int]] = {}
    for shard, topic in places:
        found.setdefault(shard, []).append(topic)
    return found


def _token(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _place_of(token: str) -> str:
    """The last key of the page before; "": there is none."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:  # no base64, or no UTF-8 in it
        raise InvalidField("page_token", "be one that the center gave you") from None
