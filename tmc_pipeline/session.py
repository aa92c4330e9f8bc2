"""Starts Spark: on this machine, on a cluster, or inside spark-submit; the same jobs run in all three."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tmc_pipeline.dialects import JARS
from tmc_pipeline.errors import CannotRun, translated
from tmc_pipeline.settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA = 17
_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # spark-submit sets it: the JVM is there already, and knows its master
_DEBIAN_JARS = Path("/usr/share/java")
_INSTALL_JAVA = f"install Java {JAVA}: apt-get install openjdk-{JAVA}-jre-headless"
# One task at a time reads, so one connection; fetches are small, so that others get their turn.
FETCH = {"polite": 2_000, "fast": 10_000}
OPENING = {"polite": 1, "fast": 4}  # connections that ask for columns before anything is read
SLICE = 250_000  # rows of one task


def check_java() -> None:
    """Raises CannotRun: Spark's own message would be a stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise CannotRun(f"Spark needs Java, and {'JAVA_HOME has none' if home else 'there is none'}: {_INSTALL_JAVA}.")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < JAVA:
        raise CannotRun(
            f"Spark needs Java {JAVA} or newer, {java} is {found[1] if found else 'unknown'}: {_INSTALL_JAVA}."
        )


def driver_jars(settings: SparkSettings, families: Iterable[str]) -> list[str]:
    """The JDBC drivers for these databases. Raises CannotRun."""
    given = [Path(path) for path in settings.drivers]
    found = given or [_DEBIAN_JARS / JARS[family] for family in sorted(set(families))]
    for path in found:
        if not path.is_file():
            raise CannotRun(
                f"The JDBC driver {path} is missing: apt-get install libmariadb-java libxerial-sqlite-jdbc-java, "
                "or set spark.drivers."
            )
    return [str(path) for path in found]


@contextmanager
def session(settings: SparkSettings, families: Iterable[str], name: str) -> Iterator[SparkSession]:
    """A Spark session for one job. families: of the databases that will be read. Raises CannotRun."""
    check_java()
    jars = driver_jars(settings, families)
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as exc:
        raise CannotRun('PySpark is not installed here: pip install "tmc-center[pipeline]".') from exc
    polite = settings.profile == "polite"
    if polite:
        os.nice(19 - os.nice(0))  # the JVM inherits it
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
        "spark.sql.shuffle.partitions": "16",
        # A union of 32 reads makes pieces of generated code that are too large to be worth compiling.
        "spark.sql.codegen.wholeStage": "false",
        # What is kept on disk for another look: trying encodings on each column took a quarter of a reconcile run.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        "spark.rdd.compress": "true",
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
        "spark.executor.extraJavaOptions": "-XX:+UseParallelGC",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.log.level": "FATAL",  # errors are told in one line; spark.options may ask for more
        **({"spark.cores.max": "1"} if polite else {}),
        **(_on_loopback() if _alone(settings) else {}),
        **settings.options,
    }
    for name_of_logger in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):  # errors are told in one line
        logging.getLogger(name_of_logger).setLevel(logging.CRITICAL)
    for key, value in options.items():
        builder = builder.config(key, value)
    with translated():
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _alone(settings: SparkSettings) -> bool:
    return settings.master.startswith("local") or (not settings.master and _SUBMITTED not in os.environ)


def _on_loopback() -> dict[str, str]:
    """Nobody else takes part: no ports on other interfaces, no look-up of this machine's name."""
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
