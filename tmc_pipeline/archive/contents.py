"""The archive: Parquet files of closed messages, by day of closing, topic and run, and the manifests that say which count.

messages/day=2026-11-21/topic=order.paid/run=RUN/part-*.parquet
removal/RUN/shard=7/part-*                numbers of the messages, for the center's retention duty
open/RUN/shard=7/part-*                   numbers of messages that were not closed yet, for the next run
manifests/00000042.json                   what run 42 published, or a checkpoint of all runs before
intents/RUN.json, _staging/RUN/           a run that publishes, or works; publishing.py
_retired/RUN/                             files that a later run replaced or that expired; rewriting.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tmc_pipeline.center import CenterTables
from tmc_pipeline.errors import ArchiveDamaged, CannotRun, PipelineError, translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import ARCHIVED, MESSAGE
from tmc_server.domain.ids import MessageId
from tmc_server.domain.manifest import Chain, Manifest, ManifestUnreadable, Partition, Place, current_names

log = logging.getLogger("tmc.pipeline")

_CLOCKS_APART_MS = 3_600_000  # of servers and databases


def fingerprint() -> Column:
    """bigint over every column of a row of MESSAGE and its closed_ms."""
    return f.xxhash64(*MESSAGE.names, "closed_ms")


def hexadecimal(digest: int) -> str:
    """A signed bigint as manifests write it."""
    return f"{digest & (1 << 64) - 1:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files of one partition. problem: why they cannot be trusted; empty: no problem is known."""

    part: Partition
    path: str
    problem: str = ""

    @property
    def complaint(self) -> str:
        place = self.part.place
        return f"{place.day} {place.topic} of run {place.run} with {self.part.messages} messages {self.problem}"


