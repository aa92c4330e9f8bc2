"""pipeline.toml, and TMCPIPELINE_ environment variables on top. docs/pipeline.md lists every key.

The store is written as in the center's own file, with an account that may only read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from tmc_server.config import StoreConfig
from tmc_server.settings import Section, read

BODY_BYTES = 262_144
_CREDENTIAL = re.compile(
    r"(access[.-]?key|secret|token|account[.-]?key|private[.-]?key|encryption[.-]?key|password|\.sas)(\.|$)",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"password=", re.IGNORECASE)


class SparkSettings(Section):
    """[spark]"""

    master: str = Field(
        "", description="spark://host:7077 for a cluster; empty: this machine, or the master given to spark-submit"
    )
    profile: Literal["polite", "fast"] = Field(
        "polite", description="polite: one connection at a time and a low priority; fast: every core"
    )
    nice: int = Field(
        19, ge=0, le=19, description="niceness in the polite profile; 19 may starve on a machine that is always busy"
    )
    memory: str = Field(
        "1g", pattern=r"^[0-9]+[mg]$", description="heap of the driver, and of each executor of a cluster"
    )
    body_bytes: int = Field(
        BODY_BYTES,
        ge=1024,
        le=8 << 20,
        description="maximum size of a message body, as the center's limits.body_bytes; it bounds the rows held in memory",
    )
    drivers: tuple[str, ...] = Field(
        (),
        description="paths of jars, of JDBC drivers and object stores, with * or without; empty: Debian's JDBC drivers",
    )
    options: Mapping[str, str] = Field({}, description="further Spark settings, spark.* = value; no credentials")

    @field_validator("options")
    @classmethod
    def _without_credentials(cls, options: Mapping[str, str]) -> Mapping[str, str]:
        """Spark hands its settings to Java as arguments, which every user of the machine can list."""
        for name, value in options.items():
            if _CREDENTIAL.search(name) or _PASSWORD.search(value):
                raise ValueError(
                    f"{name} would be shown in the list of processes: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
                    "environment, or spark.hadoop.hadoop.security.credential.provider.path to a file of Hadoop's"
                )
        return options


class ArchiveSettings(Section):
    """[archive]"""

    path: str = Field("", description="folder or URL of the archive, the same on every worker; empty: no archive")
    lag_minutes: float = Field(
        15, ge=1, le=10_080, description="minutes; messages that closed more recently wait for the next run"
    )
    lookback_hours: float = Field(
        1,
        ge=0,
        le=8760,
        description="how long before the last run messages were prepared that are looked at again, for late commits",
    )
    file_megabytes: int = Field(128, ge=1, le=4096, description="compaction: maximum size of a file, about")
    keep_days: int = Field(0, ge=0, le=36_500, description="expiry: days are kept this long; 0: forever")
    keep_days_of: Mapping[str, int] = Field({}, description="expiry: topic = days, instead of keep_days")


class ReconcileSettings(Section):
    """[reconcile]"""

    path: str = Field("reconcile", description="folder for summaries and details; each run makes a folder in it")
    keep_days: int = Field(0, ge=0, le=36_500, description="days; folders of older runs are removed; 0: never")
    tolerance_minutes: float = Field(
        15, ge=0, le=10_080, description="minutes; messages that moved more recently may still differ"
    )


class ReportSettings(Section):
    """[report]"""

    path: str = Field("report", description="folder for pages and tables; each run makes a folder in it")
    keep_days: int = Field(0, ge=0, le=36_500, description="days; folders of older runs are removed; 0: never")
    console: str = Field("", description="address of the console, for links: https://console.example.com; empty: none")


class MetricsSettings(Section):
    """[metrics]"""

    textfile: str = Field(
        "", description="folder from which a Prometheus node exporter collects *.prom files; empty: none"
    )


Column = Annotated[str, Field(min_length=1)]


class LedgerSource(Section):
    """[[producers]] and [[consumers]]: what one app noted of its own transactions, row by row."""

    app: str = Field(min_length=1, description="the app's id")
    tag: str = Field("default", description="consumers: the client tag of its subscriptions")
    topics: tuple[str, ...] = Field(
        (), description="consumers: topics whose effects are in it; empty: all that are not forwarded"
    )
    url: SecretStr = Field(SecretStr(""), description="SQLAlchemy URL of a database, with table")
    table: str = Field("", description="of the database; default: the SDK's own, tmc_ledger or tmc_inbox")
    parquet: str = Field("", description="or the path of Parquet files")
    csv: str = Field("", description="or the path of CSV files with a header line")
    columns: Mapping[str, Column] = Field(
        {},
        description="message_id, state, at_ms, body_sha256, subscriber = column name; the rest keep the SDK's names",
    )
    since_ms: int = Field(
        0, ge=0, description="milliseconds since the epoch; rows of messages prepared earlier may be missing"
    )
    states: Mapping[str, Literal["COMMITTED", "ROLLED_BACK"]] = Field(
        {"1": "COMMITTED", "2": "ROLLED_BACK"}, description="producers: meaning of the values in the state column"
    )

    @property
    def is_sdk(self) -> bool:
        """Nothing is mapped: it is the SDK's own table."""
        return bool(self.url.get_secret_value()) and not self.table and not self.columns

    @model_validator(mode="after")
    def _one_place(self) -> LedgerSource:
        given = [name for name in ("url", "parquet", "csv") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("give exactly one of url, parquet and csv")
        if self.table and given != ["url"]:
            raise ValueError("table goes with url")
        return self


class Settings(Section):
    """Everything; each field is a table of the file."""

    store: StoreConfig = StoreConfig()
    spark: SparkSettings = SparkSettings()
    archive: ArchiveSettings = ArchiveSettings()
    reconcile: ReconcileSettings = ReconcileSettings()
    report: ReportSettings = ReportSettings()
    metrics: MetricsSettings = MetricsSettings()
    producers: tuple[LedgerSource, ...] = Field((), description="ledgers of producers")
    consumers: tuple[LedgerSource, ...] = Field((), description="inboxes, or other effects, of consumers")

    @field_validator("producers")
    @classmethod
    def _of_all_that_they_send(cls, producers: tuple[LedgerSource, ...]) -> tuple[LedgerSource, ...]:
        for each in producers:
            if each.topics or each.tag != "default":
                raise ValueError(
                    f"{each.app}: topics and tag are of consumers; the ledger of a producer has all that it sends"
                )
        return producers


def load(path: str | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises ConfigError."""
    return read(Settings, "TMCPIPELINE_", path, environment)
