"""The archive: Parquet files of closed messages, by run, day and topic, and the manifests that say which runs count.

messages/run=RUN/day=2026-11-21/topic=order.paid/part-*.parquet
removal/RUN/shard=7/part-*                numbers of the messages, for the center's retention duty
intents/RUN.json                          the manifest while the files get their final names: the run was not published yet
manifests/RUN.json                        the same file, moved there last: without it a run does not exist
_staging/RUN/                             a run in progress, or the remains of a killed one

Files are never deleted once they have their final names. An intent is moved, never copied, so it proves that its run
was not published, and the next run finishes what a killed one began. Files with neither an intent nor a manifest may
be the last copies of messages that the center has removed: a run refuses to write while there are any.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.errors import ArchiveDamaged, translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import ARCHIVED, MESSAGE
from tmc_server.domain.manifest import Manifest, ManifestUnreadable, Partition, intent_name, manifest_name

log = logging.getLogger("tmc.pipeline")

_STAGING = "_staging"
PLACES = {"messages": "messages/run={run}", "removal": "removal/{run}"}  # in staging -> its final name
_CLOCKS_APART_MS = 3_600_000  # a database's clock may have been set back by so much since the last run


def fingerprint() -> Column:
    """bigint over every column of a row of MESSAGE and its closed_ms."""
    return f.xxhash64(*MESSAGE.names, "closed_ms")


def hexadecimal(digest: int) -> str:
    """A signed bigint as manifests write it."""
    return f"{digest & (1 << 64) - 1:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files of one partition of one run. problem: why they cannot be trusted; empty: no problem is known."""

    run: str
    part: Partition
    path: str
    problem: str = ""

    @property
    def complaint(self) -> str:
        return f"{self.part.day} {self.part.topic} of run {self.run} with {self.part.messages} messages {self.problem}"


