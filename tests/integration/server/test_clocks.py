"""The clock of a database does not leap when summer time ends in the zone of the session."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from tmc_common.clocks import CLOCK_MS
from tmc_storm.services.mariadb import MariaDB

SUMMER_TIME_ENDS = 1_792_890_000  # 25 October 2026, 01:00 UTC: from 3 to 2 o'clock in central Europe
_ZONE = f"""
    DELETE FROM mysql.time_zone_name WHERE Name = 'Middle';
    INSERT INTO mysql.time_zone (Use_leap_seconds) VALUES ('N');
    SET @zone = LAST_INSERT_ID();
    INSERT INTO mysql.time_zone_name (Name, Time_zone_id) VALUES ('Middle', @zone);
    INSERT INTO mysql.time_zone_transition_type VALUES (@zone, 0, 3600, 0, 'CET'), (@zone, 1, 7200, 1, 'CEST');
    INSERT INTO mysql.time_zone_transition VALUES (@zone, 1774746000, 1), (@zone, {SUMMER_TIME_ENDS}, 0)
"""


def test_an_hour_that_comes_twice_is_two_hours(mariadb: MariaDB) -> None:
    engine = sa.create_engine(mariadb.create("clocks"))
    with engine.connect() as connection:
        for statement in _ZONE.split(";"):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("SET time_zone = 'Middle'")
        for now in (SUMMER_TIME_ENDS - 1_800, SUMMER_TIME_ENDS + 1_800):
            connection.exec_driver_sql(f"SET timestamp = {now}")
            assert connection.exec_driver_sql("SELECT HOUR(NOW())").scalar_one() == 2
            assert connection.exec_driver_sql(f"SELECT {CLOCK_MS['mariadb']}").scalar_one() == now * 1000
    engine.dispose()


@pytest.mark.parametrize("name", ["sqlite", "mariadb", "postgresql"])
def test_the_clock_is_this_machines(name: str, request: pytest.FixtureRequest) -> None:
    url = "sqlite://" if name == "sqlite" else request.getfixturevalue(name).create("clock")
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        before = time.time_ns() // 1_000_000
        found = connection.exec_driver_sql(f"SELECT {CLOCK_MS[connection.dialect.name]}").scalar_one()
        assert before - 1 <= found <= time.time_ns() // 1_000_000 + 1
    engine.dispose()
