"""The figures of a report, each a pure function of messages: volumes, latencies, attempts, failures, what is open, skew.

Hours are those in which messages were prepared, as epoch milliseconds of their beginning. Latencies are milliseconds; percentiles
are approximate to a thousandth of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.frames import is_one_of
from tmc_server.domain.checks import DECIDED_BY_CHECK
from tmc_server.domain.consumption import CLOSED, ConsumptionState
from tmc_server.domain.message import UNDECIDED, MessageState

HOUR_MS = 3_600_000
_QUANTILES = (0.5, 0.95, 0.99)
_REASON_LENGTH = 80
_SET_BACK_MS = 1000
_LONGEST_MS = 400 * 86_400_000


def _hour(column: str = "created_ms") -> Column:
    return (f.col(column) - f.pmod(f.col(column), f.lit(HOUR_MS))).alias("hour_ms")


def _count(condition: Column, name: str) -> Column:
    return f.count(f.when(condition, 1)).alias(name)


def _possible(took: Column) -> Column:
    """Return a latency, or null if it cannot be: a clock was wrong. A database's clock may go back by a second."""
    return f.when(took.between(-_SET_BACK_MS, _LONGEST_MS), f.greatest(took, f.lit(0)))


def _impossible(took: Column) -> Column:
    return _count(took.isNotNull() & _possible(took).isNull(), "impossible")


def _latencies(took: Column, name: str) -> Sequence[Column]:
    """name_p50, name_p95, name_p99, name_max bigint; null where nothing was measured."""
    column = _possible(took)
    quantiles = f.percentile_approx(column, f.array(*[f.lit(q) for q in _QUANTILES]), f.lit(1000))
    return (
        *[quantiles[n].alias(f"{name}_p{round(q * 100)}") for n, q in enumerate(_QUANTILES)],
        f.max(column).alias(f"{name}_max"),
    )


def production(messages: DataFrame, *by: str) -> DataFrame:
    """MESSAGE with topic string -> one row per topic and `by` (hour_ms or nothing), in their order.

    messages, committed, rolled_back, undecided, by_check bigint; decide_p50 ... decide_max: from prepare to decision;
    impossible bigint: how many of these are left out, since a clock was wrong.
    """
    state = f.col("state")
    return (
        messages.withColumn("hour_ms", _hour())
        .groupBy("topic", *by)
        .agg(
            f.count(f.lit(1)).alias("messages"),
            _count(state == int(MessageState.COMMITTED), "committed"),
            _count(state == int(MessageState.ROLLED_BACK), "rolled_back"),
            _count(is_one_of(state, UNDECIDED), "undecided"),
            _count(f.col("check_answer") == DECIDED_BY_CHECK, "by_check"),
            *_latencies(f.col("decided_ms") - f.col("created_ms"), "decide"),
            _impossible(f.col("decided_ms") - f.col("created_ms")),
        )
        .orderBy("topic", *by)
    )


def deliveries(messages: DataFrame, subscribers: DataFrame) -> DataFrame:
    """MESSAGE with topic -> one row per consumption, with its columns and those below.

    topic, subscriber string; hour_ms, prepared_ms, decided_ms, delay_ms bigint.
    subscribers: subscription_no int, subscriber string.
    """
    return (
        messages.select(
            "topic",
            "created_ms",
            "decided_ms",
            "delay_ms",
            f.explode("consumptions").alias("each"),
            _hour().alias("hour_ms"),
        )
        .select("topic", "hour_ms", "decided_ms", "delay_ms", f.col("created_ms").alias("prepared_ms"), "each.*")
        .join(f.broadcast(subscribers), "subscription_no", "left")
        .withColumn("subscriber", f.coalesce("subscriber", f.concat(f.lit("subscription-"), "subscription_no")))
    )


def consumption(delivered: DataFrame, *by: str) -> DataFrame:
    """Rows of `deliveries` -> one row per topic, subscriber and `by`, in their order.

    deliveries, acked, failed, cancelled, under_way, first_attempt, attempts bigint; deliver_p50 ...: from decision (and delay) to
    stored ack; life_p50 ...: from prepare to stored ack. first_attempt: acked after one attempt.  impossible bigint: as in
    `production`.
    """
    state = f.col("state")
    acked = state == int(ConsumptionState.ACKED)
    return (
        delivered.groupBy("topic", "subscriber", *by)
        .agg(
            f.count(f.lit(1)).alias("deliveries"),
            _count(acked, "acked"),
            _count(state == int(ConsumptionState.FAILED), "failed"),
            _count(state == int(ConsumptionState.CANCELLED), "cancelled"),
            _count(is_one_of(state, (ConsumptionState.SCHEDULED, ConsumptionState.WAITING)), "under_way"),
            _count(acked & (f.col("attempt") <= 1), "first_attempt"),
            f.sum("attempt").alias("attempts"),
            *_latencies(f.when(acked, f.col("closed_ms") - f.col("decided_ms") - f.col("delay_ms")), "deliver"),
            *_latencies(f.when(acked, f.col("closed_ms") - f.col("prepared_ms")), "life"),
            _impossible(f.when(acked, f.col("closed_ms") - f.col("decided_ms") - f.col("delay_ms"))),
        )
        .orderBy("topic", "subscriber", *by)
    )


