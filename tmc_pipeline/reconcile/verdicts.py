"""Compare the records of producers, the center and consumers about each message, and find one verdict for it.

Every record becomes a row of CLAIM; one shuffle brings the rows of a message together; the verdict is a pure function
of their sums. No side is joined with another, so missing, duplicate or keyless rows need no special treatment.
Messages are matched by shard and number, which are never reused; the rest of their ids is compared like any other
column.

    agreed            all sides agree
    pending           undecided, not delivered yet, given up and waiting for a human, or changed a moment ago
    unknown state     a state that this version does not know
    body differs      two sides saw different bodies, or body, headers, content type, delay are not those of the center's digest
    identity differs  the sides have different topics, keys, attempts, apps or ledgers
    state differs     decided differently by two sides; delivered while undecided; archived and stored states differ
    lost              committed by its producer, unknown to the center; a due delivery is missing; acked, no effect
    ghost             committed by the center only; an effect or a delivery that was never due; an unproven replay
    duplicate effect  one message, more than one effect at one subscriber
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_common.headers import CONTEXT_HEADERS, CONTEXT_PREFIX, REPLAY_OF, REPLAY_TO
from tmc_pipeline.frames import CONSUMPTIONS, is_one_of
from tmc_server.domain.consumption import CLOSED, ConsumptionState
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.message import UNDECIDED, MessageState

AGREED, PENDING = "agreed", "pending"
VERDICTS = (
    AGREED,
    PENDING,
    "unknown state",
    "body differs",
    "identity differs",
    "state differs",
    "lost",
    "ghost",
    "duplicate effect",
)
"""In ascending order: the verdict of a message is the last of these that any of its rows has."""

CLOCKS_APART_MS = 300_000  # a time further ahead than this comes from a wrong clock and excuses nothing
REPLAY = "replay "  # prefix of the subscriber in rows that check a replay; real names contain no blank

_DELIVERY = t.StructType(
    [
        t.StructField("subscription_no", t.IntegerType()),
        t.StructField("state", t.ShortType()),
        t.StructField("created_ms", t.LongType()),
        t.StructField("at_ms", t.LongType()),
        t.StructField("expected", t.IntegerType()),  # 1: due, and the center has no such row
    ]
)
_ROWS = t.ArrayType(_DELIVERY)
_ITSELF, _ORIGINAL = -1, -2  # instead of a subscription: the row about the message, and about the original of a replay
# One record of one side. subscriber "": about the message itself; else about its delivery to that subscriber.
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
        t.StructField(
            "expected", t.IntegerType()
        ),  # 1: the subscription was in effect at the submit, and the row is missing
        t.StructField("strange", t.ShortType()),  # 1: nobody knows this subscription, or it is of another topic
        t.StructField("revoked", t.ShortType()),  # 1: cancelled, and its subscription was never removed
        t.StructField("ledgered", t.ShortType()),  # 1: the SDK's ledger should have it
        t.StructField("replayed", t.ShortType()),  # 1: sent again from the archive, so by no transaction
        t.StructField(
            "proper", t.ShortType()
        ),  # of a replay: 1: topic, producer and key are those of its original's replay
        t.StructField("altered", t.ShortType()),  # 1: does not match the center's own digest
        t.StructField("content", t.LongType()),  # xxhash64 of body and content type
        t.StructField("identity", t.LongType()),  # xxhash64 of topic, key and attempt id
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
_COUNTED = ("copies", "expected", "committed", "rolled_back", "unknown", "effects")
_GREATEST = (
    "message_id",
    "topic",
    "producer",
    "message_key",
    "state",
    "strange",
    "revoked",
    "ledgered",
    "replayed",
    "proper",
    "altered",
    "content",
    "identity",
    "center_body",
    "noted_app",
    "ledger",
    "sdk",
    "at_ms",
)
_LEAST = ("message_id", "state", "content", "identity", "noted_app", "ledger")


@dataclass(frozen=True, kw_only=True)
class Audited:
    """Which sides were read. producers, subscribers: name -> since when (epoch ms) its records are complete.

    sdk_ledgers: the producers whose records are the SDK's ledger, which has only messages sent in transactions.
    center_ms: since when (epoch ms) the center's rows are complete; older ones may have been removed unarchived.
    expired: the same by number of a topic, because of days that were taken out of the archive by rule.
    """

    producers: Mapping[str, int] = field(default_factory=dict)
    subscribers: Mapping[str, int] = field(default_factory=dict)
    sdk_ledgers: frozenset[str] = frozenset()
    center_ms: int = 0
    expired: Mapping[int, int] = field(default_factory=dict)


# -- claims -------------------------------------------------------------------------------------------------------


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


def outlined(messages: DataFrame, bodies: bool) -> DataFrame:
    """MESSAGE or ARCHIVED -> OUTLINE, one row per message with no more than is compared. bodies: with their SHA-256.

    OUTLINE: shard, id, topic_no, producer_no, message_key, attempt_id, state, decided_ms as in MESSAGE; ledgered, erased
    boolean; replay_of string, replay_to int: the headers, or null; altered boolean: the center's digest is of something else;
    content bigint; center_body string (SHA-256, hexadecimal) or null; at_ms bigint, when the message moved last;
    deliveries array of _DELIVERY, never null.
    """
    last_moved = f.transform(
        f.coalesce("consumptions", f.array().cast(CONSUMPTIONS)),
        lambda each: f.struct(
            each["subscription_no"].alias("subscription_no"),
            each["state"].alias("state"),
            each["created_ms"].alias("created_ms"),
            f.greatest(each["created_ms"], each["closed_ms"], each["tried_ms"]).alias("at_ms"),
            f.lit(0).alias("expected"),
        ),
    )
    erased = f.col("erased_ms").isNotNull() if "erased_ms" in messages.columns else f.lit(False)
    return messages.select(
        "shard",
        "id",
        "topic_no",
        "producer_no",
        "message_key",
        "attempt_id",
        "state",
        "decided_ms",
        f.col("ledger_id").isNotNull().alias("ledgered"),
        erased.alias("erased"),
        f.get_json_object("headers", f"$['{REPLAY_OF}']").alias("replay_of"),
        f.when(
            f.get_json_object("headers", f"$['{REPLAY_OF}']").isNotNull(),
            f.get_json_object("headers", f"$['{REPLAY_TO}']").try_cast("int"),
        ).alias("replay_to"),
        (
            ~erased
            & ((f.unhex(own_digest()) != f.col("digest")) | (f.col("headers").isNotNull() & _headers().isNull()))
        ).alias("altered"),
        f.when(~erased, f.xxhash64("body", "content_type")).alias("content"),
        (f.when(~erased, f.sha2("body", 256)) if bodies else f.lit(None).cast("string")).alias("center_body"),
        f.greatest("created_ms", "decided_ms").alias("at_ms"),
        last_moved.alias("deliveries"),
    )


def center_claims(outlines: DataFrame, topics: DataFrame, apps: DataFrame, subscribers: DataFrame) -> DataFrame:
    """OUTLINE -> CLAIM: one row per message, per delivery, and per delivery that is due and missing; one per replay.

    topics, apps, subscribers: of catalog.py.
    """
    placed = outlines.join(f.broadcast(topics), "topic_no", "left")
    rows = f.concat(
        _one_row(_ITSELF),
        "deliveries",
        _missing(),
        f.when(f.col("replay_of").isNull(), f.array().cast(_ROWS)).otherwise(_one_row(_ORIGINAL)),
    )
    named = (
        placed.withColumn("each", f.explode(rows))
        .withColumn("subscription_no", f.col("each.subscription_no"))
        .join(f.broadcast(apps), "producer_no", "left")
        .join(f.broadcast(subscribers), "subscription_no", "left")
    )
    number = shard_and_number("shard", "id")
    message_id = own_id()
    topic = f.coalesce("topic", f.concat(f.lit("topic-"), "topic_no"))
    itself, original = f.col("subscription_no") == _ITSELF, f.col("subscription_no") == _ORIGINAL
    of_message = itself | original
    delivered = ~of_message & f.col("each.state").isNotNull()
    subscriber = f.coalesce("subscriber", f.concat(f.lit("subscription-"), "subscription_no"))
    meant = f.coalesce(f.col("replay_to") == f.col("subscription_no"), f.lit(True))
    cancelled = f.col("each.state") == int(ConsumptionState.CANCELLED)
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
            (delivered & (~(f.coalesce("subscribed", f.lit("")) == topic) | ~meant)).alias("strange"),
            (delivered & cancelled & f.coalesce(f.col("each.created_ms") >= f.col("live_ms"), f.lit(False))).alias(
                "revoked"
            ),
            "ledgered",
            f.col("replay_of").isNotNull().alias("replayed"),
            f.when(original, f.coalesce(proper, f.lit(False))).alias("proper"),
            "altered",
            "content",
            f.when(itself & ~f.col("erased"), identity_of(topic, f.col("message_key"), f.col("attempt_id"))).alias(
                "identity"
            ),
            "center_body",
            f.when(of_message, f.col("at_ms")).otherwise(f.greatest("at_ms", "each.at_ms")).alias("at_ms"),
        )
    )


def _one_row(number: int) -> Column:
    """A row of its own about the message, in the shape of its deliveries."""
    fields = [
        f.lit(number if each.name == "subscription_no" else None).cast(each.dataType).alias(each.name)
        for each in _DELIVERY.fields
    ]
    return f.array(f.struct(*fields))


def _missing() -> Column:
    """_DELIVERY without a state for each subscription that was in effect at the submit and has no row."""
    null = [f.lit(None).cast(_DELIVERY[name].dataType).alias(name) for name in ("state", "created_ms", "at_ms")]
    rows = f.transform(
        f.filter("subscriptions", is_missing),
        lambda each: f.struct(each["subscription_no"].alias("subscription_no"), *null, f.lit(1).alias("expected")),
    )
    return f.coalesce(rows, f.array()).cast(_ROWS)


def is_missing(subscription: Column) -> Column:
    """Return whether a subscription of OUTLINE's topic was in effect at the submit and has no delivery."""
    return (
        (f.col("state") == int(MessageState.COMMITTED))
        & (f.col("decided_ms") >= subscription["from_ms"])
        & (f.col("decided_ms") < subscription["to_ms"])
        & ~f.array_contains(f.col("deliveries.subscription_no"), subscription["subscription_no"])
        & f.coalesce(f.col("replay_to") == subscription["subscription_no"], f.lit(True))
    )


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
        value = f"coalesce({value}, 0)" if name in _COUNTED else value
        return f"CAST({value} AS {kind}) AS {name}"

    return rows.selectExpr(*[column(each.name, each.dataType.simpleString()) for each in CLAIM.fields])


