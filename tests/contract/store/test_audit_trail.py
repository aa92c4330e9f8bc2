"""The audit trail over all databases: every row once, the newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.store import StoreUnderTest, migrated_sqlite
from tmc_server.domain.ports.reading import AuditFilter
from tmc_server.domain.views import OperatorAct
from tmc_server.errors import InvalidField
from tmc_server.store.audit_trail import SqlAuditTrail
from tmc_server.store.engines import Database
from tmc_server.store.tables import audit

ANY = AuditFilter()


def _note(database: Database, at_ms: int, action: str = "pause topic", subject: str = "order.paid", **row: str) -> None:
    values = {"actor": "ann", "reason": f"at {at_ms}"} | row
    with database.transaction() as connection:
        connection.execute(audit.insert().values(at_ms=at_ms, action=action, subject=subject, **values))


def _all(trail: SqlAuditTrail, wanted: AuditFilter, limit: int) -> Iterator[Sequence[OperatorAct]]:
    after: Sequence[int] = ()
    while True:
        rows, after = trail.page(wanted, after, limit)
        yield rows
        if not after:
            return


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Database]]:
    made = []
    for name in ("catalog", "shards"):
        path = tmp_path / f"{name}.db"
        path.write_bytes(Path(migrated_sqlite()).read_bytes())
        made.append(Database(f"sqlite:///{path}"))
    for database in made:
        with database.transaction() as connection:
            connection.execute(audit.delete())
    yield made
    for database in made:
        database.close()


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_of_several_databases_are_merged_by_time(two: list[Database], limit: int) -> None:
    times = [(0, 10), (1, 20), (1, 30), (0, 30), (1, 40), (0, 50), (0, 60)]
    for place, at_ms in times:
        _note(two[place], at_ms)
    found = [row.at_ms for page in _all(SqlAuditTrail(two, []), ANY, limit) for row in page]
    assert found == [60, 50, 40, 30, 30, 20, 10]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_clock_that_went_back_hides_nothing(two: list[Database], limit: int) -> None:
    for place, at_ms in [(0, 10), (0, 90), (0, 20), (1, 30), (1, 15), (0, 40)]:
        _note(two[place], at_ms)
    found = [row.at_ms for page in _all(SqlAuditTrail(two, []), ANY, limit) for row in page]
    assert sorted(found) == [10, 15, 20, 30, 40, 90]


def test_what_is_asked_for(store: StoreUnderTest) -> None:
    database = store.database
    _note(database, 10, subject="order.paid")
    _note(database, 20, subject="order.paid coupons default", action="pause subscription")
    _note(database, 30, subject="order.paid.late", actor="bob")
    _note(database, 40, subject="message 12 subscription 3", action="cancel")
    _note(database, 50, subject="message 123", action="decide")
    _note(database, 60, subject="order%paid")
    trail = SqlAuditTrail([database], [])

    def at(wanted: AuditFilter) -> list[int]:
        return [row.at_ms for row in trail.page(wanted, (), 100)[0]]

    assert at(AuditFilter(to_ms=1000)) == [60, 50, 40, 30, 20, 10]
    assert at(AuditFilter(subject="order.paid", to_ms=1000)) == [20, 10]
    assert at(AuditFilter(subject="message 12")) == [40]
    assert at(AuditFilter(subject="order%")) == []
    assert at(AuditFilter(actor="bob")) == [30]
    assert at(AuditFilter(action="decide")) == [50]
    assert at(AuditFilter(from_ms=20, to_ms=40)) == [30, 20]


def test_a_place_of_another_set_of_databases_is_refused(two: list[Database]) -> None:
    with pytest.raises(InvalidField, match="databases were added or removed"):
        SqlAuditTrail(two, []).page(ANY, [7], 10)
