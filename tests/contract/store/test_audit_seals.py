"""Seals of the audit trail on every database: a changed or deleted row is detected."""

from __future__ import annotations

from threading import Thread

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
    AuditSeals(store.database, []).seal()
    return store


def _act(store: StoreUnderTest, times: int) -> None:
    for _ in range(times):
        store.catalog_store.set_disabled("ann", "coupons", True, "its key leaked")


def _verify(store: StoreUnderTest, *keys: str) -> SealReport:
    return AuditSeals(store.database, keys).verify()


def _change(store: StoreUnderTest, *statements: sa.Executable) -> None:
    with store.database.transaction() as connection:
        for statement in statements:
            connection.execute(statement)


def test_an_unchanged_trail_is_right(trail: StoreUnderTest) -> None:
    found = _verify(trail)
    assert (found.verified, found.unsealed, found.fault, found.head_number) == (6, 0, "", 6)
    _act(trail, 2)
    assert (_verify(trail).verified, _verify(trail).unsealed) == (6, 2)
    assert AuditSeals(trail.database, []).seal() is False
    assert (_verify(trail).verified, _verify(trail).unsealed, _verify(trail).fault) == (8, 0, "")


def test_nothing_to_seal_takes_no_lock(trail: StoreUnderTest) -> None:
    with trail.database.connection() as other, other.begin():
        other.execute(sa.select(audit_head).with_for_update())
        assert AuditSeals(trail.database, []).seal() is False


def _by_number(number: int) -> sa.ColumnElement[bool]:
    return audit.c.seal_no == number


@pytest.mark.parametrize("column", ["actor", "action", "subject", "reason", "origin", "change_text", "at_ms", "seal"])
def test_a_changed_row(trail: StoreUnderTest, column: str) -> None:
    value = 1 if column == "at_ms" else b"x" * 32 if column == "seal" else "another"
    _change(trail, audit.update().where(_by_number(4)).values({column: value}))
    found = _verify(trail)
    assert found.verified == 3
    assert found.fault.startswith("Row 4 ")
    assert "was changed after it was sealed" in found.fault


def test_a_removed_row(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete().where(_by_number(2)))
    assert (_verify(trail).verified, _verify(trail).fault[:16]) == (1, "Row 2 is missing")


def test_a_removed_row_whose_gap_was_closed(trail: StoreUnderTest) -> None:
    _change(
        trail,
        audit.delete().where(_by_number(5)),
        audit.update().where(_by_number(6)).values(seal_no=5),
        audit_head.update().values(seal_no=5),
    )
    assert _verify(trail).fault.startswith("Row 5 ")


def test_removed_rows_at_the_end(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete().where(audit.c.seal_no > 4))
    assert _verify(trail).fault.startswith("The last sealed row is 4, but the chain ends at 6")


def test_all_rows_removed(trail: StoreUnderTest) -> None:
    _change(trail, audit.delete())
    assert _verify(trail).fault.startswith("The last sealed row is 0, but the chain ends at 6")


def test_seals_with_a_key_cannot_be_forged(trail: StoreUnderTest) -> None:
    keyed = AuditSeals(trail.database, ["secret"])
    _act(trail, 2)
    keyed.seal()
    found = keyed.verify()
    assert (found.verified, found.unkeyed, found.fault) == (8, 6, "")  # those from before there was a key
    assert _verify(trail, "another").fault.startswith("Row 7 ")
    _act(trail, 1)
    AuditSeals(trail.database, []).seal()  # as one who can write, but does not know the key
    assert keyed.verify().fault.startswith("Row 9 ")


def test_keys_are_changed_server_by_server(trail: StoreUnderTest) -> None:
    for keys in (["old"], ["old", "new"], ["new", "old"], ["old", "new"], ["new", "old"]):
        _act(trail, 1)
        AuditSeals(trail.database, keys).seal()
    found = _verify(trail, "new", "old")
    assert (found.verified, found.fault) == (11, "")
    assert _verify(trail, "new").fault.startswith("Row 7 ")


def test_rows_with_numbers_below_the_first_are_found(trail: StoreUnderTest) -> None:
    _act(trail, 1)
    _change(trail, audit.update().where(audit.c.seal_no.is_(None)).values(seal_no=-7, seal=b"x" * 32))
    assert _verify(trail).fault.startswith("Row 1 is missing")


def test_a_seal_that_is_gone_and_a_second_head(trail: StoreUnderTest) -> None:
    _change(
        trail,
        audit.update().where(_by_number(2)).values(seal=None),
        audit_head.insert().values(id=2, seal_no=99, seal=b"x" * 32),
    )
    assert _verify(trail).fault.startswith("Row 2 ")


@pytest.mark.parametrize("rewind", ["all of it", "its end", "another chain"])
def test_a_server_seals_nothing_after_its_seals_were_taken_back(
    trail: StoreUnderTest, rewind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = AuditSeals(trail.database, [])
    _act(trail, 2)
    server.seal()
    from_row = {"all of it": 1, "its end": 7, "another chain": 1}[rewind]
    taken_back = audit.update().where(audit.c.seal_no >= from_row).values(seal_no=None, seal=None, reason="forged")
    with trail.database.reading() as connection:
        kept = connection.execute(sa.select(audit.c.seal).where(_by_number(from_row - 1))).scalar_one_or_none()
    _change(trail, taken_back, audit_head.update().values(seal_no=from_row - 1, seal=kept or bytes(32)))
    if rewind == "another chain":
        AuditSeals(trail.database, []).seal()  # a server that started later knows nothing of it
        _act(trail, 1)
    assert server.seal() is False
    assert (server.is_rewound, "was rewound" in caplog.text) == (True, True)
    assert server.verify().fault != ""


def test_two_servers_seal_at_once(trail: StoreUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_seals, "_PAGE", 3)
    with trail.database.transaction() as connection:
        connection.execute(audit.delete())
        connection.execute(audit_head.delete())
    _act(trail, 20)

    def seal() -> None:
        while AuditSeals(trail.database, []).seal():
            pass

    threads = [Thread(target=seal) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = _verify(trail)
    assert (found.verified, found.unsealed, found.fault) == (20, 0, "")
