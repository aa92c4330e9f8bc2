"""Seals of the audit trail on every database: who changes or removes a row is found out."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.store import StoreUnderTest
from tmc_server.domain.views import SealReport
from tmc_server.store import audit_seals
from tmc_server.store.audit_seals import AuditSeals
from tmc_server.store.tables import audit, audit_head


@pytest.fixture
def trail(store: StoreUnderTest) -> StoreUnderTest:
    """Six sealed rows."""
    with store.database.transaction() as connection:
        connection.execute(audit.delete())
    _act(store, 6)
    AuditSeals(store.database, [""]).seal()
    return store


def _act(store: StoreUnderTest, times: int) -> None:
    for _ in range(times):
        store.catalog_store.set_disabled("ann", "coupons", True, "its key leaked")


def _verify(store: StoreUnderTest, *keys: str) -> SealReport:
    return AuditSeals(store.database, keys or ("",)).verify()


def _change(store: StoreUnderTest, *statements: sa.Executable) -> None:
    with store.database.transaction() as connection:
        for statement in statements:
            connection.execute(statement)


def test_what_nobody_touched_is_right(trail: StoreUnderTest) -> None:
    found = _verify(trail)
    assert (found.verified, found.unsealed, found.fault, found.head_number) == (6, 0, "", 6)
    _act(trail, 2)
    assert (_verify(trail).verified, _verify(trail).unsealed) == (6, 2)
    assert AuditSeals(trail.database, [""]).seal() is False
    assert (_verify(trail).verified, _verify(trail).unsealed, _verify(trail).fault) == (8, 0, "")


def test_nothing_to_seal_takes_no_lock(trail: StoreUnderTest) -> None:
    with trail.database.connection() as other, other.begin():
        other.execute(sa.select(audit_head).with_for_update())
        assert AuditSeals(trail.database, [""]).seal() is False


_BY_NUMBER: Callable[[int], Any] = lambda number: audit.c.seal_no == number  # noqa: E731


@pytest.mark.parametrize("column", ["actor", "action", "subject", "reason", "origin", "change_text", "at_ms", "seal"])
def test_a_changed_row(trail: StoreUnderTest, column: str) -> None:
    value = 1 if column == "at_ms" else b"x" * 32 if column == "seal" else "another"
    _change(trail, audit.update().where(_BY_NUMBER(4)).values({column: value}))
    found = _verify(trail)
    assert found.verified == 3
    assert found.fault.startswith("Row 4 ")
    assert "was changed after it was sealed" in found.fault


def test_a_removed_row(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete().where(_BY_NUMBER(2)))
    assert (_verify(trail).verified, _verify(trail).fault[:16]) == (1, "Row 2 is missing")


def test_a_removed_row_whose_gap_was_closed(trail: StoreUnderTest) -> None:
    _change(
        trail,
        audit.delete().where(_BY_NUMBER(5)),
        audit.update().where(_BY_NUMBER(6)).values(seal_no=5),
        audit_head.update().values(seal_no=5),
    )
    assert _verify(trail).fault.startswith("Row 5 ")


def test_removed_rows_at_the_end(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete().where(audit.c.seal_no > 4))
    assert _verify(trail).fault.startswith("The last row is 4 and should be 6")


def test_all_rows_removed(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete())
    assert _verify(trail).fault.startswith("The last row is 0 and should be 6")


def test_with_a_key_nobody_else_makes_seals(trail: StoreUnderTest) -> None:
    keyed = AuditSeals(trail.database, ["secret", ""])
    _act(trail, 2)
    keyed.seal()
    assert (keyed.verify().verified, keyed.verify().fault) == (8, "")
    assert _verify(trail).fault.startswith("Row 7 ")
    _act(trail, 1)
    AuditSeals(trail.database, [""]).seal()  # as one who can write, but does not know the key
    assert keyed.verify().fault.startswith("Row 9 ")


def test_two_servers_seal_at_once(trail: StoreUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_seals, "_PAGE", 3)
    with trail.database.transaction() as connection:
        connection.execute(audit.delete())
        connection.execute(audit_head.delete())
    _act(trail, 20)

    def seal() -> None:
        while AuditSeals(trail.database, [""]).seal():
            pass

    threads = [Thread(target=seal) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = _verify(trail)
    assert (found.verified, found.unsealed, found.fault) == (20, 0, "")
