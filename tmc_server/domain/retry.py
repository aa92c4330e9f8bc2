"""When a delivery is retried.

next attempt = this attempt + delay(attempts so far). Linear with an interval of 10 s (T8): the publish at 0, then the
retries at 10, 30, 60, 100 s.  Exponential with 10 s: 10, 30, 70, 150 s. Max-retry n means one publish and n retries;
one delay after the last the row is FAILED.

A policy may also limit the age, which counts from the submit, from the end of a delay, from its turn in the order of its
key, or from a reactivation. The first attempt is made at any age.

Jitter of n percent adds 0 to n percent to each delay, so that what failed together is not delivered again together. The part of
a message is computed from its number, so repeating a decision gives the same time; and there are only 16 parts, so that
rows are still claimed in few statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from tmc_server.domain.declared import setting
from tmc_server.domain.numbers import MessageNumber

DAY_MS = 86_400_000
_PARTS = 16


class RetryKind(IntEnum):
    """How delays grow; numbers are stored and sent."""

    LINEAR = 1
    EXPONENTIAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """All times in milliseconds. max_age_ms: 0: no limit.  jitter_percent: 0 .. 100."""

    kind: RetryKind = RetryKind.LINEAR
    interval_ms: int = setting(10_000, 10, DAY_MS)
    max_retry: int = setting(16, 0, 10_000)
    cap_ms: int = setting(3_600_000, 10, DAY_MS)
    max_age_ms: int = setting(0, 0, 365 * DAY_MS)
    jitter_percent: int = setting(0, 0, 100)

    def is_used_up(self, tried: int, age_ms: int, counts: bool = True) -> bool:
        """Return whether attempt number `tried` was the last one. age_ms: when the next one would be made.

        counts: whether that attempt uses up a retry; the age limit applies all the same.
        """
        counted = tried if counts else tried - 1
        return counted > self.max_retry or bool(self.max_age_ms and tried and age_ms >= self.max_age_ms)

    def delay_for_ms(self, tried: int, number: MessageNumber) -> int:
        """Milliseconds from attempt number `tried` of this message to the next, with its jitter."""
        delay_ms = self.delay_after_ms(tried)
        if not self.jitter_percent:
            return delay_ms
        return delay_ms + delay_ms * self.jitter_percent * _part(number, tried) // (100 * (_PARTS - 1))

    def delay_after_ms(self, tried: int) -> int:
        """Milliseconds from attempt number `tried` (1 = the publish) to the next, without jitter.

        >>> tries, at = [], 0
        >>> for tried in range(1, 5):
        ...     at += RetryPolicy(interval_ms=10_000).delay_after_ms(tried)
        ...     tries.append(at // 1000)
        >>> tries
        [10, 30, 60, 100]
        """
        tried = max(tried, 1)
        match self.kind:
            case RetryKind.LINEAR:
                return min(self.interval_ms * tried, self.cap_ms)
            case RetryKind.EXPONENTIAL:
                return min(self.interval_ms << min(tried - 1, 40), self.cap_ms)
            case _:
                assert_never(self.kind)


def _part(number: MessageNumber, tried: int) -> int:
    """0 .. 15, another one for each attempt; numbers that follow each other are spread evenly."""
    return ((number * 0x9E3779B97F4A7C15 + tried * 0xD1B54A32D192ED03) >> 60) % _PARTS