# -- verdicts -----------------------------------------------------------------------------------------------------


def judged(
    claims: DataFrame, audited: Audited, now_ms: int, tolerance_ms: int, partitions: int, read_ms: int = 0
) -> DataFrame:
    """CLAIM -> one row per (number, subscriber), with verdict string and the sums it was found from.

    now_ms, read_ms: when the first row was read, and the last.
    Columns: those of CLAIM, sums where they are counted, else the greatest; least_message_id and so on where both are compared;
    least_body, most_body string; verdict string; reason string: why it is pending, null: it is not; until_ms bigint: when that
    ends by itself, null: it does not; bad_clock boolean: its time lies ahead; complete boolean: a delivery that its
    subscriber's notes should have.
    """
    latest_ms = latest_possible_ms(now_ms, read_ms)
    ahead = f.col("at_ms") > f.lit(latest_ms)
    timed = claims.withColumn("bad_clock", f.coalesce(ahead, f.lit(False))).withColumn(
        "at_ms", f.when(~f.coalesce(ahead, f.lit(False)), f.col("at_ms"))
    )
    sums = (
        timed.repartition(partitions, "number")  # one shuffle and one sort serve all that follows
        .groupBy("number", "subscriber")
        .agg(
            *[f.max(name).alias(name) for name in (*_GREATEST, "bad_clock")],
            *[f.min(name).alias(f"least_{name}") for name in _LEAST],
            *[f.sum(name).cast("int").alias(name) for name in _COUNTED],
            f.min("noted_body").alias("least_body"),
            f.max("noted_body").alias("most_body"),
        )
    )
    rows = sums.select("*", *[_of_its_message(condition).alias(name) for name, condition in _ABOUT_ITS_MESSAGE.items()])
    of_message, of_replay = f.col("subscriber") == "", f.col("subscriber").startswith(REPLAY)
    made = made_ms(f.col("number"))
    verdict = (
        f.when(of_message, _of_message(audited, made))
        .when(of_replay, _of_replay(audited, made))
        .otherwise(_of_delivery(audited, made))
    )
    own_time = f.when(made <= f.lit(latest_ms), made)  # a number carries its time; notes may carry none
    # In a step of its own: the verdict is looked at several times and found once.
    found = rows.withColumns({"verdict": verdict, "moved_ms": f.greatest("at_ms", own_time)})
    said = f.col("verdict")
    moved = f.coalesce(f.col("moved_ms") > f.lit(now_ms - tolerance_ms), f.lit(False)) & ~said.isin(AGREED, PENDING)
    reason = f.when(moved, f.concat(f.lit("moved a moment ago, else: "), said)).when(said == PENDING, _waiting())
    complete = ~of_message & ~of_replay & _complete(audited.subscribers, "subscriber", made)
    return found.withColumns(
        {
            "verdict": f.when(moved, f.lit(PENDING)).otherwise(said),
            "reason": reason,
            "until_ms": f.when(moved, f.col("moved_ms") + f.lit(tolerance_ms)),
            "complete": complete,
        }
    ).drop("moved_ms")


