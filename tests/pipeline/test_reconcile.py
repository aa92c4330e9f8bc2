"""Reconciliation: a verdict for every case, and planted discrepancies all found, none invented."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import Jobs
from tests.support.dose import LONG
from tests.support.filled import START_MS, FilledCenter
from tmc_common.headers import REPLAY_OF
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.frames import CONSUMPTION, MESSAGE, small_table
from tmc_pipeline.reconcile.catalog import SUBSCRIBERS
from tmc_pipeline.reconcile.claims import CLAIM, center_claims
from tmc_pipeline.reconcile.explanations import explained
from tmc_pipeline.reconcile.job import Summary, partitions_of
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.reconcile.outlines import outlined
from tmc_pipeline.reconcile.verdicts import NEVER, VERDICTS, Audited, by_message, counted, judged
from tmc_pipeline.settings import LedgerSource
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.message import MessageState as M
from tmc_storm.services.mariadb import MariaDB

pytestmark = pytest.mark.mariadb
NOW_MS = START_MS + 86_400_000
AUDITED = Audited(
    producers={"orders": 0, "shop": 0}, subscribers={"coupons.default": 0}, sdk_ledgers=frozenset({"shop"})
)


def an_id(at_ms: int = START_MS) -> str:
    return f"1-1-00-{(at_ms - EPOCH_MS) << 22}"


def a_claim(**values: Any) -> dict[str, Any]:
    base = {each.name: None for each in CLAIM.fields}
    base |= dict.fromkeys(("copies", "expected", "committed", "rolled_back", "unknown", "effects"), 0)
    return {**base, "message_id": an_id(), "subscriber": "", "at_ms": START_MS, **values}


def here(state: M, **values: Any) -> dict[str, Any]:
    """What the center says of a message."""
    return a_claim(**{"state": int(state), "topic": "order.paid", "producer": "orders", **values})


def delivery(state: C, **values: Any) -> dict[str, Any]:
    """What the center says of a delivery."""
    values = {"subscriber": "coupons.default", **values}
    return a_claim(state=int(state), topic="order.paid", producer="orders", **values)


def effect(**values: Any) -> dict[str, Any]:
    return a_claim(**{"subscriber": "coupons.default", "effects": 1, **values})


def committed(**values: Any) -> dict[str, Any]:
    return a_claim(committed=1, **values)


def rolled_back(**values: Any) -> dict[str, Any]:
    return a_claim(rolled_back=1, **values)


CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "everybody agrees": ([here(M.COMMITTED), committed(), delivery(C.ACKED), effect()], "agreed"),
    "rolled back, and a marker": ([here(M.ROLLED_BACK), rolled_back()], "agreed"),
    "rolled back, no row": ([here(M.ROLLED_BACK)], "agreed"),
    "a marker of something never stored": ([rolled_back()], "agreed"),
    "nobody had subscribed": ([here(M.COMMITTED), committed()], "agreed"),
    "cancelled, with or without an effect": ([here(M.COMMITTED), committed(), delivery(C.CANCELLED)], "agreed"),
    "the same row read twice": ([here(M.COMMITTED), here(M.COMMITTED), committed(), committed()], "agreed"),
    "undecided": ([here(M.PREPARED), committed()], "pending"),
    "nobody knew": ([here(M.CHECK_FAILED)], "pending"),
    "not delivered yet": ([here(M.COMMITTED), committed(), delivery(C.SCHEDULED)], "pending"),
    "handled, its ack under way": ([here(M.COMMITTED), committed(), delivery(C.SCHEDULED), effect()], "pending"),
    "given up": ([here(M.COMMITTED), committed(), delivery(C.FAILED)], "pending"),
    "never submitted": ([committed()], "lost"),
    "acked, and nothing came of it": ([here(M.COMMITTED), committed(), delivery(C.ACKED)], "lost"),
    "no transaction behind it": ([here(M.COMMITTED)], "ghost"),
    "published outside any transaction": ([here(M.COMMITTED, producer="shop", ledgered=0)], "agreed"),
    "of a transaction, and its ledger lacks it": ([here(M.COMMITTED, producer="shop", ledgered=1)], "ghost"),
    "sent again from the archive": ([here(M.COMMITTED, replayed=1)], "agreed"),
    "lost, and nobody noted when": ([committed(at_ms=None)], "lost"),
    "an effect of nothing": ([effect()], "ghost"),
    "an effect of what was rolled back": ([here(M.ROLLED_BACK), effect()], "ghost"),
    "handled twice": ([here(M.COMMITTED), committed(), delivery(C.ACKED), effect(), effect()], "duplicate effect"),
    "handled twice, not acked": (
        [here(M.COMMITTED), committed(), delivery(C.SCHEDULED), effect(), effect()],
        "duplicate effect",
    ),
    "committed there, rolled back here": ([here(M.ROLLED_BACK), committed()], "state differs"),
    "rolled back there, committed here": ([here(M.COMMITTED), rolled_back()], "state differs"),
    "two ways in one ledger": ([here(M.COMMITTED), committed(), rolled_back()], "state differs"),
    "another body was stored": ([here(M.COMMITTED, center_body="aa"), committed(noted_body="bb")], "body differs"),
    "another body was handled": (
        [here(M.COMMITTED), committed(), delivery(C.ACKED, center_body="aa"), effect(noted_body="bb")],
        "body differs",
    ),
    "bodies agree": (
        [
            here(M.COMMITTED, center_body="aa"),
            committed(noted_body="aa"),
            delivery(C.ACKED, center_body="aa"),
            effect(),
        ],
        "agreed",
    ),
    "a subscriber without notes": (
        [here(M.COMMITTED), committed(), delivery(C.ACKED, subscriber="mails.default")],
        "agreed",
    ),
    "a producer without notes": ([here(M.COMMITTED, producer="stock")], "agreed"),
    "lost, but a moment ago": ([committed(at_ms=NOW_MS - 1000)], "pending"),
    "a ghost, but its ledger was read a moment too early": ([here(M.COMMITTED, at_ms=NOW_MS - 1000)], "pending"),
}


def _frame(spark: SparkSession, claims: list[dict[str, Any]]) -> DataFrame:
    rows = [{**each, "number": each["message_id"].split("-", 2)[2]} for each in claims]
    return spark.createDataFrame([tuple(row[name] for name in CLAIM.names) for row in rows], CLAIM)


def _verdicts(spark: SparkSession, claims: list[dict[str, Any]], audited: Audited = AUDITED) -> dict[str, str]:
    frame = _frame(spark, claims)
    rows = judged(frame, audited, NOW_MS, tolerance_ms=60_000, partitions=2)
    return {row.message_id: row.verdict for row in by_message(rows).collect()}


def test_every_case_has_its_verdict(spark: SparkSession) -> None:
    ids = {name: f"1-1-{n:02d}-{(START_MS - EPOCH_MS) << 22}" for n, name in enumerate(CASES)}
    claims = [{**claim, "message_id": ids[name]} for name, (said, _) in CASES.items() for claim in said]
    random.Random(5).shuffle(claims)
    found = _verdicts(spark, claims)
    assert {name: found[ids[name]] for name in CASES} == {name: verdict for name, (_, verdict) in CASES.items()}


def test_without_times_the_message_s_own_time_counts(spark: SparkSession) -> None:
    young = an_id(NOW_MS - 1000)
    assert _verdicts(spark, [effect(message_id=young, at_ms=None)]) == {young: "pending"}


def test_relations_count_as_far_as_notes_reach(spark: SparkSession) -> None:
    ids = [an_id(START_MS + n * 1000) for n in range(3)]
    said = [
        {**claim, "message_id": id_} for id_ in ids for claim in (here(M.COMMITTED), committed(), delivery(C.ACKED))
    ]
    said.append(effect(message_id=ids[1]))
    said.append({**delivery(C.ACKED, at_ms=NOW_MS - 1), "message_id": an_id(NOW_MS - 5000)})
    frame = _frame(spark, said)
    audited = Audited(producers={}, subscribers={"coupons.default": START_MS + 1000})
    rows = counted(judged(frame, audited, NOW_MS, tolerance_ms=60_000, partitions=2)).collect()
    (row,) = [each for each in rows if each.subscriber == "coupons.default"]
    assert (row.committed, row.consumed, row.unconfirmed) == (2, 1, 0)


def _stored(spark: SparkSession, rows: list[dict[str, Any]]) -> DataFrame:
    """As read from the center's tables."""
    return spark.createDataFrame(rows, MESSAGE).withColumn("live", f.lit(1).cast("smallint"))


