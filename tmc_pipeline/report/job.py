"""One report: read the requested period, aggregate, write tables as Parquet and the page as HTML."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, moment, subscriber_names
from tmc_pipeline.center import CenterTables
from tmc_pipeline.errors import translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import MESSAGE, on_disk, small_table, with_topic, without
from tmc_pipeline.report import figures, page

log = logging.getLogger("tmc.pipeline")


@dataclass(frozen=True)
class Reported:
    """What a run wrote. tables: rows by name, as in figures.py."""

    path: str
    messages: int
    tables: Mapping[str, page.Rows]


class Report:
    """archive: None: the hot tables alone."""

    def __init__(
        self,
        spark: SparkSession,
        center: CenterTables,
        archive: Archive | None,
        folder: HadoopFolder,
        skip_missing: bool = False,
    ) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._folder = folder
        self._skip_missing = skip_missing

    def run(self, from_ms: int, to_ms: int | None = None) -> Reported:
        """Messages prepared in [from_ms, to_ms), None: now. Raises PipelineError."""
        with translated(), ExitStack() as kept:
            self._center.check()
            now = self._center.now_ms()
            to_ms = now if to_ms is None else to_ms
            run = f"{moment(now)}-{secrets.token_hex(3)}"
            hot = self._hot(kept, from_ms)
            messages = kept.enter_context(on_disk(self._messages(hot, from_ms, to_ms)))
            frames = self._frames(messages, hot)
            staging = f"_staging/{run}"
            try:
                tables = {name: self._kept(frame, f"{staging}/{name}.parquet") for name, frame in frames.items()}
                seen = sum(row["messages"] for row in tables["skew"])
                facts = {
                    "prepared": f"from {page.at(from_ms)} to {page.at(to_ms)} UTC",
                    "messages": f"{seen:,}",
                    "run": run,
                }
                self._folder.write(f"{staging}/report.html", page.page("Transaction messages", facts, tables))
                self._folder.move(staging, run)
            finally:
                self._folder.remove(staging)
        log.info("report about %d messages: %s/report.html", seen, self._folder.path(run))
        return Reported(self._folder.path(run), seen, tables)

    def _hot(self, kept: ExitStack, from_ms: int) -> DataFrame:
        """MESSAGE with topic, without bodies: all that changed since from_ms or is open. kept: keeps it on disk."""
        topics = small_table(self._spark, self._center.names.topics.items(), "topic_no int, topic string")
        changed = self._center.messages(changed_since_ms=from_ms, body=False)
        hot = kept.enter_context(on_disk(with_topic(changed, topics)))
        hot.count()  # read before the manifests are listed: what is removed meanwhile was archived before
        return hot

    def _messages(self, hot: DataFrame, from_ms: int, to_ms: int) -> DataFrame:
        """MESSAGE with topic, without bodies; each message once."""
        wanted = [*MESSAGE.names, "topic"]
        every = hot.select(*wanted)
        if self._archive is not None:
            runs = [manifest for manifest in self._archive.manifests() if manifest.before_ms > from_ms]
            cold = self._archive.messages(runs, self._skip_missing).withColumn("body", f.lit(None).cast("binary"))
            cold = cold.withColumn("attempts", f.coalesce("attempts", f.array().cast(MESSAGE["attempts"].dataType)))
            every = every.unionByName(without(cold, hot).select(*wanted))
        return every.where((f.col("created_ms") >= from_ms) & (f.col("created_ms") < to_ms))

    def _frames(self, messages: DataFrame, hot: DataFrame) -> Mapping[str, DataFrame]:
        """The tables of the report. hot: also holds open messages that were prepared before the reported period."""
        names = (
            {number: name for number, (_, name) in subscriber_names(self._archive.manifests()).items()}
            if self._archive
            else {}
        )
        names |= {number: name for number, (_, name, _) in self._center.names.subscriptions.items()}
        subscribers = small_table(self._spark, names.items(), "subscription_no int, subscriber string")
        delivered = figures.deliveries(messages, subscribers)
        return {
            "production": figures.production(messages),
            "production_by_hour": figures.production(messages, "hour_ms"),
            "consumption": figures.consumption(delivered),
            "consumption_by_hour": figures.consumption(delivered, "hour_ms"),
            "failures": figures.failures(messages, subscribers),
            "oldest_open": figures.oldest_open(hot, subscribers),
            "skew": figures.skew(messages),
        }

    def _kept(self, frame: DataFrame, name: str) -> page.Rows:
        """Write a small table. Returns: its rows, in order."""
        rows = [row.asDict() for row in frame.collect()]
        self._spark.createDataFrame(rows, frame.schema).coalesce(1).write.parquet(self._folder.path(name))
        return rows