def latest_possible_ms(now_ms: int, read_ms: int) -> int:
    """A later time is impossible, so it must not excuse anything."""
    return max(now_ms, read_ms) + CLOCKS_APART_MS


def made_ms(number: Column) -> Column:
    """Epoch milliseconds inside SHARD-NUMBER."""
    return f.shiftright(f.substring(number, 4, 20).try_cast("bigint"), 22) + f.lit(EPOCH_MS)


# What a delivery has to know of its message: the value of the row about the message itself.
_ABOUT_ITS_MESSAGE: Mapping[str, str] = {
    "m_state": "state",
    "m_copies": "copies",
    "m_committed": "committed",
    "m_content": "content",
    "m_id": "message_id",
    "m_least_id": "least_message_id",
}


def _of_its_message(name: str) -> Column:
    return f.max(f.when(f.col("subscriber") == "", f.col(name))).over(Window.partitionBy("number"))


def _complete(names: Mapping[str, int], column: str, made: Column) -> Column:
    """Return whether the records of the app named in `column` were read and reach back to this message."""
    known = f.lit(False)
    for name, since_ms in names.items():
        known = known | ((f.col(column) == name) & (made >= since_ms))
    return f.coalesce(known, f.lit(False))


def _is_forgotten(audited: Audited, made: Column) -> Column:
    """Return whether the center and the archive may have removed this message by rule."""
    gone = made < audited.center_ms
    if audited.expired:
        ends = f.create_map(*[f.lit(each) for pair in audited.expired.items() for each in pair])
        topic = f.split("message_id", "-")[0].try_cast("int")
        gone = gone | f.coalesce(made < f.try_element_at(ends, topic), f.lit(False))
    return gone


