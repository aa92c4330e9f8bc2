"""Archive closed messages: read, write, read back, compare, publish. Spark removes nothing.

A message is closed when it was rolled back, or committed with every consumption acked or cancelled. Closed messages
do not change, so a row that was closed before the run began is the same whenever it is read. New messages are found
by closing time, not by message number: a message decided days late is archived days late. Because of late commits and
clocks that were set back, a run starts some time before the end of the last one and omits what earlier runs have.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import xor
from typing import Any

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, Staging, fingerprint, hexadecimal
from tmc_pipeline.center import CenterTables, Names
from tmc_pipeline.errors import JobFailed, translated
from tmc_pipeline.frames import ARCHIVED, is_one_of, small_table, with_topic, without
from tmc_server.domain import consumption, message
from tmc_server.domain.manifest import ArchivedShard, Manifest, Partition

log = logging.getLogger("tmc.pipeline")

HOUR_MS = 3_600_000
_DAY_MS = 24 * HOUR_MS
# Columns whose values hardly repeat: looking for repetitions costs more than it saves.
_PLAIN = {
    f"parquet.enable.dictionary#{name}": "false"
    for name in (
        "id",
        "message_key",
        "attempt_id",
        "digest",
        "body",
        "created_ms",
        "decided_ms",
        "closed_ms",
        "fingerprint",
        *(f"consumptions.list.element.{name}" for name in ("created_ms", "closed_ms", "tried_ms")),
    )
}


# -- pure: DataFrame -> DataFrame ---------------------------------------------------------------------------------


def closed(messages: DataFrame, since_ms: int, before_ms: int) -> DataFrame:
    """MESSAGE -> MESSAGE with closed_ms bigint, day string: those closed in [since_ms, before_ms).

    A committed message nobody subscribed to is closed when it is decided.
    """
    state = f.col("state")
    closed_states = f.array(*[f.lit(int(each)).cast("smallint") for each in consumption.CLOSED])
    done = f.size(f.array_except("consumptions.state", closed_states)) == 0  # no lambda: those are not compiled
    last = f.array_max("consumptions.closed_ms")
    # Unused, but without it Spark would push the filter below the JSON parsing, which would then run twice.
    read = messages.observe("read", f.count(f.lit(1)).alias("messages"))
    return (
        read.where(is_one_of(state, message.CLOSED_ITSELF) | (is_one_of(state, message.CLOSED_WITH_DELIVERIES) & done))
        .withColumn("closed_ms", f.greatest("decided_ms", last))
        .where((f.col("closed_ms") >= since_ms) & (f.col("closed_ms") < before_ms))
        .withColumn("day", f.date_from_unix_date(f.floor(f.col("closed_ms") / _DAY_MS).cast("int")).cast("string"))
    )


def summed(messages: DataFrame) -> DataFrame:
    """ARCHIVED -> one row per shard, day and topic: low, high, messages, consumptions, digest, damaged bigint.

    damaged: rows whose fingerprint is not that of their columns.
    """
    return messages.groupBy("shard", "day", "topic").agg(
        f.min("id").alias("low"),
        f.max("id").alias("high"),
        f.count(f.lit(1)).alias("messages"),
        f.sum(f.size("consumptions")).alias("consumptions"),
        f.bit_xor("fingerprint").alias("digest"),
        f.count_if(f.col("fingerprint") != fingerprint()).alias("damaged"),
    )


# -- the job ------------------------------------------------------------------------------------------------------


class Archiving:
    """lag_ms: messages that closed more recently wait.  lookback_ms: how far before the last run to look again."""

    def __init__(
        self, spark: SparkSession, center: CenterTables, archive: Archive, lag_ms: int, lookback_ms: int
    ) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._lag_ms = lag_ms
        self._lookback_ms = lookback_ms

    def run(self, everything: bool = False) -> Manifest:
        """Run once. everything: look at all closing times, not only recent ones. Raises PipelineError."""
        with translated():
            self._center.check()
            now = self._center.now_ms()
            before = now - self._lag_ms
            with self._archive.writing(now) as staging:
                newest = min(before, max((manifest.before_ms for manifest in staging.earlier), default=0))
                since = 0 if everything else max(0, newest - self._lookback_ms)
                log.info("run %s: messages closed before %s", staging.run, _shown(before))
                written = self._write(self._chosen(staging.earlier, since, before), staging.messages)
                manifest = self._verified(staging, since, before, written)
                staging.publish(manifest)
        log.info(
            "published run %s: %d messages, %d consumptions", manifest.run, manifest.messages, manifest.consumptions
        )
        return manifest

    def _chosen(self, earlier: Sequence[Manifest], since_ms: int, before_ms: int) -> DataFrame:
        named = with_topic(
            closed(self._center.messages(since_ms, before_ms), since_ms, before_ms),
            small_table(self._spark, self._center.names.topics.items(), "topic_no int, topic string"),
        )
        overlapping = [manifest for manifest in earlier if manifest.before_ms > since_ms and manifest.messages]
        if overlapping:
            named = without(named, self._archive.numbers(overlapping))
        return named.withColumn("fingerprint", fingerprint()).select(*ARCHIVED.names)

    def _write(self, chosen: DataFrame, path: str) -> int:
        """Write the files. Returns: the number of messages written."""
        seen = Observation("written")
        started = time.monotonic()
        chosen.observe(seen, f.count(f.lit(1)).alias("messages")).write.partitionBy("day", "topic").options(
            **_PLAIN
        ).parquet(path)
        written = int(seen.get["messages"])
        log.info("%d messages written in %.1f s", written, time.monotonic() - started)
        return written

    def _verified(self, staging: Staging, since_ms: int, before_ms: int, written: int) -> Manifest:
        """Read the files back, compare them with what was read from the databases, list what may be removed."""
        shards, partitions = self._read_back(staging, written) if written else ([], [])
        names = _by_number(self._center.names)
        return Manifest(
            run=staging.run,
            since_ms=since_ms,
            before_ms=before_ms,
            written_ms=staging.at_ms,
            shards=tuple(shards),
            partitions=tuple(partitions),
            names=names,
        )

    def _read_back(self, staging: Staging, written: int) -> tuple[list[ArchivedShard], list[Partition]]:
        files = self._spark.read.schema(ARCHIVED).parquet(staging.messages)
        sums = summed(files).collect()
        found, damaged = sum(row.messages for row in sums), sum(row.damaged for row in sums)
        if found != written or damaged:
            raise JobFailed(
                f"The files read back differ from what was written: {found} messages instead of {written}, {damaged} damaged. "
                "Nothing was published: run it again."
            )
        numbers = files.select(f.col("id").cast("string"), "shard", f.col("id").alias("number"))
        (
            numbers.repartition("shard")
            .sortWithinPartitions("shard", "number")
            .drop("number")
            .write.partitionBy("shard")
            .text(staging.removal)
        )
        return _by_shard(sums), _by_folder(sums, staging)


def _by_shard(sums: Sequence[Any]) -> list[ArchivedShard]:
    """Rows of `summed`, added up."""
    shards = []
    for shard in sorted({row.shard for row in sums}):
        mine = [row for row in sums if row.shard == shard]
        digest = reduce(xor, (row.digest for row in mine))
        low, high = min(row.low for row in mine), max(row.high for row in mine)
        messages, consumptions = sum(row.messages for row in mine), sum(row.consumptions for row in mine)
        shards.append(
            ArchivedShard(
                shard=shard,
                low=low,
                high=high,
                messages=messages,
                consumptions=consumptions,
                digest=hexadecimal(digest),
            )
        )
    return shards


def _by_folder(sums: Sequence[Any], staging: Staging) -> list[Partition]:
    """Rows of `summed`, added up, with the sizes of the files."""
    messages: Counter[tuple[str, str]] = Counter()
    digests: Counter[tuple[str, str]] = Counter()
    for row in sums:
        messages[row.day, row.topic] += row.messages
        digests[row.day, row.topic] ^= row.digest
    found = []
    for day, topic in sorted(messages):
        files, size = staging.size(day, topic)
        digest = hexadecimal(digests[day, topic])
        part = Partition(day=day, topic=topic, messages=messages[day, topic], digest=digest, files=files, bytes=size)
        found.append(part)
    return found


def _by_number(names: Names) -> Mapping[str, Mapping[str, Any]]:
    return {
        "topics": {str(number): name for number, name in names.topics.items()},
        "apps": {str(number): name for number, name in names.apps.items()},
        "subscriptions": {str(number): [topic, name] for number, (topic, name, _) in names.subscriptions.items()},
    }


def _shown(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
