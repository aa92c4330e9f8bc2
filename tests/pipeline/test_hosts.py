"""A center's database on several hosts: the pipeline reads the primary of PostgreSQL, and says that it cannot of MariaDB."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tmc_pipeline.dialects import database
from tmc_pipeline.errors import CannotRun
from tmc_storm.services.replicated import ReplicatedPostgreSQL


def test_the_primary_of_postgresql_is_read(spark: SparkSession) -> None:
    pair = ReplicatedPostgreSQL()
    try:
        for _ in range(2):
            options = database(pair.url("postgres")).options(fetch=1)
            query = "SELECT host(inet_server_addr()) AS host, pg_is_in_recovery() AS is_replica"
            (row,) = spark.read.format("jdbc").options(**options, query=query).load().collect()
            assert (row.host, row.is_replica) == (pair.primary.host, False)
            pair.kill()
            pair.promote()
            pair.rebuild()
    finally:
        pair.stop()


def test_several_hosts_of_mariadb_are_refused() -> None:
    with pytest.raises(CannotRun, match="cannot tell which of db1,db2 is the primary"):
        database("mariadb+mysqldb://tmc:secret@db1,db2:3306/tmc")
