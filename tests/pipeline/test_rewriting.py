"""Compaction, expiry and erasure: what they leave is verified, nothing else changes, and reconciliation still agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import Jobs
from tests.support.filled import START_MS, FilledCenter
from tmc_client import Center
from tmc_common.headers import REPLAY_OF
from tmc_pipeline.archive.contents import day_of
from tmc_pipeline.archive.job import DAY_MS
from tmc_pipeline.archive.publishing import Staging
from tmc_pipeline.archive.restore import Restoring, replay
from tmc_pipeline.archive.rewriting import Rewriting, erased, planned_files
from tmc_pipeline.archive.verify import Verifying
from tmc_pipeline.errors import AnotherRun, ArchiveDamaged, CannotRun
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.verdicts import AGREED
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.domain.ids import MessageId
from tmc_server.domain.manifest import Chain

pytestmark = pytest.mark.mariadb
Fill = Callable[..., FilledCenter]


def _rewriting(jobs: Jobs) -> Rewriting:
    return Rewriting(jobs.spark, jobs.tables, jobs.archive)


def _rows(jobs: Jobs) -> list[Any]:
    rows = jobs.archived().collect()
    return sorted(tuple(bytes(value) if isinstance(value, bytearray) else value for value in row) for row in rows)


def _files(jobs: Jobs) -> dict[str, int]:
    """Parquet files by day and topic."""
    found: dict[str, int] = {}
    for name in jobs.archive.folder.files("messages"):
        place = "/".join(name.split("/")[:2])
        found[place] = found.get(place, 0) + 1
    return found


def _runs(jobs: Jobs, count: int) -> None:
    """So many runs, each with a part of the messages."""
    for n in range(1, count):
        jobs.run_archive(before_ms=START_MS + n * 10_000)
    jobs.run_archive()


@pytest.fixture
def jobs(spark: SparkSession, filled: Fill, folder: Path) -> Jobs:
    """Messages of three topics, closed on one day."""
    center = filled(30)
    center.fill_ledgers()
    return Jobs(spark, center, folder)


class TestCompaction:
    def test_a_day_becomes_one_file_per_topic_with_the_same_rows(self, jobs: Jobs, folder: Path) -> None:
        _runs(jobs, 3)
        before = _rows(jobs)
        assert max(_files(jobs).values()) > 3
        done = _rewriting(jobs).compact()
        assert (done.before, done.after, done.messages) == (9, 3, 120)
        assert set(_files(jobs).values()) == {1}
        assert _rows(jobs) == before
        assert Verifying(jobs.archive).run().problems == ()
        assert jobs.run_archive().messages == 0
        assert jobs.run_reconcile().verdicts[AGREED] == 120
        assert _rewriting(jobs).compact().before == 0
        assert sorted(
            len(each.counts) for each in ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner).removals()
        ) == [4, 4, 4]

    def test_files_are_as_long_as_wanted(self, jobs: Jobs) -> None:
        jobs.run_archive()
        size = max(part.bytes for part in jobs.archive.chain().partitions)
        _rewriting(jobs).compact(file_bytes=size // 3)
        assert set(_files(jobs).values()) == {4}
        assert max(jobs.archive.folder.files("messages").values()) < size // 2

    @pytest.mark.parametrize(("size", "files"), [(0, 1), (100, 1), (101, 2), (200, 3), (1000, 11)])
    def test_files_are_planned_with_room(self, size: int, files: int) -> None:
        assert planned_files(size, 100) == files

    def test_the_day_that_is_not_over_is_left_alone(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        now = int(datetime.now(UTC).timestamp() * 1000)
        jobs = Jobs(spark, filled(4, start_ms=max(now - 600_000, now - now % DAY_MS)), folder)
        jobs.run_archive(lag_ms=0)
        jobs.run_archive(lag_ms=0, everything=True)
        before = jobs.archive.folder.files("messages")
        _rewriting(jobs).compact()
        assert jobs.archive.folder.files("messages") == before

    def test_replaced_files_are_out_of_sight_and_deleted_a_day_later(
        self, jobs: Jobs, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _runs(jobs, 2)
        table = f"parquet.`{jobs.settings.archive.path}/messages`"
        _rewriting(jobs).compact()
        assert jobs.spark.sql(f"SELECT count(*) AS n FROM {table}").first() == (120,)
        (kept,) = (folder / "archive" / "_retired").iterdir()
        _rewriting(jobs).compact()
        assert kept.exists()
        monkeypatch.setattr("tmc_pipeline.archive.rewriting._KEPT_RETIRED_MS", -DAY_MS)  # as if it were a day later
        _rewriting(jobs).compact()
        assert not list((folder / "archive" / "_retired").iterdir())

    def test_what_is_damaged_is_named_and_all_else_is_merged(self, jobs: Jobs, folder: Path) -> None:
        _runs(jobs, 2)
        damaged = next(part for part in jobs.archive.chain().partitions if part.place.topic == "orders.paid")
        file = next((folder / "archive" / damaged.place.folder).glob("*.parquet"))
        file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(
            ArchiveDamaged, match=r"1 folders were not merged, all others were\. .* orders\.paid of run"
        ):
            _rewriting(jobs).compact()
        left = [part.place.topic for part in jobs.archive.chain().partitions]
        assert sorted(left) == ["orders.paid", "orders.paid", "orders.shipped", "stock.moved"]
        assert file.exists()

    def test_nobody_reads_while_files_are_replaced(self, jobs: Jobs) -> None:
        _runs(jobs, 2)
        with jobs.archive.folder.read_by(), pytest.raises(AnotherRun, match="Another run uses"):
            _rewriting(jobs).compact()
        with jobs.archive.folder.read_by(rewriting=True), pytest.raises(AnotherRun, match="Another run uses"):
            jobs.run_reconcile()

    def test_a_compaction_that_was_killed_is_finished(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        """After its manifest, before what it replaced was moved away: other tools would see both."""
        _runs(jobs, 2)
        before = _rows(jobs)
        move, calls = HadoopFolder.move, iter(range(9))

        def dying(self: HadoopFolder, moves: Any) -> None:
            if next(calls) == 1:
                raise OSError("the power failed")
            move(self, moves)

        monkeypatch.setattr(HadoopFolder, "move", dying)
        with pytest.raises(OSError, match="power"):
            _rewriting(jobs).compact()
        monkeypatch.setattr(HadoopFolder, "move", move)
        assert len(jobs.archive.folder.files("messages")) > 3
        assert _rows(jobs) == before
        jobs.run_archive()
        assert set(_files(jobs).values()) == {1}
        assert _rows(jobs) == before

    @pytest.mark.parametrize("kind", ["compact", "erase"])
    def test_a_lost_manifest_of_a_rewrite_is_noticed(self, jobs: Jobs, folder: Path, kind: str) -> None:
        """Restored from a backup of the moment before: the merged files must not be taken for garbage, nor the old ones."""
        _runs(jobs, 2)
        if kind == "compact":
            _rewriting(jobs).compact()
        else:
            row = jobs.archived().where("shard = 7").first()
            assert row is not None
            _rewriting(jobs).erase([MessageId(row.topic_no, row.producer_no, row.shard, row.id)], "r")
        last = jobs.archive.chain().manifests[-1]
        (folder / "archive" / last.name).unlink()
        if kind == "compact":  # erased files are deleted at once; their new ones are found by verify
            with pytest.raises(ArchiveDamaged, match=f"_retired/{last.run} belongs to a run without a manifest"):
                jobs.run_archive()
        assert any("without a manifest" in each or "is gone" in each for each in Verifying(jobs.archive).run().problems)

    def test_clocks_of_servers_and_databases_may_differ(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """Numbered just after midnight, closed just before it."""
        midnight = START_MS - START_MS % DAY_MS + DAY_MS
        center = filled(3, start_ms=midnight)
        for shard in (4, 7, 16, 31):
            center.change(shard, "UPDATE tmc_message_{nn} SET decided_ms = decided_ms - 60000")
            center.change(shard, "UPDATE tmc_consumption_{nn} SET closed_ms = closed_ms - 60000")
        jobs = Jobs(spark, center, folder)
        jobs.run_archive()
        row = jobs.archived().where("shard = 7").first()
        assert row is not None
        assert row.day == day_of(midnight - 1)
        ids = [MessageId(row.topic_no, row.producer_no, row.shard, row.id)]
        assert len(list(Restoring(jobs.archive).by_id(ids))) == 1
        assert _rewriting(jobs).erase(ids, "r").messages == 1


class TestCheckpoints:
    def test_many_manifests_become_one(self, jobs: Jobs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tmc_pipeline.archive.rewriting._MANIFESTS", 2)
        manifests = folder / "archive" / "manifests"
        _runs(jobs, 3)
        before, names = _rows(jobs), jobs.archive.chain().names
        lists = ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner).removals()
        _rewriting(jobs).compact()
        assert len(jobs.archive.chain().manifests) == 1
        assert len(list(manifests.glob("*.json"))) == 5, "servers may still read what the checkpoint stands for"
        assert _rows(jobs) == before
        assert jobs.archive.chain().names == names
        assert ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner).removals() == lists
        jobs.run_archive()
        jobs.run_archive()
        assert [each.number for each in jobs.archive.chain().manifests] == [4, 5, 6]
        _rewriting(jobs).compact()
        assert sorted(path.name for path in manifests.glob("*.json")) == [
            "00000004.checkpoint.json",
            "00000005.json",
            "00000006.checkpoint.json",
            "00000006.json",
        ]
        assert Verifying(jobs.archive).run().problems == ()
        assert jobs.run_archive().messages == 0

    def test_lists_that_the_center_has_worked_off_are_deleted(
        self, jobs: Jobs, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tmc_pipeline.archive.rewriting._MANIFESTS", 1)
        _runs(jobs, 2)
        first = jobs.archive.chain().manifests[0].run
        for shard in range(32):
            with jobs.center.sql(jobs.center.database_of(shard)) as run:
                run.exec_driver_sql(
                    f"INSERT INTO tmc_retention (shard, horizon_ms, run, position) VALUES ({shard}, 0, '{first}', -1)"
                )
        _rewriting(jobs).compact()
        assert len(jobs.archive.chain().removals) == 1
        jobs.run_archive()
        _rewriting(jobs).compact()
        assert not (folder / "archive" / "removal" / first).exists()
        assert len(list((folder / "archive" / "removal").iterdir())) == 1
        assert jobs.run_archive().messages == 0


class TestExpiry:
    def test_days_expire_by_topic_and_are_not_missed(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        midnight = START_MS - START_MS % DAY_MS + DAY_MS
        center = filled(6, start_ms=midnight - 4_000)
        center.fill_ledgers()
        jobs = Jobs(spark, center, folder)
        jobs.run_archive()
        for shard in range(32):
            for table in ("message", "consumption", "attempt"):
                center.change(shard, f"DELETE FROM tmc_{table}_{{nn}}")
        age = (jobs.tables.now_ms() - midnight) // DAY_MS
        assert _rewriting(jobs).expire(0, {"orders.paid": age + 5}).before == 0
        done = _rewriting(jobs).expire(age, {"stock.moved": 0})
        assert done.before == 2
        left = {(part.place.day, part.place.topic) for part in jobs.archive.chain().partitions}
        assert left == {
            (day_of(midnight - 1), "stock.moved"),
            *((day_of(midnight), topic) for topic in ("orders.paid", "orders.shipped", "stock.moved")),
        }
        summary = jobs.run_reconcile()
        assert summary.verdicts[AGREED] == 24, "the ledgers still have what expired"
        assert Verifying(jobs.archive).run().problems == ()

    def test_what_expired_or_was_erased_does_not_come_back_from_the_tables(self, jobs: Jobs) -> None:
        jobs.run_archive()
        row = jobs.archived().where("topic = 'stock.moved'").first()
        assert row is not None
        _rewriting(jobs).erase([MessageId(row.topic_no, row.producer_no, row.shard, row.id)], "r")
        age = (jobs.tables.now_ms() - START_MS) // DAY_MS
        assert _rewriting(jobs).expire(age - 1, {}).messages == 120
        assert jobs.run_archive(everything=True).messages == 0

    def test_a_rule_about_no_topic_is_refused(self, jobs: Jobs) -> None:
        jobs.run_archive()
        with pytest.raises(CannotRun, match=r"no topic is called order\.paid"):
            _rewriting(jobs).expire(1, {"order.paid": 0})
        assert len(jobs.archive.chain().partitions) == 3

    def test_a_loss_in_a_topic_that_is_kept_is_found(self, jobs: Jobs) -> None:
        jobs.run_archive()
        age = (jobs.tables.now_ms() - START_MS) // DAY_MS
        _rewriting(jobs).expire(0, {"orders.paid": age - 5})
        jobs.center.change(7, "DELETE FROM tmc_message_{nn}")
        jobs.center.change(7, "DELETE FROM tmc_consumption_{nn}")
        (part,) = [each for each in jobs.archive.chain().partitions if each.place.topic == "stock.moved"]
        assert part.messages == 40
        jobs.archive.folder.remove(part.place.folder)
        found = jobs.run_reconcile(skip_missing=True).verdicts
        assert (found["lost"], found[AGREED]) == (10, 110)


class TestErasure:
    def test_the_content_is_gone_and_the_proof_holds(self, jobs: Jobs, folder: Path) -> None:
        jobs.center.change(7, "UPDATE tmc_message_{nn} SET check_answer = 'UNKNOWN: an order of jane@example.org'")
        _runs(jobs, 2)
        _rewriting(jobs).compact()
        row = jobs.archived().where("shard = 7 AND topic_no = 1").first()
        assert row is not None
        message = MessageId(row.topic_no, row.producer_no, row.shard, row.id)
        before = {each[:2]: each for each in _rows(jobs)}
        done = _rewriting(jobs).erase([message], "request 4711")
        assert (done.before, done.messages) == (1, 1)
        after = {each[:2]: each for each in _rows(jobs)}
        assert [key for key in before if before[key] != after[key]] == [(row.shard, row.id)]
        (shown,) = Restoring(jobs.archive).by_id([message])
        assert (shown["key"], shown["body"], shown["headers"], shown["content_type"]) == ("", "", {}, "")
        (kept,) = jobs.archived().where(f"shard = 7 AND id = {row.id}").collect()
        assert (row.check_answer[:7], kept.check_answer) == ("UNKNOWN", "")
        assert shown["erased"] == {"at_ms": shown["erased"]["at_ms"], "reason": "request 4711"}
        assert [(each.message_id, each.reason) for each in jobs.archive.chain().erased] == [
            (str(message), "request 4711")
        ]
        body = bytes(row.body)
        for path in (folder / "archive").rglob("*"):
            assert not path.is_file() or body not in path.read_bytes()
        assert not list((folder / "archive" / "_retired").iterdir())
        assert Verifying(jobs.archive).run().problems == ()
        assert jobs.run_archive(everything=True).messages == 0, "it does not come back from the tables"
        assert jobs.run_reconcile().verdicts[AGREED] == 120
        center = Mock(spec=Center)
        with pytest.raises(CannotRun, match=r"its content was erased \(request 4711\)"):
            replay(shown, center)
        assert center.mock_calls == []

    def test_an_erasure_that_was_killed_is_finished_and_deletes(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After its manifest: the old files still have the content."""
        jobs.run_archive()
        row = jobs.archived().where("shard = 7").first()
        assert row is not None
        settle = Staging.settle

        def dying(self: Staging, manifest: Any) -> None:
            raise OSError("the power failed")

        monkeypatch.setattr(Staging, "settle", dying)
        with pytest.raises(OSError, match="power"):
            _rewriting(jobs).erase([MessageId(row.topic_no, row.producer_no, row.shard, row.id)], "r")
        monkeypatch.setattr(Staging, "settle", settle)
        jobs.run_archive()
        assert jobs.archive.folder.names("_retired") == []
        assert Verifying(jobs.archive).run().problems == ()

    def test_a_message_in_a_damaged_folder_is_not_called_missing(self, jobs: Jobs, folder: Path) -> None:
        jobs.run_archive()
        row = jobs.archived().where("shard = 7").first()
        assert row is not None
        (part,) = [each for each in jobs.archive.chain().partitions if each.place.topic == row.topic]
        next((folder / "archive" / part.place.folder).glob("*.parquet")).unlink()
        with pytest.raises(ArchiveDamaged, match="folders of the archive are damaged"):
            _rewriting(jobs).erase([MessageId(row.topic_no, row.producer_no, row.shard, row.id)], "r")

    def test_what_is_not_archived_is_named(self, jobs: Jobs) -> None:
        jobs.run_archive()
        before = jobs.archive.chain()
        with pytest.raises(CannotRun, match="1-1-07-4711 is not in the archive: nothing was erased"):
            _rewriting(jobs).erase([MessageId(1, 1, 7, 4711)], "r")
        assert jobs.archive.chain() == before

    def test_a_replay_keeps_its_proof(self, jobs: Jobs) -> None:
        jobs.run_archive()
        row = jobs.archived().where("shard = 7").first()
        assert row is not None
        ids = [MessageId(row.topic_no, row.producer_no, row.shard, row.id)]
        from pyspark.sql import functions as f

        rows = jobs.archived().withColumn("headers", f.lit(json.dumps({REPLAY_OF: "1-1-07-5", "color": "red"})))
        (found,) = erased(rows, ids, 5, "r").where(f.col("erased_ms").isNotNull()).collect()
        assert json.loads(found.headers) == {REPLAY_OF: "1-1-07-5"}
        assert found.message_key == row.message_key


def test_a_chain_without_manifests_is_empty() -> None:
    chain = Chain.of([])
    assert (chain.next_number, chain.partitions, chain.removals, chain.open) == (1, [], [], None)
