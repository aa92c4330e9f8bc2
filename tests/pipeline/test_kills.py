"""Archive runs that are killed, driver or worker, and run again: the archive equals that of a clean run, row by row."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import TMC, Jobs, toml_of
from tests.pipeline.test_command_line import QUICK
from tests.support.dose import LONG
from tests.support.filled import FilledCenter
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.domain.ports.retention import ListUnreadable
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

# What is there when the driver is killed, in the order of a run.
MOMENTS: dict[str, str] = {
    "the lock": "archive/_lock",
    "staging": "archive/_staging/*",
    "the first file": "archive/_staging/*/messages/**/*.parquet",
    "all messages": "archive/_staging/*/messages/_SUCCESS",
    "the first list": "archive/_staging/*/lists/**/part-*",
    "all lists": "archive/_staging/*/lists/_SUCCESS",
    "an intent begun": "archive/_intents_*",
    "an intent": "archive/intents/*.json",
    "messages moved": "archive/messages/*/*/run=*/part-*",
    "lists moved": "archive/removal/*",
    "published": "archive/manifests/*.json",
}
IN_CI = ("an intent", "messages moved")


@pytest.fixture(scope="module")
def center(mariadb: MariaDB) -> FilledCenter:
    made = FilledCenter(mariadb, prefix="kills")
    made.fill(600, [1, 4, 17, 31])
    return made


def _rows(jobs: Jobs) -> list[Any]:
    rows = jobs.archived().drop("day", "topic").collect()
    return sorted(tuple(bytes(value) if isinstance(value, bytearray) else value for value in row) for row in rows)


@pytest.fixture(scope="module")
def clean(spark: SparkSession, center: FilledCenter, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run that nobody disturbs archives."""
    jobs = Jobs(spark, center, tmp_path_factory.mktemp("clean"))
    jobs.run_archive()
    return _rows(jobs)


