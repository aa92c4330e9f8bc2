"""An archive in S3, over Hadoop's connector and a real server of that protocol; and other tools that read the files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession

from tests.pipeline.running import FETCH, Jobs
from tests.support.filled import START_MS, FilledCenter
from tmc_pipeline.archive import rewriting
from tmc_pipeline.archive.contents import Archive, moment
from tmc_pipeline.archive.job import HOUR_MS, Archiving
from tmc_pipeline.archive.publishing import Staging
from tmc_pipeline.archive.rewriting import Rewriting
from tmc_pipeline.archive.verify import Verifying
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.errors import AnotherRun, ArchiveDamaged, CannotRun, from_text
from tmc_pipeline.files import HadoopFolder, configuration_of
from tmc_pipeline.reconcile.verdicts import AGREED
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.domain.manifest import Manifest

pytestmark = pytest.mark.mariadb
Fill = Callable[..., FilledCenter]
BUCKET = "s3a://archive"


@pytest.fixture(scope="module")
def s3(spark: SparkSession) -> Iterator[str]:
    """The address of an S3 server with one bucket, which Spark is configured for."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    configuration = configuration_of(spark)
    for name, value in {
        "endpoint": address,
        "access.key": "test",
        "secret.key": "test",
        "path.style.access": "true",
    }.items():
        configuration.set(f"fs.s3a.{name}", value)
    import s3fs

    s3fs.S3FileSystem(key="test", secret="test", endpoint_url=address).mkdir("archive")
    yield address
    server.stop()


@pytest.fixture
def jobs(spark: SparkSession, filled: Fill, folder: Path, s3: str, request: pytest.FixtureRequest) -> Jobs:
    """An archive in the bucket."""
    center = filled(6)
    center.fill_ledgers()
    path = f"{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"
    return Jobs(spark, center, folder, archive={"path": path, "lag_minutes": 1})


def _archiving(jobs: Jobs) -> Archiving:
    """A run of its own, as on another machine."""
    path = jobs.settings.archive.path
    tables = CenterTables(jobs.spark, databases_of(jobs.settings.store), FETCH)
    return Archiving(jobs.spark, tables, Archive(jobs.spark, path, tables), 60_000, HOUR_MS)


