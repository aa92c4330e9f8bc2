"""Prepare and publish: check the fields, find the place, make the number, store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from tmc_common import fields
from tmc_common.headers import ORDER_KEY, context_of, fitting
from tmc_server.domain.catalog import Topic
from tmc_server.domain.ids import IdGenerator
from tmc_server.domain.message import digest_of
from tmc_server.domain.operations import Answer, Prepare, Stored
from tmc_server.domain.placement import shard_of
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.checks import SeenSenders
from tmc_server.domain.ports.work import Performer
from tmc_server.domain.retry import DAY_MS
from tmc_server.errors import InvalidField, OpenLimit, TopicNotAllowed, UnackedLimit
from tmc_server.metrics import METRICS, count_each
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller, Item, RateLimiter, perform_each
from tmc_server.requests.first_use import EnsureProducible, topics_to_produce_exist


class OpenGauge(Protocol):
    """How many undecided messages a topic has, and deliveries that are not acked, about."""

    def open(self, topic: int) -> int: ...
    def unacked(self, topic: int) -> int: ...
    def moved(self, topic: int, by: int) -> None: ...


class Preparing:
    """body_bytes: the longest body that is taken.  senders: remembers where producers say they answer checks."""

    def __init__(
        self,
        catalog: CatalogSource,
        ids: IdGenerator,
        performer: Performer,
        rate: RateLimiter,
        gauge: OpenGauge,
        body_bytes: int,
        senders: SeenSenders,
        ensure_topic: EnsureProducible = topics_to_produce_exist,
    ) -> None:
        self._catalog = catalog
        self._ids = ids
        self._performer = performer
        self._rate = rate
        self._gauge = gauge
        self._body_bytes = body_bytes
        self._senders = senders
        self._ensure_topic = ensure_topic

    def item(
        self,
        caller: Caller,
        *,
        publish: bool,
        topic: str,
        key: str,
        body: bytes,
        content_type: str,
        headers: Mapping[str, str],
        attempt_id: bytes,
        delay_ms: int,
        order_key: str = "",
        ledger_id: bytes = b"",
        check_target: str = "",
        transaction_time_ms: int = 0,
    ) -> Prepare:
        """One checked message. order_key "": it has none.

        Raises InvalidField, TopicUnknown, OpenLimit, UnackedLimit, NoIdentity.
        """
        try:  # once: this is the hot path
            fields.topic(topic)
            fields.key(key)
            validation.attempt_id(attempt_id)
            fields.body(body, self._body_bytes)
            fields.content_type(content_type)
            fields.delay_ms(delay_ms)
            fields.between(transaction_time_ms, "transaction_time_ms", 0, DAY_MS)
        except fields.FieldInvalid as exc:
            raise validation.refused(exc) from None
        content_type = content_type or "application/octet-stream"
        operator = caller.operator
        if operator is not None and not operator.covers(topic):
            raise TopicNotAllowed
        headers = validation.headers(headers, may_replay=publish and operator is not None)
        if caller.context and not context_of(headers):
            headers = {**headers, **fitting(headers, caller.context)}
        if operator is None:
            validation.producers_key(key)
        ledger = validation.ledger_id(ledger_id)
        if order_key:
            headers = {**headers, ORDER_KEY: validation.key(order_key, "order_key")}
        self._ensure_topic(caller, topic, bool(order_key))
        found = self._catalog.current.producible(topic, caller.app)
        if found.ordered and not order_key:
            raise InvalidField(
                "order_key", f"be given: {topic} is ordered; name what the message is about, such as an account"
            )
        if order_key and not found.ordered:
            raise InvalidField(
                "order_key",
                f"be left out: {topic} is not ordered, which cannot be changed; register another topic as ordered",
            )
        if check_target and check_target not in found.checks.targets:
            raise InvalidField("check_target", "be the name of one of the topic's targets, or empty")
        if not publish and self._gauge.open(found.number) >= found.open_limit:
            raise OpenLimit
        if found.unacked_limit and self._unacked(found) >= found.unacked_limit:
            raise UnackedLimit
        return Prepare(
            shard=shard_of(found.table_index, found.spread, key),
            app=caller.app.number,
            number=self._ids.next(),
            topic=found,
            producer_tag=caller.tag or found.default_tag,
            key=key,
            attempt_id=attempt_id,
            digest=digest_of(body, content_type, headers, delay_ms),
            body=body,
            content_type=content_type,
            headers=headers,
            delay_ms=delay_ms,
            ledger_id=ledger,
            publish=publish,
            check_target=check_target,
            transaction_time_ms=transaction_time_ms,
        )

    def _unacked(self, topic: Topic) -> int:
        """Deliveries of this topic that are not acked, and those that its undecided messages may become."""
        coming = self._gauge.open(topic.number) * len(self._catalog.current.subscribers(topic.number))
        return self._gauge.unacked(topic.number) + coming

    def admit(self, caller: Caller, count: int) -> None:
        """Charge `count` items before validating any: invalid ones cost as much. Raises InvalidField, RateLimited."""
        self._rate.take(caller.app, validation.items(count))

    async def perform(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Store them. Raises QueueFull, ShuttingDown for all."""
        self._note_sender(caller, items)
        answers = await perform_each(self._performer, items)
        fresh = [
            item
            for item, answer in zip(items, answers, strict=True)
            if isinstance(item, Prepare) and isinstance(answer, Stored) and answer.changed
        ]
        prepared = [operation.topic for operation in fresh if not operation.publish]
        for topic, times in Counter(topic.number for topic in prepared).items():
            self._gauge.moved(topic, times)
        count_each(METRICS.prepared, ((topic.name,) for topic in prepared))
        count_each(METRICS.submitted, ((operation.topic.name,) for operation in fresh if operation.publish))
        return answers

    def announce(self, caller: Caller) -> None:
        """A service says where it answers checks before it sends anything."""
        if caller.instance:
            own = {t.default_tag for t in self._catalog.current.topics.values() if t.owner == caller.app.number}
            for tag in {caller.tag} if caller.tag else own or {"default"}:
                self._senders.saw(caller.app, tag, caller.instance)

    def _note_sender(self, caller: Caller, items: Sequence[Item]) -> None:
        if caller.instance:
            for tag in _tags(items):
                self._senders.saw(caller.app, tag, caller.instance)


def _tags(items: Sequence[Item]) -> set[str]:
    """The environments these messages are from."""
    return {item.producer_tag for item in items if isinstance(item, Prepare)}
