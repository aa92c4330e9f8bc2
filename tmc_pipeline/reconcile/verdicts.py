"""Compare the records of producers, the center and consumers about each message, and find one verdict for it.

Every record becomes a row of CLAIM; one shuffle brings the rows of a message together; the verdict is a pure function
of their sums. No side is joined with another, so missing, duplicate or keyless rows need no special treatment.
Messages are matched by shard and number, which are never reused; the rest of their ids is compared like any other
column. What takes more than one message to see is found in findings.py, and what people did about it in explanations.py.

    agreed                  all sides agree
    canceled by an operator a delivery was, and the audit trail says by whom
    pending                 undecided, not delivered yet, given up and waiting for a human, or changed a moment ago
    accepted                somebody has looked at this discrepancy, and closed it for a while
    unknown state           a state that this version does not know
    body differs            two sides saw different bodies, or what the center has is not what its own digest is of
    identity differs        the sides have different topics, keys, tags, attempts, apps or ledgers
    state differs           decided differently by two sides; delivered while undecided; not as archived; impossible times
    out of order            against the order of an order key
    lost                    committed by its producer, unknown to the center; a due delivery is missing; acked, no effect
    ghost                   committed by the center only; an effect or a delivery that was never due; an unproven replay
    duplicate message       one key, committed more than once
    duplicate effect        one message, more than one effect at one subscriber
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from tmc_pipeline.frames import is_one_of
from tmc_pipeline.reconcile.claims import COUNTED, REPLAY
from tmc_pipeline.reconcile.outlines import made_ms
from tmc_server.domain.consumption import CLOSED, ConsumptionState
from tmc_server.domain.message import UNDECIDED, MessageState

AGREED, CANCELED, PENDING, ACCEPTED = "agreed", "canceled by an operator", "pending", "accepted"
OUT_OF_ORDER, LOST, DUPLICATE_MESSAGE = "out of order", "lost", "duplicate message"
VERDICTS = (
    AGREED,
    CANCELED,
    PENDING,
    ACCEPTED,
    "unknown state",
    "body differs",
    "identity differs",
    "state differs",
    OUT_OF_ORDER,
    LOST,
    "ghost",
    DUPLICATE_MESSAGE,
    "duplicate effect",
)
"""In ascending order: the verdict of a message is the last of these that any of its rows has."""
DISCREPANCIES = VERDICTS[VERDICTS.index(ACCEPTED) + 1 :]

NEVER = (1 << 63) - 1
CLOCKS_APART_MS = 300_000  # a time further ahead than this comes from a wrong clock and excuses nothing

_GREATEST = (
    "message_id",
    "topic",
    "producer",
    "message_key",
    "state",
    "strange",
    "revoked",
    "canceled",
    "impossible",
    "unprotected",
    "ledgered",
    "replayed",
    "proper",
    "altered",
    "content",
    "identity",
    "identities",
    "contents",
    "courses",
    "center_body",
    "noted_app",
    "ledger",
    "sdk",
    "at_ms",
)
_LEAST = (
    "message_id",
    "state",
    "content",
    "identity",
    "identities",
    "contents",
    "courses",
    "noted_app",
    "ledger",
)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """Which sides were read. producers, subscribers: name -> since when (epoch ms) its records are complete.

    noted_from: by topic and subscriber: since when effects are noted there at all; NEVER: they are not, e.g. of a forward.
    sdk_ledgers: the producers whose records are the SDK's ledger, which has only messages sent in transactions.
    center_ms: since when (epoch ms) the center's rows are complete; older ones may have been removed unarchived.
    expired: the same by number of a topic, because of days that were taken out of the archive by rule.
    """

    producers: Mapping[str, int] = field(default_factory=dict)
    subscribers: Mapping[str, int] = field(default_factory=dict)
    noted_from: Mapping[tuple[str, str], int] = field(default_factory=dict)
    sdk_ledgers: frozenset[str] = frozenset()
    center_ms: int = 0
    expired: Mapping[int, int] = field(default_factory=dict)

    def noted_since_ms(self, topic: str, subscriber: str) -> int | None:
        """Return since when notes about a subscriber's deliveries of a topic are complete; None: there are none to read."""
        read_ms, noted_ms = self.subscribers.get(subscriber), self.noted_from.get((topic, subscriber), 0)
        return None if read_ms is None or noted_ms == NEVER else max(read_ms, noted_ms)


