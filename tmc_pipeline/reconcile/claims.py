"""Claims: what one side says about a message or about its delivery to one subscriber, all in the same columns."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_pipeline.reconcile.outlines import DELIVERY, identity_of, noted_number, number_of, own_id, shard_and_number
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState

REPLAY = "replay "  # prefix of the subscriber in rows that check a replay; real names contain no blank

_ITSELF, _ORIGINAL = -1, -2  # instead of a subscription: the row about the message, and about the original of a replay
# subscriber "": about the message itself; else about its delivery to that subscriber.
CLAIM = t.StructType(
    [
        t.StructField("number", t.StringType()),  # SHARD-NUMBER: the message
        t.StructField("message_id", t.StringType()),
        t.StructField("subscriber", t.StringType()),
        t.StructField("topic", t.StringType()),
        t.StructField("producer", t.StringType()),
        t.StructField("message_key", t.StringType()),
        t.StructField("state", t.ShortType()),  # the center's: of the message, or of the consumption
        t.StructField("copies", t.IntegerType()),  # 1: the center has this row
        t.StructField("expected", t.IntegerType()),  # 1: missing, and the subscription was in effect at the submit
        t.StructField("strange", t.ShortType()),  # 1: nobody knows this subscription, or it was removed
        t.StructField("revoked", t.ShortType()),  # 1: cancelled, and its subscription was never removed
        t.StructField("canceled", t.ShortType()),  # 1: cancelled, and the audit trail says by whom
        t.StructField("impossible", t.ShortType()),  # 1: its times cannot be
        t.StructField("unprotected", t.ShortType()),  # 1: its key is free, and should not be
        t.StructField("ledgered", t.ShortType()),  # 1: the SDK's ledger should have it
        t.StructField("replayed", t.ShortType()),  # 1: sent again from the archive, so by no transaction
        t.StructField("proper", t.ShortType()),  # of a replay: 1: its topic, producer and key are as they have to be
        t.StructField("altered", t.ShortType()),  # 1: does not match the center's own digest
        t.StructField("content", t.LongType()),  # xxhash64 of body and content type
        t.StructField("identity", t.LongType()),  # xxhash64 of topic, key and attempt id
        t.StructField("identities", t.LongType()),  # of OUTLINE, as the next two
        t.StructField("contents", t.LongType()),
        t.StructField("courses", t.LongType()),
        t.StructField("center_body", t.StringType()),  # SHA-256, hexadecimal; null: nobody asks for it
        t.StructField("committed", t.IntegerType()),
        t.StructField("rolled_back", t.IntegerType()),
        t.StructField("unknown", t.IntegerType()),  # 1: a ledger's state that its mapping does not name
        t.StructField("effects", t.IntegerType()),
        t.StructField("noted_app", t.StringType()),  # whose ledger says so; null: one that several apps share
        t.StructField("ledger", t.IntegerType()),  # which one
        t.StructField("sdk", t.ShortType()),  # 1: the SDK's
        t.StructField("noted_body", t.StringType()),
        t.StructField("at_ms", t.LongType()),
    ]
)
COUNTED = ("copies", "expected", "committed", "rolled_back", "unknown", "effects")


def center_claims(
    outlines: DataFrame,
    topics: DataFrame,
    apps: DataFrame,
    subscribers: DataFrame,
    cancellations: DataFrame | None = None,
) -> DataFrame:
    """OUTLINE -> CLAIM: one row per message, per delivery, and per delivery that is due and missing; one per replay.

    topics, apps, subscribers: of catalog.py.  cancellations: of cancellations.py, None: there are none.
    """
    placed = outlines.join(f.broadcast(topics), "topic_no", "left")
    rows = f.concat(
        _one_row(_ITSELF),
        "deliveries",
        _missing(),
        f.when(f.col("replay_of").isNull(), f.array().cast(t.ArrayType(DELIVERY))).otherwise(_one_row(_ORIGINAL)),
    )
    named = (
        placed.withColumn("each", f.explode(rows))
        .withColumn("subscription_no", f.col("each.subscription_no"))
        .join(f.broadcast(apps), "producer_no", "left")
        .join(f.broadcast(subscribers), "subscription_no", "left")
    )
    cancelled = f.col("each.state") == int(ConsumptionState.CANCELLED)
    if cancellations is None:
        named = named.withColumn("by_operator", f.lit(False))
    else:
        named = (
            named.withColumn("cancelled_ms", f.when(cancelled, f.col("each.closed_ms")))
            .join(cancellations, ["id", "subscription_no", "cancelled_ms"], "left")
            .withColumn("by_operator", f.coalesce("by_operator", f.lit(False)))
        )
    in_span = f.exists(
        "cancel_spans",
        lambda span: (
            (span["shard"] == f.col("shard")) & f.col("each.closed_ms").between(span["from_ms"], span["to_ms"])
        ),
    )
    in_span = f.coalesce(in_span, f.lit(False))
    number = shard_and_number("shard", "id")
    message_id = own_id()
    topic = f.coalesce("topic", f.concat(f.lit("topic-"), "topic_no"))
    itself, original = f.col("subscription_no") == _ITSELF, f.col("subscription_no") == _ORIGINAL
    of_message = itself | original
    delivered = ~of_message & f.col("each.state").isNotNull()
    subscriber = f.coalesce("subscriber", f.concat(f.lit("subscription-"), "subscription_no"))
    meant = f.coalesce(f.col("replay_to") == f.col("subscription_no"), f.lit(True))
    too_late = f.coalesce(f.col("decided_ms") >= f.col("not_after_ms"), f.lit(False))
    to_all, to_one = (
        f.concat(f.lit("replay."), "replay_of"),
        f.concat(f.lit("replay."), "replay_of", f.lit("."), "replay_to"),
    )
    proper = (
        f.when(f.col("replay_to").isNull(), f.col("message_key") == to_all).otherwise(
            f.col("message_key").startswith(f.concat(to_one, f.lit(".")))
        )
        & f.col("replay_of").startswith(f.concat_ws("-", "topic_no", "producer_no", f.lit("")))
        & (f.col("replay_of") != message_id)
    )
    return _as_claims(
        named.select(
            f.when(original, f.coalesce(number_of("replay_of"), number)).otherwise(number).alias("number"),
            message_id.alias("message_id"),
            f.when(itself, "")
            .when(original, f.concat(f.lit(REPLAY), message_id))
            .otherwise(subscriber)
            .alias("subscriber"),
            topic.alias("topic"),
            f.coalesce("producer", f.concat(f.lit("app-"), "producer_no")).alias("producer"),
            "message_key",
            f.when(of_message, f.col("state")).otherwise(f.col("each.state")).alias("state"),
            f.when(itself | delivered, 1).otherwise(0).alias("copies"),
            "each.expected",
            (delivered & (~(f.coalesce("subscribed", f.lit("")) == topic) | ~meant | too_late)).alias("strange"),
            (delivered & cancelled & f.coalesce(f.col("each.created_ms") >= f.col("live_ms"), f.lit(False))).alias(
                "revoked"
            ),
            (delivered & cancelled & (f.col("by_operator") | in_span)).alias("canceled"),
            f.when(itself, f.col("impossible")).when(delivered, f.col("each.impossible")).alias("impossible"),
            (itself & f.col("unprotected")).alias("unprotected"),
            "ledgered",
            f.col("replay_of").isNotNull().alias("replayed"),
            f.when(original, f.coalesce(proper, f.lit(False))).alias("proper"),
            "altered",
            "content",
            f.when(itself & ~f.col("erased"), identity_of(topic, f.col("message_key"), f.col("attempt_id"))).alias(
                "identity"
            ),
            *[f.when(itself, f.col(name)).alias(name) for name in ("identities", "contents", "courses")],
            "center_body",
            f.when(of_message, f.col("at_ms")).otherwise(f.greatest("at_ms", "each.at_ms")).alias("at_ms"),
        )
    )


def _one_row(number: int) -> Column:
    """A row of its own about the message, in the shape of its deliveries."""
    fields = [
        f.lit(number if each.name == "subscription_no" else None).cast(each.dataType).alias(each.name)
        for each in DELIVERY.fields
    ]
    return f.array(f.struct(*fields))


def _missing() -> Column:
    """DELIVERY without a state for each subscription that was in effect at the submit and has no row."""
    given = ("subscription_no", "expected")
    rows = f.transform(
        f.filter("subscriptions", is_missing),
        lambda subscription: f.struct(
            *[
                (subscription["subscription_no"] if each.name == "subscription_no" else f.lit(1)).alias(each.name)
                if each.name in given
                else f.lit(None).cast(each.dataType).alias(each.name)
                for each in DELIVERY.fields
            ]
        ),
    )
    return f.coalesce(rows, f.array()).cast(t.ArrayType(DELIVERY))


def is_missing(subscription: Column) -> Column:
    """Return whether a subscription of OUTLINE's topic was in effect at the submit and has no delivery."""
    return (
        (f.col("state") == int(MessageState.COMMITTED))
        & (f.col("decided_ms") >= subscription["from_ms"])
        & (f.col("decided_ms") < subscription["to_ms"])
        & ~f.array_contains(f.col("deliveries.subscription_no"), subscription["subscription_no"])
        & f.coalesce(f.col("replay_to") == subscription["subscription_no"], f.lit(True))
    )


