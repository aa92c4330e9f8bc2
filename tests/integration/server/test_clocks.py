"""The clock of a database does not leap when summer time ends in the zone of the session."""

from __future__ import annotations

import shutil
import subprocess

import sqlalchemy as sa

from tests.support.mariadb import MariaDB
from tmc_common.clocks import CLOCK_MS

SUMMER_TIME_ENDS = 1_792_890_000  # 25 October 2026, 01:00 UTC: from 3 to 2 o'clock in Berlin


def test_an_hour_that_comes_twice_is_two_hours(mariadb: MariaDB) -> None:
    tool = shutil.which("mariadb-tzinfo-to-sql") or "mysql_tzinfo_to_sql"
    zone = subprocess.run(
        [tool, "/usr/share/zoneinfo/Europe/Berlin", "Berlin"], capture_output=True, text=True, check=True
    )
    engine = sa.create_engine(mariadb.create("clocks"))
    with engine.connect() as connection:
        connection.exec_driver_sql("USE mysql")
        for statement in filter(str.strip, zone.stdout.split(";\n")):
            connection.exec_driver_sql(statement.replace("%", "%%"))
        connection.exec_driver_sql("SET time_zone = 'Berlin'")
        for now in (SUMMER_TIME_ENDS - 1_800, SUMMER_TIME_ENDS + 1_800):
            connection.exec_driver_sql(f"SET timestamp = {now}")
            assert connection.exec_driver_sql("SELECT HOUR(NOW())").scalar_one() == 2
            assert connection.exec_driver_sql(f"SELECT {CLOCK_MS['mariadb']}").scalar_one() == now * 1000
    engine.dispose()
