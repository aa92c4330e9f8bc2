"""Jobs in this process, over a filled center."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tests.support.filled import FilledCenter
from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.job import HOUR_MS, Archiving
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.job import Reconciliation, Summary
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.settings import Settings
from tmc_server.domain.manifest import Manifest

FETCH = 1000


class Jobs:
    """lag_ms: as in [archive]; nothing else is left out of the settings' defaults."""

    def __init__(self, spark: SparkSession, center: FilledCenter, folder: Path, **more: Any) -> None:
        self.spark = spark
        self.center = center
        self.settings = Settings.model_validate(center.settings(folder, **more))
        self.tables = CenterTables(spark, databases_of(self.settings.store), FETCH)
        self.archive = Archive(spark, self.settings.archive.path)

    def run_archive(self, lag_ms: int = 60_000, lookback_ms: int = HOUR_MS, everything: bool = False) -> Manifest:
        tables = CenterTables(self.spark, databases_of(self.settings.store), FETCH)  # names as of now
        return Archiving(self.spark, tables, self.archive, lag_ms, lookback_ms).run(everything)

    def archived(self) -> DataFrame:
        return self.archive.messages(self.archive.chain().partitions)

    def run_reconcile(
        self,
        tolerance_ms: int = 60_000,
        skip_missing: bool = False,
        since: str | int | None = None,
        until_ms: int | None = None,
    ) -> Summary:
        return Reconciliation(
            spark=self.spark,
            center=self.tables,
            archive=self.archive,
            ledgers=Ledgers(self.spark, FETCH),
            folder=HadoopFolder(self.spark, self.settings.reconcile.path),
            tolerance_ms=tolerance_ms,
            skip_missing=skip_missing,
        ).run(self.settings.producers, self.settings.consumers, since, until_ms)

    def details(self, summary: Summary) -> list[Any]:
        return self.spark.read.parquet(f"{summary.path}/details.parquet").collect()


def keys(rows: Sequence[Any]) -> list[str]:
    """Message keys in order."""
    return sorted(row.message_key for row in rows)
