"""The errors of MariaDB and MySQL by number: a database that cannot now is no fault of the center, and nothing is final."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tmc_server.store.dialects.contract import Failure
from tmc_server.store.dialects.mysql import ErrorNumber, MySQL
from tmc_server.store.dialects.sqlite import SQLite

# Killed statements and connections, full disks, memory, handles and threads, read-only servers, rights, the network.
MEANS_UNAVAILABLE = (
    *(
        3,
        5,
        1021,
        1024,
        1026,
        1030,
        1037,
        1038,
        1040,
        1041,
        1042,
        1043,
        1044,
        1045,
        1047,
        1049,
        1053,
        1102,
        1114,
        1129,
        1130,
    ),
    *(
        1135,
        1142,
        1152,
        1156,
        1158,
        1159,
        1160,
        1161,
        1180,
        1194,
        1203,
        1206,
        1223,
        1226,
        1290,
        1317,
        1637,
        1698,
        1792,
    ),
    *(1836, 1874, 1878, 1927, 1969, 2002, 2003, 2005, 2006, 2012, 2013, 2014, 2026, 2027, 2055, 3024, 3118, 4031, 4151),
)
MEANS_CONFLICT = (1020, 1213)
MEANS_A_BUG = (1048, 1054, 1062, 1064, 1153, 1264, 1366, 1406, 1452)


def _error(number: int) -> sa.exc.DBAPIError:
    return sa.exc.OperationalError("UPDATE", {}, Exception(number, "said by the server"))


@pytest.mark.parametrize("number", MEANS_UNAVAILABLE)
def test_a_database_that_cannot_now_is_unavailable(number: int) -> None:
    assert MySQL().failure_of(_error(number)) is Failure.UNAVAILABLE


@pytest.mark.parametrize("number", MEANS_CONFLICT)
def test_a_transaction_that_lost_is_run_again(number: int) -> None:
    assert MySQL().failure_of(_error(number)) is Failure.CONFLICT


@pytest.mark.parametrize("number", MEANS_A_BUG)
def test_what_is_wrong_with_a_statement_is_a_bug(number: int) -> None:
    assert MySQL().failure_of(_error(number)) is Failure.FAULT


def test_every_number_is_in_one_of_these_lists() -> None:
    alone = {ErrorNumber.ER_LOCK_WAIT_TIMEOUT, ErrorNumber.ER_NO_SUCH_TABLE}
    assert set(ErrorNumber) == {*MEANS_UNAVAILABLE, *MEANS_CONFLICT, *alone}
    assert MySQL().failure_of(_error(ErrorNumber.ER_NO_SUCH_TABLE)) is Failure.TABLE_MISSING
    assert MySQL().failure_of(_error(ErrorNumber.ER_LOCK_WAIT_TIMEOUT)) is Failure.ROW_WAITED


@pytest.mark.parametrize(
    "text",
    ["database is locked", "disk I/O error", "database or disk is full", "attempt to write a readonly database"],
)
def test_an_sqlite_file_that_cannot_now_is_unavailable(text: str) -> None:
    error = sa.exc.OperationalError("UPDATE", {}, Exception(text))
    assert SQLite().failure_of(error) is Failure.UNAVAILABLE
