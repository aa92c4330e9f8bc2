"""Which messages a reconciliation compares: all, or those of a time span and what the last run left open.

Message numbers begin with the time at which a message was prepared, so every side can be cut by it: the center's tables by
primary key, the archive by day, ledgers and inboxes by their own times, which are never earlier. What a run did not settle
is kept beside its results, with the notes about it, so that the next run does not read history again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import closed_since
from tmc_pipeline.center import MessageRange
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.verdicts import CLOCKS_APART_MS, PENDING, REPLAY, made_ms, noted_number, shard_and_number
from tmc_server.domain.ids import EPOCH_MS, created_ms
from tmc_server.domain.manifest import Partition
from tmc_server.domain.numbers import MessageNumber

SERVICES_CLOCKS_APART_MS = 3_600_000  # a service's clock may be behind the center's by so much
SERVERS_CLOCKS_APART_MS = 3_600_000  # a server's clock, which message numbers begin with, behind the database's
_NUMBER = "shard int, id bigint, differs boolean"
_OPEN, _NOTES = "open.parquet", "notes.parquet"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run left open. until_ms: it compared all messages prepared earlier.  read_ms: when it began to read.

    numbers: by shard.  differing: those of them on which the sides differ, so that the archive may have them already.
    listed: all of them as left_number string, SHARD-NUMBER.
    """

    run: str
    until_ms: int
    read_ms: int
    numbers: Mapping[int, Sequence[int]]
    differing: Mapping[int, Sequence[int]]
    listed: DataFrame

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers.values()))


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Messages prepared in [from_ms, to_ms), and those that `last` left open. to_ms None: no end.  last None: only those."""

    from_ms: int = 0
    to_ms: int | None = None
    last: Left | None = None

    @property
    def is_everything(self) -> bool:
        return not self.from_ms and self.to_ms is None

    @property
    def left(self) -> int:
        """Return how many messages of the last run are compared again."""
        return self.last.count if self.last is not None else 0

    @property
    def among(self) -> MessageRange:
        """Return the range in which to read the center's tables."""
        return MessageRange(from_ms=self.from_ms, to_ms=self.to_ms, numbers=self.last.numbers if self.last else {})

    @property
    def notes_from_ms(self) -> int:
        """Notes of ledgers and inboxes are read from this time on; earlier ones about open messages were kept."""
        return max(0, self.from_ms - SERVICES_CLOCKS_APART_MS)

    def may_have(self, part: Partition) -> bool:
        """Return whether messages of the time span, or of those that were pending, may be in this part of the archive."""
        return closed_since(self.from_ms)(part)

    def may_differ(self, part: Partition) -> bool:
        """Return whether messages on which the sides differed before may be in this part, although `may_have` says no."""
        known = [number for numbers in self.last.differing.values() for number in numbers] if self.last else []
        return bool(known) and closed_since(created_ms(MessageNumber(min(known))))(part) and not self.may_have(part)

    def within(self, rows: DataFrame, number: Column) -> DataFrame:
        """Rows about messages of this scope. number: their SHARD-NUMBER; null: dropped."""
        if self.is_everything:
            return rows
        marked = rows.withColumn("own_number", number)
        made = made_ms(f.col("own_number"))
        in_span = made >= self.from_ms if self.to_ms is None else (made >= self.from_ms) & (made < self.to_ms)
        if self.last is None or not self.last.count:
            return marked.where(in_span).drop("own_number")
        listed = f.broadcast(self.last.listed)
        return (
            marked.join(listed, f.col("own_number") == f.col("left_number"), "left")
            .where(in_span | f.col("left_number").isNotNull())
            .drop("own_number", "left_number")
        )

    def surprises(self, noted: DataFrame, now_ms: int) -> DataFrame:
        """NOTED with surprise_ms bigint: when the message was prepared, if it was settled and the note is new; else null.

        The caller widens the scope, so that it is compared again. Times in the future are no news.
        """
        if self.last is None:
            return noted.withColumn("surprise_ms", f.lit(None).cast("bigint"))
        number = noted_number("message_id")
        at = f.col("at_ms")
        new = (at >= self.last.read_ms - CLOCKS_APART_MS) & (at <= now_ms + CLOCKS_APART_MS)
        news_of_old = f.when((made_ms(number) < self.from_ms) & new, number)
        listed = noted.withColumn("own_number", news_of_old).join(
            f.broadcast(self.last.listed), f.col("own_number") == f.col("left_number"), "left"
        )
        surprise = f.when(f.col("left_number").isNull(), made_ms(f.col("own_number")))
        return listed.withColumn("surprise_ms", surprise).drop("own_number", "left_number")


