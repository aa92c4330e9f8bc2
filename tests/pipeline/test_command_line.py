"""`tmc pipeline` as operators run it: one line and exit code 2 for whatever is wrong, nothing half published."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import tmc_client
from tests.pipeline.conftest import QUICK_JAVA
from tests.pipeline.running import TMC, Jobs, toml_of
from tests.support.center import RunningCenter
from tests.support.certificates import for_loopback
from tests.support.dose import LONG
from tests.support.filled import START_MS, FilledCenter
from tmc_client.center import Center
from tmc_client.connecting.connection import Identity
from tmc_pipeline.archive.restore import Restoring, replay, wanted_ids
from tmc_pipeline.cli import _replay, app
from tmc_pipeline.dialects import database
from tmc_pipeline.errors import ArchiveDamaged, CannotRun, JobFailed, from_text
from tmc_pipeline.session import check_java, driver_jars, how_to_start_processes
from tmc_pipeline.settings import SparkSettings
from tmc_server.config import LimitsConfig
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port

pytestmark = pytest.mark.mariadb
QUICK = {"profile": "fast", "options": {"spark.driver.extraJavaOptions": QUICK_JAVA}}


def run(
    folder: Path,
    job: str,
    *arguments: str,
    settings: dict[str, Any] | None = None,
    prefix: list[str] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `tmc pipeline JOB` with these settings, quickly where they do not say how."""
    command = [*(prefix or []), TMC, "pipeline", job]
    if settings is not None:
        (folder / "pipeline.toml").write_text(toml_of({"spark": QUICK} | settings))
        command += ["--config", str(folder / "pipeline.toml")]
    return subprocess.run(
        [*command, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refused run: it is the last, and no stack trace is before it."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "\tat " not in result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def center(mariadb: MariaDB) -> FilledCenter:
    made = FilledCenter(mariadb, prefix="commands")
    made.fill(6, [4, 31])
    made.fill_ledgers()
    return made


class TestBeforeSparkStarts:
    def test_a_configuration_with_a_typo(self, tmp_path: Path) -> None:
        said = refusal(run(tmp_path, "archive", settings={"archive": {"pth": "x"}}))
        assert "archive.pth: there is no such key; did you mean 'path'?" in said

    def test_no_configuration(self, tmp_path: Path) -> None:
        assert "Cannot read" in refusal(run(tmp_path, "archive", "--config", str(tmp_path / "none.toml")))

    def test_two_places_for_one_ledger(self, tmp_path: Path) -> None:
        source = {"app": "p1", "csv": "a.csv", "parquet": "b"}
        assert "exactly one of url, parquet and csv" in refusal(
            run(tmp_path, "reconcile", settings={"producers": [source]})
        )

    @pytest.mark.parametrize(
        ("archive", "command", "said"),
        [
            ({}, ["restore", "1-1-04-1"], "No archive is configured"),
            ({}, ["archive", "expire"], "No archive is configured"),
            ({"path": "/archive"}, ["archive", "expire"], "No rule says what expires"),
        ],
    )
    def test_what_a_command_needs(
        self, archive: dict[str, str], command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # there is none
        config = tmp_path / "pipeline.toml"
        config.write_text(toml_of({"store": {"catalog": "sqlite:///center.db"}, "archive": archive}))
        done = CliRunner().invoke(app, [*command, "--config", str(config)])
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr

    def test_no_java(self, tmp_path: Path, center: FilledCenter) -> None:
        said = refusal(run(tmp_path, "archive", settings=center.settings(tmp_path), JAVA_HOME=str(tmp_path)))
        assert (
            "Spark needs Java, and JAVA_HOME has none: install Java 17: apt-get install openjdk-17-jre-headless."
            in said
        )

    def test_an_old_java(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
        java.chmod(java.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        with pytest.raises(CannotRun, match=r"Spark needs Java 17 or newer, .* is 8: install Java 17"):
            check_java()

    @pytest.mark.parametrize(
        ("system", "version", "option"),
        [
            ("linux", "17.0.15", "-Djdk.lang.Process.launchMechanism=VFORK"),
            ("linux", "25", "-Djdk.lang.Process.launchMechanism=VFORK"),
            ("linux", "26.0.1", ""),
            ("darwin", "17.0.15", ""),
        ],
    )
    def test_a_java_that_does_not_know_vfork(
        self, monkeypatch: pytest.MonkeyPatch, system: str, version: str, option: str
    ) -> None:
        """It would refuse to start any process."""
        monkeypatch.setattr("sys.platform", system)
        assert how_to_start_processes(f'openjdk version "{version}" 2026-01-20') == option

    def test_a_driver_that_is_missing(self, tmp_path: Path) -> None:
        settings = SparkSettings(drivers=(str(tmp_path / "no.jar"),))
        with pytest.raises(CannotRun, match=r"The driver .*no\.jar is missing: apt-get install libmariadb-java"):
            driver_jars(settings, ["mysql"])

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("what", "is no database URL"),
            ("oracle://u@h/db", "reads MariaDB, MySQL, PostgreSQL and SQLite, not oracle"),
            ("mysql://u@h", "names no database"),
            ("postgresql://u@h", "names no database"),
            ("sqlite:////no/such/file.db", "There is no SQLite file"),
        ],
    )
    def test_a_url_that_cannot_be(self, url: str, said: str) -> None:
        with pytest.raises(CannotRun, match=said):
            database(url)

    def test_no_password_in_what_is_said(self) -> None:
        assert "secret" not in repr(database("mysql://u:secret@h/db"))
        with pytest.raises(CannotRun) as caught:
            database("mysql://u:secret@h")
        assert "secret" not in str(caught.value)


class TestRefusals:
    def test_nobody_answers(self, tmp_path: Path, center: FilledCenter) -> None:
        settings = center.settings(tmp_path, store={"catalog": f"mysql://root@127.0.0.1:{free_port()}/tmc"})
        said = refusal(run(tmp_path, "archive", settings=settings))
        assert "No database answers at 127.0.0.1: check the URL, and that the database is running." in said

    def test_no_rights(self, tmp_path: Path, center: FilledCenter, spark: Any) -> None:
        with center.sql() as sql:
            sql.exec_driver_sql("CREATE USER IF NOT EXISTS 'poor'@'%%' IDENTIFIED BY 'pw'")
            sql.exec_driver_sql("CREATE USER IF NOT EXISTS 'poor'@'localhost' IDENTIFIED BY 'pw'")
            for user in ("'poor'@'%%'", "'poor'@'localhost'"):
                sql.exec_driver_sql(f"GRANT SELECT ON {center.prefix}_0.tmc_schema_version TO {user}")
        where = f"mysql://poor:%s@127.0.0.1:{center.server.port}/{center.prefix}_0"
        may_not_read = "The account may not read: GRANT SELECT on the databases of the center and of the ledgers to it"
        with pytest.raises(CannotRun, match=may_not_read):
            Jobs(spark, center, tmp_path, store={"catalog": where % "pw"}).run_archive()
        with pytest.raises(CannotRun, match="The database refuses 'poor'") as caught:
            Jobs(spark, center, tmp_path, store={"catalog": where % "wrong"}).run_archive()
        assert "wrong" not in str(caught.value)
        assert not (tmp_path / "archive" / "manifests").exists()

    def test_a_driver_that_hands_over_column_names(
        self, tmp_path: Path, center: FilledCenter, monkeypatch: pytest.MonkeyPatch, spark: Any
    ) -> None:
        """What jdbc:mariadb: makes of every row."""
        jobs = Jobs(spark, center, tmp_path)
        monkeypatch.setattr(jobs.tables, "_rows", lambda *_: [type("Row", (), {"version_num": "version_num"})()])
        with pytest.raises(CannotRun, match="The driver reads column names instead of values"):
            jobs.tables.check()

    def test_a_disk_that_is_full(self, tmp_path: Path, mariadb: MariaDB) -> None:
        """No file may grow beyond a megabyte, which the JVM is told as it is of a full disk."""
        center = FilledCenter(mariadb, prefix="disk")
        center.fill(5000, [4])
        center.change(4, "UPDATE tmc_message_{nn} SET body = RANDOM_BYTES(1024)")
        limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 1000; exec "$@"', "limited"]
        said = refusal(
            run(tmp_path, "archive", settings=center.settings(tmp_path), prefix=limited, SPARK_LOCAL_DIRS=str(tmp_path))
        )
        assert "make room, then run it again; nothing was published." in said
        assert not list((tmp_path / "archive").rglob("*.json"))

    @pytest.mark.timeout(900)
    def test_bodies_of_the_longest_size_fit_into_the_polite_profile(self, tmp_path: Path, mariadb: MariaDB) -> None:
        """Rows of one shard that together do not fit, each as long as limits.body_bytes allows; long: more than one fetch."""
        center = FilledCenter(mariadb, prefix="bodies")
        many, memory = (2100, "1g") if LONG else (1900, "800m")
        center.fill(many, [4], body_bytes=LimitsConfig().body_bytes)
        spark = {"profile": "polite", "memory": memory, "nice": 0}  # about memory: the lowest priority may starve
        done = run(tmp_path, "archive", settings=center.settings(tmp_path, ledgers=False, spark=spark))
        assert done.returncode == 0, done.stderr
        assert f"{many} messages" in done.stdout

    def test_the_polite_profile_has_the_priority_that_was_set(self) -> None:
        program = "import os; from tmc_pipeline.session import lower_priority; lower_priority(7); print(os.nice(0))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert int(done.stdout) == max(7, os.nice(0))

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, center: FilledCenter, spark: Any) -> None:
        (tmp_path / "archive").write_text("in the way")
        with pytest.raises(JobFailed, match="cannot be written"):
            Jobs(spark, center, tmp_path).run_archive()

    def test_a_replay_without_a_center(
        self, tmp_path: Path, center: FilledCenter, spark: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tmc_pipeline.archive.restore._PATIENCE", timedelta(seconds=1))
        jobs = Jobs(spark, center, tmp_path)
        jobs.run_archive()
        found = list(Restoring(jobs.archive).by_key("orders.paid", "k04-3"))
        with pytest.raises(CannotRun, match=r"1-1-04-\d+ was not sent again: "):
            _replay(found, f"127.0.0.1:{free_port()}", "key", "", "token")
        assert list(Restoring(jobs.archive).by_id(wanted_ids(["1-1-04-5"]))) == []
        with pytest.raises(CannotRun, match="'what' is no message id"):
            wanted_ids(["1-1-04-5", "what"])


def _as_orders(running: RunningCenter, token: str) -> Center:
    identity = Identity(app="orders", key=running.keys["orders"], operator_token=token)
    return Center(running.address, identity, None, timedelta(seconds=10), insecure=False)


def test_a_replay_is_a_new_message_and_only_one(tmp_path: Path) -> None:
    message = {
        "id": "1-1-04-5",
        "state": "COMMITTED",
        "erased": None,
        "topic": "order.paid",
        "content_type": "text/plain",
        "headers": {"color": "red"},
        "body_base64": base64.b64encode("größer".encode()).decode(),
    }
    with (
        RunningCenter(f"sqlite:///{tmp_path}/center.db") as running,
        _as_orders(running, running.token) as orders,
        _as_orders(running, "") as producer,
        _as_orders(running, "wrong") as stranger,
    ):
        with pytest.raises(tmc_client.InvalidRequest, match="tmc-replay-of is for replays by operators"):
            replay(message, producer)
        with pytest.raises(tmc_client.NotAuthenticated, match="valid admin token"):
            replay(message, stranger)
        sent = [replay(message, orders) for _ in range(2)]
        assert sent[0] == sent[1]
        stored = running.detail("order.paid", "replay.1-1-04-5").message
        assert stored.message_id == sent[0]
        assert dict(stored.headers) == {"color": "red", "tmc-replay-of": "1-1-04-5"}
        assert (stored.body.decode(), stored.content_type) == ("größer", "text/plain")
        with pytest.raises(CannotRun, match="was rolled back: nobody may see it"):
            replay({**message, "state": "ROLLED_BACK"}, orders)


def test_a_replay_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = for_loopback(tmp_path)
    message = {
        "id": "1-1-04-5",
        "state": "COMMITTED",
        "erased": None,
        "topic": "order.paid",
        "content_type": "text/plain",
        "headers": {},
        "body_base64": "",
        "producer": "orders",
        "tag": "default",
    }
    tls = {"certificate": str(certificate), "key": str(key)}
    with RunningCenter(f"sqlite:///{tmp_path}/center.db", open_to_all=True, tls=tls) as running:
        _replay([message], running.address, "any", str(certificate), "any")
    assert "1-1-04-5 was sent again as " in capsys.readouterr().err
    with pytest.raises(CannotRun, match=r"There is no file /typo\.pem: check --authority"):
        _replay([message], running.address, "any", "/typo.pem", "any")


_UNREADABLE = "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///a/b.c/part-0.parquet."


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("java.io.IOException: No space left on device", JobFailed, "No space left on device: make room"),
        ("Caused by: java.lang.OutOfMemoryError: Java heap space", JobFailed, "raise spark.memory"),
        ("(conn=5) Unknown database 'tmx'", CannotRun, "There is no database tmx"),
        (
            f"{_UNREADABLE}  SQLSTATE: KD001\nCaused by: java.lang.RuntimeException: x is not a Parquet file",
            ArchiveDamaged,
            "/a/b.c/part-0.parquet cannot be read: bring it back",
        ),
        (f"{_UNREADABLE}\nCaused by: java.lang.OutOfMemoryError: Java heap space", JobFailed, "raise spark.memory"),
        (
            "x\nCaused by: some.Odd: first\nCaused by: other.Odd: the root\n",
            JobFailed,
            "Spark gave up: other.Odd: the root.",
        ),
    ],
)
def test_what_spark_says_becomes_one_line(text: str, kind: type[Exception], said: str) -> None:
    error = from_text(text)
    assert type(error) is kind
    assert said in str(error)


@pytest.mark.takes_turns("days")
@pytest.mark.timeout(900)
def test_a_day_at_the_command_line(
    tmp_path: Path,
    center: FilledCenter,
    note: Callable[[str], None],
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Archive, restore, reconcile, compact, erase, report, with figures for Prometheus after each.

    The first is a process with a JVM of its own. The others have one that runs already: to start it takes most of their time.
    """
    settings = center.settings(tmp_path, metrics={"textfile": str(tmp_path)})
    archived = run(tmp_path, "archive", settings=settings)
    assert archived.returncode == 0, archived.stderr
    assert "12 messages, 20 consumptions" in archived.stdout
    monkeypatch.setattr("tmc_pipeline.session.session", lambda *_: nullcontext(spark))
    monkeypatch.setattr("tmc_pipeline.cli.tell_progress", lambda: None)  # it would be for the whole process

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = CliRunner().invoke(app, [*arguments, "--config", str(tmp_path / "pipeline.toml")])
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    assert "tmc_pipeline_archived_messages 12.0" in (tmp_path / "tmc_pipeline_archive.prom").read_text()
    restored = run_here("restore", "--topic", "orders.paid", "--key", "k04-3")
    message = json.loads(restored.stdout)
    assert (message["key"], message["producer"], message["state"]) == ("k04-3", "p1", "COMMITTED")
    assert [each["subscriber"] for each in message["consumptions"]] == ["c1.default", "c4.default"]
    some = run_here("restore", message["id"], "1-1-04-1", "--replay")
    assert (some.returncode, json.loads(some.stdout)["id"]) == (1, message["id"])
    assert "Not archived: 1-1-04-1. Nothing was replayed." in some.stderr
    with center.sql(center.ledger("p1")) as sql:
        sql.exec_driver_sql("DELETE FROM tmc_ledger LIMIT 1")
    reconciled = run_here("reconcile")
    assert reconciled.returncode == 1
    assert f"{'ghost':24}{1:12}" in reconciled.stdout
    assert 'tmc_pipeline_messages{verdict="ghost"} 1.0' in (tmp_path / "tmc_pipeline_reconcile.prom").read_text()
    again = run_here("reconcile", "--since", "last")
    assert again.returncode == 1, "the ghost is reported until it is repaired"
    assert f"{'agreed':24}{0:12}" in again.stdout
    assert "ended before --since" in refusal(run_here("reconcile", "--since", "2090-01-01"))
    compacted = run_here("archive", "compact")
    assert (compacted.returncode, compacted.stdout) == (0, "3 folders became 3, with 12 messages\n"), compacted.stderr
    erased = run_here("archive", "erase", message["id"], "--reason", "request 4711")
    assert (erased.returncode, erased.stdout) == (0, "erased the content of 1 messages, in 1 folders\n"), erased.stderr
    reported = run_here("report", "--since", "2026-09-01")
    assert reported.returncode == 0, reported.stderr
    assert Path(reported.stdout.strip()).read_text().startswith("<!doctype html>")
    assert "give a time as 2026-11-21" in refusal(run_here("report", "--since", "yesterday"))
    assert 'tmc_pipeline_succeeded{pipeline_job="report"} 1.0' in (tmp_path / "tmc_pipeline_report.prom").read_text()
    written = "".join(path.read_text() for path in tmp_path.glob("*.prom"))
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    documented = set(re.findall(r"^\| `(tmc_pipeline_\w+)` \|", page, re.MULTILINE))
    assert set(re.findall(r"^(tmc_pipeline_\w+)", written, re.MULTILINE)) <= documented
    note(f"messages from {START_MS} on: archived, restored, reconciled, reported")


def _scheduled() -> list[str]:
    units = (Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service")
    return [
        line for unit in units for line in re.findall(r"^Exec\w+=\S+ pipeline (.*)$", unit.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("arguments", sorted(set(_scheduled())))
def test_the_command_lines_of_the_units_are_understood(arguments: str) -> None:
    asked = CliRunner().invoke(app, [*arguments.split(), "--help"])
    assert asked.exit_code == 0, asked.output
