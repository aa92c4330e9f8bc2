"""Archive runs: what goes in, what does not, what survives crashes and damage."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.conftest import SHARDS
from tests.pipeline.running import FETCH, Jobs, keys
from tests.support.filled import START_MS, FilledCenter
from tmc_pipeline.archive import job as archiving
from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.restore import Restoring
from tmc_pipeline.archive.verify import Verifying
from tmc_pipeline.center import CenterTables, MessageRange, databases_of, in_range, messages_of
from tmc_pipeline.errors import AnotherRun, ArchiveDamaged, CannotRun, JobFailed
from tmc_pipeline.files import HadoopFolder
from tmc_server.app.moves import confirm_moves, move_shards
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.config import Config, StoreConfig
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import first_number
from tmc_server.domain.manifest import Manifest
from tmc_server.domain.message import MessageState
from tmc_server.store.engines import Database
from tmc_server.store.leases import ShardLeases
from tmc_server.store.retention import ClosedMessages
from tmc_storm.services.mariadb import MariaDB

pytestmark = pytest.mark.mariadb
Fill = Callable[..., FilledCenter]
DAY_MS = 86_400_000
_COLUMNS = (
    "topic_no, producer_no, producer_tag, {key}, live, attempt_id, ledger_id, digest, {state}, content_type, headers, body,"
    " delay_ms, due_ms, created_ms, {decided}, check_target, check_attempt, checked, unreached_ms, check_answer"
)
_CONSUMPTIONS = "UPDATE tmc_consumption_{nn} c JOIN tmc_message_{nn} m ON m.id = message_id"
# A rolled-back twin of the first message, prepared later.
_COPY = (
    "INSERT INTO tmc_message_{nn} (id, "
    + _COLUMNS.format(key="message_key", state="state", decided="decided_ms")
    + ") SELECT %(id)d, "
    + _COLUMNS.format(key="CONCAT(message_key, 'x')", state="3", decided="%(decided_ms)d")
    + " FROM tmc_message_{nn} WHERE id = (SELECT MIN(id) FROM tmc_message_{nn})"
)


def _folder(jobs: Jobs, folder: Path) -> Path:
    """The files of the topic orders.paid of the only run."""
    (part,) = [each for each in jobs.archive.chain().partitions if each.place.topic == "orders.paid"]
    return folder / "archive" / part.place.folder


def _rewritten(path: Path, spark: SparkSession, change: Callable[[DataFrame], DataFrame]) -> None:
    kept = path.with_name("before")
    path.rename(kept)
    change(spark.read.parquet(str(kept))).write.parquet(str(path))
    shutil.rmtree(kept)


def _shortened(path: Path, _spark: SparkSession) -> None:
    file = next(path.glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-10])


def _zeroed(path: Path, _spark: SparkSession) -> None:
    """One file of the same length with other bytes."""
    file = next(path.glob("*.parquet"))
    file.write_bytes(b"\0" * file.stat().st_size)


def _zeroed_without_sums(path: Path, spark: SparkSession) -> None:
    """As a copy would have it that lacks the sums that Hadoop keeps beside local files."""
    for sums in path.glob(".*.crc"):
        sums.unlink()
    _zeroed(path, spark)


def _one_page_zeroed(path: Path, _spark: SparkSession) -> None:
    """The bodies: what counts and compares folders does not read that far."""
    file = next(path.glob("*.parquet"))
    (path / f".{file.name}.crc").unlink()
    group = pq.ParquetFile(file).metadata.row_group(0)
    (body,) = [each for each in map(group.column, range(group.num_columns)) if each.path_in_schema == "body"]
    content = bytearray(file.read_bytes())
    end = body.data_page_offset + body.total_compressed_size
    content[end - 10 : end] = bytes(10)
    file.write_bytes(content)


def _doubled(path: Path, _spark: SparkSession) -> None:
    file = next(path.glob("*.parquet"))
    shutil.copy(file, file.with_name(f"copy-{file.name}"))


# What happens to the files of a published run -> what is said.
DAMAGES: dict[str, tuple[Callable[[Path, SparkSession], None], str]] = {
    "a file is missing": (lambda path, _: next(path.glob("*.parquet")).unlink(), "has 3 files"),
    "a file is there twice": (_doubled, "has 5 files"),
    "a file is truncated": (_shortened, "has 4 files with"),
    "a file has other bytes": (_zeroed_without_sums, "cannot be read"),
    "a file has other bytes than its sums say": (_zeroed, "cannot be read"),
    "a page of bodies has other bytes": (_one_page_zeroed, "cannot be read"),
    "rows are forged": (
        lambda path, spark: _rewritten(path, spark, lambda rows: rows.withColumn("body", f.lit(b"forged"))),
        "has . files with",
    ),
}


def _replaced(path: Path, text: str) -> None:
    """Without the sums that Hadoop keeps beside local files."""
    path.with_name(f".{path.name}.crc").unlink()
    path.write_text(text)


def _as_stored(center: FilledCenter) -> list[tuple[Any, ...]]:
    return sorted(
        (shard, row.id, row.topic_no, row.message_key, row.attempt_id, row.digest, row.state, row.body, row.decided_ms)
        for shard in range(32)
        for row in center.rows("SELECT * FROM tmc_message_{nn}", [shard])
    )


def _as_archived(jobs: Jobs) -> list[tuple[Any, ...]]:
    return sorted(
        (
            r.shard,
            r.id,
            r.topic_no,
            r.message_key,
            bytes(r.attempt_id),
            bytes(r.digest),
            r.state,
            bytes(r.body),
            r.decided_ms,
        )
        for r in jobs.archived().collect()
    )


@pytest.fixture(scope="module")
def still(spark: SparkSession, mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """A center with three messages in each of four shards, which no test changes, and a published run of all of them."""
    center = FilledCenter(mariadb, prefix="still")
    center.fill(3, SHARDS)
    jobs = Jobs(spark, center, tmp_path_factory.mktemp("still"))
    jobs.run_archive()
    return jobs


@pytest.fixture
def unarchived(still: Jobs, folder: Path) -> Jobs:
    """That center, before its first run."""
    return Jobs(still.spark, still.center, folder)


@pytest.fixture
def published(still: Jobs, folder: Path) -> Jobs:
    """That center, and a copy of its archive to damage."""
    shutil.copytree(Path(still.settings.archive.path), folder / "archive")
    return Jobs(still.spark, still.center, folder)


class TestWhatGoesIn:
    def test_everything_closed_is_archived_as_it_is_stored(
        self, spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        jobs = Jobs(spark, filled(6, range(32)), folder)
        manifest = jobs.run_archive()
        assert _as_archived(jobs) == _as_stored(jobs.center)
        assert (manifest.messages, manifest.consumptions) == (32 * 6, 32 * (6 + 2 + 2))
        assert [part.shard for part in manifest.shards] == list(range(32))
        assert {part.place.topic for part in manifest.partitions} == {"orders.paid", "orders.shipped", "stock.moved"}
        row = jobs.archived().where("shard = 3 and topic_no = 1").first()
        assert row is not None
        assert sorted((c.subscription_no, c.state, c.attempt) for c in row.consumptions) == [(1, 2, 1), (4, 2, 1)]
        assert row.closed_ms == row.decided_ms + 25

    def test_a_second_run_takes_only_what_is_new(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        jobs = Jobs(spark, filled(5), folder)
        first = jobs.run_archive()
        assert jobs.run_archive().messages == 0
        now = jobs.tables.now_ms()
        jobs.center.change(4, _COPY % {"id": first_number(now - 121_000), "decided_ms": now - 120_000})
        third = jobs.run_archive()
        assert [(part.shard, part.messages) for part in third.shards] == [(4, 1)]
        assert jobs.run_archive().messages == 0, "it is looked at again, and known"
        assert jobs.archived().count() == first.messages + 1

    def test_what_is_open_failed_undecided_or_too_young_stays_out(
        self, spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        jobs = Jobs(spark, filled(9), folder)
        now = jobs.tables.now_ms()
        message, consumption = (
            "UPDATE tmc_message_{nn} SET ",
            "UPDATE tmc_consumption_{nn} c JOIN tmc_message_{nn} m ON m.id = message_id SET ",
        )
        for key, change in {
            "k07-1": consumption + f"c.state = {int(ConsumptionState.SCHEDULED)}, closed_ms = NULL",
            "k07-2": consumption + f"c.state = {int(ConsumptionState.FAILED)}",
            "k07-3": message + f"state = {int(MessageState.CHECK_FAILED)}, decided_ms = NULL",
            "k07-4": message + f"state = {int(MessageState.PREPARED)}, decided_ms = NULL",
            "k07-5": consumption + f"closed_ms = {now - 30_000}",
            "k07-6": message + f"decided_ms = {now - 30_000}",
        }.items():
            assert jobs.center.change(7, f"{change} WHERE message_key = '{key}'")
        jobs.run_archive()
        assert keys(jobs.archived().where("shard = 7").collect()) == ["k07-7", "k07-8", "k07-9"]

    def test_closing_times_decide_not_numbers(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """A message prepared long ago and decided after the last run belongs to the next one."""
        jobs = Jobs(spark, filled(3), folder)
        undecided = "UPDATE tmc_message_{nn} SET state = 1, decided_ms = NULL WHERE message_key = 'k07-1'"
        jobs.center.change(7, undecided)
        jobs.center.change(
            7, "DELETE FROM tmc_consumption_{nn} WHERE message_id = (SELECT MIN(id) FROM tmc_message_{nn})"
        )
        jobs.run_archive(lookback_ms=0)
        late_ms = jobs.tables.now_ms() - 1000
        jobs.center.change(
            7, f"UPDATE tmc_message_{{nn}} SET state = 3, decided_ms = {late_ms} WHERE message_key = 'k07-1'"
        )
        assert jobs.run_archive(lag_ms=0, lookback_ms=0).messages == 1

    def test_a_clock_that_was_set_back(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """Closed before the last run by its own time, stored after it: the next run looks at what was open, whatever the time."""
        jobs = Jobs(spark, filled(4), folder)
        now = jobs.tables.now_ms()
        hidden = {"k07-1": now - 30 * 60_000, "k07-2": now - 3 * archiving.HOUR_MS}
        for key in hidden:
            jobs.center.change(7, f"UPDATE tmc_message_{{nn}} SET state = 1 WHERE message_key = '{key}'")
        jobs.run_archive()
        for key, at in hidden.items():
            jobs.center.change(
                7, f"UPDATE tmc_message_{{nn}} SET state = 3, decided_ms = {at} WHERE message_key = '{key}'"
            )
            jobs.center.change(
                7,
                f"{_CONSUMPTIONS} SET closed_ms = {at} WHERE message_key = '{key}'",
            )
        assert [part.messages for part in jobs.run_archive(lookback_ms=archiving.HOUR_MS).shards] == [2]
        assert jobs.run_archive(lookback_ms=archiving.HOUR_MS).messages == 0
        assert keys(jobs.archived().where("shard = 7").collect()) == ["k07-1", "k07-2", "k07-3", "k07-4"]

    def test_json_is_parsed_once(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """A filter that Spark moved below the parsing would do it again for every row."""
        jobs = Jobs(spark, filled(2), folder)
        topics = spark.createDataFrame([], "topic_no int, topic string")
        chosen = archiving.dated(jobs.tables.messages(), topics, START_MS, START_MS)
        plan = chosen._jdf.queryExecution().optimizedPlan().toString()
        parsing = [line for line in plan.splitlines() if "from_json(" in line]
        assert len(parsing) == 1, "planned once, after the union of the shards"
        each = {line.count("from_json(") for line in parsing}
        assert each == {2}, "consumptions and attempts, of which one step parses once"

    def test_tasks_share_the_rows_of_a_shard_whatever_their_times(self, spark: SparkSession, filled: Fill) -> None:
        """One row of years ago must not leave all others to one task."""
        center = filled(2000, [7])
        center.change(7, "UPDATE tmc_message_{nn} SET id = 5 WHERE message_key = 'k07-1'")
        store = StoreConfig.model_validate(center.store)
        tables = CenterTables(spark, databases_of(store), FETCH, slice_rows=250)
        read = tables.messages(body=False)
        parts = read.groupBy(f.spark_partition_id()).count().collect()
        assert sum(row["count"] for row in parts) == 2000
        assert len(parts) == 8
        assert max(row["count"] for row in parts) < 3 * 250
        assert read.select("id").distinct().count() == 2000
        (plan,) = center.rows("EXPLAIN SELECT id FROM tmc_message_{nn} WHERE RAND() < 0.2", [7])
        assert "Using index" in plan.Extra, "no bodies are read to find where to cut"

    def test_a_run_does_not_scan_the_tables(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """Whatever is in them: it finds what is new, and what was open, by primary key."""
        center = filled(20_000, [7])
        now = Jobs(spark, center, folder).tables.now_ms()
        low, high = MessageRange(from_ms=now - 3 * archiving.HOUR_MS).bounds(0)
        query = messages_of(databases_of(StoreConfig.model_validate(center.store)).shards[7], 7, 0, body=True)
        for condition in (f"id >= {low} AND id < {high}", "id IN (5, 6, 7)"):
            statement = f"EXPLAIN SELECT * FROM {query} WHERE {condition}"
            plan = center.rows(statement.replace("{", "{{").replace("}", "}}"), [7])
            of_messages = [row for row in plan if row.table == "m"]
            assert [(row.type, row.key) for row in of_messages] == [("range", "PRIMARY")], plan
            assert {row.type for row in plan if row.table == "c"} == {"ref"}
            assert sum(int(row.rows) for row in of_messages) <= 3
        (plan,) = center.rows(f"EXPLAIN SELECT COUNT(*) FROM {in_range(7, MessageRange(from_ms=now))}", [7])
        assert (plan.type, plan.key) == ("range", "PRIMARY")

    def test_an_hourly_run_reads_what_is_new_and_what_was_open(
        self, spark: SparkSession, filled: Fill, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs = Jobs(spark, filled(200), folder)
        jobs.center.change(7, "UPDATE tmc_message_{nn} SET state = 4, decided_ms = NULL WHERE message_key = 'k07-9'")
        jobs.run_archive()
        asked: list[MessageRange] = []
        messages = CenterTables.messages

        def noting(self: CenterTables, among: MessageRange, *rest: Any) -> DataFrame:
            asked.append(among)
            return messages(self, among, *rest)

        monkeypatch.setattr(CenterTables, "messages", noting)
        manifest = jobs.run_archive()
        assert (manifest.messages, manifest.open and dict(manifest.open.counts)) == (0, {7: 1})
        (among,) = asked
        assert {shard: len(numbers) for shard, numbers in among.numbers.items()} == {7: 1}
        assert jobs.tables.now_ms() - among.from_ms < 2 * archiving.HOUR_MS
        assert messages(jobs.tables, among).count() == 1

    def test_names_grow_whatever_the_clock_says(
        self, spark: SparkSession, filled: Fill, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The center works runs off by name: one that sorted before another would never be removed."""
        jobs = Jobs(spark, filled(2), folder)
        now = jobs.tables.now_ms()
        names = []
        for at in (now, now - archiving.HOUR_MS, now):
            monkeypatch.setattr(CenterTables, "now_ms", lambda _tables, at=at: at)
            names.append(jobs.run_archive().run)
        assert names == sorted(names)
        assert [run.run for run in ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner).removals()] == names[
            :1
        ]

    def test_days_are_those_of_closing_in_utc(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        midnight = START_MS - START_MS % DAY_MS + DAY_MS
        jobs = Jobs(
            spark, filled(4, start_ms=midnight - 2_030), folder
        )  # closes 1,030 and 30 ms before, and after midnight
        manifest = jobs.run_archive()
        day = lambda ms: datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d")  # noqa: E731
        found = dict(jobs.archived().groupBy("day").agg(f.count("*")).collect())
        assert found == {day(midnight - 1): 4, day(midnight): 12}
        assert sum(part.messages for part in manifest.partitions) == 16

    def test_an_empty_center_and_empty_shards(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        jobs = Jobs(spark, filled(0), folder)
        assert jobs.run_archive().messages == 0
        assert jobs.archived().count() == 0
        jobs.center.fill_shard(31, 3)
        assert [part.shard for part in jobs.run_archive(everything=True).shards] == [31]

    def test_a_topic_that_is_gone_keeps_its_number(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        jobs = Jobs(spark, filled(3), folder)
        with jobs.center.sql() as run:
            run.exec_driver_sql("DELETE FROM tmc_topic WHERE topic_no = 2")
        assert {part.place.topic for part in jobs.run_archive().partitions} == {"orders.paid", "topic-2", "stock.moved"}

    def test_text_that_json_has_to_escape_comes_through(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        jobs = Jobs(spark, filled(3), folder)
        error = 'a "quote", a \\ and\na line, tab\t, ☃ and 𝄞'
        with jobs.center.sql(jobs.center.database_of(4)) as run:
            number = run.exec_driver_sql("SELECT MIN(id) FROM tmc_message_04").scalar_one()
            values = (number, 1, 1, 1, 1, error)
            run.exec_driver_sql(
                "INSERT INTO tmc_attempt_04 (message_id, subscription_no, attempt, at_ms, incarnation, error)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                values,
            )
        jobs.run_archive()
        row = jobs.archived().where(f"shard = 4 and id = {number}").first()
        assert row is not None
        assert [each.error for each in row.attempts] == [error]

    def test_what_a_message_has_too_much_of_is_refused_not_dropped(
        self, spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        """MariaDB gives NULL for text that is longer than a packet."""
        jobs = Jobs(spark, filled(3), folder)
        with jobs.center.sql(jobs.center.database_of(4)) as run:
            number = run.exec_driver_sql("SELECT MIN(id) FROM tmc_message_04").scalar_one()
            run.exec_driver_sql(
                "INSERT INTO tmc_attempt_04 (message_id, subscription_no, attempt, at_ms, incarnation, error)"
                f" SELECT {number}, 1, seq, 1, 1, REPEAT('x', 500) FROM seq_1_to_200"
            )
            (usual,) = run.exec_driver_sql("SELECT @@GLOBAL.max_allowed_packet").one()
            run.exec_driver_sql("SET GLOBAL max_allowed_packet = 65536")
        try:
            with pytest.raises(JobFailed, match=f"attempts of message {number} of shard 4 are longer than .*packet"):
                jobs.run_archive()
        finally:
            with jobs.center.sql() as run:
                run.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {usual}")
        assert jobs.archive.chain().manifests == ()
        assert jobs.run_archive().messages == 12

    def test_rows_that_move_while_they_are_read(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        """Acks arrive during the run: whatever is archived is final, older than the lag, and as it is stored."""
        jobs = Jobs(spark, filled(60), folder)
        for shard in range(32):
            jobs.center.change(
                shard, "UPDATE tmc_consumption_{nn} SET state = 1, closed_ms = NULL WHERE message_id MOD 2 = 0"
            )
        stop = threading.Event()

        def ack() -> None:
            while not stop.is_set():
                for shard in range(32):
                    now = int(datetime.now(UTC).timestamp() * 1000)
                    jobs.center.change(
                        shard,
                        f"UPDATE tmc_consumption_{{nn}} SET state = 2, closed_ms = {now} WHERE state = 1 LIMIT 3",
                    )

        thread = threading.Thread(target=ack)
        thread.start()
        try:
            manifest = jobs.run_archive(lag_ms=0)
        finally:
            stop.set()
            thread.join()
        rows = jobs.archived().collect()
        stored = {
            (shard, row.message_id, row.subscription_no): (row.state, row.closed_ms)
            for shard in range(32)
            for row in jobs.center.rows("SELECT * FROM tmc_consumption_{nn}", [shard])
        }
        assert len(rows) > 0
        for row in rows:
            assert row.closed_ms < manifest.before_ms
            for each in row.consumptions:
                assert (each.state, each.closed_ms) == stored[row.shard, row.id, each.subscription_no]
                assert each.state == int(ConsumptionState.ACKED)


class TestRetention:
    def test_the_center_removes_what_a_run_lists_and_nothing_else(
        self, spark: SparkSession, filled: Fill, folder: Path
    ) -> None:
        jobs = Jobs(spark, filled(6), folder)
        manifest = jobs.run_archive()
        jobs.center.change(
            7, "UPDATE tmc_consumption_{nn} SET state = 1 WHERE message_id = (SELECT MIN(id) FROM tmc_message_{nn})"
        )
        lists = ArchiveFolder(f"{folder}/archive", center=jobs.archive.owner)
        assert [run.run for run in lists.removals()] == [manifest.run]
        for url, shards in zip(jobs.center.urls, (range(16), range(16, 32)), strict=True):
            database = Database(url)
            work = ClosedMessages(
                database, ShardLeases(database, lambda shards=list(shards): shards, lambda: 1, lambda: [1], 1 << 40)
            )
            for shard in shards:
                work.remove(shard, lists.numbers(manifest.run, shard), manifest.before_ms)
            database.close()
        assert [row.message_key for row in jobs.center.rows("SELECT message_key FROM tmc_message_{nn}")] == ["k07-1"]
        assert jobs.archived().count() == 4 * 6
        assert jobs.run_archive().messages == 0

    def test_a_shard_that_moved_is_archived_from_where_it_is(
        self, spark: SparkSession, filled: Fill, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tmc_server.app.moves.examine", lambda *_: [])  # this server waits for no disk
        jobs = Jobs(spark, filled(6), folder)
        stored = _as_stored(jobs.center)
        config = Config.model_validate({"store": jobs.center.store})
        move_shards(config, "4", f"{jobs.center.prefix}_1", str)
        assert jobs.run_archive().messages == 4 * 6
        assert _as_archived(jobs) == stored
        confirm_moves(config, "4", str)
        move_shards(config, "4", f"{jobs.center.prefix}_0", str)  # back, and the archive knows its messages
        assert jobs.run_archive().messages == 0
        confirm_moves(config, "4", str)


class TestDamage:
    def test_what_killed_runs_left_in_staging_is_swept_away(self, unarchived: Jobs, folder: Path) -> None:
        junk = folder / "archive" / "_staging" / "20200101T000000-dead" / "messages"
        junk.mkdir(parents=True)
        (junk / "part-0").write_text("junk")
        (folder / "archive" / "_intents_20200101T000000-dead.json.unfinished").write_text("{")
        unarchived.run_archive()
        assert _as_archived(unarchived) == _as_stored(unarchived.center)
        assert not [path for path in (folder / "archive").rglob("*") if "dead" in path.name]

    @pytest.mark.parametrize("gone", ["manifests", "manifests/*"])
    def test_runs_without_manifests_are_refused_and_nothing_is_deleted(
        self, spark: SparkSession, published: Jobs, filled: Fill, folder: Path, gone: str
    ) -> None:
        """A backup or a mount that lacks `manifests`, of messages that the center has removed since."""
        jobs = Jobs(spark, filled(0), folder)
        with jobs.center.sql() as change:
            own = "identity = (SELECT identity FROM tmc_database)"
            change.exec_driver_sql(f"UPDATE tmc_shard_map SET identity = '{published.center.identity}' WHERE {own}")
            change.exec_driver_sql(f"UPDATE tmc_database SET identity = '{published.center.identity}'")
        run = published.archive.chain().manifests[0].run
        for path in folder.glob(f"archive/{gone}"):
            shutil.move(path, folder / path.name)
        before = sorted(path for path in (folder / "archive").rglob("*") if path.is_file())
        with pytest.raises(
            ArchiveDamaged, match=rf"{run} belongs to a run without a manifest .* bring back the folder manifests"
        ):
            jobs.run_archive()
        assert sorted(path for path in (folder / "archive").rglob("*") if path.is_file()) == before
        (folder / "archive" / "manifests").mkdir(exist_ok=True)
        for path in folder.glob("manifests/*.json" if gone == "manifests" else "*.json"):
            shutil.move(path, folder / "archive" / "manifests" / path.name)
        assert jobs.archived().count() == 12
        assert jobs.run_archive().messages == 0

    @pytest.mark.parametrize("moved", [0, 1, 5, 99])
    def test_a_run_killed_while_it_published_is_finished_by_the_next_one(
        self, unarchived: Jobs, folder: Path, monkeypatch: pytest.MonkeyPatch, moved: int
    ) -> None:
        """After the intent, with so many of its files moved."""
        move = HadoopFolder.move

        def dying(self: HadoopFolder, moves: Mapping[str, str]) -> None:
            move(self, dict(list(moves.items())[:moved]))
            raise OSError("the power failed")

        monkeypatch.setattr(HadoopFolder, "move", dying)
        with pytest.raises(OSError, match="power"):
            unarchived.run_archive()
        monkeypatch.setattr(HadoopFolder, "move", move)
        assert unarchived.archive.chain().manifests == ()
        (kept,) = (folder / "archive" / "intents").glob("*.json")
        assert unarchived.run_archive().messages == 0
        assert [manifest.messages for manifest in unarchived.archive.chain().manifests] == [12, 0]
        assert kept.stem == unarchived.archive.chain().manifests[0].run
        assert _as_archived(unarchived) == _as_stored(unarchived.center)
        assert not list((folder / "archive" / "intents").glob("*.json"))

    def test_a_manifest_that_ends_in_the_future_is_refused(self, unarchived: Jobs, folder: Path) -> None:
        """It would hide all that closes until then: no messages and exit code 0, for a year."""
        now = unarchived.tables.now_ms()
        made = Manifest(
            number=1,
            run="20260101T000000-abc",
            since_ms=0,
            before_ms=now + 365 * DAY_MS,
            written_ms=now,
            names={},
        )
        path = folder / "archive" / made.name
        path.parent.mkdir(parents=True)
        path.write_text(made.to_json())
        with pytest.raises(ArchiveDamaged, match=r"00000001\.json says .* which is in the future"):
            unarchived.run_archive()
        assert len(list(path.parent.iterdir())) == 1

    def test_one_run_at_a_time(self, unarchived: Jobs, folder: Path) -> None:
        with unarchived.archive.folder.alone(), pytest.raises(AnotherRun, match="Another run uses"):
            unarchived.run_archive()
        assert unarchived.archive.chain().manifests == ()
        assert unarchived.run_archive().messages == 12

    def test_a_run_waits_for_another_if_it_is_told_to(self, unarchived: Jobs) -> None:
        other = ExitStack()
        other.enter_context(unarchived.archive.folder.alone())
        patient = Archive(unarchived.spark, unarchived.settings.archive.path, unarchived.tables, wait_s=3600)
        timer = threading.Timer(1.0, other.close)
        timer.start()
        assert archiving.Archiving(unarchived.spark, unarchived.tables, patient, 60_000, 0).run().messages == 12
        timer.join()

    def test_files_that_differ_from_what_was_read_are_not_published(
        self, unarchived: Jobs, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = archiving.Archiving._write

        def losing_a_file(self: Any, chosen: Any, path: str) -> Any:
            written = write(self, chosen, path)
            next(Path(path).rglob("part-*.parquet")).unlink()
            return written

        monkeypatch.setattr(archiving.Archiving, "_write", losing_a_file)
        with pytest.raises(JobFailed, match="differ from what was written"):
            unarchived.run_archive()
        assert unarchived.archive.chain().manifests == ()
        assert not list((folder / "archive").rglob("*.parquet"))

    def test_a_folder_that_disappeared_is_named(self, published: Jobs, folder: Path) -> None:
        (manifest,) = published.archive.chain().manifests
        day = manifest.partitions[0].place.day
        shutil.rmtree(_folder(published, folder))
        with pytest.raises(ArchiveDamaged, match=rf"{day} orders.paid of run {manifest.run} with 4 messages is gone"):
            published.archived()
        left = published.archive.messages(published.archive.chain().partitions, skip_missing=True)
        assert left.count() == 8

    def test_other_tools_read_the_files_as_a_table(self, published: Jobs, spark: SparkSession) -> None:
        table = f"parquet.`{published.settings.archive.path}/messages`"
        rows = spark.sql(f"SELECT topic, count(*) FROM {table} WHERE topic <> 'stock.moved' GROUP BY topic").collect()
        assert sorted(map(tuple, rows)) == [("orders.paid", 4), ("orders.shipped", 4)]

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_named_and_blocks_nothing_else(
        self, published: Jobs, spark: SparkSession, folder: Path, damage: str
    ) -> None:
        run = published.archive.chain().manifests[0].run
        assert Verifying(published.archive).run().problems == ()
        DAMAGES[damage][0](_folder(published, folder), spark)
        at_once = damage != "a page of bodies has other bytes"  # else where it is read
        if at_once:
            with pytest.raises(ArchiveDamaged, match=f"orders.paid of run {run} with 4 messages {DAMAGES[damage][1]}"):
                published.archived()
        found = Verifying(published.archive).run()
        assert [("orders.paid" in each, run in each) for each in found.problems] == [(True, True)]
        assert (found.folders, found.messages) == (2, 8)
        assert len(published.archive.messages(published.archive.chain().partitions, skip_missing=True).collect()) == 8
        restoring = Restoring(published.archive)
        assert len(list(restoring.by_key("orders.shipped", "k04-1"))) == 1
        if at_once:
            with pytest.raises(ArchiveDamaged, match=r"orders.paid"):
                restoring.by_key("orders.paid", "k04-3")

    def test_rows_with_honest_fingerprints_of_forged_columns_are_found_by_verify(
        self, published: Jobs, spark: SparkSession, folder: Path
    ) -> None:
        (manifest,) = published.archive.chain().manifests
        _rewritten(_folder(published, folder), spark, lambda rows: rows.withColumn("body", f.lit(b"forged")))
        (paid,) = [each for each in manifest.partitions if each.place.topic == "orders.paid"]
        size = published.archive.folder.size(paid.place.folder)
        assert size is not None
        forged = replace(
            manifest,
            partitions=tuple(
                replace(each, files=size[0], bytes=size[1]) if each == paid else each for each in manifest.partitions
            ),
        )
        _replaced(folder / "archive" / manifest.name, forged.to_json())
        (problem,) = Verifying(published.archive).run().problems
        assert "has 4 rows that differ from their fingerprints" in problem

    def test_a_short_removal_list_is_found_by_verify(self, published: Jobs, folder: Path) -> None:
        run = published.archive.chain().manifests[0].run
        shutil.rmtree(folder / "archive" / "removal" / run / "shard=7")
        (problem,) = Verifying(published.archive).run().problems
        assert "shard=7 has 0 numbers instead of 3" in problem

    @pytest.mark.parametrize(
        ("edit", "said"),
        [
            (lambda path: path.write_text(path.read_text() + " "), "was edited"),
            (lambda path: _replaced(path, path.read_text().replace('"messages":4', '"messages":3', 1)), "was edited"),
            (lambda path: path.rename(path.with_name("00000002.json")), "copied under another name"),
            (lambda path: _replaced(path, path.read_text()[:-100]), "This is no manifest"),
        ],
        ids=["a blank more", "edited", "renamed", "truncated"],
    )
    def test_a_manifest_that_is_not_as_published_is_named(
        self, published: Jobs, folder: Path, edit: Callable[[Path], object], said: str
    ) -> None:
        edit(folder / "archive" / published.archive.chain().manifests[0].name)
        for read in (
            published.archive.chain,
            published.run_archive,
            lambda: Restoring(published.archive).by_key("orders.paid", "k04-3"),
        ):
            with pytest.raises(ArchiveDamaged, match=said):
                read()
        assert said in Verifying(published.archive).run().problems[0]

    def test_a_manifest_that_cannot_be_read_is_named(self, published: Jobs, folder: Path) -> None:
        (manifest,) = published.archive.chain().manifests
        (folder / "archive" / manifest.name).unlink()
        (folder / "archive" / "manifests" / ".crc").touch()
        (folder / "archive" / "manifests" / "broken.json").write_text("{")
        with pytest.raises(ArchiveDamaged, match=r"broken\.json"):
            published.run_archive()

    def test_what_is_in_a_folder_that_is_gone_is_not_archived_again(self, published: Jobs, folder: Path) -> None:
        """As while the archive is being brought back from a backup."""
        gone = _folder(published, folder)
        gone.rename(folder / "aside")
        with pytest.raises(ArchiveDamaged, match="is gone"):
            published.run_archive()
        (folder / "aside").rename(gone)
        assert published.run_archive().messages == 0
        assert not Verifying(published.archive).run().problems

    def test_a_manifest_that_is_missing_is_named(self, published: Jobs, folder: Path) -> None:
        assert [published.run_archive().number for _ in range(2)] == [2, 3]
        (folder / "archive" / "manifests" / "00000002.json").unlink()
        with pytest.raises(ArchiveDamaged, match=r"manifests/00000002\.json is missing"):
            published.archived()

    def test_a_schema_that_is_too_old_is_refused(self, spark: SparkSession, filled: Fill, folder: Path) -> None:
        jobs = Jobs(spark, filled(1), folder)
        with jobs.center.sql() as run:
            run.exec_driver_sql("UPDATE tmc_schema_version SET version_num = '0000'")
        with pytest.raises(CannotRun, match="has schema 0000, this pipeline reads 0001: run tmc init"):
            jobs.run_archive()
        assert not (folder / "archive" / "manifests").exists()
