"""Find one message: by its id, or the newest one of a topic and key. Nothing here changes a row."""

from __future__ import annotations

import asyncio

from tmc_server.domain.placement import shard_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.views import MessageDetail, MessageView
from tmc_server.errors import InvalidField, MessageGone, MessageUnknown
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller


class Lookup:
    """For operators, who see every message, and for producers, who see their own."""

    def __init__(self, catalog: CatalogSource, reader: RowReader) -> None:
        self._catalog = catalog
        self._reader = reader

    async def message(self, message_id: str, topic: str, key: str) -> MessageDetail:
        """Raises as find."""
        found = await asyncio.to_thread(self.find, message_id, topic, key)
        return await asyncio.to_thread(self._reader.detail, found)

    def find(self, message_id: str, topic: str, key: str) -> MessageView:
        """Find a message by id, or the newest of topic and key, whatever its environment. Blocks.

        Raises InvalidField, MessageUnknown, MessageGone, TopicUnknown.
        """
        if bool(message_id) == bool(topic or key) or bool(topic) != bool(key):
            raise InvalidField("message_id", "be given, or topic and key instead of it")
        if message_id:
            parsed = validation.message_id(message_id)
            found = self._reader.message(parsed.shard, parsed.number)
            if found is not None and found.topic != parsed.topic:  # rights go by what the id claims
                found = None
            elif found is None and self._reader.is_gone(parsed.shard, parsed.number):
                raise MessageGone(
                    "It may have been closed and removed by the retention duty: look for it in the archive"
                    " (`tmc pipeline restore`)."
                )
        else:
            place = self._catalog.current.topic_named(validation.topic(topic))
            shard = shard_of(place.table_index, place.spread, validation.key(key))
            found = self._reader.message_by_key(shard, place.number, key, None, live_only=False)
        if found is None or found.topic not in self._catalog.current.topics:
            raise MessageUnknown(
                "There is no such message: check the id, or topic and key; it may have been removed by retention."
            )
        return found

    async def own_message(self, caller: Caller, message_id: str, topic: str, key: str) -> MessageView:
        """Return one of a producer's own messages; the same error for foreign and missing ones."""
        catalog = self._catalog.current
        if message_id:
            parsed = validation.message_id(message_id)
            place = catalog.topics.get(parsed.topic)
            if place is None or place.owner != caller.app.number or not place.may_be_on(parsed.shard):
                raise MessageUnknown
            found = await asyncio.to_thread(self._reader.message, parsed.shard, parsed.number)
        else:
            place = catalog.producible(validation.topic(topic), caller.app)
            shard = shard_of(place.table_index, place.spread, validation.key(key))
            tag = caller.tag or place.default_tag
            found = await asyncio.to_thread(self._reader.message_by_key, shard, place.number, key, tag, True)
        if found is None or found.topic != place.number:
            raise MessageUnknown
        if caller.only_this_tag and found.producer_tag != caller.tag:
            raise MessageUnknown
        return found
