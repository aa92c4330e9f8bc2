"""Whose archive it is and whether its end is there: compared with the center before anything is read, written or removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import FETCH, Jobs
from tests.support.filled import START_MS, FilledCenter
from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.job import DAY_MS, HOUR_MS
from tmc_pipeline.archive.restore import Restoring
from tmc_pipeline.archive.rewriting import Rewriting
from tmc_pipeline.archive.verify import Verifying
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.errors import ArchiveDamaged, CannotRun
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.verdicts import AGREED
from tmc_pipeline.report.job import Report
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.config import StoreConfig
from tmc_server.domain.manifest import Chain
from tmc_server.domain.ports.retention import ListUnreadable

pytestmark = pytest.mark.mariadb
Fill = Callable[..., FilledCenter]


def _rewriting(jobs: Jobs) -> Rewriting:
    return Rewriting(jobs.spark, jobs.tables, jobs.archive)


def _report(jobs: Jobs) -> object:
    return Report(jobs.spark, jobs.tables, jobs.archive, HadoopFolder(jobs.spark, jobs.settings.report.path)).run(0)


def _worked_off(jobs: Jobs, run: str) -> None:
    """As the retention duty leaves its progress after it has removed what the run lists."""
    for shard in (4, 7, 16, 31):
        jobs.center.change(shard, f"REPLACE INTO tmc_retention VALUES ({shard}, {START_MS}, '{run}', -1)")
        jobs.center.change(shard, "DELETE FROM tmc_consumption_{nn}")
        jobs.center.change(shard, "DELETE FROM tmc_message_{nn}")


def _lose(folder: Path, run: str, number: int) -> None:
    """The manifest of a run, its lists and its files: an archive of before it."""
    archive = folder / "archive"
    (archive / "manifests" / f"{number:08d}.json").unlink()
    for path in (archive / "removal" / run, archive / "open" / run, *archive.glob(f"messages/*/*/run={run}")):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def two_runs(spark: SparkSession, filled: Fill, folder: Path) -> tuple[Jobs, list[str]]:
    """Half of 24 messages in each."""
    center = filled(6)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    with pytest.MonkeyPatch.context() as early:
        early.setattr(CenterTables, "now_ms", lambda _: START_MS + 63_500)
        first = jobs.run_archive(lag_ms=60_000).run
    return jobs, [first, jobs.run_archive().run]


class TestAnothers:
    def test_another_center_reads_writes_and_removes_nothing(
        self, two_runs: tuple[Jobs, list[str]], spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        other = Jobs(spark, filled(6), folder)
        before = sorted(other.archive.folder.files("messages"))
        readers: list[Callable[[], Any]] = [
            other.run_archive,
            other.run_reconcile,
            lambda: _report(other),
            lambda: Restoring(other.archive).by_key("orders.paid", "k04-3"),
            Verifying(other.archive).run,
            _rewriting(other).compact,
        ]
        for run in readers:
            with pytest.raises(CannotRun, match=rf"another center \({two_runs[0].archive.owner[:8]}\).*correct"):
                run()
        assert sorted(other.archive.folder.files("messages")) == before
        assert sorted(other.archive.folder.names("manifests")) == ["00000001.json", "00000002.json"]
        with pytest.raises(ListUnreadable, match="another center"):
            ArchiveFolder(f"{folder}/archive", center=other.archive.owner).removals()
        assert len(ArchiveFolder(f"{folder}/archive", center=two_runs[0].archive.owner).removals()) == 2

    def test_a_checkpoint_says_whose_it_is(self, two_runs: tuple[Jobs, list[str]], monkeypatch: Any) -> None:
        jobs, _ = two_runs
        monkeypatch.setattr("tmc_pipeline.archive.rewriting._MANIFESTS", 1)
        _rewriting(jobs).compact()
        (only,) = jobs.archive.chain().manifests
        assert (only.checkpoint, only.center) == (True, jobs.archive.owner)


class TestMissingEnd:
    def test_every_job_names_the_run_that_is_missing(self, two_runs: tuple[Jobs, list[str]], folder: Path) -> None:
        jobs, (first, second) = two_runs
        _worked_off(jobs, second)
        _lose(folder, second, 2)
        for run in (jobs.run_archive, jobs.run_reconcile, lambda: _report(jobs), _rewriting(jobs).compact):
            with pytest.raises(ArchiveDamaged, match=rf"lacks run {second}.* the newest run here is {first}"):
                run()
        assert f"lacks run {second}" in Verifying(jobs.archive).run().problems[0]
        with pytest.raises(ArchiveDamaged, match=f"lacks run {second}"):
            Restoring(jobs.archive).by_key("orders.paid", "k04-6")
        assert len(list(Restoring(jobs.archive).by_key("orders.paid", "k04-3"))) == 1
        assert [each.run for each in jobs.archive.without(second).chain().manifests] == [first]

    def test_one_that_is_gone_for_good_is_written_down_and_its_messages_stay_lost(
        self, two_runs: tuple[Jobs, list[str]], folder: Path
    ) -> None:
        jobs, (_, second) = two_runs
        _worked_off(jobs, second)
        _lose(folder, second, 2)
        done = _rewriting(jobs).remove_run(second, "the disk died")
        assert (done.before, done.messages) == (0, 0)
        assert jobs.archive.chain().removed[second].reason == "the disk died"
        assert jobs.run_archive().messages == 0
        found = jobs.run_reconcile()
        assert (found.verdicts[AGREED], found.verdicts["lost"]) == (12, 12)
        with pytest.raises(CannotRun, match="was removed before: the disk died"):
            _rewriting(jobs).remove_run(second, "again")

    def test_a_checkpoint_knows_the_runs_that_it_stands_for(
        self, two_runs: tuple[Jobs, list[str]], monkeypatch: Any
    ) -> None:
        jobs, (first, second) = two_runs
        _worked_off(jobs, second)
        monkeypatch.setattr("tmc_pipeline.archive.rewriting._MANIFESTS", 1)
        _rewriting(jobs).compact()
        assert jobs.archive.chain().explains(first)
        assert jobs.run_archive().messages == 0
        with pytest.raises(CannotRun, match=f"There is no run {second}"):
            _rewriting(jobs).remove_run(second, "it has no manifest of its own any more")


class TestRemovingARun:
    def test_what_went_in_wrongly_goes_out_and_can_come_again(
        self, two_runs: tuple[Jobs, list[str]], folder: Path
    ) -> None:
        jobs, (first, second) = two_runs
        done = _rewriting(jobs).remove_run(second, "a test center's")
        assert (done.before, done.messages) == (3, 12)
        assert jobs.archived().count() == 12
        lists = ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner)
        assert [each.run for each in lists.removals()] == [first]
        assert Verifying(jobs.archive).run().problems == ()
        assert jobs.run_archive().messages == 12
        assert jobs.run_reconcile().verdicts[AGREED] == 24

    def test_what_is_no_run_or_was_merged_is_refused(self, two_runs: tuple[Jobs, list[str]]) -> None:
        jobs, (first, _) = two_runs
        with pytest.raises(CannotRun, match="There is no run 20260101T000000-abc"):
            _rewriting(jobs).remove_run("20260101T000000-abc", "why")
        _rewriting(jobs).compact()
        with pytest.raises(CannotRun, match="were merged with those of others"):
            _rewriting(jobs).remove_run(first, "why")
        compaction = jobs.archive.chain().manifests[-1].run
        with pytest.raises(CannotRun, match="archived nothing itself"):
            _rewriting(jobs).remove_run(compaction, "why")
        assert jobs.archived().count() == 24


class TestARestoredCenter:
    def test_what_is_open_again_is_taken_out_and_archived_as_it_closes(self, two_runs: tuple[Jobs, list[str]]) -> None:
        """The backup is of yesterday: some deliveries are open again, and later messages are not known at all."""
        jobs, _ = two_runs
        (number,) = jobs.center.rows("SELECT MAX(id) FROM tmc_message_{nn}", [7])[0]
        jobs.center.change(
            7, f"UPDATE tmc_consumption_{{nn}} SET state = 1, closed_ms = NULL WHERE message_id = {number}"
        )
        jobs.center.change(16, "DELETE FROM tmc_consumption_{nn}")
        jobs.center.change(16, "DELETE FROM tmc_message_{nn}")
        assert jobs.run_reconcile().verdicts["state differs"] == 1
        done = _rewriting(jobs).rewind(START_MS - HOUR_MS, "the disk died")
        assert (done.before, done.after, done.messages) == (1, 1, 1)
        assert Verifying(jobs.archive).run().problems == ()
        assert jobs.archived().count() == 23
        assert jobs.run_archive(everything=True).messages == 0
        closing = f"state = 2, closed_ms = {jobs.tables.now_ms() - 120_000}"
        jobs.center.change(7, f"UPDATE tmc_consumption_{{nn}} SET {closing} WHERE message_id = {number}")
        assert jobs.run_archive().messages == 1
        assert jobs.run_reconcile().verdicts[AGREED] == 24
        assert [each.reason for manifest in jobs.archive.chain().manifests for each in manifest.rewound] == [
            "the disk died"
        ]

    def test_folders_that_lose_everything_are_gone(self, two_runs: tuple[Jobs, list[str]]) -> None:
        jobs, _ = two_runs
        for shard in (4, 7, 16, 31):
            jobs.center.change(shard, "UPDATE tmc_consumption_{nn} SET state = 1, closed_ms = NULL")
        done = _rewriting(jobs).rewind(START_MS, "why")
        assert (done.before, done.after, done.messages) == (6, 0, 24)
        assert jobs.archive.chain().partitions == []

    def test_a_center_that_was_not_restored_loses_nothing(self, two_runs: tuple[Jobs, list[str]]) -> None:
        jobs, _ = two_runs
        runs = len(jobs.archive.chain().manifests)
        assert _rewriting(jobs).rewind(0, "why").messages == 0
        assert len(jobs.archive.chain().manifests) == runs


def test_a_server_three_hours_ahead_near_midnight_archives_nothing_twice(
    spark: SparkSession, filled: Fill, folder: Path
) -> None:
    """Numbers of tomorrow, closed today."""
    midnight = START_MS - START_MS % DAY_MS + DAY_MS
    center = filled(20, start_ms=midnight + 2 * HOUR_MS)
    jobs = Jobs(spark, center, folder)
    for shard in (4, 7, 16, 31):
        ahead = 3 * HOUR_MS
        center.change(
            shard, f"UPDATE tmc_message_{{nn}} SET created_ms = created_ms - {ahead}, decided_ms = decided_ms - {ahead}"
        )
        times = ", ".join(f"{name} = {name} - {ahead}" for name in ("created_ms", "closed_ms", "tried_ms"))
        center.change(shard, f"UPDATE tmc_consumption_{{nn}} SET {times}")
    first = jobs.run_archive(lag_ms=jobs.tables.now_ms() - midnight)
    assert first.messages == 80
    for later in (3.0, 3.5):  # the last one begins after midnight, by the numbers
        assert jobs.run_archive(lag_ms=jobs.tables.now_ms() - midnight - round(later * HOUR_MS)).messages == 0
    assert Verifying(jobs.archive).run().problems == ()


def test_messages_that_are_there_twice_are_found_by_verify(
    two_runs: tuple[Jobs, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, _ = two_runs
    with monkeypatch.context() as patched:
        patched.setattr(Chain, "partitions", [])
        assert jobs.run_archive(everything=True).messages == 24
    problems = Verifying(jobs.archive).run().problems
    assert len(problems) == 20
    assert problems[0].endswith("orders.shipped, is archived 2 times")


def test_the_archive_can_be_restored_while_the_center_s_databases_are_gone(
    two_runs: tuple[Jobs, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    jobs, _ = two_runs
    settings = StoreConfig.model_validate({"catalog": "mysql://nobody@127.0.0.1:1/tmc"})
    away = Archive(jobs.spark, jobs.settings.archive.path, CenterTables(jobs.spark, databases_of(settings), FETCH))
    assert len(list(Restoring(away).by_key("orders.paid", "k04-3"))) == 1
    assert "was not compared with the center: No database answers" in caplog.text
    with pytest.raises(CannotRun, match="No database answers"):
        away.chain()
