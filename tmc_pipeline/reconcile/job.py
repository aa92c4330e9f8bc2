"""One reconciliation: read the rows of all sides, judge them, write details and a summary.

The center's tables are read completely before the archive's manifests are listed: whatever the retention duty removes
in the meantime was archived before, so no message is missed.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.archive.contents import Archive, moment, subscriber_names
from tmc_pipeline.center import CenterTables
from tmc_pipeline.errors import translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import on_disk, small_table
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.reconcile.verdicts import (
    AGREED,
    CLOCKS_APART_MS,
    PENDING,
    VERDICTS,
    Audited,
    by_message,
    center_claims,
    judged,
    noted_claims,
    outlined,
    relations,
)
from tmc_pipeline.settings import LedgerSource
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.manifest import Manifest
from tmc_server.domain.message import MessageState

log = logging.getLogger("tmc.pipeline")

_ROWS_OF_A_PARTITION = 250_000  # sorted in memory by one task
_SWITCH_MS = 60_000  # this close to the start or end of a subscription, a server may have used either state
_NEVER_MS = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run found. verdicts: messages by verdict.  well: no discrepancy, and every relation holds.

    bad_clocks: messages and deliveries with a time in the future, which excuses nothing.
    """

    run: str
    path: str
    verdicts: Mapping[str, int]
    by_topic: Sequence[Mapping[str, Any]]
    relations: Sequence[Mapping[str, Any]]
    sources: Sequence[Mapping[str, Any]]
    bad_clocks: int

    @property
    def discrepancies(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if verdict not in (AGREED, PENDING))

    @property
    def well(self) -> bool:
        return not self.discrepancies and all(each["holds"] for each in self.relations)

    def to_json(self) -> str:
        values = {
            "run": self.run,
            "well": self.well,
            "discrepancies": self.discrepancies,
            "verdicts": self.verdicts,
            "by_topic": self.by_topic,
            "relations": self.relations,
            "sources": self.sources,
            "bad_clocks": self.bad_clocks,
        }
        return json.dumps(values, indent=1, ensure_ascii=False)


