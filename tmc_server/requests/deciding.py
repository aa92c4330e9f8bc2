"""Submit and rollback, by message id or by topic, key and attempt id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tmc_server.domain.operations import Answer, Decide, Stored
from tmc_server.domain.placement import shard_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.work import Performer
from tmc_server.errors import InvalidField, MessageUnknown
from tmc_server.metrics import METRICS, count_each
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller, Item, RateLimiter, perform_each
from tmc_server.requests.preparing import OpenGauge


class Deciding:
    """Ids are not secrets: the topic inside is checked for its owner here and against the row in the store."""

    def __init__(self, catalog: CatalogSource, performer: Performer, rate: RateLimiter, gauge: OpenGauge) -> None:
        self._catalog = catalog
        self._performer = performer
        self._rate = rate
        self._gauge = gauge

    def item(self, caller: Caller, *, commit: bool, message_id: str, topic: str, key: str, attempt_id: bytes) -> Decide:
        """One decision. Raises InvalidField, MessageUnknown, TopicUnknown."""
        catalog = self._catalog.current
        if message_id:
            parsed = validation.message_id(message_id)
            found = catalog.topics.get(parsed.topic)
            if found is None or found.owner != caller.app.number or not found.may_be_on(parsed.shard):
                raise MessageUnknown
            return Decide(
                shard=parsed.shard,
                app=caller.app.number,
                commit=commit,
                topic=found,
                producer_tag=caller.tag or found.default_tag,
                number=parsed.number,
                only_this_tag=caller.only_this_tag,
            )
        if not (topic or key or attempt_id):
            raise InvalidField("message_id", "be given, or else topic, key and attempt_id")
        validation.topic(topic)
        validation.key(key)
        validation.attempt_id(attempt_id)
        found = catalog.producible(topic, caller.app)
        return Decide(
            shard=shard_of(found.table_index, found.spread, key),
            app=caller.app.number,
            commit=commit,
            topic=found,
            producer_tag=caller.tag or found.default_tag,
            number=None,
            key=key,
            attempt_id=attempt_id,
        )

    def admit(self, caller: Caller, count: int) -> None:
        """Charge `count` items before validating any: invalid ones cost as much. Raises InvalidField, RateLimited."""
        self._rate.take(caller.app, validation.items(count))

    async def perform(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Decide them. Raises QueueFull, ShuttingDown for all."""
        answers = await perform_each(self._performer, items)
        decided = [
            item
            for item, answer in zip(items, answers, strict=True)
            if isinstance(item, Decide) and isinstance(answer, Stored) and answer.changed
        ]
        for topic, times in Counter(operation.topic.number for operation in decided).items():
            self._gauge.moved(topic, -times)
        count_each(METRICS.submitted, ((operation.topic.name,) for operation in decided if operation.commit))
        count_each(METRICS.rolled_back, ((operation.topic.name,) for operation in decided if not operation.commit))
        return answers
