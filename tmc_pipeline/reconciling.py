"""Compare what producers, the center and consumers say of each message, and find one verdict for it.

Everything that anybody says becomes a row of CLAIM; one shuffle by message brings them together; a verdict is a pure function of
the sums. No side is joined with another, so rows that are missing, doubled, or without a key need no care of their own.

    agreed            everybody says the same
    pending           undecided, not delivered yet, given up and waiting for a human, or moved a moment ago
    body differs      two sides saw different bodies
    state differs     decided one way here and the other way there
    lost              committed by its producer and unknown to the center, or acked and without an effect
    ghost             committed in the center without its producer, or an effect that nobody sent
    duplicate effect  one message, more than one effect at one subscriber
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_pipeline.frames import CONSUMPTION_CLOSED, CONSUMPTIONS
from tmc_server.domain.catalog import REPLAY_OF
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.message import UNDECIDED, MessageState

AGREED, PENDING = "agreed", "pending"
VERDICTS = (AGREED, PENDING, "body differs", "state differs", "lost", "ghost", "duplicate effect")
"""The last one that any row of a message has is the message's."""

_DELIVERY = t.StructType(
    [
        t.StructField("subscription_no", t.IntegerType()),
        t.StructField("state", t.ShortType()),
        t.StructField("at_ms", t.LongType()),
    ]
)
# What somebody says. subscriber "": about the message itself; else about its delivery to that subscriber.
CLAIM = t.StructType(
    [
        t.StructField("message_id", t.StringType()),
        t.StructField("subscriber", t.StringType()),
        t.StructField("topic", t.StringType()),
        t.StructField("producer", t.StringType()),
        t.StructField("message_key", t.StringType()),
        t.StructField("state", t.ShortType()),  # the center's: of the message, or of the consumption
        t.StructField("ledgered", t.ShortType()),  # 1: the SDK's ledger should have it
        t.StructField("replayed", t.ShortType()),  # 1: sent again from the archive, so by no transaction
        t.StructField("center_body", t.StringType()),  # SHA-256, hexadecimal; null: nobody asks for it
        t.StructField("committed", t.IntegerType()),
        t.StructField("rolled_back", t.IntegerType()),
        t.StructField("effects", t.IntegerType()),
        t.StructField("noted_body", t.StringType()),
        t.StructField("at_ms", t.LongType()),
    ]
)


@dataclass(frozen=True)
class Audited:
    """Whose notes are here. producers, subscribers: name -> since when (epoch ms) its notes are complete.

    sdk_ledgers: those of the producers whose notes are the SDK's ledger, which has only messages of transactions.
    center_ms: since when the center's rows are complete; older ones may have been removed unarchived.
    """

    producers: Mapping[str, int] = field(default_factory=dict)
    subscribers: Mapping[str, int] = field(default_factory=dict)
    sdk_ledgers: frozenset[str] = frozenset()
    center_ms: int = 0


# -- claims -------------------------------------------------------------------------------------------------------


def outlined(messages: DataFrame, bodies: bool) -> DataFrame:
    """MESSAGE -> OUTLINE, one row per message with no more than is compared. bodies: with their digests.

    OUTLINE: shard, id, topic_no, producer_no, message_key, state as in MESSAGE; ledgered, replayed boolean; center_body string
    (SHA-256, hexadecimal) or null; at_ms bigint, when the message moved last; deliveries array of structs (subscription_no int,
    state smallint, at_ms bigint), never null.
    """
    last_moved = f.transform(
        f.coalesce("consumptions", f.array().cast(CONSUMPTIONS)),
        lambda each: f.struct(
            each["subscription_no"].alias("subscription_no"),
            each["state"].alias("state"),
            f.greatest(each["created_ms"], each["closed_ms"], each["tried_ms"]).alias("at_ms"),
        ),
    )
    return messages.select(
        "shard",
        "id",
        "topic_no",
        "producer_no",
        "message_key",
        "state",
        f.col("ledger_id").isNotNull().alias("ledgered"),
        f.coalesce(f.col("headers").contains(f'"{REPLAY_OF}"'), f.lit(False)).alias("replayed"),
        (f.sha2("body", 256) if bodies else f.lit(None).cast("string")).alias("center_body"),
        f.greatest("created_ms", "decided_ms").alias("at_ms"),
        last_moved.alias("deliveries"),
    )


