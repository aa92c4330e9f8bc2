"""Deliveries that operators canceled: from the audit trail, and from what bulk jobs did, in the center's databases."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tmc_pipeline.center import CenterTables
from tmc_pipeline.frames import on_disk
from tmc_server.domain.bulk import BulkAction, ItemOutcome

_FORGOTTEN = 2  # tmc_bulk_progress.finished: the outcomes were deleted
_BROADCAST = 100_000
_CLOCKS_APART_MS = 10_000  # of the databases of catalog and shard


@dataclass(frozen=True, kw_only=True)
class Cancellations:
    """each: id bigint, subscription_no int, cancelled_ms bigint, by_operator boolean; None: there are none.

    spans: by subscription: shard, from_ms, to_ms of bulk jobs whose outcomes are forgotten: what they selected there may be
    theirs if it was canceled in that time.
    """

    each: DataFrame | None = None
    spans: Mapping[int, Sequence[Mapping[str, int]]]


def cancellations(center: CenterTables, kept: ExitStack) -> Cancellations:
    """Read them. A delivery is found by number, subscription and the time of its cancellation, which is that of its record.

    kept: keeps them on disk.
    """
    single = center.from_each(
        "SELECT subject, at_ms FROM tmc_audit WHERE action = 'cancel consumption'", "subject STRING, at_ms BIGINT"
    )
    number, subscription = (f.regexp_extract("subject", r"^message (\d+) subscription (\d+)$", n) for n in (1, 2))
    every = single.select(
        number.try_cast("bigint").alias("id"),
        subscription.try_cast("int").alias("subscription_no"),
        f.col("at_ms").alias("cancelled_ms"),
    )
    jobs = center.from_catalog(
        f"SELECT id, selection, start_ms FROM tmc_bulk_job WHERE action = {int(BulkAction.CANCEL)}",
        "id BIGINT, selection STRING, start_ms BIGINT",
    )
    spans: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    if jobs:
        apart_ms = _CLOCKS_APART_MS + center.clocks_apart_ms
        numbers = ", ".join(str(int(job.id)) for job in jobs)
        items = center.from_each(
            "SELECT message_id, subscription_no, at_ms FROM tmc_bulk_item "
            f"WHERE outcome = {int(ItemOutcome.DONE)} AND job_id IN ({numbers})",
            "message_id BIGINT, subscription_no INT, at_ms BIGINT",
        )
        every = every.union(items)
        forgotten = center.from_each(
            f"SELECT job_id, shard, updated_ms FROM tmc_bulk_progress WHERE finished = {_FORGOTTEN} AND job_id IN ({numbers})",
            "job_id BIGINT, shard INT, updated_ms BIGINT",
        ).collect()
        by_number = {int(job.id): job for job in jobs}
        for row in forgotten:
            job = by_number[int(row.job_id)]
            for shard, _, receiver in json.loads(job.selection)["places"]:
                if shard == row.shard:
                    from_ms, to_ms = int(job.start_ms) - apart_ms, int(row.updated_ms) + apart_ms
                    span = {"shard": shard, "from_ms": from_ms, "to_ms": to_ms}
                    spans[receiver].append(span)
    found = kept.enter_context(on_disk(every.distinct().withColumn("by_operator", f.lit(True))))
    count = found.count()
    return Cancellations(each=(f.broadcast(found) if count <= _BROADCAST else found) if count else None, spans=spans)
