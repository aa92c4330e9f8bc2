"""Limits how many requests of a sender may be incomplete, and for how long.

Once a read is pending, gRPC accepts a message up to its announced length; before that, flow control stops the sender
after one window (16 KiB). So no read starts before the sender is authenticated, and a sender whose requests stay
incomplete for too long, or too many at once, is refused before they are complete.

Only the sender's own time counts: while the event loop is blocked, arrived bytes wait, so that time is subtracted. Of
many incomplete requests the newest are refused first; otherwise retries would push out nearly complete ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tmc_server.errors import MalformedRequest, RateLimited
from tmc_server.rpc.refusing import Context, refuse

STRANGERS = -1  # in place of an app's number: senders that need no key
OPERATORS = -2

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Patience:
    """A request may take `longest_s`. Where more than `crowd` of one sender are unfinished: `crowded_s`."""

    longest_s: float
    crowd: int
    crowded_s: float


OF_APPS = Patience(longest_s=10, crowd=8, crowded_s=2)  # seconds: a slow line is no offence
OF_STRANGERS = Patience(longest_s=5, crowd=1, crowded_s=0.25)


class Overdue(grpc.aio.AbortError):
    """Refused after `longest_s`, the limit even for a single request."""


class Reads:
    """On the loop only."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[Context, tuple[int, float]] = {}  # who sends it, since when; oldest first
        self._looking = False
        self._due = 0.0  # when the next look should be
        self._overdue: set[Context] = set()
        self._refusing: set[asyncio.Task[None]] = set()

    async def one(self, context: Context, sender: int) -> bytes:
        """The only message of a call. Raises MalformedRequest: there is none; AbortError: the call was refused meanwhile."""
        data = await self.next(context, sender)
        if data is None:
            raise MalformedRequest
        return data

    async def next(self, context: Context, sender: int) -> bytes | None:
        """The next message of a call, None after the last.

        Raises AbortError: the call was refused meanwhile; Overdue: after `longest_s`.
        """
        self._open[context] = (sender, self._monotonic())
        if not self._looking:
            self._looking = True
            self._look_later()
        try:
            message: Any = await context.read()
        except grpc.aio.AbortError:
            if context in self._overdue:
                raise Overdue from None
            raise
        finally:
            self._open.pop(context, None)
            self._overdue.discard(context)
        return None if message is grpc.aio.EOF else bytes(message)

    def look(self) -> None:
        """Refuse what takes too long."""
        now = self._monotonic()
        if now - next((began for _, began in self._open.values()), now) <= OF_STRANGERS.crowded_s:
            return  # the oldest is younger than anybody's patience
        unfinished = Counter(sender for sender, _ in self._open.values())
        for context, (sender, began) in reversed(list(self._open.items())):
            patience = OF_STRANGERS if sender == STRANGERS else OF_APPS
            crowded = unfinished[sender] > patience.crowd
            waited = now - began
            if waited > (patience.crowded_s if crowded else patience.longest_s):
                unfinished[sender] -= 1
                del self._open[context]
                if waited > patience.longest_s:
                    self._overdue.add(context)
                task = asyncio.get_running_loop().create_task(refuse(context, _unfinished()))
                self._refusing.add(task)
                task.add_done_callback(self._refusing.discard)

    def _look_later(self) -> None:
        self._due = self._monotonic() + _LOOK_S
        asyncio.get_running_loop().call_later(_LOOK_S, self._look_on)

    def _look_on(self) -> None:
        now = self._monotonic()
        late = now - self._due
        if late > 0:  # what arrived while the loop stood still is handled after us
            for context, (sender, began) in self._open.items():
                self._open[context] = (sender, min(began + late, now))
        self.look()
        self._looking = bool(self._open)
        if self._looking:
            self._look_later()


def _unfinished() -> RateLimited:
    return RateLimited("The rest of this request did not arrive in time: send it again, fewer or smaller ones at once.")
