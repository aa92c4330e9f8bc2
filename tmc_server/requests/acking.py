"""Ack, nack, extend: the caller's app, tag and the topic inside the message id tell which consumption is meant."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from tmc_server.domain.catalog import Subscription
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import NO_ATTEMPT, NO_RUN, Attempt, RunNumber, SubscriptionNumber
from tmc_server.domain.operations import Ack, Answer, Done, Extend, GiveBack, Nack
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.work import Performer
from tmc_server.domain.retry import DAY_MS
from tmc_server.errors import SubscriptionUnknown
from tmc_server.metrics import METRICS
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller, Item, RateLimiter, perform_each


class Acking:
    """Everything here names one consumption of the caller's own."""

    def __init__(self, catalog: CatalogSource, performer: Performer, rate: RateLimiter) -> None:
        self._catalog = catalog
        self._performer = performer
        self._rate = rate

    def _target(self, caller: Caller, message_id: str) -> tuple[MessageId, Subscription]:
        parsed = validation.message_id(message_id)
        catalog = self._catalog.current
        topic = catalog.topics.get(parsed.topic)
        if topic is None or not topic.may_be_on(parsed.shard):
            raise SubscriptionUnknown
        return parsed, catalog.consumable(parsed.topic, caller.app, caller.tag or topic.default_tag)

    def ack(self, caller: Caller, message_id: str, attempt: Attempt = NO_ATTEMPT) -> Item:
        target, subscription = self._target(caller, message_id)
        validation.between(attempt, "attempt", 0, 2**31 - 1)
        return Ack(
            shard=target.shard,
            app=caller.app.number,
            number=target.number,
            subscription=subscription.number,
            attempt=attempt,
        )

    def nack(
        self,
        caller: Caller,
        message_id: str,
        attempt: Attempt,
        error: str,
        reject: bool,
        retry_after_ms: int | None,
        hangs: bool = False,
        run: RunNumber = NO_RUN,
    ) -> Item:
        target, subscription = self._target(caller, message_id)
        validation.between(attempt, "attempt", 1, 2**31 - 1)
        if retry_after_ms is not None:
            validation.between(retry_after_ms, "retry_after_ms", 0, DAY_MS)
        validation.between(run, "run", 0, 2**63 - 1)
        error = error[: validation.ERROR_CHARACTERS]
        return Nack(
            shard=target.shard,
            app=caller.app.number,
            number=target.number,
            subscription=subscription.number,
            attempt=attempt,
            policy=subscription.policy,
            error=error,
            reject=reject,
            retry_after_ms=retry_after_ms,
            hangs=hangs,
            run=run,
        )

    def give_back(self, caller: Caller, message_id: str, attempt: Attempt) -> Item:
        """Give back a copy for which no handler was begun."""
        target, subscription = self._target(caller, message_id)
        validation.between(attempt, "attempt", 1, 2**31 - 1)
        return GiveBack(
            shard=target.shard,
            app=caller.app.number,
            number=target.number,
            subscription=subscription.number,
            attempt=attempt,
            after_ms=0,
        )

    def extend(self, caller: Caller, message_id: str, attempt: Attempt, extend_ms: int, run: RunNumber) -> Item:
        target, subscription = self._target(caller, message_id)
        validation.between(attempt, "attempt", 1, 2**31 - 1)
        validation.between(extend_ms, "extend_ms", 1, DAY_MS)
        validation.between(run, "run", 0, 2**63 - 1)
        return Extend(
            shard=target.shard,
            app=caller.app.number,
            number=target.number,
            subscription=subscription.number,
            attempt=attempt,
            extend_ms=extend_ms,
            run=run,
        )

    def admit(self, caller: Caller, count: int) -> None:
        """Charge `count` items before validating any: invalid ones cost as much. Raises InvalidField, RateLimited."""
        self._rate.take(caller.app, validation.items(count))

    async def perform(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Store them. Raises QueueFull, ShuttingDown for all."""
        answers = await perform_each(self._performer, items)
        for kind, counter in ((Ack, METRICS.acked), (Nack, METRICS.nacked)):
            numbers = Tally(
                answer.subscription
                for item, answer in zip(items, answers, strict=True)
                if isinstance(answer, Done) and isinstance(item, kind)
            )
            for subscription, times in numbers.items():
                counter.labels(self._topic_name(subscription), caller.app.id).inc(times)
        return answers

    def _topic_name(self, subscription: SubscriptionNumber) -> str:
        catalog = self._catalog.current
        return catalog.topics[catalog.subscriptions[subscription].topic].name