def _differ(name: str) -> Column:
    return f.coalesce(f.col(name) != f.col(f"least_{name}"), f.lit(False))


def _bodies_differ() -> Column:
    among_notes = f.col("least_body") != f.col("most_body")
    from_center = (f.col("center_body") != f.col("least_body")) | (f.col("center_body") != f.col("most_body"))
    return f.coalesce(among_notes, f.lit(False)) | f.coalesce(from_center, f.lit(False))


def _noted_by_its_producer(audited: Audited) -> Column:
    """Return whether this message should be in its producer's records at all."""
    own_notes = ~f.col("producer").isin(list(audited.sdk_ledgers))
    return (f.coalesce("replayed", f.lit(0)) == 0) & (own_notes | (f.col("ledgered") == 1))


def _another_identity() -> Column:
    """Return whether id, topic, key, attempt, app or ledger differ, or the SDK's ledger has a plain publish."""
    another_app = f.col("producer") != f.col("noted_app")
    hidden = (f.col("committed") > 0) & (f.col("sdk") == 1) & (f.col("ledgered") == 0)
    found = [f.coalesce(each, f.lit(False)) for each in (another_app, hidden)]
    return _differ("message_id") | _differ("identity") | _differ("noted_app") | _differ("ledger") | found[0] | found[1]


