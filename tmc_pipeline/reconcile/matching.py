"""Find the messages whose records all match, so that only the others need a verdict.

The center's row of a message says which notes there should be: one of its producer, and one of each subscriber that acked. If
exactly those are there, and nothing else about the message is out of the ordinary, it matches. Every record becomes a row of
LINE, which has numbers and hashes only, so Spark adds them up in place; texts would have to be sorted.

It errs on one side only: a message that matches has the verdict AGREED of verdicts.py, and one that does not is judged there.

LINE:
    key bigint          the message
    rank int            0: a plain note, 1: a plain row of the center, 2: anything to be judged
    claims int          how many rows of CLAIM it would be
    notes int           of the center: how many notes there should be; of a note: 1
    digest bigint       of the center: XOR of the digests of those notes; of a note: its digest
    row bigint          hash of what all rows of the center about a message must have in common; null: a note
    identity bigint     hash; null: unknown
    body bigint         hash; null: unknown
    topic_no int        of the center
    audited bigint      of the center: who acked and whose notes are read, as bits of Catalog
    noting bigint       those of them whose notes reach back to the message
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.reconcile.catalog import Catalog
from tmc_pipeline.reconcile.claims import is_missing, noted_identity
from tmc_pipeline.reconcile.outlines import (
    identity_of,
    made_ms,
    noted_number,
    number_of,
    own_id,
    shard_and_number,
)
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState

_PLAIN_NOTE, _PLAIN_ROW, _JUDGE = 0, 1, 2
_OF_MATCHES = ("topic_no", "audited", "noting")


def matched(
    outlines: DataFrame,
    noted: DataFrame | None,
    catalog: Catalog,
    latest_ms: int,
    partitions: int,
    suspects: DataFrame | None = None,
) -> DataFrame:
    """OUTLINE and NOTED -> one row per message to be judged, and one for all that match and have the same topic and subscribers.

    noted: None: there are no notes.  latest_ms: a later time comes from a wrong clock.  suspects: number string (SHARD-NUMBER) of
    messages that have to be judged; None: none.
    Columns: key bigint, null: these match; topic_no, audited, noting as in LINE, null: to be judged; messages, claims bigint: how
    many there are.
    """
    lines = _center_lines(outlines, catalog, latest_ms)
    if noted is not None:
        lines = lines.unionByName(_noted_lines(noted, latest_ms), allowMissingColumns=True)
    if suspects is not None:
        doubted = suspects.select(
            _key_of(f.col("number")).alias("key"), f.lit(_JUDGE).alias("rank"), f.lit(0).alias("claims")
        )
        lines = lines.unionByName(doubted, allowMissingColumns=True)
    of_center = f.col("row").isNotNull()
    sums = (
        lines.repartition(partitions, "key")
        .groupBy("key")
        .agg(
            f.max("rank").alias("rank"),
            f.sum("claims").alias("claims"),
            f.max(f.when(of_center, f.col("notes"))).alias("expected_notes"),
            f.max(f.when(of_center, f.col("digest"))).alias("expected_digest"),
            f.sum(f.when(~of_center, f.col("notes"))).alias("notes"),
            f.bit_xor(f.when(~of_center, f.col("digest"))).alias("digest"),
            *[f.min(name).alias(f"least_{name}") for name in ("row", "identity", "body")],
            *[f.max(name).alias(name) for name in ("row", "identity", "body", *_OF_MATCHES)],
        )
    )
    matches = (f.col("rank") == _PLAIN_ROW) & (f.col("row") == f.col("least_row"))
    matches &= f.col("expected_notes") == f.coalesce("notes", f.lit(0))
    matches &= f.col("expected_digest") == f.coalesce("digest", f.lit(0))
    for name in ("identity", "body"):
        matches &= f.coalesce(f.col(name) == f.col(f"least_{name}"), f.lit(True))
    return (
        sums.withColumn("matches", f.coalesce(matches, f.lit(False)))
        .groupBy(
            f.when(~f.col("matches"), f.col("key")).alias("key"),
            *[f.when(f.col("matches"), f.col(name)).alias(name) for name in _OF_MATCHES],
        )
        .agg(f.count(f.lit(1)).alias("messages"), f.sum("claims").alias("claims"))
    )


def with_keys(rows: DataFrame, number: Column, keys: DataFrame) -> DataFrame:
    """The rows about messages with these keys. number: of a row, SHARD-NUMBER.  keys: key bigint, as from `matched`."""
    return rows.withColumn("key", _key_of(number)).join(keys, "key", "left_semi").drop("key")


def _center_lines(outlines: DataFrame, catalog: Catalog, latest_ms: int) -> DataFrame:
    """OUTLINE -> LINE: one row per message, and one for the original of each replay."""
    named = (
        outlines.join(f.broadcast(catalog.topics), "topic_no", "left")
        .join(f.broadcast(catalog.apps), "producer_no", "left")
        .withColumns(
            {
                "number": shard_and_number("shard", "id"),
                "message_id": own_id(),
                "reached": f.filter(
                    "subscriptions",
                    lambda each: f.array_contains(f.col("deliveries.subscription_no"), each["subscription_no"]),
                ),
            }
        )
    )
    made = made_ms(f.col("number"))
    noting = named.withColumn("noters", f.filter("reached", lambda each: made >= each["complete_ms"]))
    committed = f.col("state") == int(MessageState.COMMITTED)
    noted = committed & (made >= f.col("complete_ms")) & (~f.col("sdk") | f.col("ledgered"))
    by_producer = f.when(noted, _digest(f.lit(""), f.col("sdk").cast("int"), f.col("noted_app")))
    by_all = f.aggregate(
        "noters",
        f.coalesce(by_producer, f.lit(0).cast("bigint")),
        lambda digest, each: digest.bitwiseXOR(_digest(each["subscriber"], f.lit(0), f.lit(None))),
    )
    in_common = (
        "message_id",
        "state",
        "ledgered",
        "message_key",
        "attempt_id",
        "content",
        "identities",
        "contents",
        "courses",
        "center_body",
        "reached",
    )
    lines = noting.select(
        _key_of(f.col("number")).alias("key"),
        f.when(_is_plain(latest_ms), _PLAIN_ROW).otherwise(_JUDGE).alias("rank"),
        (f.size("deliveries") + 1).alias("claims"),
        (f.size("noters") + f.when(noted, 1).otherwise(0)).alias("notes"),
        by_all.alias("digest"),
        f.xxhash64(*in_common).alias("row"),
        identity_of(f.col("topic"), f.col("message_key"), f.col("attempt_id")).alias("identity"),
        _hash_of("center_body").alias("body"),
        "topic_no",
        _bits(f.filter("reached", lambda each: each["complete_ms"].isNotNull())).alias("audited"),
        _bits("noters").alias("noting"),
    )
    replays = outlines.where(f.col("replay_of").isNotNull()).select(number_of("replay_of").alias("original"))
    of_originals = replays.where(f.col("original").isNotNull()).select(
        _key_of(f.col("original")).alias("key"), f.lit(_JUDGE).alias("rank"), f.lit(1).alias("claims")
    )
    return lines.unionByName(of_originals, allowMissingColumns=True)


def _is_plain(latest_ms: int) -> Column:
    """Return whether a row of the center alone gives no reason to judge its message."""
    on_time = f.col("at_ms") <= latest_ms
    acked = f.forall(
        "deliveries",
        lambda each: (
            (each["state"] == int(ConsumptionState.ACKED))
            & f.coalesce(each["at_ms"] <= latest_ms, f.lit(True))
            & ~each["impossible"]
        ),
    )
    in_effect = f.forall(
        "reached",
        lambda each: (f.col("decided_ms") >= each["from_ms"]) & (f.col("decided_ms") < each["to_ms"]),
    )
    # As many subscribers as deliveries: all of them are known, and none has two.
    all_known = f.bit_count(_bits("reached")) == f.size("deliveries")
    committed = (
        (f.col("state") == int(MessageState.COMMITTED)) & acked & all_known & ~f.exists("subscriptions", is_missing)
    )
    rolled_back = (f.col("state") == int(MessageState.ROLLED_BACK)) & (f.size("deliveries") == 0)
    named = f.col("topic").isNotNull() & f.col("producer").isNotNull()
    untouched = f.col("replay_of").isNull() & ~f.col("erased") & ~f.col("altered")
    untouched &= ~f.col("impossible") & ~f.col("unprotected")
    return f.coalesce(named & untouched & on_time & in_effect & (committed | rolled_back), f.lit(False))


def _noted_lines(noted: DataFrame, latest_ms: int) -> DataFrame:
    """NOTED -> the columns of LINE that a note has; rows without a message id are left out."""
    committed = (f.col("subscriber") == "") & (f.col("committed") == 1) & (f.col("effects") == 0)
    effect = (f.col("subscriber") != "") & (f.col("committed") == 0) & (f.col("effects") == 1)
    undisputed = (f.col("rolled_back") == 0) & (f.col("unknown") == 0)
    on_time = f.coalesce(f.col("at_ms") <= latest_ms, f.lit(True))
    plain = f.coalesce(on_time & undisputed & (committed | effect), f.lit(False))
    return noted.where(f.col("message_id").isNotNull()).select(
        _key_of(noted_number("message_id")).alias("key"),
        f.when(plain, _PLAIN_NOTE).otherwise(_JUDGE).alias("rank"),
        f.lit(1).alias("claims"),
        f.lit(1).alias("notes"),
        _digest(f.col("subscriber"), f.col("sdk"), f.col("noted_app")).alias("digest"),
        noted_identity().alias("identity"),
        _hash_of("body_sha256").alias("body"),
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


def _bits(subscriptions: str | Column) -> Column:
    return f.aggregate(subscriptions, f.lit(0).cast("bigint"), lambda bits, each: bits.bitwiseOR(each["bit"]))
