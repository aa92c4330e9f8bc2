"""One reconciliation: read the rows of all sides, judge them, write details and a summary.

The center's tables are read completely before the archive's manifests are listed: whatever the retention duty removes
in the meantime was archived before, so no message is missed.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_common.spreadsheets import FORMULA_STARTS
from tmc_pipeline.archive.contents import Archive, closed_since, end_of_day_ms, moment
from tmc_pipeline.center import CenterTables, MessageRange, Names
from tmc_pipeline.errors import CannotRun, translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import on_disk, shuffled_into
from tmc_pipeline.reconcile.accepted import Acceptances
from tmc_pipeline.reconcile.cancellations import Cancellations, cancellations
from tmc_pipeline.reconcile.catalog import Catalog, catalog_of
from tmc_pipeline.reconcile.claims import REPLAY, center_claims, no_claims, noted_claims
from tmc_pipeline.reconcile.days import DAY_MS, Days, days_of
from tmc_pipeline.reconcile.explanations import explained
from tmc_pipeline.reconcile.findings import inboxes_out_of_order, out_of_order, repeated_keys
from tmc_pipeline.reconcile.ledgers import CONSUMER, PRODUCER, Kind, Ledgers, Notes, is_shared, key_of, reads_the_same
from tmc_pipeline.reconcile.matching import matched, with_keys
from tmc_pipeline.reconcile.outlines import made_ms, noted_number, number_of, outlined, shard_and_number
from tmc_pipeline.reconcile.scope import SERVERS_CLOCKS_APART_MS, Scope, State, scope_of
from tmc_pipeline.reconcile.verdicts import (
    AGREED,
    CLOCKS_APART_MS,
    DISCREPANCIES,
    NEVER,
    VERDICTS,
    Audited,
    by_message,
    counted,
    judged,
    latest_possible_ms,
)
from tmc_pipeline.settings import LedgerSource
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import EPOCH_MS, created_ms, first_number
from tmc_server.domain.manifest import Chain
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import MessageNumber

log = logging.getLogger("tmc.pipeline")

_ROWS_OF_A_PARTITION = 250_000  # sorted in memory by one task
_ROWS_OF_A_FILE = 1_000_000
_CLOCKS_APART_MS = 3_600_000  # of services and servers
_MEASURED = 20  # notes from which the clock of a source is measured
_FAR_BACK_MS = 30 * DAY_MS


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The findings of a run. verdicts: messages by verdict.  consistent: no discrepancy, and every relation holds.

    bad_clocks: messages and deliveries with a time in the future, which excuses nothing.
    span: since_ms: messages prepared earlier were compared only if the last run left them open, `left` of them;
    until_ms: all that were prepared earlier have been compared by this run or one before; read_ms: when it began;
    open: how many messages it left open.
    """

    run: str
    path: str
    verdicts: Mapping[str, int]
    by_topic: Sequence[Mapping[str, Any]]
    relations: Sequence[Mapping[str, Any]]
    sources: Sequence[Mapping[str, Any]]
    bad_clocks: int
    span: Mapping[str, int | None]

    @property
    def discrepancies(self) -> int:
        return sum(count for verdict, count in self.verdicts.items() if verdict in DISCREPANCIES)

    @property
    def consistent(self) -> bool:
        return not self.discrepancies and all(each["holds"] for each in self.relations)

    def to_json(self) -> str:
        values = {
            "run": self.run,
            "consistent": self.consistent,
            "discrepancies": self.discrepancies,
            "verdicts": self.verdicts,
            "by_topic": self.by_topic,
            "relations": self.relations,
            "sources": self.sources,
            "bad_clocks": self.bad_clocks,
            **self.span,
        }
        return json.dumps(values, indent=1, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Records:
    """What all sides say. center: OUTLINE.  noted: NOTED, None: there are no notes.  rows: how many, about.

    now_ms, read_ms: when the first row was read, and the last.
    """

    center: DataFrame
    noted: DataFrame | None
    rows: int
    now_ms: int
    read_ms: int


@dataclass(frozen=True, kw_only=True)
class Others:
    """Messages that do not match. keys: key bigint.  claims: how many rows of CLAIM are about them, about."""

    keys: DataFrame
    claims: int


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

    def run(
        self,
        producers: Sequence[LedgerSource],
        consumers: Sequence[LedgerSource],
        since: str | int | None = None,
        until_ms: int | None = None,
    ) -> Summary:
        """since, until_ms: as in scope.py. Raises PipelineError."""
        with translated(), ExitStack() as kept:
            self._center.check()
            if self._archive is not None:
                kept.enter_context(self._archive.folder.read_by())
                self._archive.chain()  # refused before everything else is read
            now = self._center.now_ms()
            run = f"{moment(now)}-{secrets.token_hex(3)}"
            state = State(spark=self._spark, folder=self._folder)
            scope = scope_of(state, since, until_ms)
            noted, sources, scope, settled = self._noted(kept, producers, consumers, scope)
            lines = self._lines(kept, consumers)
            bodies = any("body_sha256" in source.columns for source in (*producers, *consumers))
            hot = kept.enter_context(on_disk(outlined(self._center.messages(scope.among), now, bodies)))
            messages = hot.count()  # Reads them: before the manifests are listed.
            log.info("run %s: %d messages in the center's tables", run, messages)
            archived = self._archive.chain() if self._archive is not None else Chain(manifests=())
            center = [
                hot,
                *[kept.enter_context(on_disk(each)) for each in self._archived(archived, scope, now, bodies)],
            ]
            audited = self._audited(producers, consumers, sources, archived)
            in_archive = sum(each.messages for each in archived.partitions if scope.may_have(each))
            records = Records(
                center=_all(center),
                noted=noted,
                rows=messages + in_archive + sum(each["rows"] for each in sources),
                now_ms=now,
                read_ms=self._center.now_ms(),
            )
            kept.enter_context(shuffled_into(self._spark, self._partitions(records.rows)))
            noted_apps = {each.app: None if is_shared(each, producers) else each.app for each in producers}
            canceled = cancellations(self._center, kept)
            apart_ms = self._center.clocks_apart_ms
            catalog = catalog_of(
                self._spark, self._center.names, archived, audited, noted_apps, canceled.spans, apart_ms
            )
            erased = bool(archived.erased)
            findings = self._findings(kept, records, lines, catalog, scope, audited, erased=erased)
            matching, others = self._matched(kept, records, catalog, findings)
            judged_ = kept.enter_context(
                on_disk(self._judged(kept, records, others, catalog, canceled, audited, scope))
            )
            accepted = Acceptances(self._spark, self._folder).valid(now)
            rows = kept.enter_context(on_disk(explained(judged_, findings, accepted)))
            far_ms = now - max(self._tolerance_ms, SERVERS_CLOCKS_APART_MS)
            far_ms = far_ms if until_ms is None else min(until_ms, far_ms)
            span = {"since_ms": scope.from_ms, "until_ms": far_ms, "read_ms": now, "left": scope.left}
            summary = self._summary(run, rows, catalog.matching(matching), audited, sources, span)
            found = kept.enter_context(on_disk(rows.where(f.col("verdict") != AGREED)))
            self._write(run, found, summary, lambda staging: state.write(staging, found, noted, far_ms, settled))
        return summary

    def _noted(
        self, kept: ExitStack, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], scope: Scope
    ) -> tuple[DataFrame | None, Sequence[Mapping[str, Any]], Scope, Days]:
        """NOTED of the messages of the scope, each row once, kept on disk; the sources; the scope, wider if notes about messages
        that were settled have changed; and sums over the notes about messages before it.
        """
        if not (producers or consumers):
            return None, [], scope, Days()
        if scope.last is None:
            compared_from_ms = -(-scope.from_ms // DAY_MS) * DAY_MS
            return *self._read_notes(kept, producers, consumers, scope), scope, Days(from_ms=compared_from_ms)
        before_ms, goes_on = scope.from_ms, scope.from_ms == scope.last.until_ms
        sums = self._ledgers.days(producers, consumers, first_number(before_ms))
        noted, sources = self._read_notes(kept, producers, consumers, scope)
        # Notes about messages that were open may be new: they are compared anyway.
        still_open = days_of(noted.where(made_ms(noted_number("message_id")) < before_ms))
        now = Days(sums=sums, from_ms=scope.last.days.from_ms).plus(still_open, -1)
        known = scope.last.days
        if not goes_on:  # then the first day is not compared as a whole
            now, known = now.before(before_ms), known.before(before_ms)
        oldest_ms = known.news(now, self._cleaned(producers, consumers))
        if oldest_ms is None:
            return noted, sources, scope, now
        log.warning("notes about messages that were settled have changed: comparing from %s on", moment(oldest_ms))
        scope = replace(scope, from_ms=min(oldest_ms, before_ms))
        return *self._read_notes(kept, producers, consumers, scope), scope, now.before(scope.from_ms)

    def _read_notes(
        self, kept: ExitStack, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], scope: Scope
    ) -> tuple[DataFrame, Sequence[Mapping[str, Any]]]:
        """NOTED within the scope, and what the summary says of the sources."""
        first, numbers = scope.notes
        goes_far_back = scope.last is not None and scope.from_ms < scope.last.until_ms - _FAR_BACK_MS
        # All of them by many tasks, rather than most of them by one.
        notes = None if scope.is_everything or goes_far_back else Notes(first=first, numbers=numbers)
        # Numbered: Spark would cache identical frames once, and fill that cache twice at the same time.
        frames = [
            kept.enter_context(
                on_disk(scope.within(frame.withColumn("source", f.lit(number)), noted_number("message_id")))
            )
            for number, frame in enumerate(self._ledgers.noted(producers, consumers, notes))
        ]
        # One query over all, so that none waits for another.
        seen = _counts(_all(frames), self._center.now_ms() + CLOCKS_APART_MS).collect()
        if any(row.ahead for row in seen):  # by the clock of before they were read, which may have taken long
            seen = _counts(_all(frames), self._center.now_ms() + CLOCKS_APART_MS).collect()
        sources = [*producers, *consumers]
        once = [
            frame.drop("source")
            for number, frame in enumerate(frames)
            if number >= len(producers) or not any(reads_the_same(sources[number], each) for each in producers[:number])
        ]
        return _all(once), _summed(sources, seen)

    def _cleaned(self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource]) -> dict[str, int]:
        """Return, by source_key, how far its rows may have been cleaned away."""
        cleaned: dict[str, int] = {}
        for kind, some in ((PRODUCER, producers), (CONSUMER, consumers)):
            for source in some:  # several consumers may share an inbox
                far_ms = max(source.since_ms, self._ledgers.horizon_ms(source, kind) + DAY_MS)
                cleaned[key_of(source, kind)] = max(far_ms, cleaned.get(key_of(source, kind), 0))
        return cleaned

    def _lines(self, kept: ExitStack, consumers: Sequence[LedgerSource]) -> DataFrame | None:
        """LINE of every inbox, read before the center's tables; None: no topic is ordered, or no inbox is known."""
        names = self._center.names
        ordered = {
            name
            for number, (_, name, _) in names.subscriptions.items()
            if names.lives[number].topic_no in names.ordered
        }
        lines = self._ledgers.lines([each for each in consumers if f"{each.app}.{each.tag}" in ordered])
        if lines is None:
            return None
        lines = kept.enter_context(on_disk(lines))
        lines.count()
        return lines

    def _archived(self, chain: Chain, scope: Scope, now_ms: int, bodies: bool) -> list[DataFrame]:
        """OUTLINE of archived messages of the scope."""
        if self._archive is None:
            return []
        number = shard_and_number("shard", "id")
        parts = [part for part in chain.partitions if scope.may_have(part)]
        found = [scope.within(self._archive.messages(parts, self._skip_missing), number)]
        older = [part for part in chain.partitions if scope.may_differ(part)]
        if older and scope.last is not None and scope.last.differing is not None:
            near = f.col("id").between(*scope.last.differing)  # lets the reader skip files
            found.append(scope.within(self._archive.messages(older, self._skip_missing).where(near), number))
        return [outlined(each, now_ms, bodies) for each in found]

    def _findings(
        self,
        kept: ExitStack,
        records: Records,
        lines: DataFrame | None,
        catalog: Catalog,
        scope: Scope,
        audited: Audited,
        *,
        erased: bool,
    ) -> DataFrame | None:
        """FINDING, kept on disk; None: there are none. erased: the archive has messages without their order keys."""
        found = [repeated_keys(records.center, self._center.horizon_ms())]
        ordered = self._center.names.ordered
        if ordered:
            outlines = records.center.where(f.col("topic_no").isin(*sorted(ordered)))
            found.append(out_of_order(outlines, catalog))
            if lines is not None:
                complete = scope.is_everything and not (audited.center_ms or audited.expired or erased)
                acked_before_ms = records.now_ms - self._tolerance_ms
                found.append(inboxes_out_of_order(outlines, lines, catalog, acked_before_ms, complete))
        findings = kept.enter_context(on_disk(_all(found).dropDuplicates(["number", "subscriber"])))
        return findings if findings.take(1) else None

    def _matched(
        self, kept: ExitStack, records: Records, catalog: Catalog, findings: DataFrame | None
    ) -> tuple[list[Any], Others]:
        """Rows of `matched` about messages that match, and the others."""
        latest_ms = latest_possible_ms(records.now_ms, records.read_ms)
        partitions = self._partitions(records.rows)
        found = kept.enter_context(
            on_disk(matched(records.center, records.noted, catalog, latest_ms, partitions, findings))
        )
        matching = found.where(f.col("key").isNull()).collect()
        keys = found.where(f.col("key").isNotNull()).select("key", "claims")
        (row,) = keys.agg(f.count(f.lit(1)).alias("messages"), f.sum("claims").alias("claims")).collect()
        log.info("%d messages match, %d are judged", sum(each.messages for each in matching), row.messages)
        return matching, Others(keys=keys.select("key"), claims=int(row.claims or 0))

    def _judged(
        self,
        kept: ExitStack,
        records: Records,
        others: Others,
        catalog: Catalog,
        canceled: Cancellations,
        audited: Audited,
        scope: Scope,
    ) -> DataFrame:
        """Rows of `judged` about messages of the scope that do not match."""
        none = no_claims(self._spark)
        claims = self._claims(kept, records, others.keys, catalog, canceled, scope) if others.claims else none
        partitions = self._partitions(others.claims)
        rows = judged(claims, audited, records.now_ms, self._tolerance_ms, partitions, records.read_ms)
        # Without originals, which are compared only to verify their replays. Those verdicts are in rows of the originals.
        is_replay = f.col("subscriber").startswith(REPLAY)
        return scope.within(rows, f.when(is_replay, noted_number("message_id")).otherwise(f.col("number")))

    def _claims(
        self,
        kept: ExitStack,
        records: Records,
        keys: DataFrame,
        catalog: Catalog,
        canceled: Cancellations,
        scope: Scope,
    ) -> DataFrame:
        """CLAIM of the records about the messages with these keys, and of the originals of replays among them."""
        outlines = with_keys(records.center, shard_and_number("shard", "id"), keys)
        if not scope.is_everything:
            outlines = _all([outlines, *self._originals(kept, outlines, records.now_ms, scope)])
        claims = center_claims(outlines, catalog.topics, catalog.apps, catalog.subscribers, canceled.each)
        if records.noted is None:
            return claims
        return claims.unionByName(noted_claims(with_keys(records.noted, noted_number("message_id"), keys)))

    def _originals(self, kept: ExitStack, center: DataFrame, now_ms: int, scope: Scope) -> list[DataFrame]:
        """OUTLINE of messages before the scope that were sent again within it: a replay is verified against them."""
        replays = center.where(f.col("replay_of").isNotNull()).select(number_of("replay_of").alias("number"))
        own = scope.within(replays, f.col("number")).select("number")
        wanted = replays.join(own, "number", "left_anti").distinct().collect()
        numbers: dict[int, list[int]] = {}
        for row in wanted:
            if row.number is not None:
                shard, _, number = row.number.partition("-")
                numbers.setdefault(int(shard), []).append(int(number))
        if not numbers:
            return []
        every = [number for each in numbers.values() for number in each]
        in_span = MessageRange(from_ms=scope.from_ms, to_ms=scope.from_ms, numbers=numbers)  # nothing but the numbers
        found = [kept.enter_context(on_disk(outlined(self._center.messages(in_span), now_ms, bodies=False)))]
        found[0].count()
        if self._archive is not None:
            recent = closed_since(created_ms(MessageNumber(min(every))))
            # Listed again: what was removed since the first time was archived before.
            parts = [part for part in self._archive.chain().partitions if recent(part)]
            rows = self._archive.messages(parts, self._skip_missing).where(f.col("id").isin(every))
            found.append(outlined(rows, now_ms, bodies=False))
        return found

    def _partitions(self, rows: int) -> int:
        return partitions_of(rows, self._spark.sparkContext.defaultParallelism)

    def _audited(
        self,
        producers: Sequence[LedgerSource],
        consumers: Sequence[LedgerSource],
        sources: Sequence[Mapping[str, Any]],
        archived: Chain,
    ) -> Audited:
        """sources: of _summed, in the order of producers and consumers."""
        removed_ms = self._center.horizon_ms()
        by_list = removed_ms <= archived.before_ms or any(run in archived.removed for run in self._center.removing())
        behind_ms = [each["clock_behind_ms"] for each in sources]

        def since_ms(source: LedgerSource, kind: Kind, behind_ms: int) -> int:
            """Rows are cleaned by the clock that wrote them, messages are dated by the center's."""
            horizon = self._ledgers.horizon_ms(source, kind)
            apart_ms = min(max(_CLOCKS_APART_MS, behind_ms), DAY_MS)
            return max(source.since_ms, horizon + apart_ms if horizon else 0)

        return Audited(
            producers=_since(
                (each.app, since_ms(each, PRODUCER, behind))
                for each, behind in zip(producers, behind_ms[: len(producers)], strict=True)
            ),
            subscribers=_since(
                (f"{each.app}.{each.tag}", since_ms(each, CONSUMER, behind))
                for each, behind in zip(consumers, behind_ms[len(producers) :], strict=True)
            ),
            noted_from=_noted_from(consumers, self._center.names),
            sdk_ledgers=frozenset(source.app for source in producers if source.is_sdk),
            center_ms=0 if by_list else removed_ms,  # removed by age: what became of those is unknown
            expired=self._expired(archived),
        )

    def _expired(self, archived: Chain) -> dict[int, int]:
        """Return, by number of a topic, the end of the last day that was taken out of the archive."""
        days = archived.expired
        names = {int(number): str(name) for number, name in archived.names["topics"].items()}
        ends = {topic: end_of_day_ms(day) for topic, day in days.items()}
        return {number: ends[name] for number, name in names.items() if name in ends} | {
            int(topic.removeprefix("topic-")): end
            for topic, end in ends.items()
            if topic.removeprefix("topic-").isdigit()
        }

    def _summary(
        self,
        run: str,
        rows: DataFrame,
        matching: tuple[Counter[str], Counter[tuple[str, str]]],
        audited: Audited,
        sources: Sequence[Mapping[str, Any]],
        span: Mapping[str, int | None],
    ) -> Summary:
        """rows: judged.  matching: of Catalog.matching."""
        messages, deliveries = matching
        verdicts: Counter[tuple[str | None, str]] = Counter(
            {(topic, AGREED): count for topic, count in messages.items()}
        )
        for row in by_message(rows).groupBy("topic", "verdict").count().collect():
            verdicts[row.topic, row.verdict] += row["count"]
        counts = counted(rows).collect()
        return Summary(
            run=run,
            path=self._folder.path(run),
            verdicts={each: sum(n for (_, verdict), n in verdicts.items() if verdict == each) for each in VERDICTS},
            by_topic=[
                {"topic": topic, "verdict": verdict, "messages": verdicts[topic, verdict]}
                for topic, verdict in sorted(verdicts, key=lambda each: (each[0] or "", each[1]))
            ],
            relations=_relations(counts, deliveries, audited),
            sources=sources,
            bad_clocks=sum(row.bad_clocks for row in counts),
            span=span,
        )

    def _write(self, run: str, found: DataFrame, summary: Summary, still_open: Callable[[str], int]) -> None:
        """Details of what is not agreed as Parquet, of discrepancies as CSV too; then what is open; the summary last."""
        staging = f"_staging/{run}"
        details = found.orderBy("verdict", "message_id", "subscriber")
        try:
            details.write.parquet(self._folder.path(f"{staging}/details.parquet"))
            plain = details.where(f.col("verdict").isin(*DISCREPANCIES))
            files = -(-summary.discrepancies // _ROWS_OF_A_FILE) or 1
            written = (
                plain.coalesce(files)
                .select(*_for_people())
                .write.options(header="true", escape='"', quoteAll="true", lineSep="\r\n")
            )
            written.csv(self._folder.path(f"{staging}/details.csv"))
            summary = replace(summary, span={**summary.span, "open": still_open(staging)})
            self._folder.rename(staging, run)
            # Last: an object store renames file by file, and a run with a summary has all the others.
            self._folder.write(f"{run}/summary.json", summary.to_json())
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
    "reason",
)


