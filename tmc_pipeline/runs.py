"""How a run reports: log lines while it works, and figures for Prometheus when it ends, successfully or not."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from tmc_pipeline.errors import CannotRun

_SUCCEEDED = "tmc_pipeline_succeeded{"
_SUCCEEDED_MEANS = "1: the last run ended well; 0: it failed, or runs"

log = logging.getLogger("tmc.pipeline")


class Figures:
    """Gauges of one run, by name; `tmc_pipeline_` goes before each."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, text: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"tmc_pipeline_{name}", text, list(labels), registry=self._registry)
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


def _not_yet(folder: str, job: str) -> None:
    """Reset the last run's success and keep its figures: if this run is killed, the file reports no success."""
    path = _path(folder, job)
    with _written(path):
        if path.exists():
            unfinished = path.with_suffix(".unfinished")
            lines = path.read_text().splitlines()
            begun = [re.sub(r" \S+$", " 0.0", line) if line.startswith(_SUCCEEDED) else line for line in lines]
            unfinished.write_text("".join(f"{line}\n" for line in begun))
            unfinished.replace(path)
            return
    made = Figures()
    made.set("succeeded", _SUCCEEDED_MEANS, 0, job=job)
    made.write(folder, job)


@contextmanager
def figures(folder: str, job: str) -> Iterator[Figures]:
    """Figures of one run. folder: where they are written at the end; empty: nowhere."""
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise CannotRun(f"metrics.textfile: {folder} is not a writable folder: make it, or fix its permissions.")
    if folder:
        _not_yet(folder, job)
    made = Figures()
    started = time.time()
    succeeded = 0
    try:
        yield made
        succeeded = 1
    finally:
        made.set("seconds", "how long the run took", time.time() - started, job=job)
        made.set("succeeded", _SUCCEEDED_MEANS, succeeded, job=job)
        made.set("finished_timestamp_seconds", "when the last run ended", time.time(), job=job)
        if folder:
            made.write(folder, job)


def tell_progress() -> None:
    """Lines of this package go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
