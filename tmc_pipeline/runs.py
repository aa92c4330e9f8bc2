"""How a run tells about itself: lines while it works, and figures for Prometheus when it ends, well or not."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from tmc_pipeline.errors import CannotRun

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
        """Whole or not at all: a scrape never sees half a file. Raises CannotRun."""
        path = Path(folder) / f"tmc_pipeline_{job}.prom"
        try:
            write_to_textfile(str(path), self._registry)
        except OSError as exc:
            raise CannotRun(f"metrics.textfile: {path} cannot be written: {exc.strerror}.") from exc


@contextmanager
def figures(folder: str, job: str) -> Iterator[Figures]:
    """Figures of one run. folder: where they are written at the end; empty: nowhere."""
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise CannotRun(f"metrics.textfile: {folder} is no folder that can be written: make it, or mend its rights.")
    made = Figures()
    started = time.time()
    succeeded = 0
    try:
        yield made
        succeeded = 1
    finally:
        made.set("seconds", "how long the run took", time.time() - started, job=job)
        made.set("succeeded", "1: the last run ended well", succeeded, job=job)
        made.set("finished_timestamp_seconds", "when the last run ended", time.time(), job=job)
        if folder:
            made.write(folder, job)


def tell_progress() -> None:
    """Lines of this package go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
