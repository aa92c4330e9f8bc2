"""The columns that jobs hand to each other, as Spark types.

Times are epoch milliseconds; states are the numbers of docs/states.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t


def _struct(*fields: tuple[str, t.DataType]) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in fields])


# The delivery of a message to one subscription.
CONSUMPTION = _struct(
    ("subscription_no", t.IntegerType()),
    ("state", t.ShortType()),
    ("attempt", t.IntegerType()),  # attempts made in total
    ("tried", t.IntegerType()),  # attempts counted since submit or reactivation
    ("created_ms", t.LongType()),
    ("closed_ms", t.LongType()),  # null: open
    ("tried_ms", t.LongType()),  # when the last copy was handed over
    ("sequence", t.LongType()),  # its place among the messages of its order key; null: it was delivered without one
)
# One failed attempt.
ATTEMPT = _struct(
    ("subscription_no", t.IntegerType()),
    ("attempt", t.IntegerType()),
    ("at_ms", t.LongType()),
    ("error", t.StringType()),
)
# One row per message, as read from a shard.
STORED = _struct(
    ("id", t.LongType()),  # the number inside the public id
    ("topic_no", t.IntegerType()),
    ("producer_no", t.IntegerType()),
    ("producer_tag", t.StringType()),
    ("message_key", t.StringType()),
    ("attempt_id", t.BinaryType()),
    ("ledger_id", t.BinaryType()),  # null: sent without the SDK's ledger
    ("digest", t.BinaryType()),
    ("state", t.ShortType()),
    ("content_type", t.StringType()),
    ("headers", t.StringType()),  # JSON object; null: none
    ("body", t.BinaryType()),
    ("delay_ms", t.LongType()),
    ("created_ms", t.LongType()),
    ("decided_ms", t.LongType()),  # null: undecided
    ("check_attempt", t.IntegerType()),  # checks made
    ("check_answer", t.StringType()),
)
CONSUMPTIONS = t.ArrayType(CONSUMPTION)
ATTEMPTS = t.ArrayType(ATTEMPT)
# One row per message with all that belongs to it: what jobs work on, and what the archive keeps.
MESSAGE = t.StructType(
    [
        t.StructField("shard", t.ShortType()),
        *STORED.fields,
        t.StructField("consumptions", CONSUMPTIONS),  # never null; empty: nobody had subscribed, or not committed
        t.StructField("attempts", ATTEMPTS),  # never null
    ]
)
# As MESSAGE; closed_ms: when the last thing about it was closed. fingerprint: xxhash64 over all columns before it, as they were
# read from the database. erased_ms, erased_reason: null, unless the content was erased. day, topic: what the files are
# partitioned by.
ARCHIVED = t.StructType(
    [
        *MESSAGE.fields,
        t.StructField("closed_ms", t.LongType()),
        t.StructField("fingerprint", t.LongType()),
        t.StructField("erased_ms", t.LongType()),
        t.StructField("erased_reason", t.StringType()),
        t.StructField("day", t.StringType()),
        t.StructField("topic", t.StringType()),
    ]
)


def named(schema: t.StructType) -> dict[str, str]:
    """Column names by one-letter aliases."""
    return {chr(ord("a") + number): field.name for number, field in enumerate(schema.fields)}


def brief(schema: t.StructType) -> t.StructType:
    """The same columns under those names."""
    return t.StructType(
        [t.StructField(letter, field.dataType) for letter, field in zip(named(schema), schema.fields, strict=True)]
    )


def names(schema: t.StructType, but: Sequence[str] = ()) -> list[str]:
    """Column names in order, without those of `but`."""
    return [field.name for field in schema.fields if field.name not in but]


def is_one_of(column: Column, states: Iterable[IntEnum]) -> Column:
    return column.isin(*[int(state) for state in states])


def small_table(spark: SparkSession, rows: Iterable[Sequence[Any]], schema: str) -> DataFrame:
    """A DataFrame of a few rows, as one literal: createDataFrame would take a second to start up.

    schema: name type, name type, ...
    """
    kind = t.StructType.fromDDL(schema)
    text = json.dumps([dict(zip(kind.names, row, strict=True)) for row in rows])
    return spark.range(1).select(f.inline(f.from_json(f.lit(text), t.ArrayType(kind), {"mode": "FAILFAST"})))


@contextmanager
def on_disk(frame: DataFrame) -> Iterator[DataFrame]:
    """The frame, kept on the workers' disks once it has been read, until the end of the block."""
    kept = frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield kept
    finally:
        kept.unpersist()


@contextmanager
def shuffled_into(spark: SparkSession, partitions: int) -> Iterator[None]:
    """Shuffle into this number of partitions in joins and sums that are planned inside the block."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, str(partitions))
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def with_topic(messages: DataFrame, topics: DataFrame) -> DataFrame:
    """MESSAGE and more with topic_no -> the same with topic string; topic-NUMBER where the catalog has forgotten it.

    topics: topic_no int, topic string; one row per topic.
    """
    named = messages.join(f.broadcast(topics), "topic_no", "left")
    return named.withColumn("topic", f.coalesce("topic", f.concat(f.lit("topic-"), f.col("topic_no").cast("string"))))


def without(messages: DataFrame, known: DataFrame) -> DataFrame:
    """Rows of `messages` whose (shard, id) is not in `known`."""
    return messages.join(known.select("shard", "id"), ["shard", "id"], "left_anti")
