"""Find the messages whose records all match, so that only the others need a verdict.

The center's row of a message says which notes there should be: one of its producer, and one of each subscriber that acked. If
exactly those are there, and nothing else about the message is out of the ordinary, it matches. Every record becomes a row of
LINE, which has numbers and hashes only, so Spark adds them up in place; texts would have to be sorted.

It errs on one side only: a message that matches has the verdict AGREED of verdicts.py, and one that does not is judged there.

LINE: key bigint: the message; weight int: 0: a note in order, 1: a row of the center in order, 2: anything to be judged; notes
int, digest bigint: of a row of the center: how many notes it calls for, and the exclusive or of their digests; of a note: 1, and
its digest; row bigint: hash of what all rows of the center about a message must have in common, null: a note; identity, body
bigint: hashes, null: unknown; topic_no int; acked bigint: who acked and should have noted it, as bits of Catalog.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.reconcile.verdicts import (
    identity_of,
    is_missing,
    noted_identity,
    noted_number,
    number_of,
    shard_and_number,
)
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.message import MessageState

_NOTE, _ROW, _JUDGE = 0, 1, 2  # weights


def about(rows: DataFrame, number: Column, keys: DataFrame) -> DataFrame:
    """The rows about messages with these keys. number: of a row, SHARD-NUMBER.  keys: key bigint, as from `matched`."""
    return rows.withColumn("key", _key_of(number)).join(keys, "key", "left_semi").drop("key")


def center_lines(outlines: DataFrame, topics: DataFrame, apps: DataFrame, latest_ms: int) -> DataFrame:
    """OUTLINE -> LINE: one row per message, and one for the original of each replay.

    topics, apps: of catalog.py.  latest_ms: a later time comes from a wrong clock.
    """
    number = shard_and_number("shard", "id")
    made = f.shiftright("id", 22) + f.lit(EPOCH_MS)
    named = (
        outlines.join(f.broadcast(topics), "topic_no", "left")
        .join(f.broadcast(apps), "producer_no", "left")
        .withColumns(
            {
                "number": number,
                "message_id": f.concat_ws("-", "topic_no", "producer_no", number),
                "reached": f.filter(
                    "subscriptions",
                    lambda each: f.array_contains(f.col("deliveries.subscription_no"), each["subscription_no"]),
                ),
            }
        )
        .withColumn("noting", f.filter("reached", lambda each: made >= each["complete_ms"]))
    )
    committed = f.col("state") == int(MessageState.COMMITTED)
    noted = committed & (made >= f.col("complete_ms")) & (~f.col("sdk") | f.col("ledgered"))
    by_producer = f.when(noted, _digest(f.lit(""), f.col("sdk").cast("int"), f.col("noted_app")))
    by_all = f.aggregate(
        "noting",
        f.coalesce(by_producer, f.lit(0).cast("bigint")),
        lambda digest, each: digest.bitwiseXOR(_digest(each["subscriber"], f.lit(0), f.lit(None))),
    )
    lines = named.select(
        _key_of(f.col("number")).alias("key"),
        f.when(_is_in_order(latest_ms), _ROW).otherwise(_JUDGE).alias("weight"),
        (f.coalesce(f.size("noting"), f.lit(0)) + f.when(noted, 1).otherwise(0)).alias("notes"),
        by_all.alias("digest"),
        f.xxhash64(
            "message_id", "state", "ledgered", "message_key", "attempt_id", "content", "center_body", "reached"
        ).alias("row"),
        identity_of(f.col("topic"), f.col("message_key"), f.col("attempt_id")).alias("identity"),
        _hash_of("center_body").alias("body"),
        "topic_no",
        _bits("noting").alias("acked"),
    )
    originals = outlines.select(number_of("replay_of").alias("original")).where(f.col("original").isNotNull())
    of_originals = originals.select(_key_of(f.col("original")).alias("key"), f.lit(_JUDGE).alias("weight"))
    return lines.unionByName(of_originals, allowMissingColumns=True)


def _is_in_order(latest_ms: int) -> Column:
    """Whether a row of center_lines alone gives no reason to judge its message."""
    on_time = f.col("at_ms") <= latest_ms
    acked = f.forall(
        "deliveries",
        lambda each: (
            (each["state"] == int(ConsumptionState.ACKED)) & f.coalesce(each["at_ms"] <= latest_ms, f.lit(True))
        ),
    )
    # As many subscribers as deliveries: all of them are known, and none has two.
    all_known = f.bit_count(_bits("reached")) == f.size("deliveries")
    committed = (
        (f.col("state") == int(MessageState.COMMITTED)) & acked & all_known & ~f.exists("subscriptions", is_missing)
    )
    rolled_back = (f.col("state") == int(MessageState.ROLLED_BACK)) & (f.size("deliveries") == 0)
    plain = f.col("replay_of").isNull() & ~f.col("erased") & ~f.col("altered") & f.col("producer").isNotNull()
    return f.coalesce(on_time & plain & (committed | rolled_back), f.lit(False))


def noted_lines(noted: DataFrame, latest_ms: int) -> DataFrame:
    """NOTED (ledgers.py) -> LINE; rows without a message id are left out."""
    committed = (f.col("subscriber") == "") & (f.col("committed") == 1) & (f.col("effects") == 0)
    effect = (f.col("subscriber") != "") & (f.col("committed") == 0) & (f.col("effects") == 1)
    plain = (f.col("rolled_back") == 0) & (f.col("unknown") == 0)
    on_time = f.coalesce(f.col("at_ms") <= latest_ms, f.lit(True))
    in_order = f.coalesce(on_time & plain & (committed | effect), f.lit(False))
    lines = noted.where(f.col("message_id").isNotNull()).select(
        _key_of(noted_number("message_id")).alias("key"),
        f.when(in_order, _NOTE).otherwise(_JUDGE).alias("weight"),
        f.lit(1).alias("notes"),
        _digest(f.col("subscriber"), f.col("sdk"), f.col("noted_app")).alias("digest"),
        f.lit(None).cast("bigint").alias("row"),
        noted_identity().alias("identity"),
        _hash_of("body_sha256").alias("body"),
    )
    return lines.withColumns({"topic_no": f.lit(None).cast("int"), "acked": f.lit(None).cast("bigint")})


def matched(lines: DataFrame, partitions: int) -> DataFrame:
    """LINE -> key bigint: a message that has to be judged, null: these match; topic_no int, acked bigint, messages bigint."""
    of_center = f.col("row").isNotNull()
    sums = (
        lines.repartition(partitions, "key")
        .groupBy("key")
        .agg(
            f.max("weight").alias("weight"),
            f.max(f.when(of_center, f.col("notes"))).alias("called_for"),
            f.max(f.when(of_center, f.col("digest"))).alias("their_digest"),
            f.sum(f.when(~of_center, f.col("notes"))).alias("notes"),
            f.bit_xor(f.when(~of_center, f.col("digest"))).alias("digest"),
            *[f.min(name).alias(f"least_{name}") for name in ("row", "identity", "body")],
            *[f.max(name).alias(name) for name in ("row", "identity", "body", "topic_no", "acked")],
        )
    )
    matches = (f.col("weight") == _ROW) & (f.col("row") == f.col("least_row"))
    matches &= f.col("called_for") == f.coalesce("notes", f.lit(0))
    matches &= f.col("their_digest") == f.coalesce("digest", f.lit(0))
    for name in ("identity", "body"):
        matches &= f.coalesce(f.col(name) == f.col(f"least_{name}"), f.lit(True))
    return (
        sums.withColumn("matches", f.coalesce(matches, f.lit(False)))
        .groupBy(
            f.when(~f.col("matches"), f.col("key")).alias("key"),
            *[f.when(f.col("matches"), f.col(name)).alias(name) for name in ("topic_no", "acked")],
        )
        .agg(f.count(f.lit(1)).alias("messages"))
    )


def _key_of(number: Column) -> Column:
    """bigint of a SHARD-NUMBER. If two messages had the same, both would be judged."""
    return f.xxhash64(number)


def _digest(subscriber: Column, sdk: Column, noted_app: Column) -> Column:
    """bigint: hash of a note about message_id. subscriber: "": its producer.  sdk, noted_app: as in NOTED."""
    return f.xxhash64("message_id", subscriber, sdk, noted_app)


def _hash_of(name: str) -> Column:
    """bigint; null of null."""
    return f.when(f.col(name).isNotNull(), f.xxhash64(name))


def _bits(subscriptions: str) -> Column:
    return f.aggregate(subscriptions, f.lit(0).cast("bigint"), lambda bits, each: bits.bitwiseOR(each["bit"]))
