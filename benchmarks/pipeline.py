"""The pipeline on tables filled by MariaDB's SEQUENCE engine: 256-byte bodies, one consumption per message, two databases.

archive_*: read, write, read back, compare, publish, with the session up; rows are messages and consumptions. export: the same
rows by one connection and Arrow, unverified, in turn with the archive. reconcile_s: ledgers of three producers, center, three
inboxes. peak_memory_mb: the job's whole process tree. traffic_loss_share: open-loop full lives at half of what the center can
do, with the polite archive beside it, in turn with none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import export
from benchmarks.serving import serving
from benchmarks.store import drive
from tests.support.filled import CONSUMERS, PRODUCERS, FilledCenter
from tests.support.mariadb import MariaDB

HERE = Path(__file__).parent
MILLION = 1_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree_mb(root: int) -> float:
    """Resident memory of a process and all its descendants, in MB."""
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            resident[pid] = int((entry / "statm").read_text().split()[1]) * _PAGE
    total = 0
    for pid in resident:
        at = pid
        while at not in (0, root) and at in parents:
            at = parents[at]
        total += resident[pid] if at == root else 0
    return total / 2**20


@contextlib.contextmanager
def job(name: str, settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A job whose session is up when this begins."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(settings))
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline_job", name, file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=HERE.parent,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.wait()


def measured(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one job. Returns: what it told, and peak_mb."""
    peak = 0.0
    with job(name, settings) as process:
        ended = threading.Event()

        def watch() -> None:
            """A process just started by Java shows Java's memory as its own: two samples in a row must agree."""
            nonlocal peak
            before = 0.0
            while not ended.wait(0.2):
                now = tree_mb(process.pid)
                peak, before = max(peak, min(before, now)), now

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        ended.set()
        watcher.join()
    return {**json.loads(line), "peak_mb": peak}


class Side:
    """One size of tables."""

    def __init__(self, server: MariaDB, messages: int, folder: Path) -> None:
        self.center = FilledCenter(server, prefix=f"bench{messages}")
        self.center.fill(messages // 32, subscribers=False)
        self.messages = messages // 32 * 32
        self.folder = folder / str(messages)

    def settings(self, profile: str = "fast", cores: int = 2, ledgers: bool = False) -> dict[str, Any]:
        values = self.center.settings(self.folder, ledgers=ledgers)
        values["consumers"] = values["consumers"][:3]
        return {**values, "spark": {"profile": profile, "master": f"local[{cores}]"}}

    def archive(self, cores: int = 2) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        told = measured("archive", self.settings(cores=cores))
        assert told["messages"] == told["consumptions"] == self.messages, told
        return {**told, "rows_per_s": 2 * self.messages / told["seconds"]}

    def export(self) -> float:
        self.folder.mkdir(parents=True, exist_ok=True)
        places = [(f"{self.center.prefix}_0", list(range(16))), (f"{self.center.prefix}_1", list(range(16, 32)))]
        return export.rows_per_s(self.center.server.port, places, self.folder)

    def reconcile(self, cores: int = 2) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        told = measured("reconcile", self.settings(cores=cores, ledgers=True))
        assert told["agreed"] == self.messages, told
        return told


def traffic_loss(server: MariaDB, side: Side, seconds: float, rounds: int) -> dict[str, float]:
    """Share of the traffic that does not get through while the polite archive runs."""

    def steady(served: Any, rate: float) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.steady", served.address, served.orders_key, served.coupons_key]
        told = subprocess.run(
            [*command, str(rate), str(seconds)], check=True, capture_output=True, text=True, cwd=HERE.parent
        )
        found: dict[str, float] = json.loads(told.stdout)
        return found

    losses, p99 = [], []
    with serving(server.url("tmc_traffic")) as served:
        most = max(drive(served, "async", 1, 128, 4) for _ in range(2))
        for _ in range(rounds):
            alone = steady(served, most / 2)
            shutil.rmtree(side.folder, ignore_errors=True)
            with job("archive", side.settings("polite", cores=1)) as process:
                time.sleep(2)
                beside = steady(served, most / 2)
                assert process.poll() is None, "the archive ended before the traffic: give it more rows"
                process.kill()
            losses.append(1 - (beside["done"] / beside["offered"]) / (alone["done"] / alone["offered"]))
            p99.append((alone["p99_ms"], beside["p99_ms"]))
    return {
        "traffic_loss_share": round(statistics.median(losses), 3),
        "traffic_offered_per_s": round(most / 2),
        "traffic_p99_ms_alone": statistics.median(each[0] for each in p99),
        "traffic_p99_ms_beside": statistics.median(each[1] for each in p99),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--sizes", default="0.5,1,2,4", help="millions of messages; the archive's figures are those of 2"
    )
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    sizes = [round(float(size) * MILLION) for size in options.sizes.split(",")]
    main_size = 2 * MILLION if 2 * MILLION in sizes else sizes[-1]
    server = MariaDB(pool_mb=1024)
    folder = Path(tempfile.mkdtemp(prefix="tmc-bench-pipeline-"))
    result: dict[str, Any] = {}
    peaks: list[float] = []
    try:
        for size in sizes:
            side = Side(server, size, folder)
            if size == main_size:
                pairs = [(side.archive(), side.export()) for _ in range(options.rounds)]
                peaks += [told["peak_mb"] for told, _ in pairs]
                archive = statistics.median(told["rows_per_s"] for told, _ in pairs)
                exported = statistics.median(rate for _, rate in pairs)
                result["archive_ratio_to_export"] = round(
                    statistics.median(told["rows_per_s"] / rate for told, rate in pairs), 3
                )
                result |= {"archive_rows_per_s": round(archive), "python_export_rows_per_s": round(exported)}
                result["archive_rows_per_s_1_core"] = round(side.archive(cores=1)["rows_per_s"])
                result |= traffic_loss(server, side, options.seconds, options.rounds)
            else:
                told = side.archive()
                peaks.append(told["peak_mb"])
                result[f"archive_rows_per_s_{size / MILLION:g}m"] = round(told["rows_per_s"])
            side.center.fill_ledgers()
            told = side.reconcile()
            peaks.append(told["peak_mb"])
            result[f"reconcile_s_{size / MILLION:g}m"] = round(told["seconds"], 1)
            if size == main_size:
                result["reconcile_s"] = round(told["seconds"], 1)
                result["reconcile_s_1_core"] = round(side.reconcile(cores=1)["seconds"], 1)
            result[f"peak_memory_mb_{size / MILLION:g}m"] = round(max(peaks[-2:]))
            with side.center.sql() as run:
                for name in [*side.center.urls, *PRODUCERS, *CONSUMERS]:
                    database = name.rsplit("/", 1)[-1] if "/" in name else side.center.ledger(name)
                    run.exec_driver_sql(f"DROP DATABASE IF EXISTS {database}")
        result["peak_memory_mb"] = round(max(peaks))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result) if options.json else "\n".join(f"{key:32} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
