"""The pipeline on tables filled by MariaDB's SEQUENCE engine: 256-byte bodies, one consumption per message, two databases.

archive_*: read, write, read back, compare, publish, from the start of the process; rows are messages and consumptions.
Jobs use the file of `tmc pipeline share-classes`.
export: the same rows by one connection and Arrow, unverified, in turn with the archive. archive_again_s: the next run, with
nothing new in the tables. reconcile_s: ledgers of three producers, center, three inboxes. reconcile_increment_s: the last 30th of
the messages; reconcile_increment_share: that against everything, at the largest size; both from the start of the process.
open_increment_s: the run after one with everything, while a subscriber is away with a third of 900,000 messages.
discrepancies_*: a million messages, each of which is one, since no inbox has any.
peak_memory_mb: the job's whole process tree; bodies: of 256 KiB, in thousands of messages. traffic_loss_share: open-loop full
lives at half of what the center can do, with the polite archive beside it, in turn with none.
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
from tests.pipeline.running import toml_of
from tests.support.filled import CONSUMERS, PRODUCERS, FilledCenter
from tmc_storm.services.mariadb import MariaDB

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
def job(name: str, settings: dict[str, Any], *more: str) -> Iterator[subprocess.Popen[str]]:
    """A job whose session is up when this begins."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(settings))
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline_job", name, file.name, *more],
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


def measured(name: str, settings: dict[str, Any], *more: str) -> dict[str, Any]:
    """Run one job. Returns: its figures, peak_mb, and total_s: with the start of the process."""
    peak, began = 0.0, time.monotonic()
    with job(name, settings, *more) as process:
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
        total = time.monotonic() - began
        ended.set()
        watcher.join()
    return {**json.loads(line), "peak_mb": peak, "total_s": total}


