"""Order keys: messages of one key reach a subscriber one after another, in the order of their submits.

A *line* is one order key at one subscription. Its *head* is the delivery whose turn it is; the others wait. When the head is
closed, the one with the next sequence becomes the head. Sequences grow within a line and are never given twice, also
after the line was forgotten: they begin at the database's clock, in microseconds.
Source: docs/decisions/0022-order.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from tmc_server.domain.consumption import ConsumptionState, is_open
from tmc_server.domain.numbers import NO_MESSAGE, NO_SEQUENCE, MessageNumber, OrderHash, OrderSequence


class OrderMode(IntEnum):
    """How a subscription treats order keys. Numbers are stored and sent; never reuse one."""

    STRICT = 1  #: a FAILED delivery blocks its key until it is acked, reactivated or cancelled
    SKIP = 2  #: a FAILED delivery is skipped: the next one of its key is delivered
    OFF = 3  #: order keys have no effect


@lru_cache(65_536)
def order_hash(key: str) -> OrderHash:
    """63 bits that stand for an order key in tables. Two keys with the same hash wait for each other, which harms no order."""
    return OrderHash(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """head: NO_MESSAGE: nothing is open.  last: the newest sequence that was given; 0: none."""

    head: MessageNumber = NO_MESSAGE
    last: OrderSequence = NO_SEQUENCE

    def join(self, number: MessageNumber, now: int) -> Line:
        """The line with one more message at its end, under the sequence `last`; it is the head if nothing was open."""
        return replace(self, head=self.head or number, last=OrderSequence(max(self.last + 1, now * 1_000)))

    def advance(self, number: MessageNumber) -> Line:
        """The head is closed. number: the next one; NO_MESSAGE: nobody waits."""
        return replace(self, head=number)


def releases_next(state: ConsumptionState, mode: OrderMode) -> bool:
    """Return whether a head in this state gives way to the next of its key."""
    return not is_open(state) or (state is ConsumptionState.FAILED and mode is not OrderMode.STRICT)
