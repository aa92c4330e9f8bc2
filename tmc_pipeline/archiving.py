"""Archive closed messages: read, write, read back, compare, publish. Spark removes nothing.

A message is closed when it was rolled back, or committed with every consumption acked or cancelled. What is closed stays as it
is, so a row that was closed before the run began is the same whenever it is read. Closing times, not message numbers, say what is
new: a message decided days late is archived days late. Late commits and clocks that were set back are why a run looks a
while further back than the last one ended, and leaves out what earlier runs have.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive import Archive
from tmc_pipeline.center import CenterTables, Names
from tmc_pipeline.errors import JobFailed, translated
from tmc_pipeline.frames import ARCHIVED, CONSUMPTION_CLOSED, MESSAGE, MESSAGE_CLOSED
from tmc_server.domain.manifest import ArchivedShard, Manifest, Partition
from tmc_server.domain.message import MessageState

log = logging.getLogger("tmc.pipeline")

HOUR_MS = 3_600_000


# -- pure: DataFrame -> DataFrame ---------------------------------------------------------------------------------


def closed(messages: DataFrame, since_ms: int, before_ms: int) -> DataFrame:
    """MESSAGE -> MESSAGE with closed_ms bigint, day string: those closed in [since_ms, before_ms).

    A committed message nobody subscribed to is closed when it is decided.
    """
    over = [f.col("state") == state for state in MESSAGE_CLOSED]
    done = f.forall(
        "consumptions", lambda each: each["state"].isin(*CONSUMPTION_CLOSED) & each["closed_ms"].isNotNull()
    )
    last = f.array_max(f.transform("consumptions", lambda each: each["closed_ms"]))
    return (
        messages.where(over[0] | ((f.col("state") == int(MessageState.COMMITTED)) & done))
        .withColumn("closed_ms", f.greatest("decided_ms", last))
        .where((f.col("closed_ms") >= since_ms) & (f.col("closed_ms") < before_ms))
        .withColumn("day", f.date_format(f.timestamp_millis("closed_ms"), "yyyy-MM-dd"))
    )


def with_topic(messages: DataFrame, topics: DataFrame) -> DataFrame:
    """MESSAGE and more with topic_no -> the same with topic string; topic-NUMBER where the catalog has forgotten it.

    topics: topic_no int, topic string; one row per topic.
    """
    named = messages.join(f.broadcast(topics), "topic_no", "left")
    return named.withColumn("topic", f.coalesce("topic", f.concat(f.lit("topic-"), f.col("topic_no").cast("string"))))


def without(messages: DataFrame, known: DataFrame) -> DataFrame:
    """Rows of `messages` whose (shard, id) is not in `known`."""
    return messages.join(known.select("shard", "id"), ["shard", "id"], "left_anti")


def fingerprint() -> Column:
    """bigint over every column of a row of MESSAGE and its closed_ms."""
    return f.xxhash64(*MESSAGE.names, "closed_ms")


def summed_by_shard(messages: DataFrame) -> DataFrame:
    """ARCHIVED -> shard smallint, low, high, messages, consumptions, digest bigint; one row per shard."""
    return messages.groupBy("shard").agg(f.min("id").alias("low"), f.max("id").alias("high"), *_sums())


def _sums() -> Sequence[Column]:
    return (
        f.count(f.lit(1)).alias("messages"),
        f.sum(f.size("consumptions")).alias("consumptions"),
        f.bit_xor(fingerprint()).alias("digest"),
    )


# -- the job ------------------------------------------------------------------------------------------------------


class Archiving:
    """lag_ms: what closed later than so long ago waits.  lookback_ms: how far before the last run to look again."""

    def __init__(
        self, spark: SparkSession, center: CenterTables, archive: Archive, lag_ms: int, lookback_ms: int
    ) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._lag_ms = lag_ms
        self._lookback_ms = lookback_ms

    def run(self, everything: bool = False) -> Manifest:
        """One run. everything: look through all closing times, not only the last ones. Raises PipelineError."""
        with translated():
            self._center.check()
            now = self._center.now_ms()
            run = f"{datetime.fromtimestamp(now / 1000, UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
            with self._archive.writing(run) as staging:
                earlier = self._archive.manifests()
                before = now - self._lag_ms
                since = 0 if everything or not earlier else max(0, earlier[-1].before_ms - self._lookback_ms)
                log.info("run %s: messages closed before %s", run, _shown(before))
                written = self._write(self._chosen(earlier, since, before), staging.messages)
                manifest = self._verified(staging, run, since, before, now, written)
                staging.publish(manifest)
        log.info("published run %s: %d messages, %d consumptions", run, manifest.messages, manifest.consumptions)
        return manifest

    def _chosen(self, earlier: Sequence[Manifest], since_ms: int, before_ms: int) -> DataFrame:
        topics = [(number, name) for number, name in self._center.names.topics.items()]
        named = with_topic(
            closed(self._center.messages(since_ms, before_ms), since_ms, before_ms),
            self._spark.createDataFrame(topics, "topic_no int, topic string"),
        )
        overlapping = [manifest for manifest in earlier if manifest.before_ms > since_ms and manifest.messages]
        if overlapping:
            named = without(named, self._archive.messages(overlapping, skip_missing=True))
        return named.select(*ARCHIVED.names)

    def _write(self, chosen: DataFrame, path: str) -> Mapping[str, Any]:
        """Returns: what went through on the way to the files."""
        seen = Observation("written")
        started = time.monotonic()
        chosen.observe(seen, *_sums()).write.partitionBy("day", "topic").parquet(path)
        written: Mapping[str, Any] = seen.get
        log.info("%d messages written in %.1f s", written["messages"], time.monotonic() - started)
        return written

    def _verified(
        self, staging: Any, run: str, since_ms: int, before_ms: int, now_ms: int, written: Mapping[str, Any]
    ) -> Manifest:
        """Read the files back, compare with what was read from the databases, write down what may be removed."""
        shards, partitions = self._read_back(staging, written) if written["messages"] else ([], [])
        return Manifest(
            run, since_ms, before_ms, now_ms, tuple(shards), tuple(partitions), _by_number(self._center.names)
        )

    def _read_back(self, staging: Any, written: Mapping[str, Any]) -> tuple[list[ArchivedShard], list[Partition]]:
        files = self._spark.read.schema(ARCHIVED).parquet(staging.messages)
        sums = summed_by_shard(files).orderBy("shard").collect()
        found = {
            "messages": sum(row.messages for row in sums),
            "consumptions": sum(row.consumptions for row in sums),
            "digest": _xor([row.digest for row in sums]),
        }
        if found != {name: written[name] for name in found}:
            raise JobFailed(
                f"The files read back differ from what was written ({found} instead of {dict(written)}): run it again."
            )
        numbers = files.select(f.col("id").cast("string"), "shard", f.col("id").alias("number"))
        (
            numbers.repartition(1, "shard")
            .sortWithinPartitions("shard", "number")
            .drop("number")
            .write.partitionBy("shard")
            .text(staging.removal)
        )
        folders = files.groupBy("day", "topic").count().orderBy("day", "topic").collect()
        return (
            [
                ArchivedShard(
                    row.shard, row.low, row.high, row.messages, row.consumptions, f"{row.digest & (1 << 64) - 1:016x}"
                )
                for row in sums
            ],
            [Partition(row.day, row.topic, row["count"]) for row in folders],
        )


def _by_number(names: Names) -> Mapping[str, Mapping[str, Any]]:
    return {
        "topics": {str(number): name for number, name in names.topics.items()},
        "apps": {str(number): name for number, name in names.apps.items()},
        "subscriptions": {str(number): [topic, name] for number, (topic, name, _) in names.subscriptions.items()},
    }


def _xor(values: Sequence[int]) -> int:
    total = 0
    for value in values:
        total ^= value
    return total


def _shown(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