def _started(folder: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    (folder / "pipeline.toml").write_text(toml_of(settings))
    command = [TMC, "pipeline", "archive", "--config", str(folder / "pipeline.toml")]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The driver and its JVM, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _numbers_that_may_go(center: FilledCenter, folder: Path) -> int:
    """As the center would read it: nothing of a run that has no manifest."""
    if not Path(folder, "archive", "manifests").exists():
        return 0  # the center says that nothing is there, and removes nothing
    lists = ArchiveFolder(f"{folder}/archive", center=center.identity)
    try:
        return sum(len(lists.numbers(run.run, shard)) for run in lists.removals() for shard in run.counts)
    except ListUnreadable as exc:
        raise AssertionError("a manifest that is there promises what is not") from exc


@pytest.mark.parametrize("moment", MOMENTS if LONG else IN_CI)
def test_a_driver_that_is_killed(
    moment: str, spark: SparkSession, center: FilledCenter, clean: list[Any], tmp_path: Path
) -> None:
    jobs = Jobs(spark, center, tmp_path)
    process = _started(tmp_path, center.settings(tmp_path, ledgers=False, spark=QUICK))
    pattern = MOMENTS[moment]
    while process.poll() is None and not any(tmp_path.glob(pattern)):
        time.sleep(0.001)
    if process.poll() is None:
        _kill(process)
    allowed = _numbers_that_may_go(center, tmp_path)
    assert allowed == len(jobs.archived().collect())  # all of it or nothing
    staged = {path.relative_to(tmp_path) for path in (tmp_path / "archive").glob("messages/**/*.parquet")}
    jobs.run_archive()
    assert _rows(jobs) == clean
    assert all((tmp_path / path).exists() for path in staged), "what has its final name is finished, not thrown away"
    assert _numbers_that_may_go(center, tmp_path) == len(clean)
    assert not (tmp_path / "archive" / "_staging").exists() or not list((tmp_path / "archive" / "_staging").iterdir())


def _jvm_of(process: subprocess.Popen[bytes]) -> int:
    """The process id of its Java."""
    children = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    (jvm,) = [each for each in children if "java" in Path(f"/proc/{each}/cmdline").read_text()]
    return jvm


ENDS: dict[str, tuple[Callable[[subprocess.Popen[bytes]], None], str]] = {
    "the JVM is killed": (
        lambda process: os.kill(_jvm_of(process), signal.SIGKILL),
        "tmc pipeline archive: Spark's process ended: nothing was published, run it again.",
    ),
    "SIGTERM": (
        lambda process: process.terminate(),
        "tmc pipeline archive: stopped by a signal. This run publishes nothing more: run it again.",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_dies_is_one_line_exit_code_2_and_no_success(end: str, center: FilledCenter, tmp_path: Path) -> None:
    kept = "tmc_pipeline_archived_before_timestamp_seconds 1.79e+09"
    figures = tmp_path / "tmc_pipeline_archive.prom"
    figures.write_text(f'tmc_pipeline_succeeded{{pipeline_job="archive"}} 1.0\n{kept}\n')
    settings = center.settings(tmp_path, ledgers=False, metrics={"textfile": str(tmp_path)}, spark=QUICK)
    process = _started(tmp_path, settings)
    try:
        eventually(lambda: any(tmp_path.glob(MOMENTS["staging"])) or process.poll() is not None, seconds=300)
        during = figures.read_text()
        ENDS[end][0](process)
        assert process.wait(300) == 2
    finally:
        if process.poll() is None:
            _kill(process)
    for written in (during, figures.read_text()):
        assert {'tmc_pipeline_succeeded{pipeline_job="archive"} 0.0', kept} <= set(written.splitlines())
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if not line[:8].replace(":", "").isdigit()]
    assert lines == [ENDS[end][1]]
    assert not list((tmp_path / "archive").glob("m*/*"))


_CALLS_A_JVM = """
import logging, sys
from py4j.java_gateway import GatewayParameters, JavaGateway
from tmc_pipeline.errors import JobFailed, translated
from tmc_pipeline.runs import log, tell_progress

tell_progress()
gateway = JavaGateway(gateway_parameters=GatewayParameters(port=int(sys.argv[1])))
try:
    with translated():
        gateway.entry_point.getHeader()
except JobFailed as exc:
    print(exc, file=sys.stderr)
log.warning("ours")
logging.getLogger("another.library").warning("theirs")
"""


def test_a_connection_to_the_jvm_that_is_reset_is_one_line() -> None:
    """A killed JVM resets a connection on which it has not read everything, and ends the others."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", _CALLS_A_JVM, str(listening.getsockname()[1])]
        calling = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        connection, _ = listening.accept()
        connection.recv(1)  # the rest stays unread
        connection.close()
        ended, ours, theirs = calling.communicate(timeout=120)[1].splitlines()
    assert ended == "Spark's process ended: nothing was published, run it again."
    assert [ours[-5:], theirs[-6:]] == [" ours", "theirs"]  # each once


@contextmanager
def _cluster(folder: Path, workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A standalone master and its workers, on loopback. Gives the master's address and the workers."""
    home = Path(pyspark.__file__).parent
    port, running = free_port(), []
    environment = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_PID_DIR": str(folder),
    }

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(folder / f"{name}.log", "ab") as log:
            command = [str(home / "bin" / "spark-class"), *arguments]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        running.append(process)
        return process

    try:
        start(
            "master",
            "org.apache.spark.deploy.master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--webui-port",
            "0",
        )
        eventually(lambda: "I have been elected leader" in (folder / "master.log").read_text(), seconds=180)
        made = [
            start(
                f"worker{n}",
                "org.apache.spark.deploy.worker.Worker",
                f"spark://127.0.0.1:{port}",
                "--host",
                "127.0.0.1",
                "--cores",
                "1",
                "--memory",
                "1g",
                "--webui-port",
                "0",
            )
            for n in range(workers)
        ]
        eventually(
            lambda: (folder / "master.log").read_text().count("Registering worker 127.0.0.1") == workers, seconds=180
        )
        yield f"spark://127.0.0.1:{port}", made
    finally:
        for process in running:
            if process.poll() is None:
                _kill(process)


@pytest.mark.takes_turns("spark")
@pytest.mark.timeout(1200)
def test_a_cluster_whose_worker_dies(
    spark: SparkSession, center: FilledCenter, clean: list[Any], tmp_path: Path, note: Callable[[str], None]
) -> None:
    """Submitted to a standalone master with two workers, one of which is killed when the first file is there."""
    jobs = Jobs(spark, center, tmp_path)
    (tmp_path / "pipeline.toml").write_text(toml_of(center.settings(tmp_path, ledgers=False, spark=QUICK)))
    with _cluster(tmp_path, workers=2) as (master, workers), open(tmp_path / "log", "wb") as log:
        command = [
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            "--master",
            master,
            "--jars",
            "/usr/share/java/mariadb-java-client.jar",
            "--conf",
            "spark.driver.host=127.0.0.1",
            "--executor-memory",
            "512m",
            str(ROOT / "tmc_pipeline" / "__main__.py"),
            "archive",
            "--config",
            str(tmp_path / "pipeline.toml"),
        ]
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        submitted = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            eventually(
                lambda: any(tmp_path.glob(MOMENTS["the first file"])) or submitted.poll() is not None,
                seconds=400,  # JVM after JVM starts, on a machine that may be busy
                describe=lambda: (tmp_path / "log").read_text()[-2000:],
            )
            _kill(workers[0])
            assert submitted.wait(400) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            if submitted.poll() is None:
                _kill(submitted)
    assert _rows(jobs) == clean
    executors = (tmp_path / "master.log").read_text().count("Launching executor")
    assert executors >= 2
    note(f"a standalone cluster archived {len(clean)} messages; {executors} executors were started, one worker killed")
    shutil.rmtree(tmp_path / "work", ignore_errors=True)
