"""Two banks send each other money while senders, receivers and the center are killed: the total never changes.

12 kills in CI; with `--long` at least 200 kills and 20,000 transfers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.banks import BANKS, Banks
from tests.support.cluster import Cluster
from tests.support.dose import LONG
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.services, pytest.mark.postgresql]
_KILLS, _TRANSFERS = (200, 20_000) if LONG else (12, 300)


@pytest.fixture
def banks(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[Banks]:
    def urls(cluster: Cluster) -> tuple[str, str]:
        return cluster.databases[0].create("tmc_north"), postgresql.create("tmc_south")

    made = Banks(urls, tmp_path, types_pb2.RetryPolicy(interval_ms=2000, max_retry=100))
    yield made
    made.stop()


@pytest.mark.takes_turns("killed services")
@pytest.mark.timeout(3600 if LONG else 300)
def test_the_total_never_changes(banks: Banks, note: Callable[[str], None]) -> None:
    dice = random.Random(11)
    victims: list[tuple[str, str] | None] = [*banks.running, None]
    for number in range(_KILLS):
        enough = _TRANSFERS * (number + 1) // _KILLS
        eventually(lambda enough=enough: banks.count() >= enough, seconds=120, describe=banks.count)
        victim = victims[number % len(victims)] if number < len(victims) else dice.choice(victims)
        banks.kill(victim)
        for name in BANKS:
            held, said = banks.money(name)
            assert held == said
    banks.end()
    eventually(banks.settled, seconds=180, describe=banks.count)
    note(f"bank: {_KILLS} kills, {banks.agree()} transfers")
