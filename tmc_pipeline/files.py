"""Small files and folders of an archive or a result, wherever Spark can write: this machine's disk, HDFS, an object store."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from tmc_pipeline.errors import AnotherRun, JobFailed, translated

_CONDITIONAL = "fs.option.create.conditional.overwrite"  # a capability of object stores, and the option to use it
_EXISTS = re.compile(r"FileAlreadyExistsException|RemoteFileChangedException|PreconditionFailed|\b412\b")
_RUN = re.compile(r"\d{8}T\d{6}-")
_RENAMES = ("file", "hdfs", "viewfs")  # where a rename is one step, and fails if the name exists
_MOVES_AT_ONCE = 8
_LOOK_AGAIN_S = 0.5


def configuration_of(spark: SparkSession) -> Any:
    """Hadoop's configuration in the JVM, with addresses and credentials of object stores."""
    return spark.sparkContext._jsc.hadoopConfiguration()


class HadoopFolder:
    """A folder through Hadoop's file systems; names are relative to it. All raise PipelineError.

    root: a path of this machine, or a URL that every worker can reach.  wait_s: how long it waits for another run.
    """

    def __init__(self, spark: SparkSession, root: str, wait_s: float = 0) -> None:
        self.wait_s = wait_s
        self._jvm: Any = spark.sparkContext._jvm
        self._root = root.rstrip("/") or "/"
        with translated():
            self._files = self._path("").getFileSystem(configuration_of(spark))

    def path(self, name: str = "") -> str:
        """The path of an entry of this folder, as Spark reads and writes it."""
        return f"{self._root}/{name}" if name else self._root

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.path(name))

    def names(self, name: str = "") -> list[str]:
        """Return what is in a folder, in order; nothing when there is none."""
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

    def files(self, name: str = "") -> dict[str, int]:
        """Return every file in a folder and its folders, by its name relative to that folder, with its bytes."""
        with translated():
            path = self._path(name)
            if not self._files.exists(path):
                return {}
            start = len(str(self._files.getFileStatus(path).getPath())) + 1
            every = self._walked(path) if self._files.getUri().getScheme() in _RENAMES else self._listed(path)
            return {str(status.getPath())[start:]: int(status.getLen()) for status in every}

    def _walked(self, path: Any) -> Iterator[Any]:
        """Folder by folder. `listFiles` also asks for the owner of each file, and on a local disk starts a process for it."""
        for status in self._files.listStatus(path):
            if status.isDirectory():
                yield from self._walked(status.getPath())
            else:
                yield status

    def _listed(self, path: Any) -> Iterator[Any]:
        """Yield all at once: an object store has no folders."""
        every = self._files.listFiles(path, True)
        while every.hasNext():
            yield every.next()

    def folders(self, pattern: str) -> list[str]:
        """Names of the folders that match, in order; each * stands for one folder's name."""
        with translated():
            start = len(str(self._path("").makeQualified(self._files.getUri(), self._files.getWorkingDirectory()))) + 1
            found = self._files.globStatus(self._path(pattern)) or ()
            return sorted(str(each.getPath())[start:] for each in found if each.isDirectory())

    def read(self, name: str) -> str:
        with translated():
            stream = self._files.open(self._path(name))
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all. The name must be new."""
        if not self.create(name, text):
            raise JobFailed(f"{self.path(name)} exists already: was it copied there?")

    def create(self, name: str, text: str) -> bool:
        """Write a new file, whole or not at all. Returns: False if there is one already, perhaps that of another run.

        Where files can be renamed in one step, it is written under another name first. An object store is asked to
        refuse an existing name in the request that writes it, so of two runs, only one succeeds.
        """
        with translated():
            path = self._path(name)
            if self._files.exists(path):
                return False
            if self._files.getUri().getScheme() not in _RENAMES:
                return self._put(path, text)
            unfinished = f"_{name.replace('/', '_')}.{secrets.token_hex(4)}.unfinished"  # several runs may try
            self._written(self._files.create(self._path(unfinished), True), text)
            self._files.mkdirs(path.getParent())
            return not self._files.exists(path) and bool(self._files.rename(self._path(unfinished), path))

    def _put(self, path: Any, text: str) -> bool:
        from py4j.protocol import Py4JJavaError

        builder = self._files.createFile(path).overwrite(False)
        if self._files.hasPathCapability(path, _CONDITIONAL):
            builder = builder.must(_CONDITIONAL, True)  # others refuse existing names anyway
        try:
            self._written(builder.build(), text)
        except Py4JJavaError as exc:
            if _EXISTS.search(str(exc)):
                return False
            raise
        return True

    def _written(self, stream: Any, text: str) -> None:
        """An object store writes the file when it is closed, so a stream that got only a part is left open."""
        stream.write(bytearray(text.encode()))
        stream.close()

    def move(self, moves: Mapping[str, str]) -> None:
        """Give files their final names. moves: source -> target. A repetition finishes what an interrupted call began.

        File by file, because an object store cannot rename a folder in one step.
        """
        with translated():
            for parent in {target.rpartition("/")[0] for target in moves.values()}:
                self._files.mkdirs(self._path(parent))
        with ThreadPoolExecutor(_MOVES_AT_ONCE) as pool:
            list(pool.map(self._move_file, moves, moves.values()))

    def _move_file(self, source: str, target: str) -> None:
        with translated():
            path, old = self._path(target), self._path(source)
            if self._files.exists(path):
                # An object store copies, then deletes: of an interrupted move both may be left.
                if self._files.exists(old):
                    if self._files.getFileStatus(old).getLen() != self._files.getFileStatus(path).getLen():
                        raise JobFailed(f"{self.path(source)} cannot be moved: {self.path(target)} is another file.")
                    self._files.delete(old, False)
            elif not self._files.rename(old, path):
                raise JobFailed(f"{self.path(source)} cannot be moved to {self.path(target)}: check its permissions.")

    def rename(self, source: str, target: str) -> None:
        """Give a folder another name; in one step, unless this is an object store. The name must be new."""
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

    @property
    def is_local(self) -> bool:
        """Return whether it is on a disk of this machine."""
        with translated():
            return bool(self._files.getUri().getScheme() == "file")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock this folder against other runs, if it is on a local disk. Raises AnotherRun.

        The lock is released when the process ends, for whatever reason. Elsewhere there is no lock: of several runs,
        only one publishes.
        """
        if not self.is_local:
            yield
            return
        with self._locked(Path(urlsplit(self._root).path), "_lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def read_by(self, *, rewriting: bool = False) -> Iterator[None]:
        """Keep the files that are being read from being replaced, if they are on a local disk. Raises AnotherRun.

        rewriting: this run replaces files: no other may read them meanwhile.
        """
        root = Path(urlsplit(self._root).path)
        if not self.is_local or not root.is_dir() or not os.access(root, os.W_OK):
            yield
            return
        with self._locked(root, "_readers", fcntl.LOCK_EX if rewriting else fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, root: Path, name: str, kind: int) -> Iterator[None]:
        try:
            root.mkdir(parents=True, exist_ok=True)
            handle = (root / name).open("a")
        except OSError as exc:
            raise JobFailed(
                f"{root} cannot be written: {exc.strerror}. Choose another path, or fix its permissions."
            ) from exc
        with handle:
            until = time.monotonic() + self.wait_s
            while not _is_locked(handle, kind):
                if time.monotonic() >= until:
                    raise AnotherRun(
                        f"Another run uses {root}: repeat when it has ended, or wait for it with --wait 30."
                    )
                time.sleep(_LOOK_AGAIN_S)
            yield


def _is_locked(handle: IO[str], kind: int) -> bool:
    """Lock it. Returns: False if another process has."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def runs_of(folder: HadoopFolder) -> list[str]:
    """Return the folders of runs in it, the oldest first."""
    return [name for name in folder.names() if _RUN.match(name)]


def finished(folder: HadoopFolder) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the reconciliations that have ended, the newest first, each with its summary."""
    for run in reversed(runs_of(folder)):
        if folder.exists(f"{run}/summary.json"):
            yield run, json.loads(folder.read(f"{run}/summary.json"))


def when_ms(run: str) -> int:
    """Return when a run began, from its name."""
    return round(datetime.strptime(run[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp() * 1000)


def remove_old_runs(folder: HadoopFolder, now_ms: int, keep_days: int) -> None:
    """Remove results that are older, but never the newest: the next run continues from it. keep_days 0: keep all."""
    for run in runs_of(folder)[:-1] if keep_days else ():
        if when_ms(run) < now_ms - keep_days * 86_400_000:
            folder.remove(run)
