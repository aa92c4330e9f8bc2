"""Messages and deliveries page by page, oldest or newest first. Nothing here changes a row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import SHARDS, shards_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import RowLister, RowReader, Span
from tmc_server.domain.views import ConsumptionView, MessageView
from tmc_server.errors import InvalidField
from tmc_server.requests import validation
from tmc_server.requests.listing import Covers, Listing, topics_seen

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
    """Lists by age. topic "": all topics that the caller may see.  covers: whether that is one, by its name."""

    def __init__(self, catalog: CatalogSource, lister: RowLister, reader: RowReader) -> None:
        self._catalog = catalog
        self._lister = lister
        self._reader = reader

    async def messages(self, topic: str, state: int, wanted: Wanted, covers: Covers) -> Listing[MessageView]:
        """Raises InvalidField, TopicUnknown."""
        catalog = self._catalog.current
        topics = topics_seen(catalog, topic, covers)
        if state not in (0, *map(int, MessageState)):
            raise InvalidField("state", "be one of the message states")
        span = await self._span(wanted)
        rows = await asyncio.to_thread(
            self._lister.messages,
            sorted({shard for each in topics for shard in shards_of(each.table_index, each.spread)}),
            None if len(topics) == len(catalog.topics) else [each.number for each in topics],
            MessageState(state) if state else None,
            span,
        )
        return _page(rows, span)

    async def consumptions(
        self, topic: str, app: str, tag: str, state: int, fingerprint: str, wanted: Wanted, covers: Covers
    ) -> Listing[ConsumptionView]:
        """app, tag "": of all subscribers.  fingerprint: FAILED with this error; "": any.

        Raises InvalidField, TopicUnknown, AppUnknown.
        """
        tag = validation.tag(tag)
        catalog = self._catalog.current
        topics = topics_seen(catalog, topic, covers)
        if state not in (0, *map(int, ConsumptionState)):
            raise InvalidField("state", "be one of the consumption states")
        if fingerprint and state not in (0, ConsumptionState.FAILED):
            raise InvalidField("fingerprint", "be left out: only FAILED deliveries have one")
        state = ConsumptionState.FAILED if fingerprint else state
        subscriber = catalog.app_named(validation.app_id(app, "app")) if app else None
        span = await self._span(wanted)
        rows = await asyncio.to_thread(
            self._lister.consumptions,
            sorted({shard for each in topics for shard in shards_of(each.table_index, each.spread)}),
            {
                each.number: each.topic
                for of in topics
                for each in catalog.subscriptions_of.get(of.number, ())
                if (subscriber is None or each.app == subscriber.number) and (not tag or each.tag == tag)
            },
            ConsumptionState(state) if state else None,
            validation.fingerprint(fingerprint),
            span,
        )
        return _page(rows, span)

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
