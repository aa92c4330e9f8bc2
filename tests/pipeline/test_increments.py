"""Reconciling day by day: as much is found as by comparing everything, and history is not read again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.kinds import KINDS, Planted
from tests.pipeline.running import Jobs, few_sources
from tests.support.filled import START_MS, FilledCenter
from tmc_common.headers import REPLAY_OF
from tmc_pipeline.archive.job import DAY_MS
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.days import Days
from tmc_pipeline.reconcile.job import Summary
from tmc_pipeline.reconcile.ledgers import Ledgers, ranges
from tmc_pipeline.reconcile.scope import Left, State, scope_of
from tmc_pipeline.reconcile.verdicts import AGREED, PENDING

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(600)]
Fill = Callable[..., FilledCenter]
SHARDS = (7, 16, 31)
EACH = 30
MIDNIGHT_MS = START_MS - START_MS % DAY_MS + DAY_MS  # half of the messages of each shard were prepared earlier


def _messages(jobs: Jobs, shard: int = 16) -> list[Planted]:
    """In the order in which they were prepared."""
    rows = jobs.center.rows("SELECT id, topic_no, message_key FROM tmc_message_{nn} ORDER BY id", [shard])
    return [
        Planted(center=jobs.center, shard=shard, number=int(row.id), topic=int(row.topic_no), key=str(row.message_key))
        for row in rows
    ]


def _found(jobs: Jobs, summary: Summary) -> dict[str, str]:
    return {row.message_id: row.verdict for row in jobs.details(summary) if row.verdict != PENDING}


def _effect(message: Planted, consumer: str, at_ms: int) -> None:
    with message.center.sql(message.center.ledger(consumer)) as run:
        values = f"'{consumer}.default', '{message.id}', {at_ms}"
        run.exec_driver_sql(f"INSERT INTO tmc_inbox (subscriber, message_id, received_ms) VALUES ({values})")


def _undecided(message: Planted) -> None:
    message.message("state = 1, decided_ms = NULL")
    message.nobody_got_it()


def _committed_at_last(message: Planted, now_ms: int) -> None:
    message.message(f"state = 2, decided_ms = {now_ms - 200_000}")
    for number, consumer in message.subscriptions:
        message.center.change(
            message.shard,
            "INSERT INTO tmc_consumption_{nn} (message_id, subscription_no, state, attempt, tried, incarnation, created_ms,"
            f" closed_ms, tried_ms) VALUES ({message.number}, {number}, 2, 1, 1, 1, {now_ms - 200_000}, {now_ms}, 0)",
        )
        _effect(message, consumer, now_ms)


def _as_replay(message: Planted, original: Planted, body: str) -> None:
    """Make it look like one that the center sent again."""
    message.forget_ledger()
    headers = json.dumps({REPLAY_OF: original.id})
    hashed = (
        f"CONCAT('0:', LENGTH({body}), ':', {body}, content_type, CHAR(0), "
        f"'{len(REPLAY_OF)}:{REPLAY_OF}{len(original.id)}:{original.id}')"
    )
    message.message(
        f"headers = '{headers}', body = {body}, message_key = 'replay.{original.id}', digest = UNHEX(SHA2({hashed}, 256))"
    )


@pytest.mark.takes_turns("days")
def test_days_one_after_another(spark: SparkSession, filled: Fill, folder: Path) -> None:
    center = filled(EACH, SHARDS, start_ms=MIDNIGHT_MS - 16_000)
    center.fill_ledgers()
    others = ("c1", "c2", "c4")  # a subscriber of another topic among them
    jobs = few_sources(spark, center, folder, producers=("p1",), consumers=others)
    # Every third one: five of the first day, five of the second.
    messages = [each for each in _messages(jobs) if each.topic == 1]
    undecided, lost, altered, settled, original = messages[:5]
    _undecided(undecided)
    KINDS["the center has nothing of it"].plant(lost)
    jobs.run_archive(lag_ms=jobs.tables.now_ms() - MIDNIGHT_MS)
    center.change(31, f"DELETE FROM tmc_message_{{nn}} WHERE decided_ms < {MIDNIGHT_MS}")  # archived and removed
    center.change(31, f"DELETE FROM tmc_consumption_{{nn}} WHERE closed_ms < {MIDNIGHT_MS}")
    KINDS["archived with another body and its digest"].plant(altered)

    first = jobs.run_reconcile(until_ms=MIDNIGHT_MS)
    assert _found(jobs, first) == {lost.id: "lost", altered.id: "body differs"}
    assert (first.verdicts[AGREED], first.verdicts[PENDING], first.span["left"]) == (3 * 15 - 3, 1, 0)

    honest, forged = messages[5:7]
    _as_replay(honest, settled, "REPEAT(MD5(12 * 32 + 16), 8)")  # as it was filled
    _as_replay(forged, original, "'another body'")
    second = jobs.run_reconcile(since="last")
    assert _found(jobs, second) == {lost.id: "lost", altered.id: "body differs", forged.id: "ghost"}
    assert (second.verdicts[AGREED], second.verdicts[PENDING], second.span["left"]) == (3 * 15 - 1, 1, 3)
    rows = [sum(each["rows"] for each in summary.sources) for summary in (first, second)]
    assert rows[1] < rows[0] + 10, "half of them, and those of what was open"

    now = jobs.tables.now_ms()
    _committed_at_last(undecided, now)
    third = jobs.run_reconcile(since="last")
    assert _found(jobs, third) == _found(jobs, second), "differences are reported until they are repaired"
    assert (third.verdicts[AGREED], third.verdicts[PENDING], third.span["left"]) == (1, 0, 4)

    body = "REPEAT(MD5(9 * 32 + 16), 8)"
    altered.message(
        f"body = {body}, digest = UNHEX(SHA2(CONCAT('0:', LENGTH({body}), ':', {body}, 'text/plain'), 256))"
    )
    _effect(
        settled, f"c{settled.other}", now - 86_400_000
    )  # nothing of it was left to compare, and its clock is behind
    fourth = jobs.run_reconcile(since="last", tolerance_ms=0)
    assert _found(jobs, fourth) == {lost.id: "lost", forged.id: "ghost", settled.id: "ghost"}
    assert fourth.span["since_ms"] == MIDNIGHT_MS - DAY_MS, "from the day of the message on"
    assert _found(jobs, jobs.run_reconcile(tolerance_ms=0)) == _found(jobs, fourth), (
        "comparing everything finds no more"
    )


def test_a_replay_of_a_replay_is_verified_alone(spark: SparkSession, filled: Fill, folder: Path) -> None:
    """The first message is not read, as the replay that is about it is of an earlier day."""
    center = filled(EACH, SHARDS, start_ms=MIDNIGHT_MS - 16_000)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    messages = _messages(jobs)
    first = messages[2]
    again = next(each for each in messages[3:12] if each.topic == first.topic)
    body = "REPEAT(MD5(3 * 32 + 16), 8)"  # as the first one was filled
    _as_replay(again, first, body)
    assert jobs.run_reconcile(until_ms=MIDNIGHT_MS).consistent
    _as_replay(next(each for each in messages[18:] if each.topic == first.topic), again, body)
    found = jobs.run_reconcile(since="last")
    assert _found(jobs, found) == {}
    assert json.loads(Path(found.path, "summary.json").read_text())["open"] == 0


def test_a_run_that_was_killed_before_its_summary_is_none(
    spark: SparkSession, filled: Fill, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store renames file by file: a run with a summary must have all the rest."""
    center = filled(4, SHARDS)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    first = jobs.run_reconcile()
    write = HadoopFolder.write

    def dying(self: HadoopFolder, name: str, text: str) -> None:
        if name.endswith("summary.json"):
            raise OSError("the power failed")
        write(self, name, text)

    monkeypatch.setattr(HadoopFolder, "write", dying)
    with pytest.raises(OSError, match="power"):
        jobs.run_reconcile(since="last")
    monkeypatch.setattr(HadoopFolder, "write", write)
    last = State(spark=spark, folder=HadoopFolder(spark, jobs.settings.reconcile.path)).last()
    assert last is not None
    assert last.run == first.run