class Archive:
    """path: a folder of this machine or a URL, the same for every worker."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self.folder = HadoopFolder(spark, path)

    # -- reading --------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Every published run, oldest first. Raises ArchiveDamaged."""
        found, unreadable = self.readable()
        if unreadable:
            raise ArchiveDamaged(unreadable[0])
        return found

    def readable(self) -> tuple[list[Manifest], list[str]]:
        """Published runs, oldest first, and what is wrong with manifests that cannot be read."""
        found, unreadable = [], []
        for name in self.folder.names("manifests"):
            if name.endswith(".json"):
                try:
                    text = self.folder.read(f"manifests/{name}")
                    found.append(Manifest.from_json(text, name.removesuffix(".json")))
                except ArchiveDamaged as exc:
                    unreadable.append(str(exc))
                except (ManifestUnreadable, UnicodeError) as exc:
                    unreadable.append(f"{self.folder.path(f'manifests/{name}')}: {exc} Bring it back from a backup.")
        return sorted(found, key=lambda manifest: manifest.before_ms), unreadable

    def messages(
        self, manifests: Sequence[Manifest], skip_missing: bool = False, topics: Mapping[str, set[str]] | None = None
    ) -> DataFrame:
        """The messages of these runs: ARCHIVED, no order; each message once. Columns that old files lack are null.

        Counts and digests of what is read are compared with the manifests first.
        skip_missing: leave out folders that are gone or damaged instead of raising ArchiveDamaged.
        topics: by run, the only ones whose files are looked at.
        """
        wanted = [folder for manifest in manifests for folder in self._folders(manifest, topics)]
        return self._rows(_sound(self._counted(wanted), skip_missing)).select(*ARCHIVED.names)

    def numbers(self, manifests: Sequence[Manifest]) -> DataFrame:
        """shard smallint, id bigint of the messages of these runs, as far as their files are there."""
        wanted = [folder for manifest in manifests for folder in self._folders(manifest)]
        return self._rows(_sound(wanted, skip_missing=True)).select("shard", "id")

    def verify(self, manifests: Sequence[Manifest]) -> Sequence[Folder]:
        """Every partition of these runs, after reading all columns of all rows, with what is wrong with it."""
        return self._counted([each for manifest in manifests for each in self._folders(manifest)], completely=True)

    def listed(self, run: str) -> Mapping[int, int]:
        """How many numbers a run lists for the center to remove, by shard."""
        if not self.folder.exists(f"removal/{run}"):
            return {}
        with translated():
            read = self._spark.read.text(self.folder.path(f"removal/{run}"))
            return {int(row["shard"]): row["count"] for row in read.groupBy("shard").count().collect()}

    def unlisted(self, known: Iterable[str]) -> Sequence[str]:
        """Folders under final names of runs that are not among `known`."""
        runs = set(known)
        messages = [f"messages/{name}" for name in self.folder.names("messages") if name.startswith("run=")]
        lists = [f"removal/{name}" for name in self.folder.names("removal")]
        return [name for name in (*messages, *lists) if _run_of(name) not in runs]

    def _folders(self, manifest: Manifest, topics: Mapping[str, set[str]] | None = None) -> list[Folder]:
        """Of one run, compared with its manifest in numbers of files and bytes."""
        return [
            self._folder(manifest.run, part)
            for part in manifest.partitions
            if topics is None or part.topic in topics.get(manifest.run, ())
        ]

    def _folder(self, run: str, part: Partition) -> Folder:
        name = f"messages/run={run}/day={part.day}/topic={part.topic}"
        path, size = self.folder.path(name), self.folder.size(name)
        problem = ""
        if size is None:
            problem = "is gone"
        elif part.digest and size != (part.files, part.bytes):
            problem = f"has {size[0]} files with {size[1]} bytes instead of {part.files} with {part.bytes}"
        return Folder(run=run, part=part, path=path, problem=problem)

    def _counted(self, folders: Sequence[Folder], completely: bool = False) -> list[Folder]:
        """The same folders, with problems of their rows. completely: every column is read, not only fingerprints."""
        good = [each for each in folders if not each.problem]
        try:
            sums = self._sums(good, completely)
        except ArchiveDamaged:  # a file among them cannot be read: which?
            sums = {}
            for each in good:
                try:
                    sums |= self._sums([each], completely)
                except ArchiveDamaged as exc:
                    log.debug("%s", exc)
                    sums[each.run, each.part.day, each.part.topic] = None
        return [each if each.problem else _compared(each, sums) for each in folders]

    def _sums(self, folders: Sequence[Folder], completely: bool) -> dict[tuple[str, str, str], Any]:
        damaged = f.count_if(f.col("fingerprint") != fingerprint()) if completely else f.lit(0)
        rows = self._rows(folders).groupBy("run", "day", "topic")
        found = rows.agg(
            f.count(f.lit(1)).alias("messages"), f.bit_xor("fingerprint").alias("digest"), damaged.alias("damaged")
        )
        with translated():  # other failures, such as out of memory, say nothing about the files
            return {(row.run, row.day, row.topic): row for row in found.collect()} if folders else {}

    def _rows(self, folders: Sequence[Folder]) -> DataFrame:
        """ARCHIVED with run string."""
        if not folders:
            return self._spark.createDataFrame([], ARCHIVED).withColumn("run", f.lit(""))
        read = self._spark.read.schema(ARCHIVED).option("basePath", self.folder.path("messages"))
        with translated():
            return read.parquet(*[each.path for each in folders])

    # -- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, now_ms: int) -> Iterator[Staging]:
        """Clean up after earlier runs and start the only run that writes. Raises AnotherRun.

        Its time and name are later than those of all earlier runs, whatever the clock says: the center processes runs
        in the order of their names.
        """
        with self.folder.alone(moment(now_ms)):
            self._sweep()
            earlier = self.manifests()
            self._refuse_the_future(earlier, now_ms)
            at_ms = max([now_ms, *(manifest.written_ms + 1000 for manifest in earlier)])
            staging = Staging(self.folder, f"{moment(at_ms)}-{secrets.token_hex(3)}", at_ms, earlier)
            try:
                yield staging
            except Exception:  # a signal leaves cleaning up to the next run: the JVM may give it another call's answer
                self._clean(staging)
                raise
            self._clean(staging)

    def _clean(self, staging: Staging) -> None:
        if not self.folder.exists(intent_name(staging.run)):  # else the next run finishes it
            self.folder.remove(f"{_STAGING}/{staging.run}")

    def _refuse_the_future(self, earlier: Sequence[Manifest], now_ms: int) -> None:
        """Raise ArchiveDamaged if a run ends in the future: later runs would skip messages closed until then."""
        for manifest in earlier:
            if manifest.before_ms > now_ms + _CLOCKS_APART_MS:
                raise ArchiveDamaged(
                    f"{self.folder.path(manifest_name(manifest.run))} says that closing times before "
                    f"{moment(manifest.before_ms)} are archived, which is in the future: bring it back from a backup, or "
                    "correct the clocks of the databases."
                )

    def _sweep(self) -> None:
        """Publish runs that were killed while publishing; delete other unpublished files. Raises ArchiveDamaged."""
        known = {manifest.run for manifest in self.manifests()}
        for name in self.folder.names("intents"):
            self._finish(name.removesuffix(".json"), known)
        left = self.unlisted({manifest.run for manifest in self.manifests()})
        if left:
            raise ArchiveDamaged(
                f"{self.folder.path(left[0])} belongs to a run without a manifest ({len(left)} such folders), and may be all "
                f"that is left of its messages: bring back {self.folder.path(manifest_name(_run_of(left[0])))} from a backup. "
                "Nothing was written or deleted."
            )
        self.folder.remove(_STAGING)
        for name in self.folder.names():
            if name.endswith(".unfinished"):
                self.folder.remove(name)

    def _finish(self, run: str, known: set[str]) -> None:
        """Publish a run whose files were complete when it was killed. Raises ArchiveDamaged: they are not there any more."""
        intent = intent_name(run)
        if run in known:  # somebody copied instead of moving
            self.folder.remove(intent)
            return
        try:
            manifest = Manifest.from_json(self.folder.read(intent), run)
        except ManifestUnreadable as exc:
            raise ArchiveDamaged(f"{self.folder.path(intent)}: {exc}") from exc
        staging = Staging(self.folder, run, manifest.written_ms, ())
        missing = staging.move() if manifest.messages else []
        if len(missing) == len(PLACES):
            self.folder.remove(intent)  # nothing of it has its final name
            return
        bad = [each.complaint for each in self._folders(manifest) if each.problem]
        bad += [f"{name} is gone" for name in missing]
        if bad:
            raise ArchiveDamaged(f"Run {run} was killed while it published, and {bad[0]}: bring it back from a backup.")
        self.folder.move(intent, manifest_name(run))
        log.warning("published run %s, which was killed while it did so: %d messages", run, manifest.messages)


