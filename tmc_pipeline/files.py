"""Small files and folders of an archive or a result, wherever Spark can write: this machine's disk, HDFS, an object store."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from tmc_pipeline.errors import AnotherRun, JobFailed, translated


class HadoopFolder:
    """A folder through Hadoop's file systems; names are relative to it. All raise PipelineError.

    root: a path of this machine, or a URL that every worker can reach.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._jvm: Any = spark.sparkContext._jvm
        self._root = root.rstrip("/") or "/"
        with translated():
            configuration = spark.sparkContext._jsc.hadoopConfiguration()
            self._files = self._path("").getFileSystem(configuration)

    def path(self, name: str = "") -> str:
        """The path of an entry of this folder, as Spark reads and writes it."""
        return f"{self._root}/{name}" if name else self._root

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.path(name))

    def names(self, name: str = "") -> list[str]:
        """What is in a folder, in order; nothing when there is none."""
        with translated():
            path = self._path(name)
            if not self._files.exists(path):
                return []
            return sorted(status.getPath().getName() for status in self._files.listStatus(path))

    def size(self, name: str) -> tuple[int, int] | None:
        """Number of files in a folder and its folders, and their bytes; None: it is not there."""
        with translated():
            path = self._path(name)
            if not self._files.exists(path):
                return None
            found = self._files.getContentSummary(path)
            return int(found.getFileCount()), int(found.getLength())

    def exists(self, name: str) -> bool:
        with translated():
            return bool(self._files.exists(self._path(name)))

    def read(self, name: str) -> str:
        with translated():
            stream = self._files.open(self._path(name))
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        """Write a file atomically. The name must be new."""
        unfinished = f"_{name.replace('/', '_')}.unfinished"
        with translated():
            stream = self._files.create(self._path(unfinished), True)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()
        self.move(unfinished, name)

    def move(self, source: str, target: str) -> None:
        """Give something its final name, in one step."""
        with translated():
            path = self._path(target)
            self._files.mkdirs(path.getParent())
            if self._files.exists(path) or not self._files.rename(self._path(source), path):
                raise JobFailed(
                    f"{self.path(source)} cannot be moved to {self.path(target)}: is there something already?"
                )

    def remove(self, name: str) -> None:
        """Delete an entry with all its contents; does nothing if it is missing."""
        with translated():
            self._files.delete(self._path(name), True)

    @contextmanager
    def alone(self, who: str) -> Iterator[None]:
        """Lock this folder against other runs. Raises AnotherRun.

        On a local disk the lock is released when the process ends, for whatever reason. Elsewhere it is a file that a
        killed run leaves behind.
        """
        with translated():
            local = self._files.getUri().getScheme() == "file"
        if local:
            with self._locked(Path(urlsplit(self._root).path)):
                yield
            return
        marker = self._path("_lock")
        with translated():
            if self._files.exists(marker):
                owner, path = self.read("_lock"), self.path("_lock")
                raise AnotherRun(f"Run {owner} writes to {self._root}: wait for it; if it is gone, delete {path}.")
            stream = self._files.create(marker, False)
            stream.write(bytearray(who.encode()))
            stream.close()
        try:
            yield
        finally:
            self.remove("_lock")

    @contextmanager
    def _locked(self, root: Path) -> Iterator[None]:
        try:
            root.mkdir(parents=True, exist_ok=True)
            handle = (root / "_lock").open("w")
        except OSError as exc:
            raise JobFailed(
                f"{root} cannot be written: {exc.strerror}. Choose another path, or fix its permissions."
            ) from exc
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise AnotherRun(f"Another run writes to {root}: wait for it to end, then repeat.") from exc
            yield