def _subscribers(spark: SparkSession) -> DataFrame:
    rows = [
        (number, f"{name}.default", "order.paid", 0, None, [], False) for number, name in ((1, "coupons"), (7, "mails"))
    ]
    return small_table(spark, rows, SUBSCRIBERS)


def test_every_message_makes_a_row_of_its_own_whatever_is_missing_from_it(spark: SparkSession) -> None:
    """Archives of older schemas have null arrays; catalogs forget topics, apps and subscriptions."""
    at = EPOCH_MS
    row = dict.fromkeys(MESSAGE.names) | {"shard": 7, "state": int(M.COMMITTED), "created_ms": at, "decided_ms": at + 9}
    acked = dict.fromkeys(CONSUMPTION.names) | {"subscription_no": 1, "state": int(C.ACKED), "closed_ms": at + 20}
    stored = [
        row | {"id": 1, "topic_no": 1, "producer_no": 1},
        row | {"id": 2, "topic_no": 1, "producer_no": 1, "consumptions": [], "headers": f'{{"{REPLAY_OF}": "x"}}'},
        row | {"id": 3, "topic_no": 8, "producer_no": 9, "consumptions": [acked, acked | {"subscription_no": 6}]},
    ]
    claims = center_claims(
        outlined(_stored(spark, stored), NOW_MS, bodies=False),
        spark.createDataFrame(
            [(1, "order.paid", [(1, 0, at + 9), (7, 0, at + 10), (8, at + 10, at + 99)])],
            "topic_no int, topic string, subscriptions array<struct<subscription_no: int, from_ms: bigint, to_ms: bigint>>",
        ),
        spark.createDataFrame([(1, "orders")], "producer_no int, producer string"),
        _subscribers(spark),
    )
    rows = claims.collect()
    told = [(c.message_id, c.subscriber, c.topic, c.producer, c.state, c.replayed, c.at_ms) for c in rows]
    assert {(c.message_id, c.subscriber) for c in rows if c.expected} == {
        ("1-1-07-1", "mails.default"),
        ("1-1-07-2", "mails.default"),
    }
    assert sorted(told) == [
        ("1-1-07-1", "", "order.paid", "orders", int(M.COMMITTED), 0, at + 9),
        ("1-1-07-1", "mails.default", "order.paid", "orders", None, 0, at + 9),
        ("1-1-07-2", "", "order.paid", "orders", int(M.COMMITTED), 1, at + 9),
        ("1-1-07-2", "mails.default", "order.paid", "orders", None, 1, at + 9),
        ("1-1-07-2", "replay 1-1-07-2", "order.paid", "orders", int(M.COMMITTED), 1, at + 9),
        ("8-9-07-3", "", "topic-8", "app-9", int(M.COMMITTED), 0, at + 9),
        ("8-9-07-3", "coupons.default", "topic-8", "app-9", int(C.ACKED), 0, at + 20),
        ("8-9-07-3", "subscription-6", "topic-8", "app-9", int(C.ACKED), 0, at + 20),
    ]


