"""Starts Spark: on this machine, on a cluster, or inside spark-submit; the same jobs run in all three."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tmc_pipeline.classes import NewClasses, shared_classes, sharing
from tmc_pipeline.dialects import JARS
from tmc_pipeline.errors import DRIVER_PACKAGES, NO_PYSPARK, CannotRun, JobFailed, PipelineError, from_text, translated
from tmc_pipeline.settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA = 17
_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # spark-submit sets it: the JVM is there already, and knows its master
_DEBIAN_JARS = Path("/usr/share/java")
_INSTALL_JAVA = f"install Java {JAVA}: apt-get install openjdk-{JAVA}-jre-headless"
# One task at a time reads, so one connection; fetches are small, so that others get their turn.
FETCH = {"polite": 2_000, "fast": 10_000}
_HELD_BYTES = 32 << 20  # of bodies that one task holds at a time, when all of them are of the longest size
OPENING = {"polite": 1, "fast": 4}  # connections that ask for columns before anything is read
SLICE = 250_000  # rows of one task
# The optimizing compiler begins twenty times later than usual: it took a quarter of an archive run of 40 s, and half of what it
# compiled was hardly used again.
_JAVA_OPTIONS = (
    "-XX:+UseParallelGC -XX:Tier4InvocationThreshold=100000 -XX:Tier4MinInvocationThreshold=30000 "
    "-XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=800000"
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_LAST_WITH_VFORK = 25  # later versions of Java warn about it, and will not know it
_LAST_WORDS = 100_000  # bytes of the JVM's standard error that are looked at when it ended


def rows_at_a_time(most: int, body_bytes: int) -> int:
    """Return how many rows with bodies may be held at once: `most`, or fewer when they might not fit.

    MariaDB's driver streams: a smaller fetch costs no round trip.
    """
    return max(1, min(most, _HELD_BYTES // body_bytes))


def check_java() -> str:
    """Return what Java says about its version. Raises CannotRun: Spark's own message would be a stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise CannotRun(f"Spark needs Java, and {'JAVA_HOME has none' if home else 'there is none'}: {_INSTALL_JAVA}.")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    found = _VERSION.search(said)
    if found is None or int(found[1]) < JAVA:
        raise CannotRun(
            f"Spark needs Java {JAVA} or newer, {java} is {found[1] if found else 'unknown'}: {_INSTALL_JAVA}."
        )
    return said


def how_to_start_processes(java: str) -> str:
    """Java's option for processes that it starts. java: as of `check_java`.

    Without its native library, Hadoop starts a chmod for each file and folder that it makes on a local disk: 500 of them in an
    archive run of 2 million messages. They take half as long without Java's own helper in between.
    """
    found = _VERSION.search(java)
    is_known = sys.platform == "linux" and found is not None and int(found[1]) <= _LAST_WITH_VFORK
    return "-Djdk.lang.Process.launchMechanism=VFORK" if is_known else ""


def driver_jars(settings: SparkSettings, families: Iterable[str]) -> list[str]:
    """The JDBC drivers for these databases. Raises CannotRun."""
    given = [path for each in settings.drivers for path in _matching(each)]
    found = given or [_DEBIAN_JARS / JARS[family] for family in sorted(set(families))]
    for path in found:
        if not path.is_file():
            raise CannotRun(f"The driver {path} is missing: apt-get install {DRIVER_PACKAGES}, or set spark.drivers.")
    return [str(path) for path in found]


def _matching(path: str) -> list[Path]:
    """The files that a path with * stands for; the path itself if it has none, or if there are none."""
    folder, name = Path(path).parent, Path(path).name
    return sorted(folder.glob(name)) or [Path(path)]


def lower_priority(nice: int) -> None:
    """Lower the priority of this process and of the JVM that it starts; a process that is nicer already stays so."""
    os.nice(max(0, nice - os.nice(0)))


