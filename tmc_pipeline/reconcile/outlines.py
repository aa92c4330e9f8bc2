"""Outlines: no more of each message than is compared, one row per message and side, and what its own columns say about it.

A message is identified by shard and number, which are never reused. The number begins with the time of its Prepare by the
clock of a server; all other times of the center are the database's, and never go back.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_common.headers import CONTEXT_HEADERS, CONTEXT_PREFIX, ORDER_KEY, REPLAY_OF, REPLAY_TO
from tmc_pipeline.frames import ATTEMPTS, CONSUMPTIONS, is_one_of
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.message import UNDECIDED, MessageState

_DAY_MS = 86_400_000
_ROUNDING_MS = 1_000
_UNDER_WAY = (ConsumptionState.SCHEDULED, ConsumptionState.WAITING)

DELIVERY = t.StructType(
    [
        t.StructField("subscription_no", t.IntegerType()),
        t.StructField("state", t.ShortType()),
        t.StructField("created_ms", t.LongType()),
        t.StructField("closed_ms", t.LongType()),
        t.StructField("at_ms", t.LongType()),  # when it moved last
        t.StructField("sequence", t.LongType()),
        t.StructField("retried", t.BooleanType()),  # an attempt has failed
        t.StructField("impossible", t.BooleanType()),  # its times cannot be
        t.StructField("expected", t.IntegerType()),  # 1: due, and the center has no such row
    ]
)

# The columns of a message by what is wrong if the archive has another value: all that it keeps.
IDENTITY = ("topic_no", "producer_no", "producer_tag", "message_key", "attempt_id", "ledger_id")
CONTENT = ("digest", "content_type", "headers", "body", "delay_ms")
COURSE = ("state", "created_ms", "decided_ms", "check_attempt", "check_answer", "consumptions", "attempts")


# -- names of messages --------------------------------------------------------------------------------------------


def shard_and_number(shard: str, number: str) -> Column:
    """SHARD-NUMBER of two columns, as in message ids."""
    return f.concat_ws("-", f.lpad(f.col(shard).cast("string"), 2, "0"), number)


def own_id() -> Column:
    """The public id of a row of OUTLINE."""
    return f.concat_ws("-", "topic_no", "producer_no", shard_and_number("shard", "id"))


def number_of(column: str) -> Column:
    """SHARD-NUMBER of a message id; null: it is none."""
    return f.nullif(f.regexp_extract(column, r"^\d+-\d+-(\d\d-\d+)$", 1), f.lit(""))


def noted_number(column: str) -> Column:
    """SHARD-NUMBER of what is known to be a message id, or null, as in NOTED: many times faster."""
    return f.substring_index(column, "-", -2)


def identity_of(topic: Column, key: Column, attempt: Column) -> Column:
    return f.xxhash64(topic, key, attempt)


def made_ms(number: Column) -> Column:
    """Epoch milliseconds inside SHARD-NUMBER."""
    return _made_ms(f.substring(number, 4, 20).try_cast("bigint"))


def _made_ms(number: Column) -> Column:
    return f.shiftright(number, 22) + f.lit(EPOCH_MS)


# -- outlines -----------------------------------------------------------------------------------------------------


def outlined(messages: DataFrame, now_ms: int, bodies: bool) -> DataFrame:
    """MESSAGE with live smallint, or ARCHIVED -> OUTLINE, one row per message. bodies: with their SHA-256.

    OUTLINE: shard, id, topic_no, producer_no, producer_tag, message_key, attempt_id, state, created_ms as in MESSAGE; decided_ms,
    where that cannot be: the time of the Prepare, null: undecided; ledgered, erased, stored (in the center's tables) boolean;
    replay_of, order_key string, replay_to int: the headers, or null; altered boolean: the center's digest is of something else;
    impossible boolean: its times cannot be; unprotected boolean: its key is free, and should not be; content bigint; identities,
    contents, courses bigint: hashes of all that is archived, null: erased; center_body string (SHA-256, hexadecimal) or null;
    at_ms bigint, when the message moved last; deliveries array of DELIVERY, never null.
    """
    is_stored = "live" in messages.columns
    erased = f.lit(False) if is_stored else f.col("erased_ms").isNotNull()
    undecided = is_one_of(f.col("state"), UNDECIDED)
    made = _made_ms(f.col("id"))
    # A server's clock may be hours off: what the database said at the Prepare counts then.
    began = f.when(_near(made, f.col("created_ms")), f.least(made, "created_ms")).otherwise(made)
    decided = _plausible(f.col("decided_ms"), began, now_ms)
    out_of_time = f.when(undecided, f.col("decided_ms").isNotNull()).otherwise(
        decided.isNull() | (decided < f.col("created_ms") - _ROUNDING_MS) | (f.col("created_ms") < EPOCH_MS)
    )
    free = f.col("live").isNull() & (f.col("state") != int(MessageState.ROLLED_BACK)) if is_stored else f.lit(False)
    consumptions = f.coalesce("consumptions", f.array().cast(CONSUMPTIONS))
    attempts = f.coalesce("attempts", f.array().cast(ATTEMPTS))
    kept = messages.select(
        *[name for name in messages.columns if name not in ("consumptions", "attempts", "decided_ms")],
        f.when(~undecided, f.coalesce(decided, made)).alias("decided_ms"),
        f.col("decided_ms").alias("stored_decided_ms"),
        consumptions.alias("consumptions"),
        attempts.alias("attempts"),
        f.coalesce(out_of_time, f.lit(True)).alias("impossible"),
        f.coalesce(free, f.lit(False)).alias("unprotected"),
    )
    content = f.xxhash64("body", "content_type")
    course = [name for name in COURSE if name not in ("decided_ms", "consumptions", "attempts")]
    return kept.select(
        "shard",
        "id",
        "topic_no",
        "producer_no",
        "producer_tag",
        "message_key",
        "attempt_id",
        "state",
        "created_ms",
        "decided_ms",
        f.col("ledger_id").isNotNull().alias("ledgered"),
        erased.alias("erased"),
        f.lit(is_stored).alias("stored"),
        _header(REPLAY_OF).alias("replay_of"),
        f.when(_header(REPLAY_OF).isNotNull(), _header(REPLAY_TO).try_cast("int")).alias("replay_to"),
        _header(ORDER_KEY).alias("order_key"),
        (
            ~erased
            & ((f.unhex(own_digest()) != f.col("digest")) | (f.col("headers").isNotNull() & _headers().isNull()))
        ).alias("altered"),
        "impossible",
        "unprotected",
        f.when(~erased, content).alias("content"),
        f.when(~erased, f.xxhash64(*IDENTITY)).alias("identities"),
        f.when(~erased, f.xxhash64(content, "digest", "headers", "delay_ms")).alias("contents"),
        f.when(
            ~erased,
            f.xxhash64(*course, "stored_decided_ms", f.array_sort("consumptions"), f.array_sort("attempts")),
        ).alias("courses"),
        (f.when(~erased, f.sha2("body", 256)) if bodies else f.lit(None).cast("string")).alias("center_body"),
        f.greatest("created_ms", "stored_decided_ms").alias("at_ms"),
        f.transform("consumptions", lambda each: _delivery(each, now_ms))
        .cast(t.ArrayType(DELIVERY))
        .alias("deliveries"),
    )


def _near(made: Column, created: Column) -> Column:
    return f.coalesce(f.abs(made - created) < _DAY_MS, f.lit(False))


def _plausible(at: Column, from_ms: Column, now_ms: int) -> Column:
    """The time, or null if it cannot be. The center's time may be ahead of the clock by a day, after that was set back."""
    return f.when((at >= from_ms - _ROUNDING_MS) & (at <= now_ms + _DAY_MS), at)


def _delivery(each: Column, now_ms: int) -> Column:
    """DELIVERY of a consumption of a row with decided_ms and attempts."""
    closed = each["closed_ms"]
    times = f.when(is_one_of(each["state"], _UNDER_WAY), closed.isNull()).otherwise(
        _plausible(closed, each["created_ms"], now_ms).isNotNull()
    )
    since_submit = f.coalesce(each["created_ms"] >= f.col("decided_ms") - _ROUNDING_MS, f.lit(True))
    return f.struct(
        each["subscription_no"].alias("subscription_no"),
        each["state"].alias("state"),
        each["created_ms"].alias("created_ms"),
        closed.alias("closed_ms"),
        f.greatest(each["created_ms"], closed, each["tried_ms"]).alias("at_ms"),
        each["sequence"].alias("sequence"),
        f.exists("attempts", lambda failed: failed["subscription_no"] == each["subscription_no"]).alias("retried"),
        (~(times & since_submit)).alias("impossible"),
        f.lit(0).alias("expected"),
    )


def _header(name: str) -> Column:
    return f.get_json_object("headers", f"$['{name}']")


def _headers() -> Column:
    """A map; null: there are none, or they are no JSON object."""
    return f.from_json("headers", t.MapType(t.StringType(), t.StringType()))


def _is_context(name: Column) -> Column:
    """headers.is_context of a name in lower case."""
    return name.isin(*sorted(CONTEXT_HEADERS)) | name.startswith(CONTEXT_PREFIX)


def own_digest() -> Column:
    """Lower-case hexadecimal string: domain.message.digest_of over the columns of a row of MESSAGE."""
    entries = f.map_entries(_headers())
    kept = f.filter(entries, lambda each: ~_is_context(f.lower(each["key"])))
    parts = f.transform(
        f.array_sort(kept),
        lambda each: f.concat(
            f.lit("\0"),
            f.length(each["key"]),
            f.lit(":"),
            each["key"],
            f.length(each["value"]),
            f.lit(":"),
            each["value"],
        ),
    )
    headers = f.coalesce(f.array_join(parts, ""), f.lit(""))
    start = f.concat(f.col("delay_ms"), f.lit(":"), f.length("body"), f.lit(":"))
    return f.sha2(f.concat(start.cast("binary"), f.col("body"), f.concat("content_type", headers).cast("binary")), 256)
