"""`tmc storm` as its user runs it: in CI over SQLite and, in turn, over one of the servers or in its literal form.

By `--long` ten minutes of each.

STORM_SEED repeats a sequence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import TMC
from tests.support.dose import LONG, in_turn
from tmc_storm.operator import Operator
from tmc_storm.services.ports import free_port

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(1200)]


def _storm(report: Path, *options: str) -> subprocess.CompletedProcess[str]:
    orders = "40" if LONG else "12"
    command = [sys.executable, "-m", "tmc_cli", "storm", "--orders", orders, "--report", str(report), *options]
    return subprocess.run(command, capture_output=True, text=True)


_SQLITE = (["--store", "sqlite"], 0.6)
_SERVERS = [
    (["--store", "mariadb"], 1.4),
    (["--store", "postgresql", "--replicas"], 1.4),
    (["--store", "mariadb", "--literal", "--interval", "20" if LONG else "6"], 1.4),
]


@pytest.mark.parametrize(("center", "minutes"), [_SQLITE, *in_turn("storm", _SERVERS)])
def test_after_a_storm_the_books_agree(
    center: list[str], minutes: float, tmp_path: Path, note: Callable[[str], None]
) -> None:
    seed = os.environ.get("STORM_SEED", str(time.time_ns() % 1_000_000))
    done = _storm(tmp_path / "storm", *center, "--minutes", str(10 if LONG else minutes), "--seed", seed)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    report = json.loads((tmp_path / "storm" / "report.json").read_text())
    assert report["clean"]
    assert report["faults"] >= 6  # how many fit into these seconds is up to the machine
    if "--literal" in center:
        assert {line["kind"].partition(": ")[2] for line in report["kinds"]} == {"killed"}
    else:
        assert len(report["kinds"]) >= 5
    assert report["effects"] > report["orders"] >= 100
    assert "clean" in (tmp_path / "storm" / "report.html").read_text()
    note(f"storm, {' '.join(center)}, seed {seed}: {done.stderr.splitlines()[-1]}")


@pytest.mark.takes_turns("storms")
def test_an_earlier_run_is_repeated(tmp_path: Path) -> None:
    assert _storm(tmp_path / "first", "--minutes", "0.1", "--seed", "1").returncode == 0
    earlier = tmp_path / "first" / "report.json"
    assert _storm(tmp_path / "second", "--minutes", "0.1", "--seed", "1", "--repeat", str(earlier)).returncode == 0
    first, second = (
        [one["strike"] for one in json.loads((tmp_path / name / "report.json").read_text())["strikes"]]
        for name in ("first", "second")
    )
    assert first == second != []


@pytest.mark.takes_turns("storms")
def test_it_visits_a_center_that_runs_already_and_leaves(tmp_path: Path) -> None:
    port, check_port = free_port(), free_port()
    command = [TMC, "dev", "--port", str(port), "--console-port", "-1", "--data", str(tmp_path / "center.db")]
    with (tmp_path / "center.log").open("wb") as log:
        center = subprocess.Popen(command, stderr=log)
    operator = Operator(f"127.0.0.1:{port}", "")
    try:
        operator.call("GetOverview")
        for number, options in enumerate((["--check-address", f"127.0.0.1:{check_port}"], [])):
            report = tmp_path / f"storm{number}"
            done = _storm(report, "--minutes", "0.15", "--address", f"127.0.0.1:{port}", *options)
            assert done.returncode == 0, done.stderr
            kinds = {
                line["kind"].partition(":")[0] for line in json.loads((report / "report.json").read_text())["kinds"]
            }
            assert kinds <= {"client to server", "producer", "consumer", "operator"}
            assert all(one.removed_ms for one in operator.call("ListSubscriptions").subscriptions)
            assert all(one.disabled for one in operator.call("ListApps").apps)
        taken = _storm(tmp_path / "taken", "--address", f"127.0.0.1:{port}", "--check-address", f"127.0.0.1:{port}")
        assert (taken.returncode, "Address already in use" in taken.stderr) == (2, True)
        operator.call("EnableApp", id="storm-mail", reason="as if another storm were there")
        done = _storm(tmp_path / "another", "--address", f"127.0.0.1:{port}")
        assert (done.returncode, "one at a time" in done.stderr) == (2, True)
    finally:
        operator.close()
        center.terminate()
        center.wait()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minimize"], "--minimize needs --repeat REPORT.JSON"),
        (["--literal"], "--literal needs several nodes"),
        (["--literal", "--survey"], "two kinds of storms"),
        (["--replicas"], "--replicas are of databases of its own"),
        (["--check-address", "127.0.0.1:1"], "goes with --address"),
        (["--address", "center.example:50051"], "would travel in the clear"),
        (["--address", "127.0.0.1:1"], "No center that lets us in answers at 127.0.0.1:1"),
        (["--address", "127.0.0.1:1", "--store", "mariadb"], "leave it out with --address"),
        (["--repeat", "nowhere.json"], "--repeat: [Errno 2]"),
        (["--minutes", "0"], "--minutes"),
    ],
)
def test_what_cannot_be_run_is_said(options: list[str], sentence: str, tmp_path: Path) -> None:
    done = _storm(tmp_path / "storm", *options)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = _storm(tmp_path)
    assert (done.returncode, "is not an empty folder" in done.stderr) == (2, True)