def center_claims(outlines: DataFrame, topics: DataFrame, apps: DataFrame, subscribers: DataFrame) -> DataFrame:
    """OUTLINE -> CLAIM: one row per message and one per delivery.

    topics: topic_no, topic.  apps: producer_no, producer.  subscribers: subscription_no, subscriber.
    """
    # The row about the message itself is that of a delivery to nobody.
    nobody = f.array(f.struct(*[f.lit(None).cast(each.dataType).alias(each.name) for each in _DELIVERY.fields]))
    named = (
        outlines.withColumn("each", f.explode(f.concat(nobody, "deliveries")))
        .withColumn("subscription_no", f.col("each.subscription_no"))
        .join(f.broadcast(topics), "topic_no", "left")
        .join(f.broadcast(apps), "producer_no", "left")
        .join(f.broadcast(subscribers), "subscription_no", "left")
    )
    shard = f.lpad(f.col("shard").cast("string"), 2, "0")
    of_message = f.col("subscription_no").isNull()
    subscriber = f.coalesce("subscriber", f.concat(f.lit("subscription-"), "subscription_no"))
    return _as_claims(
        named.select(
            f.concat_ws("-", "topic_no", "producer_no", shard, "id").alias("message_id"),
            f.when(of_message, f.lit("")).otherwise(subscriber).alias("subscriber"),
            f.coalesce("topic", f.concat(f.lit("topic-"), "topic_no")).alias("topic"),
            f.coalesce("producer", f.concat(f.lit("app-"), "producer_no")).alias("producer"),
            "message_key",
            f.when(of_message, f.col("state")).otherwise(f.col("each.state")).alias("state"),
            "ledgered",
            "replayed",
            "center_body",
            f.when(of_message, f.col("at_ms")).otherwise(f.greatest("at_ms", "each.at_ms")).alias("at_ms"),
        )
    )


def noted_claims(noted: DataFrame) -> DataFrame:
    """NOTED (ledgers.py) -> CLAIM; rows without a message id are left out."""
    return _as_claims(noted.where(f.col("message_id").isNotNull()).withColumnRenamed("body_sha256", "noted_body"))


def _as_claims(rows: DataFrame) -> DataFrame:
    """Columns that are missing become null, or 0 where they are counted."""
    counted = ("committed", "rolled_back", "effects")

    def column(name: str) -> Column:
        return f.col(name) if name in rows.columns else f.lit(0 if name in counted else None)

    return rows.select(*[column(each.name).cast(each.dataType).alias(each.name) for each in CLAIM.fields])


# -- verdicts -----------------------------------------------------------------------------------------------------


_GREATEST = ("topic", "producer", "message_key", "state", "ledgered", "replayed", "center_body", "at_ms")


def judged(claims: DataFrame, audited: Audited, now_ms: int, tolerance_ms: int, partitions: int) -> DataFrame:
    """CLAIM -> one row per (message_id, subscriber), with verdict string and the sums it was found from.

    Columns: those of CLAIM, with sums of committed, rolled_back, effects; least_body, most_body string; verdict string;
    complete boolean: a delivery that its subscriber's notes should have.
    """
    sums = (
        claims.repartition(partitions, "message_id")  # one shuffle serves both groupings
        .groupBy("message_id", "subscriber")
        .agg(
            *[f.max(name).alias(name) for name in _GREATEST],
            *[f.sum(name).alias(name) for name in ("committed", "rolled_back", "effects")],
            f.min("noted_body").alias("least_body"),
            f.max("noted_body").alias("most_body"),
        )
    )
    number = f.try_element_at(f.split("message_id", "-"), f.lit(4)).try_cast("bigint")
    made = f.shiftright(number, 22) + f.lit(EPOCH_MS)  # a message number carries its time
    of_message = f.col("subscriber") == ""
    verdict = f.when(of_message, _of_message(audited, made)).otherwise(_of_delivery(audited, made))
    moved = f.greatest("at_ms", made) > f.lit(now_ms - tolerance_ms)  # notes without a time are as old as their message
    settled = f.when(~verdict.isin(AGREED, PENDING) & moved, f.lit(PENDING)).otherwise(verdict)
    complete = ~of_message & _complete(audited.subscribers, "subscriber", made)
    return sums.withColumn("verdict", settled).withColumn("complete", complete)


