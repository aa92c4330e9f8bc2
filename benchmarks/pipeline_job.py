"""One pipeline job in a process of its own, its session up before the clock starts.

usage: pipeline_job.py archive|reconcile SETTINGS.json [SINCE_MS | last]     prints one JSON line: seconds, messages, verdicts
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.job import HOUR_MS, Archiving
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.job import Reconciliation
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.session import FETCH, OPENING, session
from tmc_pipeline.settings import Settings


def main(job: str, path: str, since_ms: str = "") -> None:
    settings = Settings.model_validate_json(Path(path).read_text())
    with session(settings.spark, ["mysql"], job) as spark:
        profile = settings.spark.profile
        center = CenterTables(
            spark, databases_of(settings.store), FETCH[profile], OPENING[profile], settings.spark.body_bytes
        )
        archive = Archive(spark, settings.archive.path, center)
        center.check()  # the driver is loaded
        print("ready", flush=True)
        began = time.monotonic()
        if job == "archive":
            manifest = Archiving(spark, center, archive, 60_000, HOUR_MS).run()
            figures = {"messages": manifest.messages, "consumptions": manifest.consumptions}
        else:
            ledgers = Ledgers(spark, FETCH[profile], OPENING[profile])
            folder = HadoopFolder(spark, settings.reconcile.path)
            found = Reconciliation(
                spark=spark, center=center, archive=archive, ledgers=ledgers, folder=folder, tolerance_ms=60_000
            )
            since = since_ms if since_ms == "last" else int(since_ms) if since_ms else None
            figures = dict(found.run(settings.producers, settings.consumers, since).verdicts)
        print(json.dumps({"seconds": time.monotonic() - began, **figures}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
