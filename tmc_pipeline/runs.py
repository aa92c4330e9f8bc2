"""How a run reports: log lines while it works, and figures for Prometheus when it ends, successfully or not."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from prometheus_client.parser import text_string_to_metric_families

from tmc_pipeline.errors import CannotRun

_PREFIX = "tmc_pipeline_"
_SUCCEEDED_MEANS = "1: the last run ended well; 0: it failed, or runs"

log = logging.getLogger("tmc.pipeline")


class Figures:
    """Gauges of one run, by name; `tmc_pipeline_` goes before each."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, text: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"{_PREFIX}{name}", text, list(labels), registry=self._registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def write(self, folder: str, job: str) -> None:
        """Write the file atomically: a scrape never sees half of it. Raises CannotRun."""
        path = _path(folder, job)
        with _written(path):
            write_to_textfile(str(path), self._registry)


def _path(folder: str, job: str) -> Path:
    return Path(folder) / f"tmc_pipeline_{job}.prom"


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise CannotRun(f"metrics.textfile: {path} cannot be written: {exc.strerror}.") from exc


def _kept(folder: str, job: str) -> Figures:
    """The figures of the last run, on which alerts rest, without its success: this run has ended badly, or not yet."""
    kept, path = Figures(), _path(folder, job)
    with _written(path):
        text = path.read_text() if path.exists() else ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kept.set(family.name.removeprefix(_PREFIX), family.documentation, sample.value, **sample.labels)
    kept.set("succeeded", _SUCCEEDED_MEANS, 0, pipeline_job=job)
    return kept


@contextmanager
def figures(folder: str, job: str) -> Iterator[Figures]:
    """Figures of one run. folder: where they are written at the end; empty: nowhere."""
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise CannotRun(f"metrics.textfile: {folder} is not a writable folder: make it, or fix its permissions.")
    if folder:
        _kept(folder, job).write(folder, job)
    started = time.time()
    ended = made = Figures()
    try:
        yield made
        made.set("succeeded", _SUCCEEDED_MEANS, 1, pipeline_job=job)
    except BaseException:
        ended = _kept(folder, job) if folder else made
        raise
    finally:
        ended.set("seconds", "how long the run took", time.time() - started, pipeline_job=job)
        ended.set("finished_timestamp_seconds", "when the last run ended", time.time(), pipeline_job=job)
        if folder:
            ended.write(folder, job)


def tell_progress() -> None:
    """Lines of this package go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    # py4j logs at the root itself: a traceback about a connection to a JVM that ended, which is one line here.
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
