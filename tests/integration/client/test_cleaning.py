"""Old rows of inbox, ledger and outbox go, young ones stay, and nobody who writes is waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tmc_client import cleaning, errors
from tmc_client.producing.ledger import resume
from tmc_client.producing.producer import Prepared
from tmc_client.tables import inbox, inbox_horizon, inbox_order, ledger

AGE = timedelta(days=8)
NOW = time.time_ns() // 1_000_000
OLD = NOW - 30 * 86_400_000


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).create(f"cleaning_{os.getpid()}")
    made = sa.create_engine(url)
    tmc.create_tables(made)
    with made.begin() as connection:
        for table in (inbox, inbox_horizon, inbox_order, ledger):
            connection.execute(table.delete())
    yield made
    made.dispose()


def _inbox(subscriber: str, count: int) -> list[dict[str, Any]]:
    """Every second one is old."""
    return [
        {"subscriber": subscriber, "message_id": f"1-1-00-{number}", "received_ms": OLD if number % 2 else NOW}
        for number in range(count)
    ]


def _ledger(number: int, settled_ms: int | None, created_ms: int = OLD) -> dict[str, Any]:
    return {
        "message_id": f"1-1-00-{number}",
        "state": 1,
        "topic": "order.paid",
        "message_key": f"k{number}",
        "attempt_id": os.urandom(16),
        "created_ms": created_ms,
        "settled_ms": settled_ms,
    }


def _count(engine: sa.Engine, table: sa.Table) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_old_rows_of_all_subscribers_go_whatever_the_page(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning.delete_pages, "__kwdefaults__", {"of": (), "page": 7, "walks": False})
    lines = [
        {
            "line": f"l{number}",
            "subscriber": "a",
            "topic": "t",
            "order_key": f"{number}",
            "sequence": 1,
            "changed_ms": at,
        }
        for number, at in enumerate([OLD] * 10 + [NOW] * 3)
    ]
    with engine.begin() as connection:
        for subscriber, count in (("a", 40), ("B", 21), ("c", 2)):
            connection.execute(inbox.insert(), _inbox(subscriber, count))
        connection.execute(inbox_order.insert(), lines)
        connection.execute(ledger.insert(), [_ledger(number, OLD) for number in range(20)])
        connection.execute(ledger.insert(), [_ledger(100, None), _ledger(101, NOW), _ledger(102, OLD, NOW)])
    assert tmc.clean_inbox(engine, AGE) == 20 + 10 + 1 + 10
    assert (_count(engine, inbox), _count(engine, inbox_order)) == (20 + 11 + 1, 3)
    assert tmc.clean_ledger(engine, AGE) == 20
    assert _count(engine, ledger) == 3
    assert (tmc.clean_inbox(engine, AGE), tmc.clean_ledger(engine, AGE)) == (0, 0)


def test_how_far_it_went_is_recorded_before_the_first_row_goes_and_never_goes_back(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    horizons = sa.select(inbox_horizon.c.subscriber, inbox_horizon.c.horizon_ms).order_by(inbox_horizon.c.subscriber)
    with engine.begin() as connection:
        connection.execute(inbox.insert(), _inbox("a", 2) + _inbox("c", 2))

    def died(*_: Any, **__: Any) -> int:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(cleaning, "delete_pages", died)
        tmc.clean_inbox(engine, AGE)
    with engine.connect() as connection:
        before = connection.execute(horizons).all()
    assert [row.subscriber for row in before] == ["a", "c"]
    assert all(OLD < row.horizon_ms < NOW for row in before)
    assert tmc.clean_inbox(engine, AGE) == 2
    assert tmc.clean_inbox(engine, AGE + timedelta(days=300)) == 0
    with engine.connect() as connection:
        after = connection.execute(horizons).all()
    assert all(then.horizon_ms >= now.horizon_ms for now, then in zip(before, after, strict=True))


def test_a_database_of_an_earlier_version_says_what_to_create(engine: sa.Engine) -> None:
    inbox_horizon.drop(engine)
    with engine.begin() as connection:
        connection.execute(inbox.insert(), _inbox("a", 2))
    with pytest.raises(tmc.InvalidRequest, match="There is no table tmc_inbox_horizon in this database"):
        tmc.clean_inbox(engine, AGE)
    assert _count(engine, inbox) == 2
    tmc.create_tables(engine)
    assert tmc.clean_inbox(engine, AGE) == 1


@pytest.mark.parametrize("engine", ["mariadb", "postgresql"], indirect=True)
def test_a_slow_handler_holds_up_no_cleaning(engine: sa.Engine) -> None:
    """On MariaDB, a DELETE that scans would wait for its rows, and others for those that it has locked."""
    with engine.begin() as connection:
        connection.execute(inbox.insert(), _inbox("coupons.default", 600))
        connection.execute(ledger.insert(), [_ledger(number, OLD) for number in range(300)])
    with engine.connect() as slow, slow.begin():
        slow.execute(inbox.insert().values(subscriber="coupons.default", message_id="1-1-00-1000", received_ms=NOW))
        slow.execute(ledger.insert().values(_ledger(1_000, None, NOW)))
        with _short_waits(engine) as impatient:
            assert (tmc.clean_inbox(impatient, AGE), tmc.clean_ledger(impatient, AGE)) == (300, 300)


@contextmanager
def _short_waits(engine: sa.Engine) -> Iterator[sa.Engine]:
    """An engine that waits a second for a lock, where it would wait for 50."""
    waits = engine.dialect.name != "postgresql"
    made = sa.create_engine(engine.url)
    with engine.connect() as settings:
        if waits:
            settings.exec_driver_sql("SET GLOBAL innodb_lock_wait_timeout = 1")
        try:
            yield made
        finally:
            made.dispose()
            if waits:
                settings.exec_driver_sql("SET GLOBAL innodb_lock_wait_timeout = 50")


class _Center:
    """Answers each submit; that of the message `bad` never."""

    def __init__(self, bad: str) -> None:
        self._bad = bad

    def submit(self, message: Prepared, timeout: timedelta) -> Future[Any]:
        answer: Future[Any] = Future()
        if message.message_id == self._bad:
            answer.set_exception(errors.Unavailable("away"))
        else:
            answer.set_result(None)
        return answer


def test_what_was_answered_is_marked_before_an_error_is_raised(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(ledger.insert(), [_ledger(number, None, NOW) for number in range(9)])
    center: Any = _Center("1-1-00-4")
    with pytest.raises(tmc.Unavailable):
        resume(center, engine)
    with engine.connect() as connection:
        left = connection.execute(sa.select(ledger.c.message_id).where(ledger.c.settled_ms.is_(None))).scalars().all()
    assert list(left) == ["1-1-00-4"]
    engine.dispose()
