"""Two services of one app with a database each, in one process, beside a crowd of others: each is asked about its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_common.protocol import types_pb2
from tmc_server.checks.addressing import MOST_TRIED
from tmc_storm.eventually import eventually

CROWD = MOST_TRIED + 1


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCenter]:
    sections: dict[str, dict[str, Any]] = {
        "dev": {"transaction_time_ms": 2_000},
        "discovery": {"kind": "recorded"},
        "checks": {"allow": ["127.0.0.0/8:*"]},
    }
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True, **sections) as made:
        yield made


def _database(path: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}")
    tmc.create_tables(engine)
    return engine


def test_each_is_asked_about_its_own(running: RunningCenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_client.producing.transaction.SUBMIT_WAIT", timedelta(0))
    engines = [_database(tmp_path / f"{name}.db") for name in ("orders", "letters", "crowd")]
    with ExitStack() as stack:
        center = stack.enter_context(closing(tmc.connect(running.address, app="orders")))
        for engine in engines[:2]:
            center.checks(engine).serve()
        for _ in range(CROWD):
            other = stack.enter_context(closing(tmc.connect(running.address, app="orders")))
            other.checks(engines[2]).serve()
        lost: Future[Any] = Future()
        monkeypatch.setattr(center.producer, "submit", lambda *_: lost)  # as if the process died after its commit
        for number, engine in enumerate(engines[:2]):
            with Session(engine) as session, center.transaction(session) as tx:
                tx.send("order.paid", {}, key=f"paid-{number}")
        for number in range(2):
            eventually(
                lambda key=f"paid-{number}": _state(center, key) == types_pb2.MESSAGE_STATE_COMMITTED, seconds=60
            )
    for engine in engines:
        engine.dispose()


def _state(center: tmc.Center, key: str) -> int:
    return center.get_message(topic="order.paid", key=key).state
