"""Order keys are audited: sequences, acks and inboxes of messages that were delivered in order, and what is not so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.kinds import ORDER_KINDS, ORDERED, Planted, sequence_of
from tests.pipeline.running import Jobs, few_sources
from tests.support.filled import FilledCenter
from tmc_pipeline.reconcile.job import Summary
from tmc_pipeline.reconcile.verdicts import AGREED

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(600)]
Fill = Callable[..., FilledCenter]
SHARD = 7
_KEYS = len(ORDER_KINDS) + 1


def _ordered(center: FilledCenter) -> list[list[Planted]]:
    """Every message of stock.moved gets one of a few order keys, and its subscriber an inbox in their order."""
    with center.sql() as run:
        run.exec_driver_sql("UPDATE tmc_topic SET ordered = 1 WHERE topic_no = 3")
    rows = center.rows("SELECT id, message_key FROM tmc_message_{nn} WHERE topic_no = 3 ORDER BY id", [SHARD])
    lines: list[list[Planted]] = [[] for _ in range(_KEYS)]
    for place, row in enumerate(rows):
        key = f"o{place % _KEYS}"
        message = Planted(center=center, shard=SHARD, number=int(row.id), topic=3, key=str(row.message_key))
        hashed = f"CONCAT('0:', LENGTH(body), ':', body, content_type, CHAR(0), '13:tmc-order-key{len(key)}:{key}')"
        message.message(f"""headers = '{{"tmc-order-key": "{key}"}}', digest = UNHEX(SHA2({hashed}, 256))""")
        message.deliveries(f"sequence = {sequence_of(message.number)}, order_hash = {1 + place % _KEYS}")
        lines[place % _KEYS].append(message)
    for place, line in enumerate(lines):
        values = f"'l{place}', 'c3.default', 'stock.moved', 'o{place}', {sequence_of(line[-1].number)}, 0"
        with center.sql(center.ledger("c3")) as run:
            run.exec_driver_sql(f"INSERT INTO tmc_inbox_order VALUES ({values})")
    return lines


@pytest.fixture
def jobs(spark: SparkSession, filled: Fill, folder: Path) -> Jobs:
    center = filled(3 * _KEYS * len(ORDERED), (SHARD,))
    center.fill_ledgers()
    return few_sources(spark, center, folder, producers=("p3",), consumers=("c3",))


def _found(jobs: Jobs, summary: Summary) -> dict[str, str]:
    return {row.message_id: row.verdict for row in jobs.details(summary) if row.subscriber}


@pytest.mark.takes_turns("order")
def test_every_kind_of_disorder_is_found_and_nothing_else(jobs: Jobs) -> None:
    lines = _ordered(jobs.center)
    assert jobs.run_reconcile().consistent
    jobs.run_archive(lag_ms=jobs.tables.now_ms() - jobs.center.start_ms - 60_000)  # some of them are in both
    assert jobs.run_reconcile().verdicts[AGREED] == 3 * _KEYS * len(ORDERED)
    expected: dict[str, str] = {}
    for line, kind in zip(lines, ORDER_KINDS.values(), strict=False):
        kind.plant(line)
        expected |= {line[place].id: kind.verdict for place in kind.found}
    whole = jobs.run_reconcile()
    not_archived = {id_: verdict for id_, verdict in _found(jobs, whole).items() if verdict == "out of order"}
    assert not_archived == expected


@pytest.mark.takes_turns("order")
def test_acks_after_failures_and_switched_off_order_are_no_disorder(jobs: Jobs, folder: Path) -> None:
    """Skipped and acked late; delivered while order was off; cancelled before its turn came."""
    late, off, *_ = _ordered(jobs.center)
    late[1].note_attempt()
    late[1].deliveries("closed_ms = closed_ms + 100000, attempt = 2")
    off[2].note_attempt()
    off[2].deliveries("sequence = NULL")
    assert _found(jobs, jobs.run_reconcile()) == {}
    off[3].deliveries("sequence = NULL")
    assert _found(jobs, jobs.run_reconcile()) == {off[3].id: "out of order"}
    with jobs.center.sql() as run:
        run.exec_driver_sql(
            "INSERT INTO tmc_audit (at_ms, actor, action, subject, reason, change_text) VALUES (1, 'ops',"
            " 'register subscription', 'stock.moved c3 default', '', 'order_mode: 1 -> 3')"
        )
    again = few_sources(jobs.spark, jobs.center, folder, producers=("p3",), consumers=("c3",))
    assert _found(again, again.run_reconcile()) == {}
