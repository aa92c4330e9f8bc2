"""A randomized auditor: discrepancies of every kind in honest traffic are found with their verdicts, and nothing else is."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.kinds import CHANGED, CHANGED_DELIVERY, KINDS, ORDER_KINDS, Kind, Planted
from tests.pipeline.running import Jobs
from tests.support.dose import LONG
from tests.support.filled import START_MS, FilledCenter
from tmc_pipeline.archive.job import DAY_MS
from tmc_pipeline.frames import CONSUMPTION, MESSAGE
from tmc_pipeline.reconcile.job import Summary
from tmc_pipeline.reconcile.outlines import CONTENT, COURSE, IDENTITY
from tmc_pipeline.reconcile.verdicts import AGREED, DISCREPANCIES, PENDING, VERDICTS
from tmc_storm.services.mariadb import MariaDB

SHARDS = tuple(range(32)) if LONG else (7, 15, 16, 31)  # each makes the plans longer
REMOVED = range(8)  # shards whose hot tables lost what is archived
EACH = 313 if LONG else 120  # messages of a shard
SEEDS = range(200 if LONG else 10)
pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(1200)]


class Traffic:
    """Honest traffic: the first half archived, some of that removed from the hot tables. Plants pile up, one message each."""

    def __init__(self, spark: SparkSession, server: MariaDB, folder: Path) -> None:
        self.center = FilledCenter(server, prefix="audited")
        self.center.fill(EACH, SHARDS)
        self.center.fill_ledgers()
        self.jobs = Jobs(spark, self.center, folder)
        manifest = self.jobs.run_archive(before_ms=START_MS + EACH * 500)
        archived = [int(row.id) for row in self.jobs.archived().where("shard = 31").select("id").collect()]
        assert 0 < manifest.messages < len(SHARDS) * EACH
        self._archived_to = max(archived)
        for shard in REMOVED:
            for table, column in (("consumption", "message_id"), ("message", "id")):
                self.center.change(shard, f"DELETE FROM tmc_{table}_{{nn}} WHERE {column} <= {self._archived_to}")
        self._numbers = {
            shard: [(int(row.id), int(row.topic_no), str(row.message_key)) for row in rows]
            for shard in SHARDS
            if shard not in REMOVED
            and (rows := self.center.rows("SELECT id, topic_no, message_key FROM tmc_message_{nn}", [shard]))
        }
        self._chosen: set[tuple[int, int]] = set()
        self.expected: dict[str, str] = {}
        self._summary: Summary | None = None

    def plant(self, kind: Kind, dice: random.Random) -> None:
        while True:
            shard = dice.choice(list(self._numbers))
            number, topic, key = dice.choice(self._numbers[shard])
            if (number <= self._archived_to) is kind.archived and (shard, number) not in self._chosen:
                break
        self._chosen.add((shard, number))
        self._summary = None
        kind.plant(Planted(center=self.center, shard=shard, number=number, topic=topic, key=key))
        self.expected |= {f"{shard:02d}-{number + each}": kind.verdict for each in kind.found}

    def reconciled(self, since_ms: int | None = None) -> Summary:
        """Return the summary of a run after the last plant. since_ms: of an increment that begins there."""
        if self._summary is None:
            self._summary = self.jobs.run_reconcile(since=since_ms)
        return self._summary

    def found(self, summary: Summary) -> dict[str, str]:
        """Verdicts by SHARD-NUMBER of whatever is neither agreed nor pending."""
        worst: dict[str, str] = {}
        for row in self.jobs.details(summary):
            if row.verdict != PENDING:
                number = row.message_id.split("-", 2)[2]
                worst[number] = max(worst.get(number, AGREED), row.verdict, key=VERDICTS.index)
        return worst


@pytest.fixture(scope="module")
def traffic(spark: SparkSession, mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return Traffic(spark, mariadb, tmp_path_factory.mktemp("audited"))


def test_honest_traffic_agrees(traffic: Traffic) -> None:
    summary = traffic.reconciled()
    assert traffic.found(summary) == {}
    assert summary.verdicts[AGREED] == len(SHARDS) * EACH
    assert summary.consistent
    assert summary.bad_clocks == 0


def test_there_are_at_least_a_hundred_and_twenty_kinds_and_one_for_each_discrepancy() -> None:
    assert len(KINDS) + len(ORDER_KINDS) >= 120
    assert {kind.verdict for kind in (*KINDS.values(), *ORDER_KINDS.values())} == set(DISCREPANCIES)


def test_every_column_that_is_archived_has_a_kind() -> None:
    """A new column needs an entry that says which verdict a difference gets."""
    assert set(CHANGED) == set(MESSAGE.names) - {"shard", "id", "consumptions", "attempts"}
    assert set(CHANGED_DELIVERY) == set(CONSUMPTION.names)
    assert set(IDENTITY) | set(CONTENT) | set(COURSE) == set(MESSAGE.names) - {"shard", "id"}


def test_every_kind_is_found_with_its_verdict_and_nothing_else(traffic: Traffic) -> None:
    dice = random.Random(17)
    by_number: dict[str, str] = {}
    for name, kind in KINDS.items():
        known = set(traffic.expected)
        traffic.plant(kind, dice)
        by_number |= dict.fromkeys(traffic.expected.keys() - known, name)
    summary = traffic.reconciled()
    found = traffic.found(summary)
    wrong = {
        by_number.get(number, number): (found.get(number), traffic.expected.get(number))
        for number in found.keys() | traffic.expected.keys()
        if found.get(number) != traffic.expected.get(number)
    }
    assert wrong == {}
    assert summary.discrepancies == len(traffic.expected)
    assert not summary.consistent
    assert summary.bad_clocks > 0
    assert sum(each["rows_of_other_subscribers"] for each in summary.sources) >= 4
    assert sum(each["rows_of_unknown_state"] for each in summary.sources) == 1
    assert sum(each["rows_of_the_future"] for each in summary.sources) == 3


def test_details_are_readable_by_any_csv_reader(traffic: Traffic) -> None:
    summary = traffic.reconciled()
    (path,) = Path(summary.path, "details.csv").glob("part-*.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["message_id"].split("-", 2)[2] for row in rows} >= set(traffic.expected)
    assert {row["state"] for row in rows} >= {"COMMITTED", "ROLLED_BACK", "ACKED", "CANCELLED", "9", ""}
    assert {row["verdict"] for row in rows} == set(traffic.expected.values())


@pytest.mark.parametrize("seeds", [SEEDS[first : first + 10] for first in range(0, len(SEEDS), 10)], ids=str)
def test_random_discrepancies_are_found_and_nothing_else(traffic: Traffic, seeds: Sequence[int]) -> None:
    """Ten seeds to a run: what they plant stays, so that one run over all of it sees as much as ten. The runs are increments
    here, which find by lists of messages what a whole run finds by reading everything.
    """
    for seed in seeds:
        dice = random.Random(seed)
        for name in dice.sample(sorted(KINDS), dice.randint(1, 3)):
            traffic.plant(KINDS[name], dice)
    summary = traffic.reconciled(since_ms=START_MS - DAY_MS)
    assert summary.span["since_ms"] <= START_MS - DAY_MS
    assert traffic.found(summary) == traffic.expected
