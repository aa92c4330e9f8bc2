"""Find what takes several messages to see: one key committed twice, and order keys whose messages were not in order.

FINDING: number string (SHARD-NUMBER), subscriber string ("": the message itself), found string (a verdict), why string.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from tmc_pipeline.reconcile.catalog import Catalog
from tmc_pipeline.reconcile.outlines import own_id, shard_and_number
from tmc_pipeline.reconcile.verdicts import DUPLICATE_MESSAGE, OUT_OF_ORDER
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState

_ROUNDING_MS = 1_000


def repeated_keys(outlines: DataFrame, horizon_ms: int) -> DataFrame:
    """OUTLINE -> FINDING: committed under a key that an earlier message still had.

    horizon_ms: messages that closed earlier may have been removed by the center; their keys may be used again.
    """
    committed = outlines.where((f.col("state") == int(MessageState.COMMITTED)) & ~f.col("erased"))
    key = f.xxhash64("topic_no", "producer_tag", "message_key")
    number = f.xxhash64("shard", "id")
    several = (
        committed.select(key.alias("key"), number.alias("of"))
        .groupBy("key")
        .agg(f.min("of").alias("least"), f.max("of").alias("most"))
        .where(f.col("least") != f.col("most"))
        .select("key")
    )
    closed_ms = f.greatest("decided_ms", f.array_max("deliveries.closed_ms"))
    freed_ms = f.when(~f.col("stored") & (closed_ms < horizon_ms), closed_ms)  # null: it cannot have been removed
    found = (
        committed.withColumn("key", key)
        .join(several, "key", "left_semi")
        .groupBy("topic_no", "producer_tag", "message_key", "shard", "id")
        .agg(
            f.max(own_id()).alias("message_id"),
            f.min("created_ms").alias("created_ms"),
            f.when(f.count_if(freed_ms.isNull()) == 0, f.max(freed_ms)).alias("freed_ms"),
        )
    )
    earlier = Window.partitionBy("topic_no", "producer_tag", "message_key").orderBy("id", "shard")
    before = found.withColumns(
        {"before_id": f.lag("message_id").over(earlier), "before_freed_ms": f.lag("freed_ms").over(earlier)}
    )
    is_repeated = f.col("before_id").isNotNull() & f.coalesce(
        f.col("created_ms") < f.col("before_freed_ms"), f.lit(True)
    )
    return _findings(
        before.where(is_repeated), f.lit(""), DUPLICATE_MESSAGE, f.concat(f.lit("its key had "), "before_id")
    )


def out_of_order(outlines: DataFrame, catalog: Catalog) -> DataFrame:
    """OUTLINE -> FINDING: deliveries of an order key whose sequence or whose acks are not in the order of the submits.

    A sequence begins at the microsecond of the submit and grows by one at least; the next message is delivered after the ack of
    the one before. Acks after a failed attempt may come late, where the subscription skips it.
    """
    line = Window.partitionBy("subscription_no", "order_key").orderBy("sequence", "id")
    every = _in_lines(outlines).join(
        f.broadcast(catalog.subscribers.select("subscription_no", "subscriber", "in_order")), "subscription_no", "left"
    )
    outside = every.where(f.col("sequence").isNull() & f.col("in_order") & ~f.col("retried")).withColumn(
        "why", f.lit("it has no sequence")
    )
    rows = every.where(f.col("sequence").isNotNull())
    seen = rows.withColumn("before_sequence", f.lag("sequence").over(line))
    doubled = seen.where(f.col("before_sequence") == f.col("sequence")).withColumn(
        "why", f.lit("its sequence was given twice")
    )
    early = rows.where(f.col("sequence") < f.col("decided_ms") * 1_000).withColumn(
        "why", f.lit("its sequence is older than its submit")
    )
    acked = rows.where((f.col("state") == int(ConsumptionState.ACKED)) & ~f.col("retried"))
    around = {
        "two_before": f.lag("closed_ms", 2),
        "before": f.lag("closed_ms", 1),
        "after": f.lead("closed_ms", 1),
        "two_after": f.lead("closed_ms", 2),
    }
    beside = acked.withColumns({name: column.over(line) for name, column in around.items()})
    # Servers' readings of the database's clock differ a little.
    own = f.col("closed_ms")
    # Of two neighbors that were acked the wrong way round, the one that does not fit the next neighbor either is out of order.
    others_fault = f.coalesce(f.col("before") > f.col("after"), f.lit(False))
    too_early = (own < f.col("before") - _ROUNDING_MS) & f.coalesce(own < f.col("two_before"), ~others_fault)
    too_late = (own > f.col("after") + _ROUNDING_MS) & f.coalesce(
        f.col("after") >= f.col("before"), f.coalesce(own > f.col("two_after"), f.lit(False))
    )
    late = beside.where(f.coalesce(too_early | too_late, f.lit(False))).withColumn(
        "why", f.lit("acked before an earlier message of its order key, or after a later one")
    )
    parts = [each.select(*rows.columns, "why") for each in (outside, doubled, early, late)]
    subscriber = f.coalesce("subscriber", f.concat(f.lit("subscription-"), "subscription_no"))
    return _findings(reduce(DataFrame.unionByName, parts), subscriber, OUT_OF_ORDER, f.col("why"))


def inboxes_out_of_order(
    outlines: DataFrame, lines: DataFrame, catalog: Catalog, before_ms: int, complete: bool
) -> DataFrame:
    """OUTLINE and LINE -> FINDING: the inbox has an older sequence than was acked, or a newer one than was ever given.

    LINE: subscriber, topic, order_key string; sequence bigint: the last that had its effect.  before_ms: what was acked later may
    have had its effect after the inbox was read.  complete: these are all messages; else a newer one may be among the others.
    """
    rows = (
        _in_lines(outlines)
        .join(f.broadcast(catalog.topics.select("topic_no", "topic")), "topic_no")
        .join(f.broadcast(catalog.subscribers.select("subscription_no", "subscriber")), "subscription_no")
    )
    done = (f.col("state") == int(ConsumptionState.ACKED)) & (f.col("closed_ms") < before_ms)
    acked = f.when(done, f.col("sequence"))
    given = rows.groupBy("subscriber", "topic", "order_key").agg(
        f.max(acked).alias("acked"),
        f.max_by("shard", acked).alias("shard"),
        f.max_by("id", acked).alias("id"),
        f.max("sequence").alias("given"),
        f.bool_or(f.col("sequence").isNull()).alias("forgotten"),  # of a skipped message that was reactivated
    )
    both = lines.join(given, ["subscriber", "topic", "order_key"]).where(f.col("acked").isNotNull())
    behind = f.col("sequence") < f.col("acked")
    ahead = (f.col("sequence") > f.col("given")) & ~f.col("forgotten") & f.lit(complete)
    why = f.when(behind, "the inbox has an older sequence of its order key").otherwise(
        "the inbox has a newer sequence of its order key than was given"
    )
    return _findings(both.where(behind | ahead), f.col("subscriber"), OUT_OF_ORDER, why)


def _in_lines(outlines: DataFrame) -> DataFrame:
    """OUTLINE -> each delivery of messages with an order key once: their columns and those of DELIVERY."""
    ordered = outlines.where(f.col("order_key").isNotNull() & ~f.col("erased"))
    return ordered.select("shard", "id", "topic_no", "order_key", "decided_ms", f.inline("deliveries")).dropDuplicates(
        ["shard", "id", "subscription_no"]
    )


def _findings(rows: DataFrame, subscriber: Column, verdict: str, why: Column) -> DataFrame:
    """FINDING of rows with shard and id, one per message and subscriber."""
    return rows.select(
        shard_and_number("shard", "id").alias("number"),
        subscriber.alias("subscriber"),
        f.lit(verdict).alias("found"),
        why.alias("why"),
    ).dropDuplicates(["number", "subscriber"])