def _unknown(column: str, states: type[MessageState] | type[ConsumptionState]) -> Column:
    return ~is_one_of(f.col(column), states)


def _of_message(audited: Audited, made: Column) -> Column:
    state, committed, rolled_back = f.col("state"), f.col("committed") > 0, f.col("rolled_back") > 0
    here = state == int(MessageState.COMMITTED)
    undecided = is_one_of(state, UNDECIDED)
    return (
        f.when(state.isNull() & (f.col("unknown") > 0), "unknown state")
        .when(state.isNull() & committed & _is_forgotten(audited, made), AGREED)  # removed long ago
        .when(state.isNull() & committed, "lost")
        .when(state.isNull(), AGREED)  # a rollback of something the center never stored, or has forgotten
        .when(_unknown("state", MessageState) | (f.col("unknown") > 0), "unknown state")
        .when(_differ("state") | (~undecided & committed & rolled_back), "state differs")
        .when(here & rolled_back, "state differs")
        .when(~here & ~undecided & committed, "state differs")
        .when(
            here & ~committed & _noted_by_its_producer(audited) & _complete(audited.producers, "producer", made),
            "ghost",
        )
        .when(_another_identity(), "identity differs")
        .when((f.col("altered") == 1) | _differ("content") | _bodies_differ(), "body differs")
        .when(undecided, PENDING)
        .otherwise(AGREED)
    )


def _of_delivery(audited: Audited, made: Column) -> Column:
    state, effects, of_its_message = f.col("state"), f.col("effects"), f.col("m_state")
    undecided_or_not = of_its_message != int(MessageState.COMMITTED)
    renamed = f.col("m_id") != f.col("m_least_id")
    return (
        f.when(effects > 1, "duplicate effect")
        .when(f.coalesce(renamed, f.lit(False)), AGREED)  # the row about the message itself reports the differing ids
        .when(state.isNull() & (f.col("expected") > 0), "lost")
        .when(state.isNull() & of_its_message.isNull() & _is_forgotten(audited, made), AGREED)
        .when(state.isNull() & of_its_message.isNull() & (f.col("m_committed") > 0), "lost")
        .when(state.isNull(), "ghost")
        .when(_unknown("state", ConsumptionState), "unknown state")
        .when(f.col("strange") == 1, "ghost")
        .when(f.coalesce(undecided_or_not & ~_unknown("m_state", MessageState), f.lit(False)), "state differs")
        .when(_differ("state") | f.coalesce(f.col("copies") < f.col("m_copies"), f.lit(False)), "state differs")
        .when(f.col("revoked") == 1, "state differs")
        .when(~is_one_of(state, CLOSED), PENDING)
        .when(
            (state == int(ConsumptionState.ACKED))
            & (effects == 0)
            & _complete(audited.subscribers, "subscriber", made),
            "lost",
        )
        .when(_bodies_differ(), "body differs")
        .otherwise(AGREED)
    )


