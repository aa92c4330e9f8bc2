"""Ten minutes (in CI less) of random faults on the whole production form, then the ledgers are compared.

Three servers, two databases, RabbitMQ behind a proxy that cuts, delays, black-holes and resets; servers, databases,
broker and consumers are killed and stopped. STORM_SEED repeats a sequence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import KINDS, Cluster, Kind
from tests.support.dose import LONG
from tests.support.eventually import eventually
from tests.support.storm import Storm
from tests.support.story.cast import Story

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_storm_nothing_is_lost_invented_or_doubled(
    kind: Kind, tmp_path: Path, note: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("STORM_SEED", time.time_ns() % 1_000_000))
    with Cluster(databases=2, servers=3, kind=kind, consul=True, broker_behind_proxy=True) as cluster:
        cluster.shared(3)
        story = Story(cluster, tmp_path, count=10_000_000)
        try:
            eventually(lambda: story.progress() >= 100, seconds=60)
            storm = Storm(cluster, story, seed)
            storm.rage(600 if LONG else 25)
            calm = time.monotonic()
            story.end_producers()
            committed = story.committed()
            wanted = {app: {key for key in committed if key.endswith(topics)} for app, topics in story.apps.items()}
            total = sum(map(len, wanted.values()))
            eventually(
                lambda: cluster.consumptions() == {"ACKED": total},
                seconds=240,
                describe=lambda: f"seed {seed}: {cluster.consumptions()} instead of {total}",
            )
            settled_s = time.monotonic() - calm
            for app, keys in wanted.items():
                effects = story.effects(app)
                assert set(effects) - keys == set(), f"invented; seed {seed}"
                assert keys - set(effects) == set(), f"lost; seed {seed}"
                assert set(effects.values()) == {1}, f"doubled; seed {seed}"
            note(
                f"storm over {kind}, seed {seed}: {sum(storm.struck.values())} faults of {len(storm.struck)} kinds, "
                f"{len(committed)} messages, {total} deliveries, settled {settled_s:.0f} s after the last fault"
            )
        finally:
            story.stop()
