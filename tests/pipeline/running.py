"""Jobs in this process, over a filled center, and settings of those at the command line."""

from __future__ import annotations

import json
import sys
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
TMC = str(Path(sys.executable).parent / "tmc")


class _StoppedTables(CenterTables):
    """A center whose clock may stand: a job on a busy machine begins seconds later."""

    stopped_ms: int | None = None

    def now_ms(self) -> int:
        return super().now_ms() if self.stopped_ms is None else self.stopped_ms


class Jobs:
    """lag_ms: as in [archive]; nothing else is left out of the settings' defaults."""

    def __init__(self, spark: SparkSession, center: FilledCenter, folder: Path, **more: Any) -> None:
        self.spark = spark
        self.center = center
        self.settings = Settings.model_validate(center.settings(folder, **more))
        self.tables = CenterTables(spark, databases_of(self.settings.store), FETCH)
        self.archive = Archive(spark, self.settings.archive.path, self.tables)

    def run_archive(
        self,
        lag_ms: int = 60_000,
        lookback_ms: int = HOUR_MS,
        everything: bool = False,
        before_ms: int | None = None,
    ) -> Manifest:
        """before_ms: what was closed before that, instead of lag_ms."""
        tables = _StoppedTables(self.spark, databases_of(self.settings.store), FETCH)  # names as of now
        if before_ms is not None:
            tables.stopped_ms = self.tables.now_ms()
            lag_ms = tables.stopped_ms - before_ms
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


def few_sources(
    spark: SparkSession, center: FilledCenter, folder: Path, producers: Sequence[str], consumers: Sequence[str]
) -> Jobs:
    """Jobs that compare the notes of these apps only: each source makes the plans longer."""
    named = {
        name: [{"app": each, "url": center.server.url(center.ledger(each))} for each in apps]
        for name, apps in (("producers", producers), ("consumers", consumers))
    }
    return Jobs(spark, center, folder, **named)


def keys(rows: Sequence[Any]) -> list[str]:
    """Message keys in order."""
    return sorted(row.message_key for row in rows)


def toml_of(values: dict[str, Any]) -> str:
    """Settings as a file would have them: JSON's scalars and inline tables are TOML's."""
    lines: list[str] = []
    for section, content in values.items():
        if isinstance(content, list):
            lines += [line for each in content for line in (f"[[{section}]]", *_pairs(each))]
        else:
            nested = {
                key: value
                for key, value in content.items()
                if isinstance(value, list) and value and isinstance(value[0], dict)
            }
            lines += [f"[{section}]", *_pairs({key: value for key, value in content.items() if key not in nested})]
            for key, tables in nested.items():
                lines += [line for each in tables for line in (f"[[{section}.{key}]]", *_pairs(each))]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any]) -> list[str]:
    return [
        f"{key} = {{ {', '.join(f'{json.dumps(k)} = {json.dumps(v)}' for k, v in value.items())} }}"
        if isinstance(value, dict)
        else f"{key} = {json.dumps(value)}"
        for key, value in values.items()
    ]
