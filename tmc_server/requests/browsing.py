"""Messages and deliveries page by page, oldest or newest first. Nothing here changes a row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tmc_server.domain.catalog import Topic
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import SHARDS, shards_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import RowLister, RowReader, Span
from tmc_server.domain.views import ConsumptionView, MessageView
from tmc_server.errors import AppUnknown, InvalidField, TopicUnknown
from tmc_server.requests import validation
from tmc_server.requests.listing import Listing

_ALL = [Shard(number) for number in range(SHARDS)]

Placed = TypeVar("Placed", MessageView, ConsumptionView)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A page as a caller asks for it. older_than_ms: only messages of at least this age, milliseconds; 0: any age."""

    from_ms: int = 0
    to_ms: int = 0
    older_than_ms: int = 0
    newest_first: bool = False
    page_size: int = 0
    page_token: str = ""


class Browsing:
    """Lists by age. topic "": all topics."""

    def __init__(self, catalog: CatalogSource, lister: RowLister, reader: RowReader) -> None:
        self._catalog = catalog
        self._lister = lister
        self._reader = reader

    async def messages(self, topic: str, state: int, wanted: Wanted) -> Listing[MessageView]:
        """Raises InvalidField, TopicUnknown."""
        place = self._topic(topic)
        if state not in (0, *map(int, MessageState)):
            raise InvalidField("state", "be one of the message states")
        span = await self._span(wanted)
        rows = await asyncio.to_thread(
            self._lister.messages,
            shards_of(place.table_index, place.spread) if place is not None else _ALL,
            place.number if place is not None else None,
            MessageState(state) if state else None,
            span,
        )
        return _page(rows, span)

    async def consumptions(
        self, topic: str, app: str, tag: str, state: int, fingerprint: str, wanted: Wanted
    ) -> Listing[ConsumptionView]:
        """app, tag "": of all subscribers.  fingerprint: FAILED with this error; "": any.

        Raises InvalidField, TopicUnknown, AppUnknown.
        """
        tag = validation.tag(tag)
        place = self._topic(topic)
        if state not in (0, *map(int, ConsumptionState)):
            raise InvalidField("state", "be one of the consumption states")
        if fingerprint and state not in (0, ConsumptionState.FAILED):
            raise InvalidField("fingerprint", "be left out: only FAILED deliveries have one")
        state = ConsumptionState.FAILED if fingerprint else state
        catalog = self._catalog.current
        subscriber = catalog.app_by_id.get(validation.app_id(app, "app")) if app else None
        if app and subscriber is None:
            raise AppUnknown(f"There is no app {app!r}: list the apps to see their ids.")
        all_of_them = (
            catalog.subscriptions.values() if place is None else catalog.subscriptions_of.get(place.number, ())
        )
        span = await self._span(wanted)
        rows = await asyncio.to_thread(
            self._lister.consumptions,
            shards_of(place.table_index, place.spread) if place is not None else _ALL,
            {
                each.number: each.topic
                for each in all_of_them
                if (subscriber is None or each.app == subscriber.number) and (not tag or each.tag == tag)
            },
            ConsumptionState(state) if state else None,
            validation.fingerprint(fingerprint),
            span,
        )
        return _page(rows, span)

    def _topic(self, name: str) -> Topic | None:
        if not name:
            return None
        found = self._catalog.current.topic_by_name.get(validation.topic(name))
        if found is None:
            raise TopicUnknown(f"There is no topic {name!r}: list the topics to see their names.")
        return found

    async def _span(self, wanted: Wanted) -> Span:
        to_ms = validation.between(wanted.to_ms, "to_ms", 0, 2**53)
        age_ms = validation.between(wanted.older_than_ms, "older_than_ms", 0, 2**53)
        if age_ms:
            before_ms = max(1, await asyncio.to_thread(self._reader.now, _ALL[0]) - age_ms)
            to_ms = min(to_ms or before_ms, before_ms)
        return Span(
            from_ms=validation.between(wanted.from_ms, "from_ms", 0, 2**53),
            to_ms=to_ms,
            newest_first=wanted.newest_first,
            after=validation.page_token(wanted.page_token),
            limit=validation.page_size(wanted.page_size),
        )


def _page(rows: Sequence[Placed], span: Span) -> Listing[Placed]:
    token = f"{rows[-1].shard}-{rows[-1].number}" if len(rows) >= span.limit else ""
    return Listing(rows=rows, next_token=token)
