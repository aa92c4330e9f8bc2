"""Explain judged rows by what stands beside them: findings, replays that repaired, and discrepancies that were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.frames import small_table
from tmc_pipeline.reconcile.accepted import Acceptance
from tmc_pipeline.reconcile.claims import REPLAY
from tmc_pipeline.reconcile.outlines import noted_number
from tmc_pipeline.reconcile.verdicts import ACCEPTED, AGREED, DISCREPANCIES, LOST, VERDICTS
from tmc_server.domain.consumption import ConsumptionState

_REPLAYS_OF_REPLAYS = 5
FINDING = "number string, subscriber string, found string, why string"


def explained(rows: DataFrame, findings: DataFrame | None, accepted: Sequence[Acceptance]) -> DataFrame:
    """Add to judged rows what takes more than one row to see. Reads them several times: keep them on disk.

    findings: FINDING, verdicts on several messages, None: there are none.  accepted: those that have not expired.
    """
    if findings is not None:
        rows = _with_findings(rows, findings)
    (seen,) = rows.agg(
        f.count_if(f.col("subscriber").startswith(REPLAY) & (f.col("verdict") == AGREED)).alias("replays"),
        f.count_if(f.col("verdict") == LOST).alias("lost"),
    ).collect()
    if seen.replays and seen.lost:
        rows = _repaired(rows)
    return _accepted(rows, accepted) if accepted else rows


def _with_findings(rows: DataFrame, findings: DataFrame) -> DataFrame:
    """The worse of both verdicts."""
    ranks = f.array(*[f.lit(each) for each in VERDICTS])
    joined = rows.join(findings, ["number", "subscriber"], "left")
    is_worse = f.coalesce(
        f.array_position(ranks, f.col("found")) > f.array_position(ranks, f.col("verdict")), f.lit(False)
    )
    return joined.withColumns(
        {
            "verdict": f.when(is_worse, f.col("found")).otherwise(f.col("verdict")),
            "reason": f.when(is_worse, f.col("why")).otherwise(f.col("reason")),
            "until_ms": f.when(~is_worse, f.col("until_ms")),
        }
    ).drop("found", "why")


def _repaired(rows: DataFrame) -> DataFrame:
    """Rows with what was lost at a subscriber as AGREED, where a proven replay, or one of that, had its effect there."""
    proven = f.col("subscriber").startswith(REPLAY) & (f.col("verdict") == AGREED)
    replays = rows.where(proven).select(
        f.col("number").alias("original"), noted_number("message_id").alias("replay_number")
    )
    had_effect = (f.col("state") == int(ConsumptionState.ACKED)) & (f.col("effects") > 0) & (f.col("subscriber") != "")
    effects = rows.where(had_effect & (f.col("verdict") == AGREED)).select(
        f.col("number").alias("replay_number"), f.col("subscriber").alias("receiver")
    )
    done = found = replays.join(effects, "replay_number").select("original", "receiver").distinct()
    for _ in range(
        _REPLAYS_OF_REPLAYS
    ):  # one may be lost as well, and be replayed: what repairs it repairs its original
        if not found.take(1):
            break
        again = found.withColumnRenamed("original", "replay_number")
        found = replays.join(again, "replay_number").select("original", "receiver").distinct()
        done = done.union(found)
    done = done.distinct().withColumn("done", f.lit(True))
    is_lost = f.col("verdict") == LOST
    joined = rows.join(
        done, is_lost & (f.col("number") == f.col("original")) & (f.col("subscriber") == f.col("receiver")), "left"
    )
    repaired = f.coalesce("done", f.lit(False))
    return joined.withColumns(
        {"verdict": f.when(repaired, AGREED).otherwise(f.col("verdict")), "repaired": repaired}
    ).drop("original", "receiver", "done")


def _accepted(rows: DataFrame, accepted: Sequence[Acceptance]) -> DataFrame:
    """An acceptance is of one verdict on one row: whatever else is found about the message is reported."""
    texts = {(each.number, each.subscriber, each.verdict): each.explanation for each in accepted}
    columns = "number string, subscriber string, verdict string, explanation string"
    listed = small_table(rows.sparkSession, [(*key, text) for key, text in texts.items()], columns)
    joined = rows.join(f.broadcast(listed), ["number", "subscriber", "verdict"], "left")
    is_accepted = f.col("explanation").isNotNull() & f.col("verdict").isin(*DISCREPANCIES)
    return joined.withColumns(
        {
            "reason": f.when(is_accepted, f.col("explanation")).otherwise(f.col("reason")),
            "verdict": f.when(is_accepted, ACCEPTED).otherwise(f.col("verdict")),
        }
    ).drop("explanation")