class Reconciliation:
    """archive: None: there is none.  folder: where results go."""

    def __init__(
        self,
        spark: SparkSession,
        center: CenterTables,
        archive: Archive | None,
        ledgers: Ledgers,
        folder: HadoopFolder,
        tolerance_ms: int,
        skip_missing: bool = False,
    ) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._ledgers = ledgers
        self._folder = folder
        self._tolerance_ms = tolerance_ms
        self._skip_missing = skip_missing

    def run(self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource]) -> Summary:
        """Raises PipelineError."""
        with translated(), ExitStack() as kept:
            self._center.check()
            now = self._center.now_ms()
            run = f"{moment(now)}-{secrets.token_hex(3)}"
            notes = [(source, self._ledgers.produced(source, producers)) for source in producers]
            notes += [(source, self._ledgers.consumed(source, consumers)) for source in consumers]
            # Numbered: Spark would cache identical frames once, and fill that cache twice at the same time.
            noted = [
                kept.enter_context(on_disk(frame.withColumn("source", f.lit(number))))
                for number, (_, frame) in enumerate(notes)
            ]
            # This reads the ledgers, before their horizons are read.
            sources = _counted([source for source, _ in notes], noted, self._center.now_ms() + CLOCKS_APART_MS)
            bodies = any("body_sha256" in source.columns for source, _ in notes)
            hot = kept.enter_context(on_disk(outlined(self._center.messages(), bodies)))
            messages = hot.count()  # Reads them: before the manifests are listed.
            log.info("run %s: %d messages in the center's tables", run, messages)
            center, archived = [hot], list[Manifest]()
            if self._archive is not None:
                archived = self._archive.manifests()
                center.append(outlined(self._archive.messages(archived, self._skip_missing), bodies))
            audited = self._audited(producers, consumers, archived)
            claims = [self._claims(_all(center), archived), *map(noted_claims, noted)]
            read_ms = self._center.now_ms()
            rows_in_all = messages + sum(each.messages for each in archived) + sum(each["rows"] for each in sources)
            partitions = partitions_of(rows_in_all, self._spark.sparkContext.defaultParallelism)
            judgement = judged(_all(claims), audited, now, self._tolerance_ms, partitions, read_ms)
            rows = kept.enter_context(on_disk(judgement))
            summary = self._summary(run, rows, audited, sources)
            self._write(run, rows, summary)
        return summary

    def _claims(self, outlines: DataFrame, archived: Sequence[Manifest]) -> DataFrame:
        """Claims of the center. archived: manifests whose names are used where the catalog no longer has them."""
        names = self._center.names
        due: dict[int, list[dict[str, int]]] = {number: [] for number in names.topics}
        live: dict[int, int] = {}
        for number, life in names.lives.items():
            to_ms = _NEVER_MS if life.to_ms is None else life.to_ms - _SWITCH_MS
            due.setdefault(life.topic_no, []).append(
                {
                    "subscription_no": number,
                    "from_ms": life.from_ms + (_SWITCH_MS if life.from_ms else 0),
                    "to_ms": to_ms,
                }
            )
            if life.to_ms is None:
                live[number] = life.from_ms
        topics = small_table(
            self._spark,
            [(number, names.topics.get(number, f"topic-{number}"), each) for number, each in due.items()],
            "topic_no int, topic string, subscriptions array<struct<subscription_no: int, from_ms: bigint, to_ms: bigint>>",
        )
        apps = small_table(self._spark, names.apps.items(), "producer_no int, producer string")
        known = {number: (subscriber, topic) for number, (topic, subscriber) in subscriber_names(archived).items()}
        known |= {number: (subscriber, topic) for number, (topic, subscriber, _) in names.subscriptions.items()}
        subscribed = small_table(
            self._spark,
            [(number, *each, live.get(number)) for number, each in known.items()],
            "subscription_no int, subscriber string, subscribed string, live_ms bigint",
        )
        return center_claims(outlines, topics, apps, subscribed)

    def _audited(
        self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], archived: Sequence[Manifest]
    ) -> Audited:
        removed_ms = self._center.horizon_ms()
        by_list = removed_ms <= max((manifest.before_ms for manifest in archived), default=0)
        return Audited(
            producers=_since(
                (source.app, max(source.since_ms, self._ledgers.horizon_ms(source))) for source in producers
            ),
            subscribers=_since((f"{source.app}.{source.tag}", source.since_ms) for source in consumers),
            sdk_ledgers=frozenset(source.app for source in producers if source.is_sdk),
            center_ms=0 if by_list else removed_ms,  # removed by age: what became of those is unknown
        )

    def _summary(self, run: str, rows: DataFrame, audited: Audited, sources: Sequence[Mapping[str, Any]]) -> Summary:
        counted = by_message(rows).groupBy("topic", "verdict").count().orderBy("topic", "verdict").collect()
        totals = {verdict: sum(row["count"] for row in counted if row.verdict == verdict) for verdict in VERDICTS}
        related = relations(rows).where(f.col("subscriber").isin(list(audited.subscribers)))
        return Summary(
            run=run,
            path=self._folder.path(run),
            verdicts=totals,
            by_topic=[{"topic": row.topic, "verdict": row.verdict, "messages": row["count"]} for row in counted],
            relations=[_relation(row.asDict()) for row in related.orderBy("topic", "subscriber").collect()],
            sources=sources,
            bad_clocks=rows.where("bad_clock").count(),
        )

    def _write(self, run: str, rows: DataFrame, summary: Summary) -> None:
        """Details of whatever is not agreed as Parquet, of discrepancies as CSV too; the summary last, under its final name."""
        staging = f"_staging/{run}"
        found = rows.where(f.col("verdict") != AGREED).orderBy("verdict", "message_id", "subscriber")
        try:
            found.write.parquet(self._folder.path(f"{staging}/details.parquet"))
            plain = found.where(f.col("verdict") != PENDING).coalesce(1)
            written = plain.select(*_for_people()).write.options(
                header="true", escape='"', quoteAll="true", lineSep="\r\n"
            )
            written.csv(self._folder.path(f"{staging}/details.csv"))
            self._folder.write(f"{staging}/summary.json", summary.to_json())
            self._folder.move(staging, run)
        finally:
            self._folder.remove(staging)


