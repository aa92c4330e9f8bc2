"""One report: read the requested period, aggregate, write tables as Parquet and the page as HTML."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, closed_since, moment, subscriber_names
from tmc_pipeline.center import CenterTables
from tmc_pipeline.errors import translated
from tmc_pipeline.files import HadoopFolder, finished, when_ms
from tmc_pipeline.frames import MESSAGE, on_disk, small_table, with_topic, without
from tmc_pipeline.reconcile.verdicts import DISCREPANCIES
from tmc_pipeline.report import figures, page

log = logging.getLogger("tmc.pipeline")

_TREND = 30  # reconciliations of which the page shows how many discrepancies they found
_EXAMPLES = 3  # discrepancies of each verdict on the page; all are in the details of the reconciliation


@dataclass(frozen=True)
class Reported:
    """What a run wrote. tables: rows by name, as in figures.py."""

    path: str
    messages: int
    tables: Mapping[str, page.Rows]


class Report:
    """archive: None: the hot tables alone.  reconciled: folder of reconciliation results; None: there is none.

    console: address of the console that the page links to; empty: no links.
    """

    def __init__(
        self,
        spark: SparkSession,
        center: CenterTables,
        archive: Archive | None,
        folder: HadoopFolder,
        skip_missing: bool = False,
        reconciled: HadoopFolder | None = None,
        console: str = "",
    ) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._folder = folder
        self._skip_missing = skip_missing
        self._reconciled = reconciled
        self._console = console.rstrip("/")

    def run(self, from_ms: int, to_ms: int | None = None) -> Reported:
        """Messages prepared in [from_ms, to_ms), None: now. Raises PipelineError."""
        with translated(), ExitStack() as kept:
            self._center.check()
            if self._archive is not None:
                kept.enter_context(self._archive.folder.read_by())
            now = self._center.now_ms()
            to_ms = now if to_ms is None else to_ms
            run = f"{moment(now)}-{secrets.token_hex(3)}"
            before_ms = max(0, 2 * from_ms - to_ms)  # where a period of the same length before this one begins
            hot = self._hot(kept, before_ms)
            both = kept.enter_context(on_disk(self._messages(hot, before_ms, to_ms)))
            frames = self._frames(both, hot, from_ms, to_ms)
            staging = f"_staging/{run}"
            try:
                tables = {name: self._kept(frame, f"{staging}/{name}.parquet") for name, frame in frames.items()}
                seen = sum(row["messages"] for row in tables["skew"])
                facts = {
                    "prepared": f"from {page.at(from_ms)} to {page.at(to_ms)} UTC",
                    "messages": f"{seen:,}",
                    "run": run,
                }
                impossible = sum(row["impossible"] for name in ("production", "consumption") for row in tables[name])
                if impossible:
                    facts["wrong clocks"] = f"{impossible:,} times that cannot be are left out of the latencies"
                verdicts = self._verdicts()
                text = page.page("Transaction messages", facts, tables, verdicts, self._console)
                self._folder.write(f"{staging}/report.html", text)
                self._folder.rename(staging, run)
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
            recent = closed_since(from_ms)  # nothing closes before it was prepared
            parts = [part for part in self._archive.chain().partitions if recent(part)]
            cold = self._archive.messages(parts, self._skip_missing).withColumn("body", f.lit(None).cast("binary"))
            cold = cold.withColumn("attempts", f.coalesce("attempts", f.array().cast(MESSAGE["attempts"].dataType)))
            every = every.unionByName(without(cold, hot).select(*wanted))
        return every.where((f.col("created_ms") >= from_ms) & (f.col("created_ms") < to_ms))

    def _verdicts(self) -> page.Verdicts | None:
        """Return the verdicts of the last reconciliation, with some of its discrepancies."""
        last = list(islice(finished(self._reconciled), _TREND)) if self._reconciled is not None else []
        if self._reconciled is None or not last:
            return None
        run, summary = last[0]
        details = self._spark.read.parquet(self._reconciled.path(f"{run}/details.parquet"))
        found = details.where(f.col("verdict").isin(*DISCREPANCIES)).select(
            "verdict", "message_id", "subscriber", "topic"
        )
        place = f.row_number().over(Window.partitionBy("verdict").orderBy("message_id", "subscriber"))
        examples = found.withColumn("place", place).where(f.col("place") <= _EXAMPLES).drop("place").collect()
        worst_first = sorted(examples, key=lambda row: -DISCREPANCIES.index(row.verdict))
        trend = [
            {"at_ms": when_ms(each), "verdict": verdict, "count": of["verdicts"].get(verdict, 0)}
            for each, of in reversed(last)
            for verdict in DISCREPANCIES
        ]
        return page.Verdicts(run=run, summary=summary, examples=[row.asDict() for row in worst_first], trend=trend)

    def _frames(self, both: DataFrame, hot: DataFrame, from_ms: int, to_ms: int) -> Mapping[str, DataFrame]:
        """The tables of the report. both: messages of the reported period and of the one before.

        hot: also holds open messages that were prepared before the reported period.
        """
        messages = both.where(f.col("created_ms") >= from_ms)
        names = (
            {number: name for number, (_, name) in subscriber_names(self._archive.chain()).items()}
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
            "comparison": figures.compared(both, subscribers, from_ms),
            "latencies": figures.latencies(delivered),
            "heat": figures.heat(messages, page.heat_step_ms(from_ms, to_ms)),
        }

    def _kept(self, frame: DataFrame, name: str) -> page.Rows:
        """Write a small table. Returns: its rows, in order."""
        rows = [row.asDict() for row in frame.collect()]
        self._spark.createDataFrame(rows, frame.schema).coalesce(1).write.parquet(self._folder.path(name))
        return rows