@contextmanager
def session(
    settings: SparkSettings, families: Iterable[str], name: str, new_classes: NewClasses | None = None
) -> Iterator[SparkSession]:
    """A Spark session for one job. families: of the databases that will be read. Raises CannotRun.

    new_classes: the file of shared classes that its JVM writes; None: it uses the one that is there.
    """
    java = check_java()
    jars = driver_jars(settings, families)
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as exc:
        raise CannotRun(NO_PYSPARK) from exc
    if new_classes is not None and _SUBMITTED in os.environ:
        raise CannotRun("spark-submit has started Java already: run this command without it.")
    polite = settings.profile == "polite"
    if polite:
        lower_priority(settings.nice)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"tmc {name}")
    if settings.master or _SUBMITTED not in os.environ:
        builder = builder.master(settings.master or ("local[1]" if polite else "local[*]"))
    options = {
        "spark.jars": ",".join(jars),
        "spark.driver.memory": settings.memory,
        "spark.executor.memory": settings.memory,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.maxConcurrentOutputFileWriters": "200",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.hadoop.parquet.compression.codec.zstd.level": "1",
        # Bodies may be long, and any of them may follow short ones: row groups, pages and batches are bounded in rows and bytes.
        "spark.sql.parquet.columnarReaderBatchSize": str(rows_at_a_time(4096, settings.body_bytes)),
        "spark.hadoop.parquet.memory.pool.ratio": "0.25",
        "spark.hadoop.parquet.block.size": str(64 << 20),
        "spark.hadoop.parquet.block.size.row.check.max": str(rows_at_a_time(10_000, settings.body_bytes)),
        "spark.hadoop.parquet.block.size.row.check.min": str(rows_at_a_time(100, settings.body_bytes)),
        "spark.hadoop.parquet.page.size.row.check.min": str(rows_at_a_time(10, settings.body_bytes)),
        "spark.hadoop.parquet.page.size.row.check.max": str(rows_at_a_time(10_000, settings.body_bytes)),
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
        # Else nine calls to the JVM note where each expression was written, for error messages that are not shown.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.shuffle.partitions": "16",
        # What follows a union of 32 reads is planned and compiled once, after it, instead of 32 times.
        "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.PushProjectionThroughUnion",
        # Pieces of generated code with methods that the JVM would only interpret are left out.
        "spark.sql.codegen.hugeMethodLimit": "8000",
        # Planning again after each stage takes seconds of a small job. Rows with content are shuffled by reconcile only, which
        # sets the number of partitions from the data.
        "spark.sql.adaptive.enabled": "false",
        # Frames kept on disk: trying encodings on each of their columns took a quarter of a reconcile run.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        "spark.rdd.compress": "true",
        "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.python.authenticate.socketTimeout": "60s",  # for Python to fetch a result on a busy machine
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.log.level": "FATAL",  # an error is one line; spark.options may ask for more
        **({"spark.cores.max": "1"} if polite else {}),
        **(_on_loopback() if _alone(settings) else {}),
        **settings.options,
    }
    classes = shared_classes(java) if new_classes is None else None
    more = sharing(classes) if classes is not None else new_classes.writing if new_classes is not None else ""
    options["spark.driver.extraJavaOptions"] = " ".join(
        (more, how_to_start_processes(java), options["spark.driver.extraJavaOptions"])
    )
    for name_of_logger in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):  # an error is one line
        logging.getLogger(name_of_logger).setLevel(logging.CRITICAL)
    for key, value in options.items():
        builder = builder.config(key, value)
    loud = sys.stderr.isatty() or "spark.log.level" in settings.options or _SUBMITTED in os.environ
    spark: SparkSession | None = None
    with tempfile.TemporaryFile() as said:
        try:
            with translated(), nullcontext() if loud else _standard_error(said):
                spark = builder.getOrCreate()
            yield spark
        except JobFailed as exc:
            raise _known_end(exc, _last_words(said), classes) from exc
        finally:
            _stop(spark)


@contextmanager
def _standard_error(file: IO[bytes]) -> Iterator[None]:
    """Redirect standard error of processes started inside to a file, so that cron does not mail the JVM's output."""
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _last_words(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS))
    return file.read().decode(errors="replace")


def _known_end(error: JobFailed, said: str, classes: Path | None) -> PipelineError:
    """The same error, or its cause if the JVM printed one before it ended. classes: the file that it used."""
    if "OutOfMemoryError" in said:
        return from_text(said)
    if "JAVA_GATEWAY_EXITED" in str(error) and said.strip():
        return CannotRun(f"Java did not start: {said.strip().splitlines()[0]}. Check spark.memory and spark.options.")
    if "JAVA_GATEWAY_EXITED" in str(error) and classes is not None:
        return CannotRun(f"Java did not start: delete {classes}, it may be damaged, and run share-classes again.")
    return error


def _stop(spark: SparkSession | None) -> None:
    """Stop Spark, ignoring a JVM that is gone: that error was already reported."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        if spark is not None:
            spark.stop()


def _alone(settings: SparkSettings) -> bool:
    return settings.master.startswith("local") or (not settings.master and _SUBMITTED not in os.environ)


def _on_loopback() -> dict[str, str]:
    """Options for Spark on this machine alone: no ports on other interfaces, no lookup of the host name."""
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
