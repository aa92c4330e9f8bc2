"""Statements of a second database are judged by their text: a missed write commits two databases, a false one refuses reads."""

import pytest

from tmc_client.local.elsewhere import may_write

READS = [
    "SELECT 1",
    "  (SELECT a FROM t) UNION (SELECT b FROM t)",
    "-- a comment\n/* INSERT */ select * FROM t FOR UPDATE",
    "WITH recent AS (SELECT * FROM orders) SELECT * FROM recent",
    "WITH a AS (SELECT 'DELETE it') SELECT \"update\", replace(x, 'a', 'b') FROM a",
    "WITH a AS (SELECT 1) SELECT * FROM t FOR NO KEY UPDATE",
    "SHOW TABLES",
    "SET LOCAL lock_timeout = '1s'",
]
WRITES = [
    "INSERT INTO t VALUES (1)",
    "/* SELECT */ update t SET a = 1",
    "WITH gone AS (DELETE FROM t RETURNING id) SELECT * FROM gone",
    "WITH a AS (SELECT 1) INSERT INTO t SELECT * FROM a",
    "INSERT INTO t VALUES (1) RETURNING id",
    "CALL book(7)",
    "DO $$ BEGIN END $$",
]


@pytest.mark.parametrize("statement", READS)
def test_reads_are_free(statement: str) -> None:
    assert not may_write(statement)


@pytest.mark.parametrize("statement", WRITES)
def test_what_may_change_something_counts(statement: str) -> None:
    assert may_write(statement)