def test_a_replay_to_one_subscriber_is_due_to_that_one_and_the_header_alone_hides_nothing(spark: SparkSession) -> None:
    at = EPOCH_MS
    row = dict.fromkeys(MESSAGE.names) | {"shard": 7, "state": int(M.COMMITTED), "created_ms": at, "decided_ms": at + 9}
    acked = dict.fromkeys(CONSUMPTION.names) | {"state": int(C.ACKED), "closed_ms": at + 20, "created_ms": at + 9}
    original = "1-1-07-900"

    def message(number: int, key: str, receivers: list[int], **headers: str) -> dict[str, Any]:
        rows = [acked | {"subscription_no": each} for each in receivers]
        texts = json.dumps({f"tmc-replay-{name}": value for name, value in headers.items()})
        return row | {
            "id": number,
            "topic_no": 1,
            "producer_no": 1,
            "message_key": key,
            "headers": texts,
            "consumptions": rows,
        }

    stored = [
        message(1, f"replay.{original}.7.0.0", [7], of=original, to="7"),
        message(2, f"replay.{original}.7.3.1", [1], of=original, to="7"),
        message(3, f"replay.{original}", [7], of=original, to="7"),
        message(4, "any", [7], to="7"),
    ]
    claims = center_claims(
        outlined(_stored(spark, stored), NOW_MS, bodies=False),
        spark.createDataFrame(
            [(1, "order.paid", [(1, 0, at + 99), (7, 0, at + 99)])],
            "topic_no int, topic string, subscriptions array<struct<subscription_no: int, from_ms: bigint, to_ms: bigint>>",
        ),
        spark.createDataFrame([(1, "orders")], "producer_no int, producer string"),
        _subscribers(spark),
    ).collect()
    due = sorted((claim.message_id, claim.subscriber) for claim in claims if claim.expected)
    assert due == [("1-1-07-2", "mails.default"), ("1-1-07-4", "coupons.default")]
    assert [(claim.message_id, claim.subscriber) for claim in claims if claim.strange] == [
        ("1-1-07-2", "coupons.default")
    ]
    proven = {claim.message_id: claim.proper for claim in claims if claim.subscriber.startswith("replay ")}
    assert proven == {"1-1-07-1": 1, "1-1-07-2": 1, "1-1-07-3": 0}


def test_every_source_is_listed_with_its_rows(spark: SparkSession, filled: Any, folder: Path) -> None:
    """Also an empty one, and one file that two producers share."""
    for name, rows in {"shared": "1-1-00-5,COMMITTED\nnobody,COMMITTED\n", "empty": ""}.items():
        Path(folder, f"{name}.csv").write_text(f"message_id,state\n{rows}")
    files = [("p1", "shared"), ("p2", "shared"), ("p1", "empty")]
    producers = [{"app": app, "csv": f"{folder}/{name}.csv"} for app, name in files]
    summary = Jobs(spark, filled(1), folder, producers=producers, consumers=[]).run_reconcile()
    assert [(each["app"], each["rows"], each["rows_without_a_message_id"]) for each in summary.sources] == [
        ("p1", 2, 1),
        ("p2", 2, 1),
        ("p1", 0, 0),
    ]
    assert not spark.sparkContext._jsc.getPersistentRDDs()


def test_two_subscribers_share_one_inbox(spark: SparkSession, folder: Path) -> None:
    rows = [("nobody.x", an_id()), ("coupons.a", an_id()), ("coupons.b", an_id()), ("coupons.b", an_id(START_MS + 1))]
    spark.createDataFrame(rows, "subscriber string, message_id string").write.parquet(f"{folder}/inbox")
    sources = [LedgerSource(app="coupons", tag=tag, parquet=f"{folder}/inbox") for tag in "ab"]
    read = [Ledgers(spark, 100).consumed(source, sources).collect() for source in sources]
    assert [sorted(row.subscriber for row in rows) for rows in read] == [
        ["coupons.a", "nobody.x"],
        ["coupons.b", "coupons.b"],
    ]


