"""Which messages a reconciliation compares: all, or those of a time span and what the last run left open.

Message numbers begin with the time at which a message was prepared, so every side can be cut by it, whatever the clocks of
services say: the center's tables by primary key, the archive by day, ledgers and inboxes by the number in their message ids.
What a run did not settle is kept beside its results, with sums over the notes about what it did settle (days.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import closed_since
from tmc_pipeline.center import LISTED_AT_MOST, MessageRange
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.files import HadoopFolder, finished
from tmc_pipeline.frames import on_disk
from tmc_pipeline.reconcile.claims import REPLAY
from tmc_pipeline.reconcile.days import Days, days_of
from tmc_pipeline.reconcile.outlines import made_ms, noted_number, shard_and_number
from tmc_pipeline.reconcile.verdicts import CANCELED, PENDING
from tmc_server.domain.ids import created_ms, first_number
from tmc_server.domain.manifest import Partition
from tmc_server.domain.numbers import MessageNumber

SERVERS_CLOCKS_APART_MS = 3_600_000  # a server's clock, which message numbers begin with, behind the database's
_NUMBER = "shard int, id bigint, differs boolean"
_OPEN, _DAYS = "open.parquet", "days.json"
_ROWS_OF_A_FILE = 1_000_000
_BROADCAST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ShardLeft:
    """Count what was left open in one shard: how many, and the lowest and the highest number."""

    count: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class Left:
    """Hold what a run left open. until_ms: it compared all messages prepared earlier.

    shards: what is open, by shard.  numbers: those, where they are few; None: they are many.
    differing: the lowest and the highest number of those on which the sides differ, so that the archive may have them already;
    None: there are none.  listed: all of them as left_number string, SHARD-NUMBER.  days: about the notes that were settled.
    """

    run: str
    until_ms: int
    shards: Mapping[int, ShardLeft]
    numbers: Mapping[int, list[int]] | None
    differing: tuple[int, int] | None
    listed: DataFrame
    days: Days

    @property
    def count(self) -> int:
        return sum(each.count for each in self.shards.values())

    @property
    def among(self) -> tuple[Mapping[int, list[int]], Mapping[int, int]]:
        """Numbers by shard; and by shard from which number on to read all, where they are too many to be listed."""
        if self.numbers is not None:
            return self.numbers, {}
        return {}, {shard: each.low for shard, each in self.shards.items()}


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
        numbers, lows = self.last.among if self.last is not None else ({}, {})
        return MessageRange(from_ms=self.from_ms, to_ms=self.to_ms, numbers=numbers, lows=lows)

    @property
    def notes(self) -> tuple[int, list[int]]:
        """Return from which number on to read notes, and single numbers before that."""
        first = int(first_number(self.from_ms))
        if self.last is None or not self.last.count:
            return first, []
        if self.last.numbers is None:
            return min(first, *(each.low for each in self.last.shards.values())), []
        return first, sorted({each for numbers in self.last.numbers.values() for each in numbers if each < first})

    def may_have(self, part: Partition) -> bool:
        """Return whether messages of the time span, or of those that were pending, may be in this part of the archive."""
        return closed_since(self.from_ms)(part)

    def may_differ(self, part: Partition) -> bool:
        """Return whether messages on which the sides differed before may be in this part, although `may_have` says no."""
        if self.last is None or self.last.differing is None:
            return False
        return closed_since(created_ms(MessageNumber(self.last.differing[0])))(part) and not self.may_have(part)

    def within(self, rows: DataFrame, number: Column) -> DataFrame:
        """Rows about messages of this scope. number: their SHARD-NUMBER; null: dropped."""
        if self.is_everything:
            return rows
        marked = rows.withColumn("own_number", number)
        in_span = self._in_span(f.col("own_number"))
        if self.last is None or not self.last.count:
            return marked.where(in_span).drop("own_number")
        listed = f.broadcast(self.last.listed) if self.last.count <= _BROADCAST else self.last.listed
        return (
            marked.join(listed, f.col("own_number") == f.col("left_number"), "left")
            .where(in_span | f.col("left_number").isNotNull())
            .drop("own_number", "left_number")
        )

    def _in_span(self, number: Column) -> Column:
        made = made_ms(number)
        return made >= self.from_ms if self.to_ms is None else (made >= self.from_ms) & (made < self.to_ms)


@dataclass(frozen=True, kw_only=True)
class State:
    """What runs left open, beside their results. folder: of the results."""

    spark: SparkSession
    folder: HadoopFolder

    def last(self) -> Left | None:
        """Return what was left open by the newest run that says how far it came; None: there is none."""
        for run, summary in finished(self.folder):
            if "until_ms" in summary and self.folder.exists(f"{run}/{_DAYS}"):
                return self._left(run, int(summary["until_ms"]))
        return None

    def write(self, staging: str, found: DataFrame, noted: DataFrame | None, until_ms: int, before: Days) -> int:
        """Keep what is open and was prepared before until_ms. found: judged rows not agreed.

        noted: NOTED with source of all messages that were compared; None: there are no notes.  before: about the notes of earlier
        messages, which were not. Returns: how many messages are open.
        """
        is_replay = f.col("subscriber").startswith(REPLAY)
        unsettled = found.where(f.col("verdict") != CANCELED)
        itself = unsettled.where(~is_replay).select(
            "number", ((f.col("verdict") != PENDING) | f.col("until_ms").isNotNull()).alias("differs")
        )
        # The verdict on a replay is in a row about its original.
        replays = unsettled.where(is_replay).select(
            noted_number("message_id").alias("number"), f.lit(True).alias("differs")
        )
        numbers = itself.unionByName(replays).where(made_ms(f.col("number")) < until_ms)
        parts = f.split("number", "-")
        left = (
            numbers.groupBy("number")
            .agg(f.max("differs").alias("differs"))
            .select(parts[0].cast("int").alias("shard"), parts[1].cast("bigint").alias("id"), "differs")
        )
        with on_disk(left) as kept:
            count = int(kept.count())
            kept.coalesce(-(-count // _ROWS_OF_A_FILE) or 1).write.parquet(self.folder.path(f"{staging}/{_OPEN}"))
            settled = before
            if noted is not None:
                listed = _listed(kept)
                rows = noted.where(made_ms(noted_number("message_id")) < until_ms)
                if count:
                    rows = rows.join(
                        f.broadcast(listed) if count <= _BROADCAST else listed,
                        noted_number("message_id") == f.col("left_number"),
                        "left_anti",
                    )
                settled = before.plus(days_of(rows))
        self.folder.write(f"{staging}/{_DAYS}", settled.to_json())
        return count

    def _left(self, run: str, until_ms: int) -> Left:
        read = self.spark.read.schema(_NUMBER).parquet(self.folder.path(f"{run}/{_OPEN}"))
        by_shard = read.groupBy("shard").agg(
            f.count(f.lit(1)).alias("count"),
            f.min("id").alias("low"),
            f.max("id").alias("high"),
            f.min(f.when(f.col("differs"), f.col("id"))).alias("differs_from"),
            f.max(f.when(f.col("differs"), f.col("id"))).alias("differs_to"),
        )
        rows = by_shard.collect()
        shards = {
            int(row.shard): ShardLeft(count=int(row["count"]), low=int(row.low), high=int(row.high)) for row in rows
        }
        differing = [row for row in rows if row.differs_from is not None]
        few = sum(each.count for each in shards.values()) <= LISTED_AT_MOST
        return Left(
            run=run,
            until_ms=until_ms,
            shards=shards,
            numbers=_by_shard(read.collect()) if few else None,
            differing=(
                min(int(row.differs_from) for row in differing),
                max(int(row.differs_to) for row in differing),
            )
            if differing
            else None,
            listed=_listed(read),
            days=Days.from_json(self.folder.read(f"{run}/{_DAYS}")),
        )


def _listed(numbers: DataFrame) -> DataFrame:
    """left_number string, SHARD-NUMBER, of shard int, id bigint."""
    return numbers.select(shard_and_number("shard", "id").alias("left_number"))


def _by_shard(rows: list[Any]) -> dict[int, list[int]]:
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