class Archive:
    """path: a folder of this machine or a URL, the same for every worker.  center: whose it is.

    wait_s: how long it waits for another run that uses the archive.  gone: a run that does not count, whatever is there of it.
    """

    def __init__(
        self, spark: SparkSession, path: str, center: CenterTables, *, wait_s: float = 0, gone: str = ""
    ) -> None:
        self._spark = spark
        self._center = center
        self.gone = gone
        self.folder = HadoopFolder(spark, path, wait_s)

    def without(self, run: str) -> Archive:
        """Return the same, whose chain can be read although that run is missing or another center's."""
        return Archive(self._spark, self.folder.path(), self._center, wait_s=self.folder.wait_s, gone=run)

    @property
    def owner(self) -> str:
        """Return the identity of its center, for manifests."""
        return self._center.identity

    def chain(self) -> Chain:
        """Return everything that was published. Raises ArchiveDamaged; CannotRun: it is another center's."""
        found, unreadable = self._readable()
        unreadable += self._missing_end(found, *self._center_says())
        if unreadable:
            raise ArchiveDamaged(unreadable[0])
        return found

    def readable(self) -> tuple[Chain, list[str]]:
        """Return what was published, and what is wrong with manifests that cannot be read, or are missing.

        Works without the center's databases, which may be what was lost. Raises CannotRun: it is another center's.
        """
        found, unreadable = self._readable()
        try:
            center = self._center_says()
        except PipelineError as exc:
            log.warning("whether the newest runs are missing was not compared with the center: %s", exc)
            return found, unreadable
        return found, unreadable + self._missing_end(found, *center)

    def _center_says(self) -> tuple[str, set[str]]:
        """Return who it is, and by which runs it has removed messages last."""
        with translated():
            return self._center.identity, self._center.removing()

    def _missing_end(self, chain: Chain, identity: str, removing: set[str]) -> list[str]:
        """Return a sentence if the center has removed messages by the list of a run that is not here; else nothing.

        Raises CannotRun: the archive is another center's.
        """
        chain = Chain(manifests=tuple(each for each in chain.manifests if each.run != self.gone))
        if chain.center not in ("", identity):
            raise CannotRun(
                f"{self.folder.path()} is the archive of another center ({chain.center[:8]}), and [store] is center "
                f"{identity[:8]}: correct archive.path or [store]."
            )
        unknown = sorted(run for run in removing if run != self.gone and not chain.explains(run))
        newest = max((each.run for each in chain.manifests), default="none")
        return [
            f"{self.folder.path()} lacks run {run}, by which the center has removed messages; the newest run here is "
            f"{newest}. Bring the folders manifests, messages and removal back from a backup; if that run is gone for good: "
            f"tmc pipeline archive remove-run {run} --reason TEXT."
            for run in unknown[-1:]
        ]

    def _readable(self) -> tuple[Chain, list[str]]:
        found, unreadable = [], []
        for name in current_names(self.folder.names("manifests")):
            try:
                found.append(Manifest.from_json(self.folder.read(f"manifests/{name}"), name))
            except ArchiveDamaged as exc:
                unreadable.append(str(exc))
            except (ManifestUnreadable, UnicodeError) as exc:
                unreadable.append(f"{self.folder.path(f'manifests/{name}')}: {exc} Bring it back from a backup.")
        try:
            return Chain.of(found), unreadable
        except ManifestUnreadable as exc:
            unreadable.append(f"{self.folder.path()}: {exc}")
            return Chain(manifests=tuple(sorted(found, key=lambda each: each.written_ms))), unreadable

    def messages(self, partitions: Sequence[Partition], skip_missing: bool = False) -> DataFrame:
        """The messages of these partitions: ARCHIVED, no order; each message once. Columns that old files lack are null.

        Counts and digests of what is read are compared with the manifests first.
        skip_missing: leave out folders that are gone or damaged instead of raising ArchiveDamaged.
        """
        wanted = [self.compared(each) for each in partitions]
        # A page that cannot be read shows when it is read: what is to be left out must be known before.
        counted = self._counted(wanted, completely=skip_missing)
        return self._rows(_sound(counted, skip_missing)).select(*ARCHIVED.names)

    def placed(self, partitions: Sequence[Partition], skip_missing: bool = True) -> DataFrame:
        """ARCHIVED with run string: rows of these partitions, compared with the manifests in numbers of files and bytes only.

        skip_missing: leave out folders that are gone or differ instead of raising ArchiveDamaged.
        """
        return self._rows(_sound([self.compared(each) for each in partitions], skip_missing))

    def numbers(self, partitions: Sequence[Partition]) -> DataFrame:
        """shard smallint, id bigint of the messages of these partitions. Raises ArchiveDamaged: a folder is gone, or differs.

        What is in it would be archived a second time, and be there twice when the folder comes back.
        """
        return self.placed(partitions, skip_missing=False).select("shard", "id")

    def verify(self, partitions: Sequence[Partition]) -> Sequence[Folder]:
        """Return these partitions, after reading all columns of all rows, with what is wrong with each."""
        return self._counted([self.compared(each) for each in partitions], completely=True)

    def listed(self, name: str) -> DataFrame:
        """Message numbers of a removal or open list: shard int, id bigint."""
        with translated():
            read = self._spark.read.text(self.folder.path(name))
            return read.select(f.col("shard").cast("int").alias("shard"), f.col("value").cast("bigint").alias("id"))

    def unlisted(self, chain: Chain) -> Sequence[str]:
        """Folders of messages and lists under final names that no manifest explains. Looks at every folder."""
        explained = {part.place.folder for each in chain.manifests for part in each.partitions}
        explained |= {place.folder for each in chain.manifests for place in each.retired}
        found = self.folder.folders("messages/day=*/topic=*/run=*")
        return [name for name in found if name not in explained] + self.unlisted_runs(chain)

    def unlisted_runs(self, chain: Chain) -> list[str]:
        """The same with a few listings: lists, retired files, and days if there is no manifest at all."""
        known = {each.run for each in chain.manifests}
        covered = max((each.run for each in chain.manifests if each.checkpoint), default="")
        found = [f"{each}/{name}" for each in ("removal", "open", "_retired") for name in self.folder.names(each)]
        runs = {name: name.rpartition("/")[2] for name in found}
        left = [name for name, run in runs.items() if run not in known and run > covered]
        if not chain.manifests:
            left += [f"messages/{name}" for name in self.folder.names("messages") if name.startswith("day=")]
        return left

    def compared(self, part: Partition) -> Folder:
        """Compare it with its manifest in numbers of files and bytes."""
        size, problem = self.folder.size(part.place.folder), ""
        if size is None:
            problem = "is gone"
        elif size != (part.files, part.bytes):
            problem = f"has {size[0]} files with {size[1]} bytes instead of {part.files} with {part.bytes}"
        return Folder(part=part, path=self.folder.path(part.place.folder), problem=problem)

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
                    sums[each.part.place] = None
        return [each if each.problem else _compared(each, sums) for each in folders]

    def _sums(self, folders: Sequence[Folder], completely: bool) -> dict[Place, Any]:
        damaged = f.count_if(f.col("fingerprint") != fingerprint()) if completely else f.lit(0)
        rows = self._rows(folders).groupBy("run", "day", "topic")
        found = rows.agg(
            f.count(f.lit(1)).alias("messages"), f.bit_xor("fingerprint").alias("digest"), damaged.alias("damaged")
        )
        with translated():  # other failures, such as out of memory, say nothing about the files
            return {Place(run=row.run, day=row.day, topic=row.topic): row for row in found.collect()} if folders else {}

    def _rows(self, folders: Sequence[Folder]) -> DataFrame:
        """ARCHIVED with run string."""
        if not folders:
            return self._spark.createDataFrame([], ARCHIVED).withColumn("run", f.lit(""))
        read = self._spark.read.schema(ARCHIVED).option("basePath", self.folder.path("messages"))
        with translated():
            return read.parquet(*(each.path for each in folders)).select(*ARCHIVED.names, "run")


