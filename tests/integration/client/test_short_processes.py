"""Processes that end right after their block, or are killed: nothing stays unmarked in the ledger for good."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.producing import FakeProducer
from tmc_client.local.choosing import local_of
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger
from tmc_storm.services.ports import free_port

MONTH = timedelta(days=30)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCenter]:
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/short.db")
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


def _run(running: RunningCenter, engine: sa.Engine, key: str, ending: str = "") -> None:
    script = f"""
        import os
        import sqlalchemy as sa
        from sqlalchemy.orm import Session
        import tmc_client as tmc
        engine = sa.create_engine({str(engine.url)!r})
        center = tmc.connect({running.address!r}, app="orders")
        with Session(engine) as session, center.transaction(session) as tx:
            tx.send("order.paid", {{}}, key={key!r})
        {ending}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def _unmarked(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).where(ledger.c.settled_ms.is_(None))).scalar_one()


def test_a_process_that_ends_marks_what_it_has_sent(running: RunningCenter, engine: sa.Engine) -> None:
    _run(running, engine, "a")
    assert _unmarked(engine) == 0


def test_cleaning_asks_about_what_no_process_lived_to_mark(running: RunningCenter, engine: sa.Engine) -> None:
    _run(running, engine, "a", "os._exit(0)")
    assert _unmarked(engine) == 1
    with engine.begin() as connection:
        connection.execute(ledger.update().values(created_ms=ledger.c.created_ms - 40 * 86_400_000))
    assert tmc.clean_ledger(engine, MONTH) == 0
    with closing(tmc.connect(running.address, app="orders")) as center:
        assert tmc.clean_ledger(engine, MONTH, center=center) == 0  # marked now, and a month old in a month
    assert _unmarked(engine) == 0


def test_a_block_of_too_many_messages_names_the_time_it_was_given(engine: sa.Engine) -> None:
    class Slow(FakeProducer):
        def prepare(self, request: Any, timeout: timedelta) -> Future[Any]:
            return super().prepare(request, timeout) if request.key == "a" else Future()

    local_time = timedelta(milliseconds=10)
    with pytest.raises(tmc.DeadlineExceeded, match=r"1 of 3 messages were prepared within prepare_timeout=0\.01 s"):
        with Session(engine) as session:
            local = local_of(session, "center.transaction()")
            with Transaction(Slow(), lambda *_: None, local, local_time) as tx:  # type: ignore[arg-type]
                for key in "abc":
                    tx.send("t", {}, key=key)


def test_a_block_without_a_center_says_that_nobody_answers(engine: sa.Engine) -> None:
    with closing(tmc.connect(f"127.0.0.1:{free_port()}", app="orders")) as center, Session(engine) as session:
        with pytest.raises(tmc.DeadlineExceeded) as caught:
            with center.transaction(session, prepare_timeout=timedelta(milliseconds=200)) as tx:
                tx.send("order.paid", {}, key="a")
    said = str(caught.value)
    assert said.startswith("0 of 1 messages were prepared within prepare_timeout=0.2 s. No answer in time")
    assert "Connection refused" in said
    assert "send fewer" not in said