def _complete(names: Mapping[str, int], column: str, made: Column) -> Column:
    """Whether the notes of whoever `column` names are here and reach back to this message."""
    known = f.lit(False)
    for name, since_ms in names.items():
        known = known | ((f.col(column) == name) & (made >= since_ms))
    return f.coalesce(known, f.lit(False))


def _bodies_differ() -> Column:
    among_notes = f.col("least_body") != f.col("most_body")
    from_center = (f.col("center_body") != f.col("least_body")) | (f.col("center_body") != f.col("most_body"))
    return f.coalesce(among_notes, f.lit(False)) | f.coalesce(from_center, f.lit(False))


def _noted_by_its_producer(audited: Audited) -> Column:
    """Whether this message belongs into its producer's notes at all."""
    own_notes = ~f.col("producer").isin(list(audited.sdk_ledgers))
    return (f.coalesce("replayed", f.lit(0)) == 0) & (own_notes | (f.col("ledgered") == 1))


def _of_message(audited: Audited, made: Column) -> Column:
    state, committed, rolled_back = f.col("state"), f.col("committed") > 0, f.col("rolled_back") > 0
    here = state == int(MessageState.COMMITTED)
    return (
        f.when(state.isNull() & committed & (made < audited.center_ms), AGREED)  # removed long ago
        .when(state.isNull() & committed, "lost")
        .when(state.isNull(), AGREED)  # a rollback of something the center never stored, or has forgotten
        .when(state.isin(*[int(each) for each in UNDECIDED]), PENDING)
        .when(committed & rolled_back, "state differs")
        .when(here & rolled_back, "state differs")
        .when(~here & committed, "state differs")
        .when(
            here & ~committed & _noted_by_its_producer(audited) & _complete(audited.producers, "producer", made),
            "ghost",
        )
        .when(here & _bodies_differ(), "body differs")
        .otherwise(AGREED)
    )


def _of_delivery(audited: Audited, made: Column) -> Column:
    state, effects = f.col("state"), f.col("effects")
    return (
        f.when(effects > 1, "duplicate effect")
        .when(state.isNull() & (made < audited.center_ms), AGREED)
        .when(state.isNull(), "ghost")
        .when(~state.isin(*CONSUMPTION_CLOSED), PENDING)
        .when(
            (state == int(ConsumptionState.ACKED))
            & (effects == 0)
            & _complete(audited.subscribers, "subscriber", made),
            "lost",
        )
        .when(_bodies_differ(), "body differs")
        .otherwise(AGREED)
    )


def by_message(rows: DataFrame) -> DataFrame:
    """Judged rows -> message_id string, topic string, verdict string; one row per message, its worst verdict."""
    rank = f.array_position(f.array(*[f.lit(each) for each in VERDICTS]), f.col("verdict"))
    worst = rows.groupBy("message_id").agg(f.max(rank).alias("rank"), f.max("topic").alias("topic"))
    named = f.element_at(f.array(*[f.lit(each) for each in VERDICTS]), f.col("rank").cast("int"))
    return worst.select("message_id", "topic", named.alias("verdict"))


def relations(rows: DataFrame) -> DataFrame:
    """Judged rows -> the F5 numbers, one row per topic and subscriber.

    topic, subscriber string; committed bigint: deliveries the center counts as done, as far as notes reach and nothing moved
    a moment ago; consumed bigint: those of them with an effect; open bigint: deliveries under way, with or without an effect;
    unconfirmed bigint: undecided messages of the topic.
    """
    here = rows.where(f.col("topic").isNotNull())
    undecided = f.col("state").isin(*[int(each) for each in UNDECIDED])
    waiting = (
        here.where((f.col("subscriber") == "") & undecided).groupBy("topic").agg(f.count(f.lit(1)).alias("unconfirmed"))
    )
    done = (f.col("state") == int(ConsumptionState.ACKED)) & f.col("complete") & (f.col("verdict") != PENDING)
    underway = ~f.col("state").isin(*CONSUMPTION_CLOSED)
    return (
        here.where(f.col("subscriber") != "")
        .groupBy("topic", "subscriber")
        .agg(
            f.count(f.when(done, 1)).alias("committed"),
            f.count(f.when(done & (f.col("effects") > 0), 1)).alias("consumed"),
            f.count(f.when(underway, 1)).alias("open"),
        )
        .join(waiting, "topic", "left")
        .fillna(0, ["unconfirmed"])
    )