def test_csv_is_read_as_it_is_written(spark: SparkSession, folder: Path) -> None:
    """With a byte order mark, blanks around ids, and quotes inside quotes; a time in the future is counted."""
    ids = [an_id(START_MS + n) for n in range(3)]
    lines = ['message_id,"state",created_ms', f' {ids[0]} ,"say ""done""",5', f'"{ids[1]}",done,5', f"{ids[2]},,5"]
    (folder / "ledger.csv").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    source = LedgerSource(
        app="orders",
        csv=f"{folder}/ledger.csv",
        states={'say "done"': "COMMITTED", "done": "ROLLED_BACK"},
    )
    rows = sorted(Ledgers(spark, 100).produced(source).collect(), key=lambda row: row.message_id)
    assert [row.message_id for row in rows] == ids
    assert [(row.committed, row.rolled_back, row.unknown) for row in rows] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_pending_says_until_when_and_why(spark: SparkSession) -> None:
    said = [
        here(M.PREPARED),
        here(M.CHECK_FAILED),
        here(M.COMMITTED),
        committed(),
        delivery(C.FAILED),
        delivery(C.SCHEDULED),
    ]
    ids = [an_id(START_MS + n) for n in range(len(said))]
    said[3] = committed(at_ms=NOW_MS - 1000)
    frame = _frame(spark, [{**claim, "message_id": id_} for claim, id_ in zip(said, ids, strict=True)])
    rows = {row.message_id: row for row in judged(frame, Audited(), NOW_MS, 60_000, 2).collect()}
    assert [(rows[id_].verdict, rows[id_].reason, rows[id_].until_ms) for id_ in ids] == [
        ("pending", "its producer has not decided", None),
        ("pending", "nobody knew: a human decides", None),
        ("agreed", None, None),
        ("pending", "moved a moment ago, else: lost", NOW_MS + 59_000),
        ("pending", "given up: a human reactivates it", None),
        ("pending", "not acked yet", None),
    ]


def test_one_sort_serves_the_sums_and_what_deliveries_know_of_their_message(spark: SparkSession) -> None:
    """A plan with another shuffle or sort of all rows would make the morning longer."""
    plan = (
        judged(_frame(spark, [committed()]), AUDITED, NOW_MS, 60_000, 2)._jdf.queryExecution().executedPlan().toString()
    )
    assert plan.count("Exchange ") == 1
    assert plan.count("Sort ") == 1


def test_the_shuffle_grows_with_the_rows() -> None:
    assert [partitions_of(*each) for each in ((0, 2), (250_000, 1), (250_001, 1), (3_000_000_000, 200))] == [
        2,
        1,
        2,
        12_000,
    ]


def test_no_cell_of_the_details_is_a_formula(spark: SparkSession, filled: Any, folder: Path) -> None:
    jobs = Jobs(spark, filled(3), folder)
    jobs.center.fill_ledgers()
    for key, change in {"=1+1": "k07-1", '+"x",': "k07-2", "\uff1d1": "k07-3"}.items():
        jobs.center.change(7, f"UPDATE tmc_message_{{nn}} SET message_key = '{key}' WHERE message_key = '{change}'")
    summary = jobs.run_reconcile()
    (path,) = Path(summary.path, "details.csv").glob("part-*.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["verdict"], row["message_key"], row["state"]) for row in rows} == {
        ("identity differs", "'=1+1", "COMMITTED"),
        ("identity differs", '\'+"x",', "COMMITTED"),
        ("identity differs", "'\uff1d1", "COMMITTED"),
    }


@pytest.mark.parametrize(("content", "verdict"), [(5, "agreed"), (6, "ghost"), (None, "agreed")])
def test_a_replay_has_the_content_of_its_original_unless_it_was_erased(
    spark: SparkSession, content: int | None, verdict: str
) -> None:
    claims = [here(M.COMMITTED, content=5), a_claim(subscriber="replay 1-1-00-9", proper=1, content=content)]
    rows = judged(_frame(spark, claims), AUDITED, NOW_MS, tolerance_ms=60_000, partitions=2).collect()
    assert [row.verdict for row in rows if row.subscriber] == [verdict]


def test_what_expired_excuses_no_effect_of_a_message_that_is_still_here(spark: SparkSession) -> None:
    audited = Audited(producers={}, subscribers={"coupons.default": 0}, expired={1: NOW_MS})
    assert _verdicts(spark, [effect()], audited) == {an_id(): "agreed"}
    assert _verdicts(spark, [here(M.COMMITTED), effect()], audited) == {an_id(): "ghost"}