def judged(
    claims: DataFrame, audited: Audited, now_ms: int, tolerance_ms: int, partitions: int, read_ms: int = 0
) -> DataFrame:
    """CLAIM -> one row per (number, subscriber), with verdict string and the sums it was found from.

    now_ms, read_ms: when the first row was read, and the last.
    Columns: those of CLAIM, sums where they are counted, else the greatest; least_message_id and so on where both are compared;
    least_body, most_body string; verdict string; reason string: why it is pending, null: it is not; until_ms bigint: when that
    ends by itself, null: it does not; bad_clock boolean: its time lies ahead; complete boolean: a delivery that its
    subscriber's notes should have; repaired boolean: false, see explanations.py.
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
            *[f.sum(name).cast("int").alias(name) for name in COUNTED],
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
    moved = f.coalesce(f.col("moved_ms") > f.lit(now_ms - tolerance_ms), f.lit(False)) & said.isin(*DISCREPANCIES)
    reason = f.when(moved, f.concat(f.lit("moved a moment ago, else: "), said)).when(said == PENDING, _waiting())
    complete = ~of_message & ~of_replay & _is_noted(audited, made)
    return found.withColumns(
        {
            "verdict": f.when(moved, f.lit(PENDING)).otherwise(said),
            "reason": reason,
            "until_ms": f.when(moved, f.col("moved_ms") + f.lit(tolerance_ms)),
            "complete": complete,
            "repaired": f.lit(False),
        }
    ).drop("moved_ms")


def latest_possible_ms(now_ms: int, read_ms: int) -> int:
    """A later time is impossible, so it must not excuse anything."""
    return max(now_ms, read_ms) + CLOCKS_APART_MS


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


def _is_noted(audited: Audited, made: Column) -> Column:
    """Return whether the subscriber of a delivery should have noted its effect."""
    noted = _complete(audited.subscribers, "subscriber", made)
    if not audited.noted_from:
        return noted
    pairs = [("\n".join(pair), since_ms) for pair, since_ms in sorted(audited.noted_from.items())]
    since = f.create_map(*[f.lit(each) for pair in pairs for each in pair])
    here = f.concat_ws("\n", "topic", "subscriber")
    return noted & f.coalesce(made >= f.try_element_at(since, here), f.lit(True))


def _is_forgotten(audited: Audited, made: Column) -> Column:
    """Return whether the center and the archive may have removed this message by rule."""
    gone = made < audited.center_ms
    if audited.expired:
        ends = f.create_map(*[f.lit(each) for pair in audited.expired.items() for each in pair])
        topic = f.split("message_id", "-")[0].try_cast("int")
        # A day is of the database's clock, a number of a server's.
        gone = gone | f.coalesce(made < f.try_element_at(ends, topic) + f.lit(CLOCKS_APART_MS), f.lit(False))
    return gone


def _is(name: str) -> Column:
    return f.coalesce(f.col(name) == 1, f.lit(False))


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
        .when(state.isNull() & committed, LOST)
        .when(state.isNull(), AGREED)  # a rollback of something the center never stored, or has forgotten
        .when(_unknown("state", MessageState) | (f.col("unknown") > 0), "unknown state")
        .when(_differ("state") | (~undecided & committed & rolled_back), "state differs")
        .when(here & rolled_back, "state differs")
        .when(~here & ~undecided & committed, "state differs")
        .when(
            here & ~committed & _noted_by_its_producer(audited) & _complete(audited.producers, "producer", made),
            "ghost",
        )
        .when(_is("unprotected"), DUPLICATE_MESSAGE)
        .when(_another_identity() | _differ("identities"), "identity differs")
        .when(
            (f.col("altered") == 1) | _differ("content") | _differ("contents") | _bodies_differ(),
            "body differs",
        )
        .when(_differ("courses") | _is("impossible"), "state differs")
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
        .when(state.isNull() & (f.col("expected") > 0), LOST)
        .when(state.isNull() & of_its_message.isNull() & _is_forgotten(audited, made), AGREED)
        .when(state.isNull() & of_its_message.isNull() & (f.col("m_committed") > 0), LOST)
        .when(state.isNull(), "ghost")
        .when(_unknown("state", ConsumptionState), "unknown state")
        .when(f.col("strange") == 1, "ghost")
        .when(f.coalesce(undecided_or_not & ~_unknown("m_state", MessageState), f.lit(False)), "state differs")
        .when(_differ("state") | f.coalesce(f.col("copies") < f.col("m_copies"), f.lit(False)), "state differs")
        .when((f.col("revoked") == 1) & ~_is("canceled"), "state differs")
        .when(_differ("message_id"), "identity differs")  # a note under another topic or producer
        .when(~is_one_of(state, CLOSED) & ~_is("impossible"), PENDING)
        .when(
            (state == int(ConsumptionState.ACKED)) & (effects == 0) & _is_noted(audited, made),
            LOST,
        )
        .when(_bodies_differ(), "body differs")
        .when(_is("impossible"), "state differs")
        .when(_is("canceled"), CANCELED)
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
    settled = f.col("complete") & ~f.col("verdict").isin(PENDING, ACCEPTED) & ~f.col("repaired")
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
