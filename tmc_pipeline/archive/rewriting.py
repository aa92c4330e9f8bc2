"""Runs that rewrite what is archived: compact small files, expire old days, erase content, take out what is not so any more.

Each publishes one manifest that lists the new folders and retires the old ones. Retired files move out of sight at once and
are deleted a day later, so that a job that reads them can finish; those of erased messages are deleted at once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import xor

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_common.headers import REPLAY_OF, REPLAY_TO
from tmc_pipeline.archive.contents import Archive, Folder, closed_since, day_of, fingerprint
from tmc_pipeline.archive.job import DAY_MS, OPEN, PLAIN, by_folder, dated, verified
from tmc_pipeline.archive.publishing import Publishing, Staging, retired_before
from tmc_pipeline.archive.restore import topic_names, with_ids
from tmc_pipeline.center import CenterTables
from tmc_pipeline.errors import ArchiveDamaged, CannotRun, JobFailed, translated
from tmc_pipeline.frames import ARCHIVED, on_disk, small_table, without
from tmc_server.domain.checks import DECIDED_BY_CHECK
from tmc_server.domain.ids import MessageId, created_ms
from tmc_server.domain.manifest import Chain, Erasure, Manifest, Partition, Place, Removal, RemovedRun, Rewinding

log = logging.getLogger("tmc.pipeline")

FILE_BYTES = 128 << 20
_ROOM = 1.1  # files are planned a tenth smaller, since no two of them come out alike
_KEPT_RETIRED_MS = DAY_MS
_64_BITS = (1 << 64) - 1
_NEVER_MS = (1 << 62) - 1
_MANIFESTS = 24  # with more of them, a checkpoint is written


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """The result of a run. before, after: numbers of the folders that it touched, then and now."""

    before: int
    after: int
    messages: int


class Rewriting:
    """center: for its clock, and for how far the retention duty has come."""

    def __init__(self, spark: SparkSession, center: CenterTables, archive: Archive) -> None:
        self._spark = spark
        self._center = center
        self._archive = archive
        self._publishing = Publishing(archive, rewriting=True)

    def compact(self, file_bytes: int = FILE_BYTES) -> Rewritten:
        """Merge files of finished days: one per day, topic and `file_bytes`. Merge manifests.

        Raises PipelineError; ArchiveDamaged, after all that is sound was merged: the rest stays as it is.
        """
        now = self._now()
        before = after = messages = 0
        damaged: list[Folder] = []
        groups: Mapping[tuple[str, str], Sequence[Partition]] = {}
        with translated(), self._archive.folder.read_by(rewriting=True):
            while True:
                done = max((day for day, _ in groups), default="")
                with self._publishing.run(now) as staging:
                    self._purge(now)
                    groups = scattered(staging.chain, done, day_of(now), file_bytes)
                    sound, bad = self._sound_groups(groups)
                    damaged += bad
                    if sound:
                        old = [part for parts in sound.values() for part in parts]
                        new = self._merged(staging, sound, file_bytes)
                        before, after = before + len(old), after + len(new)
                        messages += sum(each.messages for each in new)
                        log.info("%s: %d folders became %d", old[0].place.day, len(old), len(new))
                    elif not groups:
                        self._checkpoint(staging.chain)
                if not groups:
                    break
        if damaged:
            raise ArchiveDamaged(
                f"{len(damaged)} folders were not merged, all others were. {damaged[0].complaint}: bring it back from a backup."
            )
        return Rewritten(before=before, after=after, messages=messages)

    def expire(self, keep_days: int, of_topics: Mapping[str, int]) -> Rewritten:
        """Take days out of the archive that are older than `keep_days`, or as given for a topic; 0: they are kept forever."""
        now = self._now()
        with translated(), self._archive.folder.read_by(rewriting=True), self._publishing.run(now) as staging:
            self._purge(now)
            unknown = sorted(set(of_topics) - set(self._center.names.topics.values()) - _topics(staging.chain))
            if unknown:
                raise CannotRun(f"archive.keep_days_of: no topic is called {unknown[0]}. Nothing was removed.")
            old = [
                part
                for part in staging.chain.partitions
                if _is_expired(part, now, of_topics.get(part.place.topic, keep_days))
            ]
            if old:
                topics = {part.place.topic for part in old}
                last = {name: max(part.place.day for part in old if part.place.topic == name) for name in topics}
                staging.publish(_manifest(staging, retired=old, expired=last))
        return Rewritten(before=len(old), after=0, messages=sum(part.messages for part in old))

    def erase(self, ids: Sequence[MessageId], reason: str) -> Rewritten:
        """Remove key, body, headers and error texts of these messages for good; what remains is needed to reconcile.

        Raises CannotRun: one of them is not in the archive.
        """
        now = self._now()
        with translated(), self._archive.folder.read_by(rewriting=True), self._publishing.run(now) as staging:
            parts = self._holding(staging.chain, ids)
            sound = self._sound(parts)
            rows = self._archive.placed(sound)
            wanted = with_ids(rows, ids).select("shard", "id", "fingerprint").collect()
            missing = [
                str(each) for each in ids if (each.shard, each.number) not in {(row.shard, row.id) for row in wanted}
            ]
            if missing:
                raise CannotRun(
                    f"{missing[0]} is not in the archive: nothing was erased. A run archives it once it has closed."
                )
            expected = sum(part.messages for part in parts)
            new, files = self._written(staging, erased(rows, ids, now, reason), _files_of(parts), expected)
            blanked = [int(row.fingerprint) for row in with_ids(files, ids).select("fingerprint").collect()]
            changes = reduce(xor, [*blanked, *(int(row.fingerprint) for row in wanted)])
            if _digest(new) != _digest(parts) ^ changes & _64_BITS:
                raise JobFailed("Other rows than those to be erased changed. Nothing was published: run it again.")
            records = tuple(Erasure(message_id=str(each), at_ms=now, reason=reason) for each in ids)
            staging.publish(_manifest(staging, partitions=new, retired=parts, erased=records))
        return Rewritten(before=len(parts), after=len(new), messages=len(ids))

    def remove_run(self, run: str, reason: str) -> Rewritten:
        """Take out all that a run archived, or record that a run is gone of which nothing is left here.

        Raises CannotRun: there is no such run, or its files were merged with those of others.
        """
        now, archive = self._now(), self._archive.without(run)
        with (
            translated(),
            archive.folder.read_by(rewriting=True),
            Publishing(archive, rewriting=True).run(now) as staging,
        ):
            chain = staging.chain
            if run in chain.removed:
                raise CannotRun(f"Run {run} was removed before: {chain.removed[run].reason}")
            made = [each for each in chain.manifests if each.run == run and not each.checkpoint]
            old = [part for part in chain.partitions if part.place.run == run]
            if not made and (chain.explains(run) or run not in self._center.removing()):
                raise CannotRun(
                    f"There is no run {run}: the folder manifests and the log of archive runs have their names. One that a "
                    "compaction has merged into a checkpoint can no longer be removed."
                )
            if made and (made[0].retired or not made[0].before_ms):
                raise CannotRun(f"Run {run} archived nothing itself: it rewrote what others had archived.")
            if made and {part.place for part in made[0].partitions} != {part.place for part in old}:
                raise CannotRun(
                    f"The files of run {run} were merged with those of others, or have expired: it cannot be removed."
                )
            record = RemovedRun(run=run, at_ms=now, reason=reason)
            staging.publish(_manifest(staging, retired=old, removed=(record,)))
        return Rewritten(before=len(old), after=0, messages=sum(part.messages for part in old))

    def rewind(self, since_ms: int, reason: str) -> Rewritten:
        """Take out what closed at or after `since_ms` and the center, restored as of that time, has in another state again.

        Messages that the center does not have stay. Run the archive with `everything` next.
        """
        now = self._now()
        with (
            translated(),
            self._archive.folder.read_by(rewriting=True),
            self._publishing.run(now) as staging,
            on_disk(self._superseded(staging.chain, since_ms)) as superseded,
        ):
            by_place = superseded.groupBy("run", "day", "topic").agg(
                f.count(f.lit(1)).alias("messages"), f.bit_xor("fingerprint").alias("digest")
            )
            gone = {Place(run=row.run, day=row.day, topic=row.topic): row for row in by_place.collect()}
            old = [part for part in staging.chain.partitions if part.place in gone]
            messages = sum(row.messages for row in gone.values())
            left = sum(part.messages for part in old) - messages
            new: Sequence[Partition] = []
            if left:
                kept = without(self._archive.placed(self._sound(old)), superseded)
                new, _ = self._written(staging, kept, _files_of(old), left)
                change = reduce(xor, (int(row.digest) for row in gone.values()))
                if _digest(new) != _digest(old) ^ change & _64_BITS:
                    raise JobFailed(
                        "Other rows than those to be taken out changed. Nothing was published: run it again."
                    )
            if old:
                record = Rewinding(since_ms=since_ms, at_ms=now, reason=reason)
                staging.publish(_manifest(staging, partitions=new, retired=old, rewound=(record,)))
        return Rewritten(before=len(old), after=len(new), messages=messages)

    def _superseded(self, chain: Chain, since_ms: int) -> DataFrame:
        """shard, id, run, day, topic, fingerprint of archived messages that the center's tables have, not closed as archived."""
        parts = [part for part in chain.partitions if closed_since(since_ms)(part)]
        rows = self._archive.placed(parts, skip_missing=False).where(f.col("closed_ms") >= since_ms)
        topics = small_table(self._spark, (), "topic_no int, topic string")
        hot = dated(self._center.messages(body=False, attempts=False), topics, _NEVER_MS, _NEVER_MS).select(
            "shard", "id", f.col("day").alias("now_day"), f.col("closed_ms").alias("now_ms")
        )
        differs = (f.col("now_day") == OPEN) | (f.col("now_ms") != f.col("closed_ms"))
        return (
            rows.join(hot, ["shard", "id"])
            .where(f.coalesce(differs, f.lit(True)))
            .select("shard", "id", "run", "day", "topic", "fingerprint")
        )

    def _now(self) -> int:
        with translated():
            self._center.check()
            return self._center.now_ms()

    def _sound(self, parts: Sequence[Partition]) -> Sequence[Partition]:
        """The same, after reading all of them. Raises ArchiveDamaged: damage must not get a new digest."""
        for folder in self._archive.verify(parts):
            if folder.problem:
                raise ArchiveDamaged(f"{folder.complaint}: bring it back from a backup. Nothing was changed.")
        return parts

    def _sound_groups(
        self, groups: Mapping[tuple[str, str], Sequence[Partition]]
    ) -> tuple[dict[tuple[str, str], Sequence[Partition]], list[Folder]]:
        """Return those without damage, after reading all of them, and the folders that are damaged."""
        folders = self._archive.verify([part for parts in groups.values() for part in parts])
        bad = [folder for folder in folders if folder.problem]
        for folder in bad:
            log.warning("not merged: %s", folder.complaint)
        damaged = {(folder.part.place.day, folder.part.place.topic) for folder in bad}
        return {key: parts for key, parts in groups.items() if key not in damaged}, bad

    def _merged(
        self, staging: Staging, groups: Mapping[tuple[str, str], Sequence[Partition]], file_bytes: int
    ) -> Sequence[Partition]:
        """Rewrite and publish the folders of one day, which were verified."""
        old = [part for parts in groups.values() for part in parts]
        counts = {key: planned_files(sum(part.bytes for part in parts), file_bytes) for key, parts in groups.items()}
        new, _ = self._written(staging, self._archive.placed(old), counts, sum(part.messages for part in old))
        if _digest(new) != _digest(old):
            raise JobFailed("The merged files have other rows than before. Nothing was published: run it again.")
        staging.publish(_manifest(staging, partitions=new, retired=old))
        return new

    def _written(
        self, staging: Staging, rows: DataFrame, counts: Mapping[tuple[str, str], int], expected: int
    ) -> tuple[Sequence[Partition], DataFrame]:
        """Write rows, sorted by number so that readers can skip files. counts: number of files by day and topic.

        Returns: the new partitions, and what is read back of them. Raises JobFailed: those are not `expected` rows.
        """
        plan, first = [], 0
        for (day, topic), files in counts.items():
            plan.append((day, topic, first, files))
            first += files
        table = small_table(self._spark, plan, "day string, topic string, first int, files int")
        place = (f.col("first") + f.pmod(f.xxhash64("shard", "id"), f.col("files"))).cast("int")
        (
            rows.join(f.broadcast(table), ["day", "topic"])
            .repartitionById(first, place)
            .select(*ARCHIVED.names)
            .sortWithinPartitions("day", "topic", "id")
            .write.partitionBy("day", "topic")
            .options(**PLAIN)
            .parquet(staging.messages)
        )
        files = self._spark.read.schema(ARCHIVED).parquet(staging.messages)
        return by_folder(verified(files, expected), staging), files

    def _holding(self, chain: Chain, ids: Sequence[MessageId]) -> list[Partition]:
        """The partitions that have one of these messages."""
        recent, topics = closed_since(min(created_ms(each.number) for each in ids)), topic_names(chain, ids)
        parts = [part for part in chain.partitions if part.place.topic in topics and recent(part)]
        rows = self._archive.placed(parts, skip_missing=False)  # a message may be in several
        found = with_ids(rows, ids).select("run", "day", "topic").distinct().collect()
        places = {Place(run=row.run, day=row.day, topic=row.topic) for row in found}
        return [part for part in parts if part.place in places]

    def _purge(self, now_ms: int) -> None:
        for path in retired_before(self._archive.folder, now_ms - _KEPT_RETIRED_MS):
            self._archive.folder.remove(path)

    def _checkpoint(self, chain: Chain) -> None:
        """Write a checkpoint if there are many manifests; delete what the checkpoint before it stands for.

        Not what this one stands for: servers may be reading that.
        """
        if len(chain.manifests) <= _MANIFESTS:
            return
        last = chain.manifests[-1]
        done = self._center.worked_off()
        pending = [each for each in chain.removals if not _is_worked_off(each, done)]
        made = Manifest(
            number=last.number or len(chain.manifests),
            checkpoint=True,
            run=max(each.run for each in chain.manifests),
            since_ms=0,
            before_ms=chain.before_ms,
            written_ms=chain.written_ms,
            names=chain.names,
            partitions=tuple(chain.partitions),
            open=chain.open,
            erased=tuple(chain.erased),
            expired=chain.expired,
            pending=tuple(pending),
            center=chain.center,
            removed=tuple(chain.removed.values()),
            rewound=tuple(each for manifest in chain.manifests for each in manifest.rewound),
        )
        folder = self._archive.folder
        if not folder.create(made.name, made.to_json()):
            return  # another compaction was faster
        log.info("checkpoint %d stands for %d manifests", made.number, len(chain.manifests))
        before = next((each for each in chain.manifests if each.checkpoint), None)
        if before is None:
            return
        kept = {each.run for each in pending}
        for name in folder.names("manifests"):
            if name.endswith(".json") and _stands_for(name, before.number):
                folder.remove(f"manifests/{name}")
        for run in folder.names("removal"):
            if run <= before.run and run not in kept:
                folder.remove(f"removal/{run}")