def test_a_delivery_that_nobody_notes_is_nobodys_loss(spark: SparkSession) -> None:
    audited = replace(AUDITED, noted_from={("order.paid", "coupons.default"): NEVER})
    said = [here(M.COMMITTED), committed(), delivery(C.ACKED)]
    assert _verdicts(spark, said) == {an_id(): "lost"}
    assert _verdicts(spark, said, audited) == {an_id(): "agreed"}
    assert _verdicts(spark, [*said, effect(), effect()], audited) == {an_id(): "duplicate effect"}
    later = replace(AUDITED, noted_from={("order.paid", "coupons.default"): START_MS})
    assert _verdicts(spark, said, later) == {an_id(): "lost"}


def test_forwarded_deliveries_have_no_effects_here_unless_one_says_so(
    spark: SparkSession, filled: Any, folder: Path
) -> None:
    center = filled(6)
    center.fill_ledgers()
    with center.sql() as run:
        run.exec_driver_sql("UPDATE tmc_subscription SET forward_kind = 'kafka' WHERE subscription_no = 1")
    with center.sql(center.ledger("c1")) as run:
        run.exec_driver_sql("DELETE FROM tmc_inbox")
    jobs = Jobs(spark, center, folder)
    summary = jobs.run_reconcile()
    assert summary.consistent
    assert "c1.default" not in {each["subscriber"] for each in summary.relations}
    topic, _, _ = jobs.tables.names.subscriptions[1]
    consumers = jobs.settings.consumers

    def with_c1(*topics: str) -> Summary:
        named = [each.model_copy(update={"topics": topics}) if each.app == "c1" else each for each in consumers]
        jobs.settings = jobs.settings.model_copy(update={"consumers": tuple(named)})
        return jobs.run_reconcile()

    assert with_c1(topic).verdicts["lost"] == 8
    with center.sql() as run:  # an inbox before and, since a while, a forward
        run.exec_driver_sql("UPDATE tmc_subscription SET forward_kind = '' WHERE subscription_no = 1")
    jobs.tables.__dict__.pop("names")
    assert with_c1().verdicts["lost"] == 8
    with pytest.raises(CannotRun, match=r"c1.default has no subscription to nothing: look at its topics"):
        with_c1("nothing")


@pytest.mark.parametrize(("has_effect", "left"), [(True, []), (False, ["1-1-00-1", "1-1-00-2"])])
def test_a_replay_that_was_lost_is_repaired_by_its_own_replay(
    spark: SparkSession, has_effect: bool, left: list[str]
) -> None:
    """1 is lost, and so is 2, its replay; 3 is the replay of 2."""

    def acked(number: int, verdict: str, effects: int) -> tuple[Any, ...]:
        return (f"00-{number}", f"1-1-00-{number}", "coupons.default", int(C.ACKED), effects, verdict)

    def replay(original: int, number: int) -> tuple[Any, ...]:
        return (f"00-{original}", f"1-1-00-{number}", f"replay 1-1-00-{number}", None, 0, "agreed")

    rows = [acked(1, "lost", 0), acked(2, "lost", 0), acked(3, "agreed", int(has_effect)), replay(1, 2), replay(2, 3)]
    frame = spark.createDataFrame(
        rows, "number string, message_id string, subscriber string, state int, effects int, verdict string"
    )
    found = explained(frame, None, ()).where(f.col("verdict") == "lost").collect()
    assert sorted(row.message_id for row in found) == left


def test_what_may_have_been_cleaned_away_is_nobodys_loss(spark: SparkSession) -> None:
    audited = Audited(
        producers={"orders": START_MS + 1}, subscribers={"coupons.default": START_MS + 1}, center_ms=START_MS + 1
    )
    for said in ([here(M.COMMITTED)], [committed()], [effect()], [here(M.COMMITTED), delivery(C.ACKED)]):
        assert _verdicts(spark, said, audited) == {an_id(): "agreed"}
    later = [{**claim, "message_id": an_id(START_MS + 1)} for claim in (here(M.COMMITTED), delivery(C.ACKED))]
    assert _verdicts(spark, later, audited) == {an_id(START_MS + 1): "ghost"}