def test_a_gap_is_refused(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(spark=spark, folder=HadoopFolder(spark, str(folder)))
    with pytest.raises(CannotRun, match="There is no earlier run to continue"):
        scope_of(state, "last", None)
    assert scope_of(state, 5, None).from_ms == 5
    listed = spark.createDataFrame([], "left_number string")
    left = Left(run="r", until_ms=100, shards={}, numbers={}, differing=None, listed=listed, days=Days())
    monkeypatch.setattr(State, "last", lambda _: left)
    assert (scope_of(state, "last", 200).from_ms, scope_of(state, 100, 200).to_ms) == (100, 200)
    with pytest.raises(CannotRun, match="ended before --since"):
        scope_of(state, 101, None)


def test_a_ledger_is_read_in_slices_that_cover_each_row_once(spark: SparkSession, filled: Fill, folder: Path) -> None:
    center = filled(EACH, SHARDS)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    producers, consumers = jobs.settings.producers, jobs.settings.consumers
    for size in (7, 10_000):
        ledgers = Ledgers(jobs.spark, 1000, slice_rows=size)
        for frame in (ledgers.produced(producers[0]), ledgers.consumed(consumers[0])):
            ids = [row.message_id for row in frame.collect()]
            assert len(ids) == len(set(ids)) == 30
            assert (frame.rdd.getNumPartitions() > 2) is (size == 7)


@pytest.mark.parametrize("columns", [("k",), ("a", "b")])
def test_ranges_cover_every_key_once(columns: tuple[str, ...]) -> None:
    keys = [("x", "1"), ("x", "5"), ("y", "0")] if len(columns) == 2 else [("1",), ("5",)]
    with sqlite3.connect(":memory:") as database:
        database.execute(f"CREATE TABLE t ({', '.join(columns)})")
        values: list[Any] = [(left, right) for left in "wxyz" for right in "0123456789"]
        if len(columns) == 1:
            values = [(right,) for right in "0123456789"]
        database.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(columns))})", values)
        found = [row for each in ranges(columns, keys) for row in database.execute(f"SELECT * FROM t WHERE {each}")]
    assert sorted(found) == sorted(values)