def failures(messages: DataFrame, subscribers: DataFrame) -> DataFrame:
    """MESSAGE with topic -> topic, subscriber, reason string, attempts bigint; most first. Digits of a reason become #."""
    failed = messages.select("topic", f.explode("attempts").alias("each")).select("topic", "each.*")
    reason = f.substring(f.regexp_replace("error", r"\d+", "#"), 1, _REASON_LENGTH)
    named = failed.join(f.broadcast(subscribers), "subscription_no", "left")
    return (
        named.groupBy("topic", "subscriber", reason.alias("reason"))
        .agg(f.count(f.lit(1)).alias("attempts"))
        .orderBy(f.desc("attempts"), "topic", "subscriber", "reason")
    )


# Whose turn it is, by state.
DECIDES: Mapping[MessageState, str] = {
    MessageState.PREPARED: "its producer decides",
    MessageState.CHECK_FAILED: "a human decides: checks gave up",
}
DELIVERS: Mapping[ConsumptionState, str] = {
    ConsumptionState.SCHEDULED: "under way",
    ConsumptionState.WAITING: "an earlier message of its order key is not acked yet",
    ConsumptionState.FAILED: "a human reactivates: delivery gave up",
}


def _turn(whose: Mapping[Any, str]) -> Column:
    found = f.concat(f.lit("state "), f.col("state").cast("string"))
    for state, text in whose.items():
        found = f.when(f.col("state") == int(state), text).otherwise(found)
    return found.alias("turn")


def oldest_open(messages: DataFrame, subscribers: DataFrame) -> DataFrame:
    """MESSAGE with topic -> topic, subscriber, turn string, open bigint, oldest_ms bigint: prepared then; oldest first.

    subscriber "": undecided messages.  turn: who has to act.  open: undecided messages, and deliveries that are
    neither acked nor cancelled.
    """
    undecided = messages.where(is_one_of(f.col("state"), UNDECIDED)).select(
        "topic", f.lit("").alias("subscriber"), _turn(DECIDES), f.col("created_ms").alias("prepared_ms")
    )
    waiting = (
        deliveries(messages, subscribers)
        .where(~is_one_of(f.col("state"), CLOSED))
        .select("topic", "subscriber", _turn(DELIVERS), "prepared_ms")
    )
    return (
        undecided.unionByName(waiting)
        .groupBy("topic", "subscriber", "turn")
        .agg(f.count(f.lit(1)).alias("open"), f.min("prepared_ms").alias("oldest_ms"))
        .orderBy("oldest_ms", "topic", "subscriber")
    )


def compared(messages: DataFrame, subscribers: DataFrame, from_ms: int) -> DataFrame:
    """MESSAGE with topic, of two periods of one length -> one row per period: current boolean, and the figures below.

    messages, committed, rolled_back, undecided, deliveries, acked, first_attempt, failed, attempts bigint; deliver_p50 ...
    from_ms: when the current period begins.
    """
    sums = production(messages.withColumn("topic", _current("created_ms", from_ms)))
    delivered = deliveries(messages, subscribers).withColumns(
        {"topic": _current("prepared_ms", from_ms), "subscriber": f.lit("")}
    )
    columns = ("topic", "messages", "committed", "rolled_back", "undecided")
    both = sums.select(*columns).join(consumption(delivered), "topic", "left").drop("subscriber")
    return both.withColumn("current", f.col("topic") == _CURRENT).drop("topic").orderBy("current")


_CURRENT = "current"


def _current(column: str, from_ms: int) -> Column:
    return f.when(f.col(column) >= from_ms, _CURRENT).otherwise("before")


def latencies(delivered: DataFrame) -> DataFrame:
    """Rows of `deliveries` -> topic, subscriber string, step int, deliveries bigint; acked ones, by how long they took.

    step n: from LATENCY_STEPS[n] milliseconds on; the last one has no end.
    """
    took = _possible(f.col("closed_ms") - f.col("decided_ms") - f.col("delay_ms"))
    step = f.lit(0)
    for number, limit in enumerate(LATENCY_STEPS):
        step = f.when(took >= limit, number).otherwise(step)
    acked = delivered.where((f.col("state") == int(ConsumptionState.ACKED)) & took.isNotNull())
    return (
        acked.groupBy("topic", "subscriber", step.alias("step"))
        .agg(f.count(f.lit(1)).alias("deliveries"))
        .orderBy("topic", "subscriber", "step")
    )


LATENCY_STEPS = (0, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 600_000, 3_600_000, 86_400_000)


def heat(messages: DataFrame, step_ms: int) -> DataFrame:
    """MESSAGE -> shard smallint, at_ms bigint, messages bigint: by shard and the `step_ms` in which they were prepared."""
    at = f.col("created_ms") - f.pmod(f.col("created_ms"), f.lit(step_ms))
    counted = messages.groupBy("shard", at.alias("at_ms")).agg(f.count(f.lit(1)).alias("messages"))
    return counted.orderBy("shard", "at_ms")


def skew(messages: DataFrame) -> DataFrame:
    """MESSAGE -> shard smallint, messages bigint, consumptions bigint; by shard."""
    sums = (f.count(f.lit(1)).alias("messages"), f.sum(f.size("consumptions")).alias("consumptions"))
    return messages.groupBy("shard").agg(*sums).orderBy("shard")
