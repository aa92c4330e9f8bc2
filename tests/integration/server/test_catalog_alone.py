"""A catalog in a database of its own: it has no tables of shards, and everything works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.center import RunningCenter


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder: Path = tmp_path_factory.mktemp("alone")
    shards = [
        {"url": f"sqlite:///{folder}/{first}.db", "first": first, "last": last} for first, last in ((0, 15), (16, 31))
    ]
    with RunningCenter(f"sqlite:///{folder}/catalog.db", store={"shards": shards}) as made:
        yield made


@pytest.fixture(scope="module")
def rejected(center: RunningCenter) -> str:
    """The id of a message that its consumer rejected."""
    return center.rejected("paid-1")


def test_the_catalog_has_no_tables_of_shards(center: RunningCenter) -> None:
    with center.server.store.shards.catalog.reading() as connection:
        names = set(sa.inspect(connection).get_table_names())
    assert {"tmc_app", "tmc_audit"} <= names
    assert not names & {"tmc_message_00", "tmc_lease", "tmc_failed", "tmc_bulk_item"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("overview", "order.paid"),
        ("list-messages", "paid-1"),
        ("list-consumptions --state FAILED", "no stock"),
        ("timeline {}", "no stock"),
        ("why {}", "no stock"),
        ("list-alerts", "no stock"),
        ("list-servers", "0"),
        ("bulk reactivate --topic order.paid", '"count"'),
        ("cancel {} coupons --reason sold-out", "CANCELLED"),
    ],
)
def test_operators_see_and_steer(center: RunningCenter, rejected: str, command: str, says: str) -> None:
    done = center.run_admin(*command.format(rejected).split())
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
