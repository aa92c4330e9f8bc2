"""Centers on SQLite and on PostgreSQL are archived, reconciled and reported like those on MariaDB."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

from tests.pipeline.running import FETCH
from tests.support.clock import ManualClock
from tests.support.filled import START_MS
from tests.support.store import server_store, sqlite_store
from tmc_client.producing.ledger import create_tables
from tmc_client.tables import inbox
from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.job import Archiving
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.job import Reconciliation
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.report.job import Report
from tmc_pipeline.settings import LedgerSource
from tmc_server.config import StoreConfig
from tmc_server.domain.ids import MessageId


@pytest.mark.takes_turns("stores of the pipeline")
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_center(kind: str, request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    if kind == "sqlite":
        store = sqlite_store(tmp_path, clock)
    else:
        store = server_store(request.getfixturevalue(kind), "tmc_center", clock)
    catalog = store.database.url.render_as_string(hide_password=False)
    acked, waiting = [store.submitted(room=1, body=b"\x00\xff" * 5) for _ in range(3)], store.submitted(room=1)
    for number in acked:
        store.perform(store.nack_of(number, 1, error='"it\'s" \\ \u00e9'), store.ack_of(number))
    store.close()
    effects = f"sqlite:///{tmp_path}/coupons.db"
    engine = sa.create_engine(effects)
    create_tables(engine)
    with engine.begin() as connection:
        for number in acked[:2]:
            public = str(MessageId(store.topic.number, store.orders.number, store.shard, number))
            values = {"subscriber": "coupons.default", "message_id": public, "received_ms": store.clock()}
            connection.execute(inbox.insert().values(values))
    engine.dispose()
    tables = CenterTables(spark, databases_of(StoreConfig.model_validate({"catalog": catalog})), FETCH)
    archive = Archive(spark, f"{tmp_path}/archive", tables)
    ahead_ms = tables.now_ms() - store.clock() - 1000  # the store's clock is a manual one
    manifest = Archiving(spark, tables, archive, lag_ms=ahead_ms, lookback_ms=0).run()
    assert (manifest.messages, manifest.consumptions) == (3, 3)
    row = archive.messages(manifest.partitions).orderBy("id").first()
    assert row is not None
    assert (row.id, bytes(row.body), row.topic) == (acked[0], b"\x00\xff" * 5, "order.paid")
    assert [each.error for each in row.attempts] == ['"it\'s" \\ \u00e9']
    source = LedgerSource.model_validate({"app": "coupons", "url": effects})
    folder = HadoopFolder(spark, f"{tmp_path}/reconcile")
    found = Reconciliation(
        spark=spark, center=tables, archive=archive, ledgers=Ledgers(spark, FETCH), folder=folder, tolerance_ms=ahead_ms
    ).run([], [source])
    assert found.verdicts | {"agreed": 2, "lost": 1, "pending": 1} == found.verdicts
    assert (
        Report(spark, tables, archive, HadoopFolder(spark, f"{tmp_path}/report")).run(0, store.clock() + 1000).messages
        == 4
    )
    assert waiting not in acked