def noted_identity() -> Column:
    """Return the identity in a row of NOTED; null: it does not say."""
    return f.when(
        f.col("attempt_id").isNotNull(), identity_of(f.col("noted_topic"), f.col("noted_key"), f.col("attempt_id"))
    )


def noted_claims(noted: DataFrame) -> DataFrame:
    """NOTED (ledgers.py) -> CLAIM; rows without a message id are left out."""
    rows = noted.where(f.col("message_id").isNotNull()).withColumnRenamed("body_sha256", "noted_body")
    return _as_claims(rows.withColumns({"number": noted_number("message_id"), "identity": noted_identity()}))


def no_claims(spark: SparkSession) -> DataFrame:
    """CLAIM without rows: what is made of it is planned in no time."""
    return _as_claims(spark.range(0).withColumnRenamed("id", "none"))


def _as_claims(rows: DataFrame) -> DataFrame:
    """Columns that are missing become null, or 0 where they are counted."""
    present = set(rows.columns)

    def column(name: str, kind: str) -> str:
        value = name if name in present else "NULL"
        value = f"coalesce({value}, 0)" if name in COUNTED else value
        return f"CAST({value} AS {kind}) AS {name}"

    return rows.selectExpr(*[column(each.name, each.dataType.simpleString()) for each in CLAIM.fields])
