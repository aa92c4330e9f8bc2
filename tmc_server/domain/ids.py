"""Identities: the 63-bit number of a message and its public name.

Number = milliseconds since 2026-01-01 (41 bits) | node slot (10 bits) | sequence (12 bits): it grows with time, so inserts
append to the primary key, and two servers never make the same one as long as slots are leased (store/nodes.py).
Public id = TOPIC-APP-SHARD-NUMBER, all decimal: any server finds the row from the id alone, and an operator can paste
the last part into SQL.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from msgspec import Struct

from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.placement import SHARDS
from tmc_server.errors import NoIdentity

EPOCH_MS = 1_767_225_600_000
SLOTS = 1024
_LAST_MS = EPOCH_MS + (1 << 41) - 1  # in the year 2095
_LAST_NUMBER = (1 << 63) - 1  # a BIGINT holds no more
_PER_MS = 4096
_ID = re.compile(r"[0-9]{1,10}-[0-9]{1,10}-[0-9]{2}-[0-9]{1,19}", re.ASCII)


class MessageId(Struct, frozen=True):
    """A message id taken apart. Comes from callers: what it claims is compared with the row before anything changes."""

    topic: int
    app: int
    shard: Shard
    number: MessageNumber

    def __str__(self) -> str:
        return f"{self.topic}-{self.app}-{self.shard:02d}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> MessageId | None:
        """Parse a message id; None if the text is none."""
        if _ID.fullmatch(text) is None:
            return None
        topic, app, shard, number = map(int, text.split("-"))
        if shard >= SHARDS or number >= 1 << 63 or max(topic, app) >= 1 << 31:
            return None
        return cls(topic, app, Shard(shard), MessageNumber(number))


def first_number(ms: int) -> MessageNumber:
    """The least message number that can be made in that millisecond since the Unix epoch; the last one for times beyond it."""
    return MessageNumber(min(max(0, ms - EPOCH_MS) << 22, _LAST_NUMBER))


class IdGenerator:
    """Makes numbers for one leased slot; never goes back, stops at the lease's end.

    clock: milliseconds since the Unix epoch.  A lease is (slot, from_ms, until_ms): numbers carry times in that range
    only, so a later holder of the slot, who starts at until_ms, cannot repeat one. Thread-safe.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._slot = 0
        self._until_ms = 0
        self._last_ms = 0
        self._sequence = 0

    def lease(self, slot: int, from_ms: int, until_ms: int) -> None:
        """Use this slot from now on; also called to extend the lease of the same slot."""
        with self._lock:
            self._slot, self._until_ms = slot, until_ms
            if from_ms > self._last_ms:
                self._last_ms, self._sequence = from_ms, 0

    @property
    def high_ms(self) -> int:
        """The highest millisecond used."""
        return self._last_ms

    def check_clock(self) -> int:
        """Returns: the time. Raises NoIdentity when no number can carry it."""
        now = self._clock()
        if not EPOCH_MS <= now <= _LAST_MS:
            raise NoIdentity(
                f"This machine's clock says {now} ms since 1970, but message numbers carry times from 2026 to 2095:"
                " set the clock, then repeat."
            )
        return now

    def next(self) -> MessageNumber:
        """The next number. Raises NoIdentity: the lease has expired, or numbers cannot represent the clock's time."""
        with self._lock:
            now = self.check_clock()
            if now > self._last_ms:
                self._last_ms, self._sequence = now, 0
            elif self._sequence == _PER_MS - 1:
                self._last_ms, self._sequence = self._last_ms + 1, 0
            else:
                self._sequence += 1
            if self._last_ms >= self._until_ms:
                raise NoIdentity
            return MessageNumber((self._last_ms - EPOCH_MS) << 22 | self._slot << 12 | self._sequence)


def created_ms(number: MessageNumber) -> int:
    """The time inside a message number, milliseconds since the Unix epoch."""
    return (number >> 22) + EPOCH_MS