class Side:
    """One size of tables."""

    def __init__(self, server: MariaDB, messages: int, folder: Path, body_bytes: int = 256) -> None:
        self.center = FilledCenter(server, prefix=f"bench{messages}")
        with self.center.sql() as run:  # c4 and c5 would be owed deliveries
            run.exec_driver_sql("DELETE FROM tmc_subscription WHERE subscription_no > 3")
        self.center.fill(messages // 32, body_bytes=body_bytes, subscribers=False)
        self.messages = messages // 32 * 32
        self.folder = folder / str(messages)

    def settings(self, profile: str = "fast", cores: int = 2, ledgers: bool = False) -> dict[str, Any]:
        values = self.center.settings(self.folder, ledgers=ledgers)
        values["consumers"] = values["consumers"][:3]
        return {**values, "spark": {"profile": profile, "master": f"local[{cores}]"}}

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with self.center.sql() as run:
            for name in [*self.center.urls, *PRODUCERS, *CONSUMERS]:
                database = name.rsplit("/", 1)[-1] if "/" in name else self.center.ledger(name)
                run.exec_driver_sql(f"DROP DATABASE IF EXISTS {database}")

    def archive(self, cores: int = 2) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        figures = measured("archive", self.settings(cores=cores))
        assert figures["messages"] == figures["consumptions"] == self.messages, figures
        return {**figures, "rows_per_s": 2 * self.messages / figures["total_s"]}

    def archive_again(self) -> dict[str, Any]:
        figures = measured("archive", self.settings())
        assert figures["messages"] == 0, figures
        return figures

    def export(self) -> float:
        self.folder.mkdir(parents=True, exist_ok=True)
        places = [(f"{self.center.prefix}_0", list(range(16))), (f"{self.center.prefix}_1", list(range(16, 32)))]
        return export.rows_per_s(self.center.server.port, places, self.folder)

    def reconcile(self, cores: int = 2) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        figures = measured("reconcile", self.settings(cores=cores, ledgers=True))
        assert figures["agreed"] == self.messages, figures
        return figures

    def reconcile_increment(self) -> dict[str, Any]:
        """The last 30th, after `reconcile` compared everything."""
        each = self.messages // 32
        since = self.center.start_ms + (each - each // 30) * 1000 + 500
        figures = measured("reconcile", self.settings(ledgers=True), str(since))
        assert figures["agreed"] == each // 30 * 32, figures
        return figures

    def with_one_away(self) -> dict[str, float]:
        """One subscriber acked nothing: a third of the messages stay open. Compare everything, then the increment after it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for shard in range(32):
            self.center.change(
                shard,
                "UPDATE tmc_consumption_{nn} SET state = 1, closed_ms = NULL, due_ms = 9000000000000 WHERE subscription_no = 1",
            )
        with self.center.sql(self.center.ledger("c1")) as run:
            run.exec_driver_sql("DELETE FROM tmc_inbox")
        everything = measured("reconcile", self.settings(ledgers=True))
        increment = measured("reconcile", self.settings(ledgers=True), "last")
        assert increment["pending"] == everything["pending"] > self.messages / 4, (everything, increment)
        return {
            "open_messages": everything["pending"],
            "open_everything_s": round(everything["total_s"], 1),
            "open_increment_s": round(increment["total_s"], 1),
            "open_increment_ratio": round(increment["total_s"] / everything["total_s"], 2),
            "open_peak_memory_mb": round(max(everything["peak_mb"], increment["peak_mb"])),
        }

    def with_nothing_effected(self) -> dict[str, float]:
        """All inboxes are empty, and each message is a discrepancy."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in CONSUMERS:
            with self.center.sql(self.center.ledger(name)) as run:
                run.exec_driver_sql("DELETE FROM tmc_inbox")
        figures = measured("reconcile", self.settings(ledgers=True))
        assert figures["lost"] == self.messages, figures
        return {
            "discrepancies": figures["lost"],
            "discrepancies_s": round(figures["total_s"], 1),
            "discrepancies_peak_memory_mb": round(figures["peak_mb"]),
        }


def share_classes(side: Side, folder: Path) -> None:
    """As docs/pipeline.md says, before all that is measured."""
    os.environ["XDG_CACHE_HOME"] = str(folder)  # of the jobs, too
    config = folder / "pipeline.toml"
    config.write_text(toml_of(side.settings()))
    command = [sys.executable, "-m", "tmc_pipeline", "share-classes", "--config", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE.parent)


def traffic_loss(server: MariaDB, side: Side, seconds: float, rounds: int) -> dict[str, float]:
    """Share of the traffic that does not get through while the polite archive runs."""

    def steady(served: Any, rate: float) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.steady", served.address, served.orders_key, served.coupons_key]
        figures = subprocess.run(
            [*command, str(rate), str(seconds)], check=True, capture_output=True, text=True, cwd=HERE.parent
        )
        found: dict[str, float] = json.loads(figures.stdout)
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
        "--sizes", default="1,2,8,20", help="millions of messages; the archive's figures are those of 2"
    )
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument(
        "--away", type=int, default=900_000, help="messages, a third of which a subscriber has not acked; 0: none"
    )
    parser.add_argument("--lost", type=int, default=MILLION, help="messages, all of them discrepancies; 0: none")
    options = parser.parse_args()
    sizes = [round(float(size) * MILLION) for size in options.sizes.split(",") if size]
    main_size = 2 * MILLION if 2 * MILLION in sizes else max(sizes, default=0)
    server = MariaDB(pool_mb=1024)
    folder = Path(tempfile.mkdtemp(prefix="tmc-bench-pipeline-"))
    result: dict[str, Any] = {}
    peaks: list[float] = []

    def side_of(messages: int, **settings: int) -> Side:
        side = Side(server, messages, folder, **settings)
        if not (folder / "pipeline.toml").exists():
            share_classes(side, folder)
        return side

    try:
        for size in sizes:
            side = side_of(size)
            if size == main_size:
                pairs = [(side.archive(), side.export()) for _ in range(options.rounds)]
                peaks += [figures["peak_mb"] for figures, _ in pairs]
                archive = statistics.median(figures["rows_per_s"] for figures, _ in pairs)
                exported = statistics.median(rate for _, rate in pairs)
                result["archive_ratio_to_export"] = round(
                    statistics.median(figures["rows_per_s"] / rate for figures, rate in pairs), 3
                )
                result |= {"archive_rows_per_s": round(archive), "python_export_rows_per_s": round(exported)}
                result["archive_rows_per_s_1_core"] = round(side.archive(cores=1)["rows_per_s"])
            else:
                figures = side.archive()
                peaks.append(figures["peak_mb"])
                result[f"archive_rows_per_s_{size / MILLION:g}m"] = round(figures["rows_per_s"])
            result[f"archive_again_s_{size / MILLION:g}m"] = round(side.archive_again()["seconds"], 1)
            if size == main_size:
                result |= traffic_loss(server, side, options.seconds, options.rounds)
            side.center.fill_ledgers()
            figures = side.reconcile()
            peaks.append(figures["peak_mb"])
            result[f"reconcile_s_{size / MILLION:g}m"] = round(figures["seconds"], 1)
            if size == main_size:
                result["reconcile_s"] = round(figures["seconds"], 1)
                result["reconcile_s_1_core"] = round(side.reconcile(cores=1)["seconds"], 1)
            result[f"peak_memory_mb_{size / MILLION:g}m"] = round(max(peaks[-2:]))
            increment_s = side.reconcile_increment()["total_s"]
            result[f"reconcile_increment_s_{size / MILLION:g}m"] = round(increment_s, 1)
            if size == max(sizes):
                result["reconcile_increment_share"] = round(increment_s / figures["total_s"], 3)
            side.drop()
        apart = {Side.with_one_away: options.away, Side.with_nothing_effected: options.lost}
        for measure, size in apart.items():
            if not size:
                continue
            side = side_of(size)
            side.center.fill_ledgers()
            result |= measure(side)
            side.drop()
        for thousands in (1, 8) if sizes else ():
            side = side_of(thousands * 1000, body_bytes=256 << 10)
            result[f"peak_memory_mb_bodies_{thousands}k"] = round(side.archive()["peak_mb"])
            side.drop()
        if peaks:
            result["peak_memory_mb"] = round(max(peaks))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result) if options.json else "\n".join(f"{key:32} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
