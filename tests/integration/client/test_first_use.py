"""Tables that a migration made, and the first blocks of several threads at once: one gives the ledger its id."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.support.producing import FakeProducer
from tmc_client import tables
from tmc_client.local.choosing import local_of
from tmc_client.producing.transaction import Transaction

AT_ONCE = 8


@pytest.fixture(params=["sqlite", "mariadb", "mariadb in READ COMMITTED", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    database, _, isolation = request.param.partition(" in ")
    url = f"sqlite:///{tmp_path}/first.db"
    if database != "sqlite":
        url = request.getfixturevalue(database).create("tmc_first")
    engine = sa.create_engine(url, pool_size=AT_ONCE, **({"isolation_level": isolation} if isolation else {}))
    tables.metadata.drop_all(engine)
    tables.metadata.create_all(engine)  # as Alembic does
    yield engine
    engine.dispose()


def _block(source: Any) -> Transaction:
    local = local_of(source, "center.transaction()")
    return Transaction(FakeProducer(), lambda *_: None, local, timedelta(seconds=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["session", "driver"])
def test_first_blocks_at_once_agree_on_one_id(engine: sa.Engine, kind: str) -> None:
    barrier = threading.Barrier(AT_ONCE)

    def send(number: int) -> None:
        if kind == "session":
            with Session(engine) as session:
                barrier.wait()
                with _block(session) as tx:
                    tx.send("t", {}, key=f"k{number}")
        else:
            with closing(engine.raw_connection()) as connection:
                barrier.wait()
                with _block(connection) as tx:
                    tx.send("t", {}, key=f"k{number}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(send, range(AT_ONCE)))
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(tables.ledger)).scalar() == AT_ONCE
        assert len(connection.execute(sa.select(tables.ledger_info)).all()) == 1
