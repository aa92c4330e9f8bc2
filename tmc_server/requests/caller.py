"""Who asks, how often they may, and how a list of items is answered one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmc_server.domain.catalog import App
from tmc_server.domain.operations import Answer, Operation
from tmc_server.domain.ports import Performer
from tmc_server.errors import RateLimited, TmcError


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated app.

    tag: the environment it said it runs in, "" when it said none.  check_address: where it said it answers checks.
    """

    app: App
    tag: str
    check_address: str = ""


Item = tuple[int, Operation] | TmcError
"""One item of a batch: the shard and what to do there, or why it was refused before it got that far."""


async def perform_each(performer: Performer, items: Sequence[Item]) -> list[Answer]:
    """Perform what can be performed. Returns: one answer per item, in order. Raises only what concerns all of them."""
    runnable = [item for item in items if not isinstance(item, TmcError)]
    if runnable:
        await performer.perform(runnable)
    return [item if isinstance(item, TmcError) else _answer_of(item[1]) for item in items]


def _answer_of(operation: Operation) -> Answer:
    assert operation.answer is not None, "performed operations have answers"
    return operation.answer


class RateLimiter:
    """A token bucket per app. per_second: items an app may send, 0 for no limit; a burst of one second is free."""

    def __init__(self, per_second: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._monotonic = monotonic
        self._buckets: dict[int, tuple[float, float]] = {}

    def take(self, app: App, items: int) -> None:
        """Raises RateLimited with the time after which the items would fit."""
        if not self._rate:
            return
        now = self._monotonic()
        tokens, then = self._buckets.get(app.number, (float(self._rate), now))
        tokens = min(float(self._rate), tokens + (now - then) * self._rate)
        missing = min(items, self._rate) - tokens
        if missing > 0:
            self._buckets[app.number] = (tokens, now)
            raise RateLimited(retry_after_ms=int(missing / self._rate * 1000) + 1)
        self._buckets[app.number] = (tokens - items, now)
