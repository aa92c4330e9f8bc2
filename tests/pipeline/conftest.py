"""Fixtures: one Spark session and one MariaDB for all, a filled center of its own for each test that asks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.filled import FilledCenter
from tests.support.mariadb import MariaDB
from tmc_pipeline.session import session
from tmc_pipeline.settings import SparkSettings

SHARDS = (4, 7, 16, 31)
_names = itertools.count(1)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    settings = SparkSettings(
        master="local[2]",
        profile="fast",
        options={"spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"},
    )
    with session(settings, ["mysql", "sqlite"], "tests") as made:
        yield made


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    server = MariaDB(pool_mb=512)
    yield server
    server.stop()


@pytest.fixture
def filled(mariadb: MariaDB) -> Callable[..., FilledCenter]:
    """Makes a center with so many messages in each of a few shards, two per database."""

    def make(each: int, shards: Sequence[int] = SHARDS, **options: int) -> FilledCenter:
        center = FilledCenter(mariadb, prefix=f"center{next(_names)}", **options)
        center.fill(each, shards)
        return center

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