class Planted:
    """Discrepancies of every kind, `many` of each, in a filled center and its honest ledgers."""

    def __init__(self, center: FilledCenter, many: int, folder: Path, spark: SparkSession, each: int) -> None:
        self.center = center
        # Bodies are noted by p1 and doubles by c1, so those two kinds are planted in the first topic.
        first = random.Random(7).sample([place for place in range(32 * each) if (1 + place // 32) % 3 == 0], 2 * many)
        others = random.Random(8).sample(sorted(set(range(32 * each)) - set(first)), 7 * many)
        self._chosen = iter([others[start : start + many] for start in range(0, len(others), many)])
        self.body, self.twice = self._located(first[:many]), self._located(first[many:])
        messages = {"lost": self._lose(), "lost by a consumer": self._lose_effects()}
        messages |= {"ghost": self._forget(), "ghost effect": self._invent_effects(), "state": self._contradict()}
        messages |= {"undecided": self._undecided(), "given up": self._give_up()}
        self.planted = messages
        self._write_files(folder, spark)

    def _places(self) -> list[tuple[int, int]]:
        """(shard, seq) of the next `many` messages."""
        return self._located(next(self._chosen))

    @staticmethod
    def _located(places: list[int]) -> list[tuple[int, int]]:
        return [(place % 32, 1 + place // 32) for place in places]

    def _by_shard(self, places: list[tuple[int, int]]) -> dict[int, str]:
        found: dict[int, list[int]] = {}
        for shard, seq in places:
            found.setdefault(shard, []).append(seq)
        return {shard: ", ".join(f"'k{shard:02d}-{seq}'" for seq in seqs) for shard, seqs in found.items()}

    def _where(self, keys: str) -> str:
        return f"(SELECT id FROM tmc_message_{{nn}} WHERE message_key IN ({keys}))"

    def _ledgers(self, names: tuple[str, ...], statement: str) -> None:
        for name in names:
            with self.center.sql(self.center.ledger(name)) as run:
                run.exec_driver_sql(statement)

    def _ids(self, shard: int, keys: str) -> list[str]:
        query = f"SELECT topic_no, producer_no, id FROM tmc_message_{{nn}} WHERE message_key IN ({keys})"
        return [f"'{r.topic_no}-{r.producer_no}-{shard:02d}-{r.id}'" for r in self.center.rows(query, [shard])]

    def _each_shard(self, change: Callable[[int, str, list[str]], None]) -> list[tuple[int, int]]:
        places = self._places()
        for shard, keys in self._by_shard(places).items():
            change(shard, keys, self._ids(shard, keys))
        return places

    def _lose(self) -> list[tuple[int, int]]:
        def change(shard: int, keys: str, ids: list[str]) -> None:
            self._ledgers(CONSUMERS, f"DELETE FROM tmc_inbox WHERE message_id IN ({', '.join(ids)})")
            self.center.change(shard, f"DELETE FROM tmc_consumption_{{nn}} WHERE message_id IN {self._where(keys)}")
            self.center.change(shard, f"DELETE FROM tmc_message_{{nn}} WHERE message_key IN ({keys})")

        return self._each_shard(change)

    def _lose_effects(self) -> list[tuple[int, int]]:
        return self._each_shard(
            lambda _shard, _keys, ids: self._ledgers(
                CONSUMERS, f"DELETE FROM tmc_inbox WHERE message_id IN ({', '.join(ids)})"
            )
        )

    def _forget(self) -> list[tuple[int, int]]:
        return self._each_shard(
            lambda _shard, _keys, ids: self._ledgers(
                PRODUCERS, f"DELETE FROM tmc_ledger WHERE message_id IN ({', '.join(ids)})"
            )
        )

    def _invent_effects(self) -> list[tuple[int, int]]:
        """The center never had the message, and neither had its producer."""

        def change(shard: int, keys: str, ids: list[str]) -> None:
            self._ledgers(PRODUCERS, f"DELETE FROM tmc_ledger WHERE message_id IN ({', '.join(ids)})")
            self.center.change(shard, f"DELETE FROM tmc_consumption_{{nn}} WHERE message_id IN {self._where(keys)}")
            self.center.change(shard, f"DELETE FROM tmc_message_{{nn}} WHERE message_key IN ({keys})")

        return self._each_shard(change)

    def _contradict(self) -> list[tuple[int, int]]:
        """Rolled back in the center, so nobody got it; committed by its producer."""

        def change(shard: int, keys: str, ids: list[str]) -> None:
            self._ledgers(CONSUMERS, f"DELETE FROM tmc_inbox WHERE message_id IN ({', '.join(ids)})")
            self.center.change(shard, f"DELETE FROM tmc_consumption_{{nn}} WHERE message_id IN {self._where(keys)}")
            self.center.change(shard, f"UPDATE tmc_message_{{nn}} SET state = 3 WHERE message_key IN ({keys})")

        return self._each_shard(change)

    def _undecided(self) -> list[tuple[int, int]]:
        def change(shard: int, keys: str, ids: list[str]) -> None:
            self._ledgers(CONSUMERS, f"DELETE FROM tmc_inbox WHERE message_id IN ({', '.join(ids)})")
            self.center.change(shard, f"DELETE FROM tmc_consumption_{{nn}} WHERE message_id IN {self._where(keys)}")
            self.center.change(
                shard, f"UPDATE tmc_message_{{nn}} SET state = 1, decided_ms = NULL WHERE message_key IN ({keys})"
            )

        return self._each_shard(change)

    def _give_up(self) -> list[tuple[int, int]]:
        def change(shard: int, keys: str, ids: list[str]) -> None:
            self._ledgers(CONSUMERS, f"DELETE FROM tmc_inbox WHERE message_id IN ({', '.join(ids)})")
            self.center.change(
                shard, f"UPDATE tmc_consumption_{{nn}} SET state = 3 WHERE message_id IN {self._where(keys)}"
            )

        return self._each_shard(change)

    def _write_files(self, folder: Path, spark: SparkSession) -> None:
        """p1 keeps Parquet with digests, c1 CSV without a unique key: the ledgers of people without our SDK."""
        where = f"jdbc:mysql://127.0.0.1:{self.center.server.port}"
        jdbc = {"driver": "org.mariadb.jdbc.Driver", "user": "root", "password": ""}
        jdbc["url"] = f"{where}/{self.center.ledger('p1')}"
        ledger = spark.read.format("jdbc").options(**jdbc, dbtable="tmc_ledger").load()
        rows = {row.message_id: row for row in ledger.collect()}
        bodies = self._digests(1)
        wrong = self._public(self.body, topic=1)
        noted = [
            (
                id_,
                "done" if row.state == 1 else "undone",
                row.created_ms,
                "ff" * 32 if id_ in wrong else bodies.get(id_),
            )
            for id_, row in rows.items()
        ]
        spark.createDataFrame(noted, "msg string, outcome string, at bigint, sha string").write.parquet(f"{folder}/p1")
        jdbc["url"] = f"{where}/{self.center.ledger('c1')}"
        inbox = spark.read.format("jdbc").options(**jdbc, dbtable="tmc_inbox").load().collect()
        twice = self._public(self.twice, topic=1)
        lines = [
            f"{row.message_id},{row.received_ms}" for row in inbox for _ in range(2 if row.message_id in twice else 1)
        ]
        lines += [",1790000000000", "what is this,1790000000000"]
        (folder / "c1.csv").write_text("\n".join(["message,when", *lines]) + "\n")

    def _public(self, places: list[tuple[int, int]], topic: int) -> set[str]:
        found: set[str] = set()
        for shard, keys in self._by_shard(places).items():
            found |= {id_.strip("'") for id_ in self._ids(shard, keys) if id_.startswith(f"'{topic}-")}
        return found

    def _digests(self, topic: int) -> dict[str, str]:
        query = f"SELECT id, producer_no, SHA2(body, 256) AS digest FROM tmc_message_{{nn}} WHERE topic_no = {topic}"
        return {
            f"{topic}-{row.producer_no}-{shard:02d}-{row.id}": row.digest
            for shard in range(32)
            for row in self.center.rows(query, [shard])
        }

    def settings(self, folder: Path) -> dict[str, Any]:
        p1 = {
            "app": "p1",
            "parquet": f"{folder}/p1",
            "states": {"done": "COMMITTED", "undone": "ROLLED_BACK"},
            "columns": {"message_id": "msg", "state": "outcome", "at_ms": "at", "body_sha256": "sha"},
        }
        c1 = {"app": "c1", "csv": f"{folder}/c1.csv", "columns": {"message_id": "message", "at_ms": "when"}}
        url = lambda name: {"app": name, "url": self.center.server.url(self.center.ledger(name))}  # noqa: E731
        return {"producers": [p1, url("p2"), url("p3")], "consumers": [c1, *(url(name) for name in CONSUMERS[1:])]}


PRODUCERS, CONSUMERS = ("p1", "p2", "p3"), ("c1", "c2", "c3", "c4", "c5")


@pytest.mark.timeout(1800)
def test_planted_discrepancies_are_all_found_and_none_is_invented(
    spark: SparkSession, mariadb: MariaDB, folder: Path, note: Callable[[str], None]
) -> None:
    """Half of the center's rows are in the archive, and half of those were removed from the hot tables."""
    each, many = (31_250, 500) if LONG else (313, 20)
    center = FilledCenter(mariadb, prefix="truth")
    center.fill(each)
    center.fill_ledgers()
    planted = Planted(center, many, folder, spark, each)
    jobs = Jobs(spark, center, folder, **planted.settings(folder))
    manifest = jobs.run_archive(before_ms=START_MS + each * 500)
    assert 0 < manifest.messages < 32 * each * 0.6
    archived = f"m.decided_ms < {manifest.before_ms} AND m.state = 2"
    both = "tmc_message_{nn} m LEFT JOIN tmc_consumption_{nn} c ON m.id = c.message_id"
    for shard in range(16):
        center.change(
            shard, f"DELETE c FROM {both} WHERE {archived} AND c.closed_ms < {manifest.before_ms} AND c.state = 2"
        )
        center.change(shard, f"DELETE m FROM {both} WHERE {archived} AND c.message_id IS NULL")
    summary = jobs.run_reconcile()
    total = 32 * each
    expected = {
        "lost": 2 * many,
        "ghost": 2 * many,
        "state differs": many,
        "pending": 2 * many,
        "body differs": many,
        "duplicate effect": many,
    }
    expected = dict.fromkeys(VERDICTS, 0) | expected
    expected["agreed"] = total - sum(expected.values())
    assert summary.verdicts == expected
    found = {row.message_id: row.verdict for row in jobs.details(summary) if row.verdict != "pending"}
    for kind, verdict in {"lost by a consumer": "lost", "ghost": "ghost", "state": "state differs"}.items():
        for topic in (1, 2, 3):
            assert {found.get(id_) for id_ in planted._public(planted.planted[kind], topic)} <= {verdict}
    kept = {each["app"]: each for each in summary.sources}
    assert kept["c1"]["rows_without_a_message_id"] == 2
    assert not summary.consistent
    written = json.loads(Path(summary.path, "summary.json").read_text())
    assert written["verdicts"] == expected
    assert len(list(Path(summary.path, "details.csv").glob("part-*.csv"))) == 1
    note(f"{total} messages reconciled: {summary.discrepancies} discrepancies, all planted")


def test_honest_ledgers_agree_and_both_relations_are_reported(spark: SparkSession, filled: Any, folder: Path) -> None:
    jobs = Jobs(spark, filled(6), folder)
    jobs.center.fill_ledgers()
    summary = jobs.run_reconcile()
    assert summary.consistent
    assert summary.verdicts["agreed"] == 24
    assert [
        (each["subscriber"], each["committed"], each["consumed"], each["relation"]) for each in summary.relations
    ] == [
        ("c1.default", 8, 8, "committed = consumed"),
        ("c4.default", 8, 8, "committed = consumed"),
        ("c2.default", 8, 8, "committed = consumed"),
        ("c5.default", 8, 8, "committed = consumed"),
        ("c3.default", 8, 8, "committed = consumed"),
    ]
    jobs.center.change(7, "UPDATE tmc_message_{nn} SET state = 1, decided_ms = NULL WHERE message_key = 'k07-1'")
    jobs.center.change(
        7,
        "DELETE FROM tmc_consumption_{nn} WHERE message_id = (SELECT id FROM tmc_message_{nn} WHERE message_key = 'k07-1')",
    )
    with jobs.center.sql(jobs.center.ledger("c2")) as run:
        run.exec_driver_sql(
            "DELETE FROM tmc_inbox WHERE message_id LIKE '2-2-07-%' ORDER BY message_id LIMIT 1".replace("%", "%%")
        )
    with jobs.center.sql(jobs.center.ledger("c5")) as run:
        run.exec_driver_sql(
            "DELETE FROM tmc_inbox WHERE message_id LIKE '2-2-07-%' ORDER BY message_id LIMIT 1".replace("%", "%%")
        )
    summary = jobs.run_reconcile()
    assert summary.consistent
    (shipped,) = [each for each in summary.relations if each["subscriber"] == "c2.default"]
    assert shipped["relation"] == "committed <= consumed <= committed + unconfirmed"
    assert (shipped["committed"], shipped["unconfirmed"], shipped["consumed"]) == (7, 1, 7)


def test_producers_that_share_a_ledger_match_too(
    spark: SparkSession, filled: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    center = filled(6)
    center.fill_ledgers()
    with center.sql(center.ledger("p1")) as run:
        run.exec_driver_sql(f"INSERT INTO tmc_ledger SELECT * FROM {center.ledger('p2')}.tmc_ledger")
    url = center.server.url(center.ledger("p1"))
    others = [each for each in center.settings(folder)["producers"] if each["app"] == "p3"]
    shared = [{"app": app, "url": url} for app in ("p1", "p2")]
    with caplog.at_level("INFO", "tmc.pipeline"):
        summary = Jobs(spark, center, folder, producers=[*shared, *others]).run_reconcile()
    assert summary.consistent
    assert "24 messages match, 0 are judged" in caplog.text
    assert [each["rows"] for each in summary.sources if each["app"] in ("p1", "p2")] == [16, 16]


def test_a_service_may_have_its_ledger_and_its_inbox_in_one_database(
    spark: SparkSession, filled: Any, folder: Path
) -> None:
    center = filled(6, (7,))
    center.fill_ledgers()
    both = center.ledger("p1")
    with center.sql(both) as run:
        run.exec_driver_sql(f"INSERT INTO tmc_inbox SELECT * FROM {center.ledger('c1')}.tmc_inbox")
    url = center.server.url(both)
    jobs = Jobs(spark, center, folder, producers=[{"app": "p1", "url": url}], consumers=[{"app": "c1", "url": url}])
    summary = jobs.run_reconcile()
    assert summary.consistent
    assert [(each["subscriber"], each["consumed"]) for each in summary.relations] == [("c1.default", 2)]


class TestMappings:
    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            ({"mesage_id": "id"}, "there is no such column to map, mesage_id: did you mean message_id"),
            ({"message_id": "nowhere"}, "has no column nowhere for message_id: it has a, b. Map it"),
            ({"message_id": "a"}, "has no column state for state"),
        ],
    )
    def test_a_column_that_is_not_there(
        self, spark: SparkSession, folder: Path, columns: dict[str, str], said: str
    ) -> None:
        (folder / "ledger.csv").write_text("a,b\n1,2\n")
        source = LedgerSource(app="orders", csv=str(folder / "ledger.csv"), columns=columns)
        with pytest.raises(CannotRun, match=said):
            Ledgers(spark, 100).produced(source)

    def test_a_file_or_table_that_is_not_there(self, spark: SparkSession, mariadb: MariaDB, folder: Path) -> None:
        url = mariadb.create("no_ledger")
        with pytest.raises(CannotRun, match=r"There is nothing at .*missing"):
            Ledgers(spark, 100).produced(LedgerSource(app="orders", parquet=str(folder / "missing")))
        with pytest.raises(CannotRun, match=r"There is no table no_ledger\.tmc_ledger"):
            Ledgers(spark, 100).produced(LedgerSource(app="orders", url=url))
        with pytest.raises(CannotRun, match="is no table name"):
            Ledgers(spark, 100).produced(LedgerSource(app="orders", url=url, table="x; drop table y"))
