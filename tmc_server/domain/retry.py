"""When a delivery is retried.

next attempt = this attempt + delay(attempts so far). Linear with an interval of 10 s (T8): the publish at 0, then the
retries at 10, 30, 60, 100 s.  Exponential with 10 s: 10, 30, 70, 150 s. Max-retry n means one publish and n retries;
one delay after the last the row is FAILED.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

DAY_MS = 86_400_000


class RetryKind(IntEnum):
    """How delays grow; numbers are stored and sent."""

    LINEAR = 1
    EXPONENTIAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """All times in milliseconds."""

    kind: RetryKind = RetryKind.LINEAR
    interval_ms: int = 10_000
    max_retry: int = 16
    cap_ms: int = 3_600_000

    def delay_after_ms(self, tried: int) -> int:
        """Milliseconds from attempt number `tried` (1 = the publish) to the next.

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
