"""Class data sharing: Java maps Spark's classes from one file instead of reading them from 300 jars, and starts 2 to 3 s sooner.

The file's name says for which Java and which Spark it was made; it is not used with others.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tmc_pipeline.errors import NO_PYSPARK, CannotRun, JobFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXIT_S = 120  # Java writes 200 MB at its end
_MAKING = "making-"  # prefix of folders
_ABANDONED_S = 3600
_SEPARATORS = frozenset(":\"'\\")  # they mean something in Java's options


def classes_file(java: str) -> Path | None:
    """Return where the file of this user is, whether there is one or not; None: nowhere. java: what `java -version` said."""
    cache = os.environ.get("XDG_CACHE_HOME") or (f"{os.environ['HOME']}/.cache" if os.environ.get("HOME") else "")
    if not cache.startswith("/") or _SEPARATORS & set(cache) or importlib.util.find_spec("pyspark") is None:
        return None
    import pyspark

    version = [line for line in java.splitlines() if not line.startswith("Picked up ")]  # options of the environment
    home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    made_for = "\n".join((*version, pyspark.__version__, home))
    return Path(cache) / "tmc" / f"spark-classes-{hashlib.blake2b(made_for.encode(), digest_size=8).hexdigest()}.jsa"


def shared_classes(java: str) -> Path | None:
    """Return the file that jobs use; None if there is none, or if others can change it or its folder."""
    path = classes_file(java)
    return path if path is not None and _is_ours(path) and _is_ours(path.parent) else None


def _is_ours(path: Path) -> bool:
    """Return whether nobody else can change it: these classes are run."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def sharing(path: Path) -> str:
    """Java's options to use this file."""
    # Java explains on standard output why it does not use a file: that is where reports of jobs go.
    return f'-Xlog:disable "-XX:SharedArchiveFile={path}"'


class NewClasses:
    """A file in the making. Use it with `with`; it is there, whole, after `finish`."""

    def __init__(self, java: str) -> None:
        """Raises CannotRun: there is no folder for it."""
        if importlib.util.find_spec("pyspark") is None:
            raise CannotRun(NO_PYSPARK)
        target = classes_file(java)
        if target is None:
            raise CannotRun(
                "There is no folder for it: set XDG_CACHE_HOME, here and for the jobs, to an absolute path."
            )
        self.target = target
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=target.parent, prefix=_MAKING)
        except OSError as exc:
            raise CannotRun(
                f"{target.parent} cannot be written: {exc.strerror}. Set XDG_CACHE_HOME, here and for the jobs."
            ) from exc
        self.folder = Path(self._folder.name)
        self._path, self._said = self.folder / "classes.jsa", self.folder / "said.txt"
        if not _is_ours(target.parent):
            self._folder.cleanup()
            raise CannotRun(f"{target.parent} can be changed by others, and its classes are run: chmod go-w it.")
        for left in target.parent.glob(f"{_MAKING}*"):  # by a run that was killed
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)

    @property
    def writing(self) -> str:
        """Java's options to write it at its end."""
        return f'-Xlog:disable "-Xlog:all=warning:file={self._said}" "-XX:ArchiveClassesAtExit={self._path}"'

    def __enter__(self) -> NewClasses:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def finish(self, spark: SparkSession) -> None:
        """End the JVM of this session, which writes the file. A file that is not whole would crash Java.

        Raises JobFailed: it was not written.
        """
        gateway: Any = spark.sparkContext._gateway
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        try:
            code = gateway.proc.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            code = gateway.proc.wait()
        if code or not self._path.is_file():
            said = self._said.read_text().strip() if self._said.is_file() else ""
            reason = said.splitlines()[-1] if said else f"it ended with {code}"
            raise JobFailed(f"Java did not write the file: {reason}. Jobs run without it.")
        self._path.chmod(0o600)
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        self._path.rename(self.target)
