"""Fixtures: one Spark session and one server of each kind for all, a filled center per test, emptied for the next one."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import TMC, toml_of
from tests.support.filled import START_MS, FilledCenter
from tmc_pipeline.classes import classes_file
from tmc_pipeline.dialects import JARS
from tmc_pipeline.session import check_java, session
from tmc_pipeline.settings import SparkSettings
from tmc_storm.services.cache import cache
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

SHARDS = (4, 7, 16, 31)
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
# Nobody pulls the plug of this server: nothing waits for a disk.
_WITHOUT_SYNC = ("--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0", "--innodb-flush-method=nosync")
_names = itertools.count(1)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    settings = SparkSettings(
        master="local[2]",
        profile="fast",
        drivers=(*(f"/usr/share/java/{jar}" for jar in JARS.values()), f"{cache()}/s3/*.jar"),
        options={
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
            # Each plan here runs once over a few rows: compiling it would take most of the time. What makes the plans is the same
            # for hours, so the JVM compiles that as well as it can. Runs at the command line compile, as in production.
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
        },
    )
    with session(settings, ["mysql", "sqlite"], "tests") as made:
        yield made


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    server = MariaDB(pool_mb=512, options=_WITHOUT_SYNC)
    yield server
    server.stop()


@pytest.fixture(scope="session", autouse=True)
def cached(mariadb: MariaDB) -> Path:
    """The file with Spark's classes, made once per cache: each job at the command line starts seconds sooner."""
    os.environ["XDG_CACHE_HOME"] = str(cache())
    path = classes_file(check_java())
    assert path is not None
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = path.with_suffix(".toml")
        config.write_text(toml_of(FilledCenter(mariadb, prefix="classes").settings(path.parent, ledgers=False)))
        subprocess.run([TMC, "pipeline", "share-classes", "--config", str(config)], check=True, timeout=600)
    return path


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def idle() -> list[FilledCenter]:
    """Empty centers that no test uses now."""
    return []


@pytest.fixture
def filled(mariadb: MariaDB, idle: list[FilledCenter]) -> Iterator[Callable[..., FilledCenter]]:
    """Makes a center with so many messages in each of a few shards, two databases."""
    used: list[FilledCenter] = []

    def make(each: int, shards: Sequence[int] = SHARDS, start_ms: int = START_MS) -> FilledCenter:
        center = idle.pop() if idle else FilledCenter(mariadb, prefix=f"center{next(_names)}")
        used.append(center)
        center.empty(start_ms)
        center.fill(each, shards)
        return center

    yield make
    idle += used


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
