"""The archive: Parquet files of closed messages, by run, day and topic, and the manifests that say which runs count.

messages/run=RUN/day=2026-11-21/topic=order.paid/part-*.parquet
removal/RUN/shard=7/part-*                numbers of the messages, for the center's retention duty
manifests/RUN.json                        appears last: without it a run does not exist
_staging/RUN/                             a run at work, or what a killed one left
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

from tmc_pipeline.errors import ArchiveDamaged, translated
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.frames import ARCHIVED
from tmc_server.domain.manifest import Manifest, ManifestUnreadable, manifest_name

log = logging.getLogger("tmc.pipeline")

_STAGING = "_staging"


class Archive:
    """path: a folder of this machine or a URL, the same for every worker."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self.folder = HadoopFolder(spark, path)

    # -- reading --------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Every published run, oldest first. Raises ArchiveDamaged."""
        found = []
        for name in self.folder.names("manifests"):
            if name.endswith(".json"):
                try:
                    found.append(Manifest.from_json(self.folder.read(f"manifests/{name}")))
                except ManifestUnreadable as exc:
                    raise ArchiveDamaged(f"{self.folder.path(f'manifests/{name}')}: {exc}") from exc
        return sorted(found, key=lambda manifest: manifest.before_ms)

    def messages(self, manifests: Sequence[Manifest], skip_missing: bool = False) -> DataFrame:
        """The messages of these runs: ARCHIVED, no order; each message once. Columns that old files lack are null.

        skip_missing: leave out folders that are gone instead of raising ArchiveDamaged.
        """
        paths = [path for manifest in manifests for path in self._paths(manifest, skip_missing)]
        if not paths:
            return self._spark.createDataFrame([], ARCHIVED)
        with translated():
            read = self._spark.read.schema(ARCHIVED).option("basePath", self.folder.path("messages")).parquet(*paths)
        return read.select(*ARCHIVED.names)

    def _paths(self, manifest: Manifest, skip_missing: bool) -> list[str]:
        run = f"messages/run={manifest.run}"
        there = {
            f"{day}/{topic}"
            for day in (self.folder.names(run) if manifest.messages else [])
            if day.startswith("day=")
            for topic in self.folder.names(f"{run}/{day}")
        }
        wanted = {f"day={part.day}/topic={part.topic}": part for part in manifest.partitions}
        missing = [wanted[name] for name in wanted if name not in there]
        if missing and not skip_missing:
            first = missing[0]
            raise ArchiveDamaged(
                f"{len(missing)} folders of run {manifest.run} are gone, the first is {first.day} {first.topic} with "
                f"{first.messages} messages: bring them back, or repeat with --skip-missing."
            )
        if missing:
            log.warning("%d messages of run %s are gone", sum(part.messages for part in missing), manifest.run)
        return [self.folder.path(f"{run}/{name}") for name in sorted(wanted) if name in there]

    # -- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, now_ms: int) -> Iterator[Staging]:
        """The one run that writes, on a clean floor. Raises AnotherRun.

        Its time and name are later than those of every run before, whatever the clock says: the center works them off by name.
        """
        with self.folder.alone(moment(now_ms)):
            self._sweep()
            earlier = self.manifests()
            at_ms = max([now_ms, *(manifest.written_ms + 1000 for manifest in earlier)])
            staging = Staging(self.folder, f"{moment(at_ms)}-{secrets.token_hex(3)}", at_ms, earlier)
            try:
                yield staging
            finally:
                self.folder.remove(f"{_STAGING}/{staging.run}")

    def _sweep(self) -> None:
        """Remove what killed runs left: files without a manifest."""
        self.folder.remove(_STAGING)
        known = {manifest.run for manifest in self.manifests()}
        for name in self.folder.names("messages"):
            if name.removeprefix("run=") not in known:
                self.folder.remove(f"messages/{name}")
        for name in self.folder.names("removal"):
            if name not in known:
                self.folder.remove(f"removal/{name}")


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

    def publish(self, manifest: Manifest) -> None:
        """Files first, the manifest last: until then readers and the center see nothing of it."""
        if manifest.messages:
            self._folder.move(f"{_STAGING}/{self.run}/messages", f"messages/run={self.run}")
            self._folder.move(f"{_STAGING}/{self.run}/removal", f"removal/{self.run}")
        self._folder.write(manifest_name(self.run), manifest.to_json())


def moment(ms: int) -> str:
    """A time as runs are named: 20261121T053000, UTC."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y%m%dT%H%M%S}"


def subscriber_names(manifests: Sequence[Manifest]) -> dict[int, tuple[str, str]]:
    """(topic, subscriber) by subscription number, the newest run's word first."""
    found: dict[int, tuple[str, str]] = {}
    for manifest in manifests:
        found |= {int(number): (name[0], name[1]) for number, name in manifest.names["subscriptions"].items()}
    return found
