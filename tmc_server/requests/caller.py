"""Callers, their rate limits and budgets, and batches answered item by item."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tmc_server.domain.catalog import App
from tmc_server.domain.operations import Answer, Operation
from tmc_server.domain.operators import Operator
from tmc_server.domain.ports.checks import Instance
from tmc_server.domain.ports.work import Performer
from tmc_server.errors import RateLimited, TmcError


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated app.

    tag: the environment it said it runs in, or that of its key; "" when it said none.
    instance: where it said it answers checks; None: it did not.
    only_this_tag: its key works for nothing of other environments.
    operator: who acts for the app, proven by a token; None: the app itself.
    context: the trace that the call belongs to, as headers; of a client that does not put it into its messages.
    """

    app: App
    tag: str
    instance: Instance | None = None
    only_this_tag: bool = False
    operator: Operator | None = None
    context: Mapping[str, str] = field(default_factory=dict)


Item = Operation | TmcError
"""One item of a batch: what to do, or why it was refused before it got that far."""


async def perform_each(performer: Performer, items: Sequence[Item]) -> list[Answer]:
    """Perform what can be performed. Returns: one answer per item, in order. Raises only what concerns all of them."""
    runnable = [item for item in items if not isinstance(item, TmcError)]
    answers = iter(await performer.perform(runnable) if runnable else ())
    return [item if isinstance(item, TmcError) else next(answers) for item in items]


class RateLimiter:
    """A token bucket per app. per_second: how much an app may use, 0 for no limit; a burst of one second is free."""

    def __init__(self, per_second: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._monotonic = monotonic
        self._buckets: dict[int, tuple[float, float]] = {}

    def take(self, app: App, amount: int) -> None:
        """Raises RateLimited with the time after which the amount would fit."""
        if not self._rate:
            return
        now = self._monotonic()
        tokens, then = self._buckets.get(app.number, (float(self._rate), now))
        tokens = min(float(self._rate), tokens + (now - then) * self._rate)
        missing = min(amount, self._rate) - tokens
        if missing > 0:
            self._buckets[app.number] = (tokens, now)
            raise RateLimited(retry_after_ms=int(missing / self._rate * 1000) + 1)
        self._buckets[app.number] = (tokens - amount, now)


async def when_allowed(take: Callable[[], None]) -> None:
    """Take from a rate as soon as it allows it. Callers wait in line for their turn, or the small ones overtake the large."""
    while True:
        try:
            return take()
        except RateLimited as limited:
            pause_s = limited.retry_after_ms / 1000
        await asyncio.sleep(pause_s)


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one app may use of one server process. 0 means no limit."""

    calls_per_second: int = 0
    bytes_per_second: int = 0
    open_calls: int = 0
    open_bytes: int = 0
    streams: int = 0


class Budget:
    """What apps use besides items: calls, the bytes of their requests, what they hold open. On the loop only.

    An app over an allowance is refused before its request is read (calls, streams) or decoded (bytes).
    """

    def __init__(self, allowance: Allowance, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._allowance = allowance
        self._calls = RateLimiter(allowance.calls_per_second, monotonic)
        self._bytes = RateLimiter(allowance.bytes_per_second, monotonic)
        self._open_calls: dict[int, int] = {}
        self._open_bytes: dict[int, int] = {}
        self._streams: dict[int, int] = {}

    def begin_call(self, app: App) -> None:
        """Raises RateLimited."""
        self._calls.take(app, 1)
        _hold(self._open_calls, app.number, 1, self._allowance.open_calls, "calls open at once")

    def end_call(self, app: App) -> None:
        _let_go(self._open_calls, app.number, 1)

    def begin_request(self, app: App, size: int) -> None:
        """Raises RateLimited."""
        self._bytes.take(app, size)
        self.hold_request(app, size)

    async def when_rates_allow(self, app: App, size: int) -> None:
        """Charge a request of a stream as a call of that size, as soon as the rates allow it."""
        await when_allowed(lambda: self._calls.take(app, 1))
        await when_allowed(lambda: self._bytes.take(app, size))

    def hold_request(self, app: App, size: int) -> None:
        """Hold bytes only. Raises RateLimited. One request alone is never too large for the bytes that may be open."""
        limit = self._allowance.open_bytes
        _hold(self._open_bytes, app.number, size, max(limit, size) if limit else 0, "bytes of requests at once")

    def end_request(self, app: App, size: int) -> None:
        _let_go(self._open_bytes, app.number, size)

    def begin_stream(self, app: App) -> None:
        """Raises RateLimited."""
        self._calls.take(app, 1)
        _hold(self._streams, app.number, 1, self._allowance.streams, "streams")

    def end_stream(self, app: App) -> None:
        _let_go(self._streams, app.number, 1)


def _hold(held: dict[int, int], app: int, amount: int, limit: int, what: str) -> None:
    total = held.get(app, 0) + amount
    if limit and total > limit:
        raise RateLimited(f"Your app has {limit} {what} with this server, the most it may have: end some, then repeat.")
    held[app] = total


def _let_go(held: dict[int, int], app: int, amount: int) -> None:
    left = held[app] - amount
    if left:
        held[app] = left
    else:
        del held[app]