def partitions_of(rows: int, cores: int) -> int:
    """Number of shuffle partitions for `rows`: at least one per core, and enough that each fits in memory."""
    return max(cores, -(-rows // _ROWS_OF_A_PARTITION))


_IN_CSV = (
    "verdict",
    "message_id",
    "subscriber",
    "topic",
    "producer",
    "message_key",
    "state",
    "committed",
    "rolled_back",
    "unknown",
    "effects",
    "noted_app",
    "at_ms",
)


def _for_people() -> list[Column]:
    """Columns of the details for CSV: states by name, and no text that a spreadsheet would evaluate as a formula."""
    of_message = f.col("subscriber") == ""
    state = f.when(of_message, _name_of(MessageState)).otherwise(_name_of(ConsumptionState))
    texts = {"message_id", "subscriber", "topic", "producer", "message_key", "noted_app"}
    return [
        (state if name == "state" else _no_formula(name) if name in texts else f.col(name)).alias(name)
        for name in _IN_CSV
    ]


def _name_of(states: type[MessageState] | type[ConsumptionState]) -> Column:
    name = f.col("state").cast("string")  # one that this version does not know keeps its number
    for each in states:
        name = f.when(f.col("state") == int(each), each.name).otherwise(name)
    return name


def _no_formula(name: str) -> Column:
    return f.when(f.col(name).rlike(r"^[=+\-@\t\r]"), f.concat(f.lit("'"), name)).otherwise(f.col(name))


def _all(parts: Sequence[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, parts)


def _counted(sources: Sequence[LedgerSource], noted: Sequence[DataFrame], ahead_ms: int) -> list[Mapping[str, Any]]:
    """How many rows each of them has. noted: NOTED with source int. One query over all, so that none waits for another."""
    if not noted:
        return []
    rows = f.count(f.lit(1)).alias("rows")
    nameless = f.count_if(f.col("message_id").isNull()).alias("nameless")
    unknown = f.sum("unknown").alias("unknown")
    ahead = f.count_if(f.col("at_ms") > ahead_ms).alias("ahead")
    columns = ("source", "message_id", "subscriber", "unknown", "at_ms")
    counts = _all([frame.select(*columns) for frame in noted]).groupBy("source", "subscriber")
    seen = counts.agg(rows, nameless, unknown, ahead).collect()
    summaries: list[Mapping[str, Any]] = []
    for number, source in enumerate(sources):
        mine = [row for row in seen if row.source == number]
        others = [row for row in mine if row.subscriber not in ("", f"{source.app}.{source.tag}")]
        summaries.append(
            {
                "app": source.app,
                "tag": source.tag,
                "rows": sum(row.rows for row in mine),
                "rows_without_a_message_id": sum(row.nameless for row in mine),
                "rows_of_other_subscribers": sum(row.rows for row in others),
                "rows_of_unknown_state": sum(row.unknown for row in mine),
                "rows_of_the_future": sum(row.ahead for row in mine),
            }
        )
    return summaries


def _since(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By name, the time since which all sources of that name are complete."""
    since: dict[str, int] = {}
    for name, at_ms in found:
        since[name] = max(since.get(name, 0), at_ms)
    return since


def _relation(row: dict[str, Any]) -> dict[str, Any]:
    """The relation that has to hold, and whether it does. Deliveries under way count on neither side."""
    if row["unconfirmed"]:
        relation = "committed <= consumed <= committed + unconfirmed"
        holds = row["committed"] <= row["consumed"] <= row["committed"] + row["unconfirmed"]
    else:
        relation = "committed = consumed"
        holds = row["committed"] == row["consumed"]
    return {**row, "relation": relation, "holds": holds}