@pytest.mark.takes_turns("spark")
def test_an_archive_in_s3(jobs: Jobs, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archived, read, compacted, verified, reconciled; and the center reads the lists over fsspec."""
    first = jobs.run_archive(before_ms=START_MS + 3_500)
    second = jobs.run_archive()
    assert (first.messages, second.messages, jobs.run_archive().messages) == (12, 12, 0)
    assert jobs.archived().count() == 24
    done = Rewriting(jobs.spark, jobs.tables, jobs.archive).compact()
    assert (done.before, done.after) == (6, 3)
    assert len(jobs.archive.folder.files("messages")) == 3
    assert Verifying(jobs.archive).run().problems == ()
    assert jobs.run_reconcile().verdicts[AGREED] == 24
    for name, value in {"ENDPOINT_URL": s3, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    lists = ArchiveFolder(jobs.settings.archive.path, center=jobs.archive.owner)
    assert [each.run for each in lists.removals()] == [first.run, second.run]
    assert [len(lists.numbers(first.run, shard)) for shard in first.removals[0].counts] == [3, 3, 3, 3]
    jobs.archive.folder.write("manifests/seen.txt", "not a manifest")
    assert len(lists.removals()) == 2


@pytest.mark.takes_turns("object storage")
def test_of_two_runs_at_once_one_publishes(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing locks here: both write their files, and the second finds that its number is taken."""
    publish, ran = Staging.publish, list[Manifest]()

    def overtaken(self: Staging, manifest: Manifest) -> Manifest:
        monkeypatch.setattr(Staging, "publish", publish)
        ran.append(_archiving(jobs).run())
        return publish(self, manifest)

    monkeypatch.setattr(Staging, "publish", overtaken)
    with pytest.raises(AnotherRun, match=r"00000001\.json while this one worked. Nothing of this one was published"):
        _archiving(jobs).run()
    assert [each.run for each in jobs.archive.chain().manifests] == [ran[0].run]
    assert jobs.archived().count() == 24
    assert Verifying(jobs.archive).run().problems == (), "the loser took its files back"
    assert jobs.archive.folder.names("intents") == []


def _killed_while_publishing(jobs: Jobs, overtaken: bool) -> str:
    """With all its files under their final names, but no manifest. overtaken: another run has its number. Returns: the run."""
    with pytest.MonkeyPatch.context() as patches:
        publish = Staging.publish

        def publishing(self: Staging, manifest: Manifest) -> Manifest:
            patches.undo()
            if overtaken:
                _archiving(jobs).run()
            patches.setattr(Staging, "owner_of", lambda *_: "")  # as it was a moment ago
            patches.setattr(Staging, "_refuse_the_incomplete", dying)
            return publish(self, manifest)

        def dying(self: Staging, manifest: Manifest) -> None:
            raise OSError("the power failed")

        patches.setattr(Staging, "publish", publishing)
        with pytest.raises(OSError, match="power"):
            _archiving(jobs).run()
    (intent,) = jobs.archive.folder.names("intents")
    return intent.removesuffix(".json")


@pytest.mark.takes_turns("object storage")
@pytest.mark.parametrize("overtaken", [True, False])
def test_a_run_that_was_killed_while_it_published(jobs: Jobs, overtaken: bool) -> None:
    """It is finished, or taken back if another run was published with its number."""
    killed = _killed_while_publishing(jobs, overtaken)
    assert _archiving(jobs).run().messages == 0
    (run,) = [each.run for each in jobs.archive.chain().manifests if each.messages]
    assert (run == killed) is not overtaken
    assert jobs.archived().count() == 24
    assert Verifying(jobs.archive).run().problems == ()


@pytest.mark.takes_turns("object storage")
def test_taking_back_continues_where_it_was_killed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = _killed_while_publishing(jobs, overtaken=True)
    remove, removed = HadoopFolder.remove, list[str]()

    def dying(self: HadoopFolder, name: str) -> None:
        if name.startswith("messages/"):
            removed.append(name)
            if len(removed) == 2:
                raise OSError("the power failed")
        remove(self, name)

    monkeypatch.setattr(HadoopFolder, "remove", dying)
    with pytest.raises(OSError, match="power"):
        _archiving(jobs).run()
    monkeypatch.setattr(HadoopFolder, "remove", remove)
    assert jobs.archive.folder.exists(f"removal/{killed}")
    assert _archiving(jobs).run().messages == 0
    assert jobs.archived().count() == 24
    assert Verifying(jobs.archive).run().problems == ()


@pytest.mark.takes_turns("object storage")
def test_a_run_that_another_one_finished_keeps_its_files(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a checkpoint, which lists no runs but their files, stands for its manifest by now."""
    move = Staging.move

    def overtaken(self: Staging) -> None:
        move(self)
        monkeypatch.setattr(Staging, "move", move)
        assert _archiving(jobs).run().messages == 0
        monkeypatch.setattr(rewriting, "_MANIFESTS", 0)
        Rewriting(jobs.spark, jobs.tables, jobs.archive).compact()
        jobs.archive.folder.remove("manifests/00000001.json")  # as the next checkpoint does

    monkeypatch.setattr(Staging, "move", overtaken)
    assert _archiving(jobs).run().messages == 24
    assert any(each.checkpoint for each in jobs.archive.chain().manifests)
    assert jobs.archived().count() == 24
    assert Verifying(jobs.archive).run().problems == ()


def test_of_many_requests_for_one_name_one_succeeds(jobs: Jobs) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder = jobs.archive.folder
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: folder.create("manifests/00000009.json", f"run {n}"), range(8)))
    assert sum(made) == 1
    assert folder.read("manifests/00000009.json") == f"run {made.index(True)}"


def test_a_run_whose_files_were_deleted_is_not_published(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that took its staging for abandoned: the center would remove what nobody has."""
    publish = Staging.publish

    def robbed(self: Staging, manifest: Manifest) -> Manifest:
        folder = jobs.archive.folder
        name = next(each for each in folder.files(f"{self.path}/messages") if each.endswith(".parquet"))
        folder.remove(f"{self.path}/messages/{name}")
        return publish(self, manifest)

    monkeypatch.setattr(Staging, "publish", robbed)
    with pytest.raises(ArchiveDamaged, match=r"cannot be published: s3a:.* (is gone|instead of 4 with)"):
        _archiving(jobs).run()
    assert jobs.archive.chain().manifests == ()


def test_a_list_of_open_messages_that_is_gone_costs_time_only(jobs: Jobs) -> None:
    jobs.center.change(7, "UPDATE tmc_message_{nn} SET state = 4, decided_ms = NULL WHERE message_key = 'k07-1'")
    assert jobs.run_archive().messages == 23
    jobs.archive.folder.remove("open")
    assert jobs.run_archive().messages == 0
    assert jobs.archived().count() == 23


def test_the_staging_of_a_run_elsewhere_is_left_alone_for_a_day(jobs: Jobs) -> None:
    folder = jobs.archive.folder
    working = f"{moment(jobs.tables.now_ms() - HOUR_MS)}-abc"
    folder.write(f"_staging/{working}/messages/part-0", "x")
    folder.write("_staging/20200101T000000-dead/messages/part-0", "x")
    jobs.run_archive()
    assert folder.names("_staging") == [working]


def test_other_tools_read_the_archive_as_a_table(spark: SparkSession, filled: Fill, folder: Path) -> None:
    """Each line of docs/pipeline.md, also while a compaction has just replaced files."""
    jobs = Jobs(spark, filled(30), folder)
    jobs.run_archive(before_ms=START_MS + 10_000)
    jobs.run_archive()
    Rewriting(spark, jobs.tables, jobs.archive).compact()
    documented = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    lines = {
        name: next(line for line in documented.splitlines() if mark in line).partition("   ")[0]
        for name, mark in {
            "spark": "FROM parquet.`",
            "duckdb": "read_parquet('",
            "pandas": "pandas.read_parquet(",
        }.items()
    }
    here = {name: line.replace("/var/lib/tmc/archive", str(folder / "archive")) for name, line in lines.items()}
    expected = [("orders.paid", 40), ("orders.shipped", 40), ("stock.moved", 40)]
    assert sorted(map(tuple, spark.sql(here["spark"]).collect())) == expected
    assert sorted(duckdb.sql(here["duckdb"]).fetchall()) == expected
    table: Any = eval(here["pandas"], {"pandas": pd})
    assert len(table) == 40
    assert set(table["topic"]) == {"orders.paid"}


def test_a_connector_that_spark_lacks_is_named() -> None:
    for said in (
        "java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
        'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "gs"',
    ):
        error = from_text(said)
        assert isinstance(error, CannotRun)
        assert "add the jars of the object store to spark.drivers" in str(error)


def test_a_missing_connector_is_named() -> None:
    with pytest.raises(ValueError, match=r"retention\.archive nowhere://a/b"):
        ArchiveFolder("nowhere://a/b", center="")


def test_a_server_without_s3fs_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from tmc_server.archives.folder import ArchiveFolder\n"
        "try:\n    ArchiveFolder('s3a://bucket/archive', center='')\nexcept ValueError as exc:\n    print(exc)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("retention.archive s3://bucket/archive: Install s3fs")


def test_a_local_folder_has_a_lock(spark: SparkSession, folder: Path) -> None:
    local = HadoopFolder(spark, str(folder))
    with local.alone(), pytest.raises(AnotherRun):
        with local.alone():
            raise AssertionError("two runs have the lock")
