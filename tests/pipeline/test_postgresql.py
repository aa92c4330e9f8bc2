"""Producers and consumers on PostgreSQL: their ledgers and inboxes are read as those on MariaDB are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

from tests.pipeline.running import FETCH, Jobs
from tests.support.filled import CONSUMERS, PRODUCERS
from tmc_client.producing.ledger import create_tables
from tmc_client.tables import inbox, ledger
from tmc_pipeline.dialects import database
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.settings import LedgerSource
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql]


def _moved(jobs: Jobs, postgresql: PostgreSQL, name: str, table: sa.Table) -> sa.Engine:
    """A database with what this app has noted on MariaDB."""
    engine = sa.create_engine(postgresql.create(f"pipeline_{name}"))
    create_tables(engine)
    with jobs.center.sql(jobs.center.ledger(name)) as source, engine.begin() as target:
        target.execute(sa.delete(table))
        rows = [dict(row) for row in source.execute(sa.select(table)).mappings()]
        assert rows
        target.execute(table.insert(), rows)
    return engine


def _url(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.mark.takes_turns("stores of the pipeline")
def test_both_sides_on_postgresql_are_compared(
    spark: SparkSession, filled: Callable[..., Any], folder: Path, postgresql: PostgreSQL
) -> None:
    center = filled(12)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    engines = {name: _moved(jobs, postgresql, name, ledger) for name in PRODUCERS}
    engines |= {name: _moved(jobs, postgresql, name, inbox) for name in CONSUMERS}
    producers = [{"app": name, "url": _url(engines[name])} for name in PRODUCERS]
    consumers = [{"app": name, "url": _url(engines[name])} for name in CONSUMERS]
    jobs = Jobs(spark, center, folder, producers=producers, consumers=consumers)
    summary = jobs.run_reconcile()
    assert summary.consistent
    assert summary.verdicts["agreed"] == 48
    with engines["p1"].begin() as connection:
        key = connection.execute(sa.select(ledger.c.message_key).limit(1)).scalar_one()
        connection.execute(ledger.update().where(ledger.c.message_key == key).values(attempt_id=b"another one"))
    with engines["c2"].begin() as connection:
        message_id = connection.execute(sa.select(inbox.c.message_id).limit(1)).scalar_one()
        connection.execute(inbox.delete().where(inbox.c.message_id == message_id))
    found = jobs.run_reconcile().verdicts
    assert (found["identity differs"], found["lost"], found["agreed"]) == (1, 1, 46)
    for engine in engines.values():
        engine.dispose()


def test_large_tables_are_read_in_slices(
    spark: SparkSession, filled: Callable[..., Any], folder: Path, postgresql: PostgreSQL
) -> None:
    center = filled(60)
    center.fill_ledgers()
    engine = _moved(Jobs(spark, center, folder), postgresql, "p1", ledger)
    rows = Ledgers(spark, FETCH, slice_rows=10).produced(LedgerSource(app="p1", url=_url(engine)))
    assert rows.rdd.getNumPartitions() > 4
    assert rows.select("message_id").distinct().count() == rows.count() == 80
    engine.dispose()


def test_sessions_may_only_read(spark: SparkSession, postgresql: PostgreSQL) -> None:
    options = database(postgresql.create("pipeline_empty")).options(FETCH)
    query = "(SELECT current_setting('transaction_read_only') AS read_only) q"
    row = spark.read.format("jdbc").options(**options, dbtable=query).load().first()
    assert row is not None
    assert row.read_only == "on"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"database": "nowhere"}, r"There is no database nowhere"),
        ({"port": 1}, r"No database answers at 127\.0\.0\.1:1: check the URL"),
        ({"username": "stranger"}, r'The database refuses "stranger"'),
        ({"database": ""}, r"names no database: add /name"),
        ({}, r"There is no table tmc_ledger: check the URL"),
    ],
)
def test_what_is_not_there_is_named(
    spark: SparkSession, postgresql: PostgreSQL, change: dict[str, Any], sentence: str
) -> None:
    url = sa.make_url(postgresql.create("pipeline_empty")).set(**change)
    source = LedgerSource(app="p1", url=url.render_as_string(hide_password=False))
    with pytest.raises(CannotRun, match=sentence):
        Ledgers(spark, FETCH).produced(source).collect()


def test_an_account_that_may_not_read(spark: SparkSession, postgresql: PostgreSQL) -> None:
    engine = sa.create_engine(postgresql.create("pipeline_closed"), isolation_level="AUTOCOMMIT")
    create_tables(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE pipeline_reader LOGIN")
    source = LedgerSource(app="p1", url=_url(engine).replace("tmc@", "pipeline_reader@"))
    with pytest.raises(CannotRun, match=r"GRANT SELECT .*permission denied for table tmc_ledger"):
        Ledgers(spark, FETCH).produced(source).collect()
    with engine.connect() as connection:
        connection.exec_driver_sql("GRANT SELECT ON tmc_ledger TO pipeline_reader")
    assert Ledgers(spark, FETCH).produced(source).count() == 0
    engine.dispose()