def _for_people() -> list[Column]:
    """Columns of the details for CSV: states by name, and no text that a spreadsheet would evaluate as a formula."""
    of_message = f.col("subscriber") == ""
    state = f.when(of_message, _name_of(MessageState)).otherwise(_name_of(ConsumptionState))
    texts = {"message_id", "subscriber", "topic", "producer", "message_key", "noted_app", "reason"}
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
    return f.when(f.col(name).rlike(f"^[{re.escape(''.join(FORMULA_STARTS))}]"), f.concat(f.lit("'"), name)).otherwise(
        f.col(name)
    )


def _all(parts: Sequence[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, parts)


def _counts(noted: DataFrame, ahead_ms: int) -> DataFrame:
    """NOTED with source -> rows, nameless, unknown, ahead, behind_ms bigint by source and subscriber.

    behind_ms: by how much almost all of its times are not before those of its messages.
    """
    at = f.col("at_ms")
    behind = f.when(at >= EPOCH_MS, made_ms(noted_number("message_id")) - at)
    return noted.groupBy("source", "subscriber").agg(
        f.count(f.lit(1)).alias("rows"),
        f.count_if(f.col("message_id").isNull()).alias("nameless"),
        f.sum("unknown").alias("unknown"),
        f.count_if(f.col("at_ms") > ahead_ms).alias("ahead"),
        # Of a few rows, one bad time would be the measure.
        f.when(f.count(behind) >= _MEASURED, f.percentile_approx(behind, 0.99)).alias("behind_ms"),
    )


def _summed(sources: Sequence[LedgerSource], seen: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return how many rows each of them has. seen: of _counts."""
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
                "clock_behind_ms": max((row.behind_ms or 0 for row in mine), default=0),
            }
        )
    return summaries


def _noted_from(consumers: Sequence[LedgerSource], names: Names) -> dict[tuple[str, str], int]:
    """Return `Audited.noted_from`. Raises CannotRun: a source names a topic that its subscriber does not get."""
    lives: dict[tuple[str, str], list[tuple[int, bool]]] = {}
    for number, life in names.lives.items():
        lives.setdefault(names.subscriptions[number][:2], []).append((life.from_ms, number in names.forwarded))
    found: dict[tuple[str, str], int] = {}
    for source in consumers:
        subscriber = f"{source.app}.{source.tag}"
        own = [pair for pair in lives if pair[1] == subscriber]
        if unknown := set(source.topics) - {topic for topic, _ in own}:
            raise CannotRun(f"{subscriber} has no subscription to {', '.join(sorted(unknown))}: look at its topics.")
        for pair in own:
            since_ms = _after_forwards(lives[pair]) if not source.topics else 0 if pair[0] in source.topics else NEVER
            found[pair] = min(since_ms, found.get(pair, NEVER))
    for (topic, subscriber), since_ms in sorted(found.items()):
        if since_ms == NEVER:
            log.info(
                "effects of %s at %s are not compared: it is forwarded, or not among its topics", topic, subscriber
            )
    return {pair: since_ms for pair, since_ms in found.items() if since_ms}


def _after_forwards(lives: Sequence[tuple[int, bool]]) -> int:
    """Return since when nothing is forwarded. lives: of each registration: since when, and whether it is a forward."""
    last = max((from_ms for from_ms, is_forward in lives if is_forward), default=None)
    if last is None:
        return 0
    return min((from_ms for from_ms, is_forward in lives if not is_forward and from_ms >= last), default=NEVER)


def _since(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return, by name, the time since which all sources of that name are complete."""
    since: dict[str, int] = {}
    for name, at_ms in found:
        since[name] = max(since.get(name, 0), at_ms)
    return since


def _relations(counts: Sequence[Any], matching: Counter[tuple[str, str]], audited: Audited) -> list[dict[str, Any]]:
    """The relation of each topic and subscriber that has to hold, and whether it does.

    Deliveries under way count on neither side.
    counts: of verdicts.counted.  matching: deliveries with their effects, of messages that were not judged.
    """
    by_pair = {(row.topic, row.subscriber): row for row in counts if row.topic is not None}
    unconfirmed: Counter[str] = Counter()
    for (topic, _), row in by_pair.items():
        unconfirmed[topic] += row.unconfirmed
    found = []
    for topic, subscriber in sorted(by_pair.keys() | matching.keys()):
        if audited.noted_since_ms(topic, subscriber) is None:
            continue
        row, matched_, maybe = by_pair.get((topic, subscriber)), matching[topic, subscriber], unconfirmed[topic]
        committed, consumed, open_ = (row.committed, row.consumed, row.open) if row else (0, 0, 0)
        found.append(
            {
                "topic": topic,
                "subscriber": subscriber,
                "committed": committed + matched_,
                "consumed": consumed + matched_,
                "open": open_,
                "unconfirmed": maybe,
                "relation": "committed <= consumed <= committed + unconfirmed" if maybe else "committed = consumed",
                "holds": committed <= consumed <= committed + maybe,
            }
        )
    return found