@dataclass(frozen=True, kw_only=True)
class State:
    """What runs left open, beside their results. folder: of the results."""

    spark: SparkSession
    folder: HadoopFolder

    def last(self) -> Left | None:
        """Return what was left open by the newest run that says how far it came; None: there is none."""
        for run in reversed(self.folder.names()):
            if not run.startswith("_") and self.folder.exists(f"{run}/summary.json"):
                summary = json.loads(self.folder.read(f"{run}/summary.json"))
                if "until_ms" in summary:
                    return self._left(run, summary)
        return None

    def notes(self, scope: Scope) -> list[DataFrame]:
        """NOTED: what was noted about open messages earlier than the notes that are read now; none if it left nothing open."""
        if scope.last is None or not self.folder.exists(f"{scope.last.run}/{_NOTES}"):
            return []
        rows = self.spark.read.parquet(self.folder.path(f"{scope.last.run}/{_NOTES}"))
        return [rows.where((f.col("at_ms") < scope.notes_from_ms) & (f.col("at_ms") >= EPOCH_MS))]

    def write(self, staging: str, found: DataFrame, noted: Sequence[DataFrame], until_ms: int) -> int:
        """Keep what is open and was prepared before until_ms. found: judged rows not agreed.  noted: NOTED of each source.

        Returns: how many messages these are.
        """
        is_replay = f.col("subscriber").startswith(REPLAY)
        itself = found.where(~is_replay).select(
            "number", ((f.col("verdict") != PENDING) | f.col("until_ms").isNotNull()).alias("differs")
        )
        # The verdict on a replay is in a row about its original.
        replays = found.where(is_replay).select(
            noted_number("message_id").alias("number"), f.lit(True).alias("differs")
        )
        found = itself.unionByName(replays).where(made_ms(f.col("number")) < until_ms)
        left = found.groupBy("number").agg(f.max("differs").alias("differs"))
        parts = f.split("number", "-")
        left.select(parts[0].cast("int").alias("shard"), parts[1].cast("bigint").alias("id"), "differs").coalesce(
            1
        ).write.parquet(self.folder.path(f"{staging}/{_OPEN}"))
        written = self.spark.read.schema(_NUMBER).parquet(self.folder.path(f"{staging}/{_OPEN}"))
        count = int(written.count())
        if noted and count:  # joined as a file, whose size Spark knows: the notes are then not shuffled
            every = reduce(DataFrame.unionByName, noted).withColumn("left_number", noted_number("message_id"))
            kept = every.join(_listed(written), "left_number", "left_semi").drop("left_number")
            kept.write.parquet(self.folder.path(f"{staging}/{_NOTES}"))
        return count

    def _left(self, run: str, summary: Mapping[str, Any]) -> Left:
        read = self.spark.read.schema(_NUMBER).parquet(self.folder.path(f"{run}/{_OPEN}"))
        rows = read.collect()
        return Left(
            run=run,
            until_ms=summary["until_ms"],
            read_ms=summary["read_ms"],
            numbers=_by_shard(rows),
            differing=_by_shard([row for row in rows if row.differs]),
            listed=_listed(read),
        )


def _listed(numbers: DataFrame) -> DataFrame:
    """left_number string, SHARD-NUMBER, of shard int, id bigint."""
    return numbers.select(shard_and_number("shard", "id").alias("left_number"))


def _by_shard(rows: Sequence[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(int(row.shard), []).append(int(row.id))
    return found


LAST = "last"


def scope_of(state: State, since: str | int | None, until_ms: int | None) -> Scope:
    """since: None: everything; LAST: where the last run ended; or epoch ms. Raises CannotRun: the last run ended earlier."""
    if since is None:
        return Scope(to_ms=until_ms)
    last = state.last()
    if since == LAST:
        if last is None:
            raise CannotRun("There is no earlier run to continue: run reconcile without --since once.")
        return Scope(from_ms=last.until_ms, to_ms=until_ms, last=last)
    from_ms = int(since)
    if last is not None and last.until_ms < from_ms:
        raise CannotRun(
            f"Run {last.run} ended before --since, so messages in between would never be compared: give --since last."
        )
    return Scope(from_ms=from_ms, to_ms=until_ms, last=last)
