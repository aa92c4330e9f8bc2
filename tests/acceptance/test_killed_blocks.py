"""kill -9 at every step of a block, on three databases: what is committed is sent, nothing else, and keys are free at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.cluster import ROOT
from tests.support.dose import LONG
from tests.support.shops import DATABASES, open_shop, url_of
from tests.support.story.killed_blocks import TOPIC
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually

BLOCKS = int(os.environ.get("TMC_TEST_BLOCKS", "3400" if LONG else "130"))
SEED = int(os.environ.get("TMC_TEST_SEED", random.randrange(1 << 30)))


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    made = open_shop(sa.create_engine(url_of(request, tmp_path, "killed")))
    yield made
    made.dispose()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCenter]:
    sections = {
        "dev": {"transaction_time_ms": 2_000},
        "discovery": {"kind": "recorded"},
        "checks": {"allow": ["127.0.0.0/8:*"]},
        "delivery": {"scan_seconds": 0.1},
    }
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, **sections) as made:
        yield made


def _paid(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        return {f"paid-{number}" for number in connection.exec_driver_sql("SELECT id FROM orders").scalars()}


def _state(center: tmc.Center, key: str) -> int:
    try:
        return center.get_message(topic=TOPIC, key=key).state
    except tmc.NotFound:
        return types_pb2.MESSAGE_STATE_ROLLED_BACK


@pytest.mark.takes_turns("killed services")
def test_what_is_committed_is_sent_and_nothing_else(
    engine: sa.Engine, running: RunningCenter, note: Callable[[str], None]
) -> None:
    command = [sys.executable, str(ROOT / "tests" / "support" / "story" / "killed_blocks.py")]
    url = engine.url.render_as_string(hide_password=False)
    with tmc.connect(running.address, app="orders") as center:
        center.checks(engine).serve()
        done = subprocess.run(
            [*command, running.address, url, str(BLOCKS), str(SEED)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=3_000,
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        report = json.loads(done.stdout)
        assert report["wrong"] == [], f"seed {SEED}: {done.stderr[-2_000:]}"
        keys = [f"paid-{number}" for number in range(BLOCKS)]

        def undecided() -> list[str]:
            return [key for key in keys if _state(center, key) == types_pb2.MESSAGE_STATE_PREPARED]

        eventually(lambda: not undecided(), seconds=120, describe=undecided)
        sent = {key for key in keys if _state(center, key) == types_pb2.MESSAGE_STATE_COMMITTED}
    assert sent == _paid(engine), f"seed {SEED}"
    refused = sorted(report["refused_ms"])
    note(
        f"{BLOCKS} blocks on {engine.dialect.name}, seed {SEED}: {len(sent)} sent, 0 contradictions; {len(refused)} refused "
        f"commits, their keys free after {refused[len(refused) // 2]:.0f} ms, p99 {refused[len(refused) * 99 // 100]:.0f} ms"
    )