def _of_replay(audited: Audited, made: Column) -> Column:
    """Verdict of a replay: proven if its original was committed and has the same body, topic, producer and key.

    content null: it was erased.
    """
    proven = (
        (f.col("m_state") == int(MessageState.COMMITTED))
        & (f.col("content").isNull() | f.col("m_content").isNull() | (f.col("content") == f.col("m_content")))
        & (f.col("proper") == 1)
    )
    forgotten = f.col("m_state").isNull() & _is_forgotten(audited, made) & (f.col("proper") == 1)
    return f.when(f.coalesce(proven | forgotten, f.lit(False)), AGREED).otherwise("ghost")


def _waiting() -> Column:
    state = f.col("state")
    return (
        f.when((f.col("subscriber") == "") & (state == int(MessageState.CHECK_FAILED)), "nobody knew: a human decides")
        .when(f.col("subscriber") == "", "its producer has not decided")
        .when(state == int(ConsumptionState.FAILED), "given up: a human reactivates it")
        .when(state == int(ConsumptionState.WAITING), "an earlier message of its order key is not acked yet")
        .otherwise("not acked yet")
    )


def by_message(rows: DataFrame) -> DataFrame:
    """Reduce judged rows to message_id string, topic string, verdict string; one row per message, its worst verdict."""
    verdicts = f.array(*[f.lit(each) for each in VERDICTS])
    of_replay = f.col("subscriber").startswith(REPLAY)
    worst = (
        rows.where(~of_replay)
        .groupBy("number")
        .agg(
            f.max(f.array_position(verdicts, f.col("verdict"))).alias("rank"),
            f.max("topic").alias("topic"),
            f.coalesce(f.max("m_id"), f.max("message_id")).alias("message_id"),
        )
    )
    # The verdict of a replay is in a row of its original, but counts for the replay.
    replays = rows.where(of_replay & (f.col("verdict") != AGREED)).select(
        "message_id", f.array_position(verdicts, f.col("verdict")).alias("replay_rank")
    )
    ranked = worst.join(f.broadcast(replays), "message_id", "left")
    named = f.element_at(verdicts, f.greatest("rank", "replay_rank").cast("int"))
    return ranked.select("message_id", "topic", named.alias("verdict"))


def counted(rows: DataFrame) -> DataFrame:
    """Count judged rows: the F5 numbers, one row per topic (null: unknown) and subscriber ("": the messages themselves).

    topic, subscriber string; committed bigint: deliveries that the center counts as done; consumed bigint: effects
    that the subscriber recorded, whatever the center says (both only where its records are complete and nothing
    changed a moment ago); open bigint: deliveries under way, with or without an effect; unconfirmed bigint: undecided
    messages; bad_clocks bigint: rows with a time in the future.
    """
    of_message = (f.col("subscriber") == "") | f.col("subscriber").startswith(REPLAY)
    undecided = (f.col("subscriber") == "") & is_one_of(f.col("state"), UNDECIDED)
    settled = f.col("complete") & (f.col("verdict") != PENDING)
    done = (f.col("state") == int(ConsumptionState.ACKED)) & settled
    taken_back = f.coalesce(f.col("state") == int(ConsumptionState.CANCELLED), f.lit(False))
    underway = ~of_message & ~is_one_of(f.col("state"), CLOSED)
    return rows.groupBy("topic", f.when(of_message, "").otherwise(f.col("subscriber")).alias("subscriber")).agg(
        f.count_if(done).alias("committed"),
        f.coalesce(f.sum(f.when(settled & ~taken_back, f.col("effects"))), f.lit(0)).alias("consumed"),
        f.count_if(underway).alias("open"),
        f.count_if(undecided).alias("unconfirmed"),
        f.count_if("bad_clock").alias("bad_clocks"),
    )