def _compared(folder: Folder, sums: Mapping[Place, Any]) -> Folder:
    part = folder.part
    sum_ = sums.get(part.place)
    if sum_ is None:
        problem = "cannot be read"
    elif sum_.messages != part.messages:
        problem = f"has {sum_.messages} rows"
    elif sum_.damaged:
        problem = f"has {sum_.damaged} rows that differ from their fingerprints"
    elif hexadecimal(sum_.digest) != part.digest:
        problem = "has other rows than were archived: their digest differs"
    else:
        problem = ""
    return replace(folder, problem=problem)


def _sound(folders: Sequence[Folder], skip_missing: bool) -> list[Folder]:
    """Return those without a problem. Raises ArchiveDamaged."""
    bad = [each for each in folders if each.problem]
    if bad and not skip_missing:
        raise ArchiveDamaged(
            f"{len(bad)} folders of the archive are damaged. {bad[0].complaint}: bring it back from a backup, or repeat with "
            "--skip-missing."
        )
    for each in bad:
        log.warning("left out: %s", each.complaint)
    return [each for each in folders if not each.problem]


def is_among(ids: Sequence[MessageId]) -> Column:
    """Return whether shard and id of a row are those of one of these messages."""
    by_shard = {shard: [each.number for each in ids if each.shard == shard] for shard in {each.shard for each in ids}}
    some = f.lit(False)
    for shard, numbers in by_shard.items():
        some = some | ((f.col("shard") == shard) & f.col("id").isin(numbers))
    return some


def closed_since(ms: int) -> Callable[[Partition], bool]:
    """A filter of partitions: those with days that may contain messages closed, or prepared, at or after this time (epoch ms).

    Message numbers have a server's clock, days a database's.
    """
    first = day_of(ms - _CLOCKS_APART_MS)
    return lambda part: part.place.day >= first


def day_of(ms: int) -> str:
    """The UTC day of a time, as folders are named."""
    return f"{datetime.fromtimestamp(max(0, ms) / 1000, UTC):%Y-%m-%d}"


def end_of_day_ms(day: str) -> int:
    """Epoch milliseconds when a UTC day ends."""
    return round(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() * 1000) + 86_400_000


def moment(ms: int) -> str:
    """A time as runs are named: 20261121T053000, UTC."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y%m%dT%H%M%S}"


def subscriber_names(chain: Chain) -> dict[int, tuple[str, str]]:
    """(topic, subscriber) by subscription number."""
    return {int(number): (name[0], name[1]) for number, name in chain.names["subscriptions"].items()}