def scattered(chain: Chain, after: str, today: str, file_bytes: int) -> dict[tuple[str, str], list[Partition]]:
    """Partitions by day and topic, of the first finished day later than `after` that has more files than it needs.

    Empty: there is none.
    """
    groups: dict[tuple[str, str], list[Partition]] = defaultdict(list)
    for part in chain.partitions:
        if after < part.place.day < today:
            groups[part.place.day, part.place.topic].append(part)
    wanted = {
        key: parts
        for key, parts in groups.items()
        if len(parts) > 1 or parts[0].files > planned_files(sum(part.bytes for part in parts), file_bytes)
    }
    oldest = min((day for day, _ in wanted), default="")
    return {key: parts for key, parts in wanted.items() if key[0] == oldest}


def planned_files(size: int, file_bytes: int) -> int:
    """The number of files of at most `file_bytes` that `size` bytes need."""
    return max(1, -(-round(size * _ROOM) // file_bytes)) if size > file_bytes else 1


def erased(rows: DataFrame, ids: Sequence[MessageId], at_ms: int, reason: str) -> DataFrame:
    """ARCHIVED -> ARCHIVED without the content of these messages, with new fingerprints for them.

    What the services wrote goes: key, body, digest, headers, content type, error texts, answers to checks. Numbers, times and
    states stay. So does the proof of a replay: its headers, and its key, which the center made.
    """
    gone = with_ids(rows, ids).select("shard", "id").distinct().withColumn("gone", f.lit(True))
    replay = {name: f.get_json_object("headers", f"$['{name}']") for name in (REPLAY_OF, REPLAY_TO)}
    headers = f.to_json(f.struct(*[value.alias(name) for name, value in replay.items()]))
    is_replay = replay[REPLAY_OF].isNotNull()
    blanks = {
        "message_key": f.when(is_replay, f.col("message_key")).otherwise(""),
        "headers": f.when(is_replay, headers),
        "body": f.lit(b""),
        "digest": f.lit(None).cast("binary"),
        "content_type": f.lit(""),
        "check_answer": f.when(f.col("check_answer") == DECIDED_BY_CHECK, DECIDED_BY_CHECK).otherwise(""),
        "attempts": f.transform("attempts", lambda each: each.withField("error", f.lit(""))),
        "erased_ms": f.lit(at_ms).cast("bigint"),
        "erased_reason": f.lit(reason),
    }
    marked = rows.join(f.broadcast(gone), ["shard", "id"], "left")
    blanked = marked.select(
        *[
            (f.when(f.col("gone"), blanks[name]).otherwise(f.col(name)) if name in blanks else f.col(name)).alias(name)
            for name in ARCHIVED.names
        ],
        "gone",
    )
    return blanked.withColumn(
        "fingerprint", f.when(f.col("gone"), fingerprint()).otherwise(f.col("fingerprint"))
    ).select(*ARCHIVED.names)


def _topics(chain: Chain) -> set[str]:
    return {part.place.topic for part in chain.partitions}


def _is_expired(part: Partition, now_ms: int, keep_days: int) -> bool:
    last = datetime.fromtimestamp(now_ms / 1000, UTC) - timedelta(days=keep_days)
    return keep_days > 0 and part.place.day < f"{last:%Y-%m-%d}"


def _is_worked_off(removal: Removal, done: Callable[[int, str], bool]) -> bool:
    """Return whether the center has removed what it could of this run."""
    return all(done(shard, removal.run) for shard in removal.counts)


def _stands_for(name: str, number: int) -> bool:
    """Return whether a checkpoint of that number stands for a manifest with this name."""
    text = name.partition(".")[0]
    return not text.isdigit() or int(text) < number or (int(text) == number and "checkpoint" not in name)


def _digest(parts: Sequence[Partition]) -> int:
    return reduce(xor, (int(part.digest, 16) for part in parts), 0)


def _manifest(
    staging: Staging,
    *,
    retired: Sequence[Partition],
    partitions: Sequence[Partition] = (),
    erased: tuple[Erasure, ...] = (),
    expired: Mapping[str, str] | None = None,
    removed: tuple[RemovedRun, ...] = (),
    rewound: tuple[Rewinding, ...] = (),
) -> Manifest:
    """Make the manifest of a run that archived nothing."""
    return Manifest(
        run=staging.run,
        since_ms=0,
        before_ms=0,
        written_ms=staging.at_ms,
        names={},
        partitions=tuple(partitions),
        retired=tuple(part.place for part in retired),
        erased=erased,
        expired=expired or {},
        removed=removed,
        rewound=rewound,
    )


def _files_of(parts: Sequence[Partition]) -> Counter[tuple[str, str]]:
    """Return how many files they have, by day and topic."""
    counts: Counter[tuple[str, str]] = Counter()
    for part in parts:
        counts[part.place.day, part.place.topic] += max(1, part.files)
    return counts
