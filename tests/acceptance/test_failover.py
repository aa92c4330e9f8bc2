"""The primary of a center's database is killed and its replica promoted: nothing that was answered is lost.

By `--long` ten times on each kind of database.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.dose import LONG, in_turn
from tests.support.failing_over import fail_over
from tmc_storm.services.replicated import Replicated, ReplicatedMariaDB, ReplicatedPostgreSQL

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


_KINDS = [
    pytest.param(ReplicatedMariaDB, marks=pytest.mark.mariadb),
    pytest.param(ReplicatedPostgreSQL, marks=pytest.mark.postgresql),
]


@pytest.mark.parametrize("kind", in_turn("failover", _KINDS))
def test_nothing_that_was_answered_is_lost(kind: Callable[[], Replicated], note: Callable[[str], None]) -> None:
    seen = fail_over(kind(), kills=10 if LONG else 2, promoted_after_s=1.0)
    assert (seen.failed, seen.missing, seen.not_consumed, seen.said_lost) == ([], 0, 0, 0)
    away = ", ".join(f"{each:.1f}" for each in seen.away_s)
    note(f"failover: {seen.answered} messages answered, {len(seen.away_s)} kills; answers {away} s after the promotion")