class Staging:
    """The unpublished files of one run. earlier: the manifests of the runs before it, oldest first."""

    def __init__(self, folder: HadoopFolder, run: str, at_ms: int, earlier: Sequence[Manifest]) -> None:
        self._folder = folder
        self.run = run
        self.at_ms = at_ms
        self.earlier = earlier

    @property
    def messages(self) -> str:
        """Where Spark writes the messages."""
        return self._folder.path(f"{_STAGING}/{self.run}/messages")

    @property
    def removal(self) -> str:
        """Where Spark writes the numbers."""
        return self._folder.path(f"{_STAGING}/{self.run}/removal")

    def size(self, day: str, topic: str) -> tuple[int, int]:
        """Files and bytes of one partition."""
        return self._folder.size(f"{_STAGING}/{self.run}/messages/day={day}/topic={topic}") or (0, 0)

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest as an intent, move the files, then the intent: until then the run is invisible."""
        self._folder.write(intent_name(self.run), manifest.to_json())
        if manifest.messages:
            self.move()
        self._folder.move(intent_name(self.run), manifest_name(self.run))

    def move(self) -> Sequence[str]:
        """Move files and lists from staging to their final names. Returns: those found in neither place."""
        missing = []
        for name, final in PLACES.items():
            place, staged = final.format(run=self.run), f"{_STAGING}/{self.run}/{name}"
            if not self._folder.exists(place):
                if self._folder.exists(staged):
                    self._folder.move(staged, place)
                else:
                    missing.append(place)
        return missing


def _run_of(name: str) -> str:
    """Of messages/run=RUN and removal/RUN."""
    return name.rpartition("/")[2].removeprefix("run=")


def _compared(folder: Folder, sums: Mapping[tuple[str, str, str], Any]) -> Folder:
    part = folder.part
    sum_ = sums.get((folder.run, part.day, part.topic))
    if sum_ is None:
        problem = "cannot be read"
    elif sum_.messages != part.messages:
        problem = f"has {sum_.messages} rows"
    elif sum_.damaged:
        problem = f"has {sum_.damaged} rows that differ from their fingerprints"
    elif part.digest and hexadecimal(sum_.digest) != part.digest:
        problem = "has other rows than were archived: their digest differs"
    else:
        problem = ""
    return Folder(run=folder.run, part=part, path=folder.path, problem=problem)


def _sound(folders: Sequence[Folder], skip_missing: bool) -> list[Folder]:
    """Those without a problem. Raises ArchiveDamaged."""
    bad = [each for each in folders if each.problem]
    if bad and not skip_missing:
        raise ArchiveDamaged(
            f"{len(bad)} folders of the archive are damaged. {bad[0].complaint}: bring it back from a backup, or repeat with "
            "--skip-missing."
        )
    for each in bad:
        log.warning("left out: %s", each.complaint)
    return [each for each in folders if not each.problem]


def moment(ms: int) -> str:
    """A time as runs are named: 20261121T053000, UTC."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y%m%dT%H%M%S}"


def subscriber_names(manifests: Sequence[Manifest]) -> dict[int, tuple[str, str]]:
    """(topic, subscriber) by subscription number; newer runs take precedence."""
    found: dict[int, tuple[str, str]] = {}
    for manifest in manifests:
        found |= {int(number): (name[0], name[1]) for number, name in manifest.names["subscriptions"].items()}
    return found
