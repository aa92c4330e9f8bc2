"""Archive closed messages: read, write, read back, compare, publish. Spark removes nothing.

A message is closed when it was rolled back, or committed with every consumption acked or cancelled. Closed messages
do not change, so a row that was closed before the run began is the same whenever it is read.

A run does not scan the tables. It reads messages prepared since shortly before the last run, and those that the last
run listed as still open: both are ranges of the primary key. A message decided days late is archived days late.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import reduce
from operator import xor
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, closed_since, fingerprint, hexadecimal, is_among
from tmc_pipeline.archive.publishing import Publishing, Staging
from tmc_pipeline.center import EVERYTHING, CenterTables, MessageRange, Names
from tmc_pipeline.errors import JobFailed, translated
from tmc_pipeline.frames import ARCHIVED, is_one_of, small_table, with_topic, without
from tmc_server.domain import consumption, message
from tmc_server.domain.ids import MessageId, first_number
from tmc_server.domain.manifest import ArchivedShard, Chain, Manifest, OpenMessages, Partition, Place
from tmc_server.domain.numbers import Shard

log = logging.getLogger("tmc.pipeline")

HOUR_MS = 3_600_000
OPEN = "open"  # instead of a day, in staging only: messages that are not closed yet
DAY_MS = 24 * HOUR_MS
# Columns whose values hardly repeat: looking for repetitions costs more than it saves.
PLAIN = {
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


def dated(messages: DataFrame, topics: DataFrame, before_ms: int, open_before_ms: int) -> DataFrame:
    """MESSAGE -> with topic string, closed_ms bigint, day string: when everything about it was closed.

    topics: as in `with_topic`.
    A committed message nobody subscribed to is closed when it is decided. Of messages that were not closed before
    `before_ms`, those prepared before `open_before_ms` are kept with OPEN as day and topic, without bodies; the rest is
    dropped.
    """
    state = f.col("state")
    closed_states = f.array(*[f.lit(int(each)).cast("smallint") for each in consumption.CLOSED])
    done = f.size(f.array_except("consumptions.state", closed_states)) == 0  # no lambda: those are not compiled
    finished = is_one_of(state, message.CLOSED_ITSELF) | (is_one_of(state, message.CLOSED_WITH_DELIVERIES) & done)
    last = f.greatest("decided_ms", f.array_max("consumptions.closed_ms"))
    closed = f.coalesce(finished & (last < before_ms), f.lit(False))
    day = f.date_from_unix_date(f.floor(last / DAY_MS).cast("int")).cast("string")
    # Unused, but without it Spark would push the filter below the JSON parsing, which would then run twice.
    read = messages.observe("read", f.count(f.lit(1)).alias("messages"))
    # All columns at once: each further step would copy every row with its body.
    return with_topic(read.where(closed | (f.col("id") < first_number(open_before_ms))), topics).withColumns(
        {
            "closed_ms": last,
            "day": f.when(closed, day).otherwise(OPEN),
            "topic": f.when(closed, f.col("topic")).otherwise(OPEN),
            "body": f.when(closed, f.col("body")),
        }
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
        """Run once. everything: look at all messages, not only at recent and open ones. Raises PipelineError."""
        with translated():
            self._center.check()
            now = self._center.now_ms()
            before = now - self._lag_ms
            with Publishing(self._archive).run(now) as staging:
                among = EVERYTHING if everything else self._unseen(staging.chain, before)
                open_before = max(0, before - self._lookback_ms)
                log.info("run %s: messages closed before %s", staging.run, _shown(before))
                written = self._write_missing(staging, among, before, open_before)
                shards, partitions, still_open = self._read_back(staging, written)
                names = _by_number(self._center.names)
                manifest = staging.publish(
                    Manifest(
                        run=staging.run,
                        since_ms=among.from_ms,
                        before_ms=before,
                        written_ms=staging.at_ms,
                        names=names,
                        shards=tuple(shards),
                        partitions=tuple(partitions),
                        open=OpenMessages(run=staging.run, before_ms=open_before, counts=still_open),
                    )
                )
        log.info(
            "published run %s: %d messages, %d consumptions", manifest.run, manifest.messages, manifest.consumptions
        )
        return manifest

    def _unseen(self, chain: Chain, before_ms: int) -> MessageRange:
        """Return what earlier runs may have left: messages prepared recently, and those that the last run listed as open."""
        left = chain.open
        if left is None:  # the first run
            return EVERYTHING
        from_ms = max(0, min(left.before_ms, min(before_ms, chain.before_ms) - self._lookback_ms))
        if not left.counts:
            return MessageRange(from_ms=from_ms)
        with translated():
            listed = self._archive.folder.exists(f"open/{left.run}")
            rows = self._archive.listed(f"open/{left.run}").collect() if listed else []
        numbers: dict[int, list[int]] = {
            shard: [int(row.id) for row in rows if row.shard == shard] for shard in left.counts
        }
        if any(len(numbers[shard]) != count for shard, count in left.counts.items()):
            log.warning("the list of open messages of run %s is incomplete: all messages are read", left.run)
            return EVERYTHING
        return MessageRange(from_ms=from_ms, numbers=numbers)

    def _write_missing(self, staging: Staging, among: MessageRange, before_ms: int, open_before_ms: int) -> int:
        """Write what the archive lacks, and with OPEN as day, what the next run has to look at again. Returns: how many rows."""
        chain = staging.chain
        topics = small_table(self._spark, self._center.names.topics.items(), "topic_no int, topic string")
        named = dated(self._center.messages(among), topics, before_ms, open_before_ms).where(~_was_removed(chain))
        # A number on the list of open messages can be in the archive only if the run that wrote the list put it there.
        recent, last = closed_since(among.from_ms), chain.open.run if chain.open else ""
        known = [part for part in chain.partitions if recent(part) or part.place.run == last]
        written = self._write(self._lacking(named, known), staging.messages)
        # Of a server whose clock was ahead, messages were closed on days before those that their numbers speak of.
        days = {day for day, _ in staging.sizes()}
        overlooked = [part for part in chain.partitions if part.place.day in days and part not in known]
        if overlooked:
            staging.drop_messages()
            written = self._write(self._lacking(named, known + overlooked), staging.messages)
        return written

    def _lacking(self, named: DataFrame, known: Sequence[Partition]) -> DataFrame:
        """ARCHIVED of rows of `dated` that these partitions do not have."""
        if known:
            named = without(named, self._archive.numbers(known))
        whole = named.withColumns({name: f.lit(None) for name in ("erased_ms", "erased_reason")})
        return whole.withColumn("fingerprint", fingerprint()).select(
            *[f.col(each.name).cast(each.dataType) for each in ARCHIVED.fields]
        )

    def _write(self, chosen: DataFrame, path: str) -> int:
        """Write the files. Returns: the number of rows written."""
        seen = Observation("written")
        started = time.monotonic()
        chosen.observe(seen, f.count(f.lit(1)).alias("messages")).write.partitionBy("day", "topic").options(
            **PLAIN
        ).parquet(path)
        written = int(seen.get["messages"])
        log.info("%d messages written in %.1f s", written, time.monotonic() - started)
        return written

    def _read_back(
        self, staging: Staging, written: int
    ) -> tuple[list[ArchivedShard], list[Partition], dict[Shard, int]]:
        """Read the files back, compare them with what was read from the databases, list their numbers.

        Returns: what was archived by shard and by folder, and how many messages are open by shard.
        """
        if not written:
            return [], [], {}
        files = self._spark.read.schema(ARCHIVED).parquet(staging.messages)
        pool = ThreadPoolExecutor(1)
        listing = pool.submit(_write_lists, files, staging.lists)
        pool.shutdown(wait=False)  # a signal does not wait for it
        try:
            sums = verified(files, written)
        except Exception:
            wait([listing])  # it writes to staging, which is cleaned up now
            raise
        listing.result()
        closed = [row for row in sums if row.day != OPEN]
        still_open: Counter[Shard] = Counter()
        for row in sums:
            if row.day == OPEN:
                still_open[Shard(row.shard)] += row.messages
        staging.drop(OPEN)
        return _by_shard(closed), by_folder(closed, staging), dict(still_open)


def _write_lists(files: DataFrame, path: str) -> None:
    """The numbers of archived and of open messages, by shard."""
    which = f.when(f.col("day") == OPEN, "open").otherwise("removal").alias("list")
    (
        files.select("id", which, "shard")
        .repartition("shard")
        .sortWithinPartitions("list", "shard", "id")
        .select(f.col("id").cast("string"), "list", "shard")
        .write.partitionBy("list", "shard")
        .text(path)
    )


def _was_removed(chain: Chain) -> Column:
    """Return whether a row with day and topic was erased, or is of a day that expired: it must not come back from the tables."""
    ids = [found for each in chain.erased if (found := MessageId.parse(each.message_id)) is not None]
    gone = is_among(ids)
    for topic, day in chain.expired.items():
        gone = gone | ((f.col("topic") == topic) & (f.col("day") <= day))
    return gone


def verified(files: DataFrame, written: int) -> Sequence[Any]:
    """Rows of `summed` over files that were just written. Raises JobFailed: they are not what was written."""
    sums: Sequence[Any] = summed(files).collect()
    found, damaged = sum(row.messages for row in sums), sum(row.damaged for row in sums)
    if found != written or damaged:
        raise JobFailed(
            f"The files read back differ from what was written: {found} messages instead of {written}, {damaged} damaged. "
            "Nothing was published: run it again."
        )
    return sums


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


def by_folder(sums: Sequence[Any], staging: Staging) -> list[Partition]:
    """Rows of `summed`, added up, with the sizes of the files."""
    messages: Counter[tuple[str, str]] = Counter()
    digests: Counter[tuple[str, str]] = Counter()
    for row in sums:
        messages[row.day, row.topic] += row.messages
        digests[row.day, row.topic] ^= row.digest
    sizes, found = staging.sizes(), []
    for day, topic in sorted(messages):
        files, size = sizes.get((day, topic), (0, 0))
        found.append(
            Partition(
                place=Place(run=staging.run, day=day, topic=topic),
                messages=messages[day, topic],
                digest=hexadecimal(digests[day, topic]),
                files=files,
                bytes=size,
            )
        )
    return found


def _by_number(names: Names) -> Mapping[str, Mapping[str, Any]]:
    return {
        "topics": {str(number): name for number, name in names.topics.items()},
        "apps": {str(number): name for number, name in names.apps.items()},
        "subscriptions": {str(number): [topic, name] for number, (topic, name, _) in names.subscriptions.items()},
    }


def _shown(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
