"""What matches has the verdict AGREED: random records, in and out of order, against the verdicts of all of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.support.filled import START_MS
from tmc_pipeline.center import Life, Names
from tmc_pipeline.reconcile.catalog import Catalog, catalog_of
from tmc_pipeline.reconcile.claims import center_claims, noted_claims
from tmc_pipeline.reconcile.matching import matched, with_keys
from tmc_pipeline.reconcile.outlines import DELIVERY, noted_number, shard_and_number
from tmc_pipeline.reconcile.verdicts import (
    AGREED,
    Audited,
    by_message,
    counted,
    judged,
    latest_possible_ms,
)
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.ids import EPOCH_MS
from tmc_server.domain.manifest import Chain
from tmc_server.domain.message import MessageState as M

NOW_MS = START_MS + 86_400_000
FUTURE_MS = NOW_MS + 86_400_000
SINCE_MS = START_MS + 50_000  # the notes of some begin here
_OUTLINE = (
    "shard smallint, id bigint, topic_no int, producer_no int, producer_tag string, message_key string, attempt_id binary,"
    " state smallint, created_ms bigint, decided_ms bigint, ledgered boolean, erased boolean, stored boolean, replay_of string,"
    " replay_to int, order_key string, altered boolean, impossible boolean, unprotected boolean, content bigint,"
    " identities bigint, contents bigint, courses bigint, center_body string, at_ms bigint,"
    f" deliveries array<{DELIVERY.simpleString()}>"
)
_NOTED = (
    "message_id string, subscriber string, committed int, rolled_back int, unknown int, effects int, noted_app string,"
    " ledger int, sdk int, noted_topic string, noted_key string, attempt_id binary, at_ms bigint, body_sha256 string"
)
# Topic 1 has a subscriber that came again under another number, one without notes, and one whose notes begin late.
SUBSCRIPTIONS = {
    1: (1, "coupons.a", 0, None),
    2: (1, "coupons.a", 0, START_MS),
    3: (1, "mails.a", 0, None),
    4: (1, "late.a", 0, None),
    5: (2, "coupons.a", 0, None),
}
NAMES = Names(
    topics={1: "order.paid", 2: "order.sent"},
    apps={1: "orders", 2: "shop", 3: "both", 4: "quiet", 5: "late"},
    subscriptions={
        n: (f"order.{'paid' if t == 1 else 'sent'}", who, bool(e)) for n, (t, who, _, e) in SUBSCRIPTIONS.items()
    },
    lives={n: Life(topic_no=t, from_ms=a, to_ms=e) for n, (t, _, a, e) in SUBSCRIPTIONS.items()},
)
AUDITED = Audited(
    producers={"orders": 0, "shop": 0, "both": 0, "late": SINCE_MS},
    subscribers={"coupons.a": 0, "late.a": SINCE_MS},
    sdk_ledgers=frozenset({"shop"}),
)
NOTED_APPS = {"orders": "orders", "shop": "shop", "both": None, "late": "late"}

Records = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def honest(number: int, dice: random.Random) -> Records:
    """A message and its notes."""
    topic, producer = dice.choice((1, 2)), dice.choice(list(NAMES.apps))
    made_ms = START_MS + number * 100
    id_ = (made_ms - EPOCH_MS) << 22
    public = f"{topic}-{producer}-07-{id_}"
    key, attempt, sha = f"k{number}", number.to_bytes(16, "big"), f"{number:064x}"
    app, ledgered = NAMES.apps[producer], dice.random() < 0.8
    committed = dice.random() < 0.9
    due = [n for n, (of, _, _, end) in SUBSCRIPTIONS.items() if of == topic and end is None] if committed else []
    row = {
        "shard": 7,
        "id": id_,
        "topic_no": topic,
        "producer_no": producer,
        "producer_tag": "default",
        "message_key": key,
        "attempt_id": attempt,
        "state": int(M.COMMITTED if committed else M.ROLLED_BACK),
        "created_ms": made_ms,
        "decided_ms": made_ms + 1,
        "ledgered": ledgered,
        "erased": False,
        "stored": True,
        "replay_of": None,
        "replay_to": None,
        "order_key": None,
        "altered": False,
        "impossible": False,
        "unprotected": False,
        **dict.fromkeys(("content", "identities", "contents", "courses"), number),
        "center_body": sha,
        "at_ms": made_ms + 1,
        "deliveries": [
            {
                "subscription_no": n,
                "state": int(C.ACKED),
                "created_ms": made_ms + 1,
                "closed_ms": made_ms + 5,
                "at_ms": made_ms + 5,
                "sequence": None,
                "retried": False,
                "impossible": False,
                "expected": 0,
            }
            for n in due
        ],
    }
    note = dict.fromkeys(("committed", "rolled_back", "unknown", "effects", "sdk"), 0) | {
        "message_id": public,
        "subscriber": "",
        "at_ms": made_ms,
        **dict.fromkeys(("noted_app", "ledger", "noted_topic", "noted_key", "attempt_id", "body_sha256")),
    }
    notes = []
    if committed and app in AUDITED.producers and made_ms >= AUDITED.producers[app] and (app != "shop" or ledgered):
        identity = {"noted_topic": NAMES.topics[topic], "noted_key": key, "attempt_id": attempt}
        of_app = {
            "noted_app": NOTED_APPS[app],
            "ledger": producer,
            "sdk": int(app == "shop"),
            "body_sha256": dice.choice((None, sha)),
        }
        notes.append(note | {"committed": 1} | of_app | dice.choice(({}, identity)))
    for n in due:
        who = SUBSCRIPTIONS[n][1]
        if made_ms >= AUDITED.subscribers.get(who, FUTURE_MS):
            notes.append(note | {"subscriber": who, "effects": 1, "body_sha256": dice.choice((None, sha))})
    return [row], notes


Change = Callable[[dict[str, Any], random.Random], Any]
_ROW: Mapping[str, tuple[Any, ...]] = {
    "message_key": ("other", None),
    "attempt_id": (b"other", None),
    "state": (*map(int, M), 77),
    "decided_ms": (None, START_MS - 30_000, FUTURE_MS),
    "ledgered": (True, False),
    "erased": (True,),
    "altered": (True,),
    "impossible": (True,),
    "unprotected": (True,),
    "content": (-1, None),
    "identities": (-1, None),
    "contents": (-1, None),
    "courses": (-1, None),
    "center_body": ("other", None),
    "at_ms": (FUTURE_MS, None),
    "topic_no": (1, 2, 8),
    "producer_no": (1, 2, 9),
    "deliveries": ([],),
}
_DELIVERY: Mapping[str, tuple[Any, ...]] = {
    "subscription_no": (*SUBSCRIPTIONS, 99),
    "state": (*map(int, C), 77),
    "at_ms": (FUTURE_MS, None),
    "impossible": (True,),
}
_NOTE: Mapping[str, tuple[Any, ...]] = {
    "message_id": ("1-1-07-5", None),
    "subscriber": ("", "coupons.a", "mails.a", "late.a", "nobody.a"),
    "committed": (0, 1),
    "rolled_back": (1,),
    "unknown": (1,),
    "effects": (0, 1, 2),
    "noted_app": ("orders", "shop", None),
    "sdk": (0, 1),
    "noted_topic": ("other",),
    "noted_key": ("other", None),
    "attempt_id": (b"other", None),
    "at_ms": (FUTURE_MS, None),
    "body_sha256": ("other", None),
}


def disturbed(records: Records, dice: random.Random) -> Records:
    """One thing is different."""
    rows, notes = [dict(row) for row in records[0]], [dict(note) for note in records[1]]

    def some(values: Mapping[str, tuple[Any, ...]], record: dict[str, Any]) -> dict[str, Any]:
        name = dice.choice(list(values))
        return record | {name: dice.choice(values[name])}

    what = dice.choice(("row", "delivery", "delivery", "note", "note", "drop", "twice", "copy"))
    deliveries = [dict(each) for each in rows[0]["deliveries"]] if rows else []
    if what == "row" and rows:
        rows[0] = some({**_ROW, "replay_of": (f"1-1-07-{rows[0]['id'] - (100 << 22)}", "x")}, rows[0])
    elif what == "delivery" and deliveries:
        place = dice.randrange(len(deliveries))
        kept = [deliveries[place], some(_DELIVERY, deliveries[place])]
        deliveries[place : place + 1] = dice.choice((kept, kept[:0], kept[1:]))
        rows[0]["deliveries"] = deliveries
    elif what == "note" and notes:
        place = dice.randrange(len(notes))
        notes[place] = some(_NOTE, notes[place])
    elif what == "copy" and rows:
        rows.append(some(_ROW, rows[0]))
    elif what == "drop":
        within = dice.choice((rows, notes))
        del within[:1]
    elif what == "twice":
        within = dice.choice((rows, notes))
        within += [dict(each) for each in within[:1] * dice.choice((1, 2))]
    return rows, notes


@pytest.fixture(scope="module")
def catalog(spark: SparkSession) -> Catalog:
    return catalog_of(spark, NAMES, Chain(manifests=()), AUDITED, NOTED_APPS, {})


def frames(spark: SparkSession, every: list[Records]) -> tuple[DataFrame, DataFrame]:
    rows = [row for message, _ in every for row in message]
    notes = [note for _, message in every for note in message]
    return spark.createDataFrame(rows, _OUTLINE), spark.createDataFrame(notes, _NOTED)


def found(outlines: DataFrame, noted: DataFrame, catalog: Catalog) -> DataFrame:
    return matched(outlines, noted, catalog, latest_possible_ms(NOW_MS, 0), partitions=2)


def judgement(outlines: DataFrame, noted: DataFrame, catalog: Catalog) -> DataFrame:
    claims = center_claims(outlines, catalog.topics, catalog.apps, catalog.subscribers)
    return judged(claims.unionByName(noted_claims(noted)), AUDITED, NOW_MS, 0, 2)


def disturbed_in_part(count: int) -> list[Records]:
    dice = random.Random(5)
    every = []
    for number in range(count):
        records = honest(number, dice)
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
            records = disturbed(records, dice)
        every.append(records)
    return every


def test_whoever_is_honest_matches_and_is_counted(spark: SparkSession, catalog: Catalog) -> None:
    dice = random.Random(3)
    every = [honest(number, dice) for number in range(1000)]
    copies = [(message * dice.choice((1, 2)), notes) for message, notes in every]  # in the archive, too
    rows = found(*frames(spark, copies), catalog).collect()
    assert [row for row in rows if row.key is not None] == []
    messages, deliveries = catalog.matching(rows)
    by_topic: dict[str, int] = defaultdict(int)
    by_subscriber: dict[tuple[str, str], int] = defaultdict(int)
    for (row,), notes in every:
        by_topic[NAMES.topics[row["topic_no"]]] += 1
        for note in notes:
            if note["effects"]:
                by_subscriber[NAMES.topics[row["topic_no"]], note["subscriber"]] += 1
    assert messages == by_topic
    assert +deliveries == by_subscriber
    assert len(by_subscriber) == 3


def test_whatever_matches_would_have_been_agreed(spark: SparkSession, catalog: Catalog) -> None:
    outlines, noted = frames(spark, disturbed_in_part(6000))
    rows = found(outlines, noted, catalog)
    wrong = judgement(outlines, noted, catalog).where((f.col("verdict") != AGREED) | f.col("bad_clock"))
    keys = rows.where(f.col("key").isNotNull()).select("key")
    to_judge = with_keys(wrong, f.col("number"), keys)
    assert wrong.count() > 2000
    assert wrong.exceptAll(to_judge).select("number", "subscriber", "verdict").collect() == []
    # And it does what it is for: most of what agrees has not to be judged.
    agreed = (
        outlines.select(shard_and_number("shard", "id").alias("number")).distinct().join(wrong, "number", "left_anti")
    )
    needless = with_keys(agreed, f.col("number"), keys).count()
    assert needless < agreed.count() / 3


@pytest.mark.parametrize("count", [400, 2000])  # of the first 500, nobody has late notes
def test_the_sums_are_those_of_a_judgement_of_everything(spark: SparkSession, catalog: Catalog, count: int) -> None:
    outlines, noted = frames(spark, disturbed_in_part(count))
    rows = found(outlines, noted, catalog)
    keys = rows.where(f.col("key").isNotNull()).select("key")
    outlines_to_judge = with_keys(outlines, shard_and_number("shard", "id"), keys)
    noted_to_judge = with_keys(noted, noted_number("message_id"), keys)
    messages, deliveries = catalog.matching(rows.where(f.col("key").isNull()).collect())

    def sums(judgement: DataFrame) -> tuple[Counter[tuple[str, str]], dict[tuple[str, str], tuple[int, ...]], int]:
        verdicts = by_message(judgement).groupBy("topic", "verdict").count().collect()
        counts = counted(judgement).collect()
        related = {
            (row.topic, row.subscriber): (row.committed, row.consumed, row.open)
            for row in counts
            if row.topic is not None and row.subscriber in AUDITED.subscribers
        }
        return (
            Counter({(row.topic, row.verdict): row["count"] for row in verdicts}),
            related,
            sum(row.bad_clocks for row in counts),
        )

    verdicts, related, bad_clocks = sums(judgement(outlines_to_judge, noted_to_judge, catalog))
    for topic, number in messages.items():
        verdicts[topic, AGREED] += number
    for pair, number in deliveries.items():
        committed, consumed, underway = related.get(pair, (0, 0, 0))
        related[pair] = (committed + number, consumed + number, underway)
    assert (verdicts, related, bad_clocks) == sums(judgement(outlines, noted, catalog))


def test_a_subscriber_whose_notes_begin_later_is_still_listed(spark: SparkSession, catalog: Catalog) -> None:
    dice = random.Random(3)
    rows = found(*frames(spark, [honest(number, dice) for number in range(100)]), catalog).collect()
    assert catalog.matching(rows)[1]["order.paid", "late.a"] == 0
    assert ("order.paid", "late.a") in catalog.matching(rows)[1]


def test_live_subscriptions_get_the_bits_first(spark: SparkSession) -> None:
    old = {n: (1, f"old{n}.a", 0, START_MS) for n in range(1, 81)}
    subscribed = {**old, 81: (1, "coupons.a", 0, None)}
    names = replace(
        NAMES,
        subscriptions={n: ("order.paid", who, bool(end)) for n, (_, who, _, end) in subscribed.items()},
        lives={n: Life(topic_no=t, from_ms=a, to_ms=e) for n, (t, _, a, e) in subscribed.items()},
    )
    many = catalog_of(spark, names, Chain(manifests=()), AUDITED, NOTED_APPS, {})
    assert many.bits[1][0] == "coupons.a"
    assert len(many.bits[1]) == 62
    (row,) = many.topics.where("topic_no = 1").collect()
    assert sorted(each.bit for each in row.subscriptions)[:20] == [0] * 19 + [1]
