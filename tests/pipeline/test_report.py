"""The report: every figure by hand, every message once, and a page that loads nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from tests.pipeline.running import Jobs
from tests.support.filled import START_MS
from tmc_pipeline.files import HadoopFolder, remove_old_runs, when_ms
from tmc_pipeline.frames import ATTEMPT, CONSUMPTION, MESSAGE
from tmc_pipeline.report import figures, page
from tmc_pipeline.report.job import Report
from tmc_server.domain import consumption, message
from tmc_server.domain.checks import DECIDED_BY_CHECK
from tmc_server.domain.consumption import ConsumptionState as C
from tmc_server.domain.message import MessageState as M

pytestmark = pytest.mark.mariadb
HOUR_MS = figures.HOUR_MS
TEN = 10 * HOUR_MS  # ten o'clock on the first day


def test_whose_turn_it_is_is_said_for_every_open_state() -> None:
    assert set(figures.DECIDES) == set(message.UNDECIDED)
    assert set(figures.DELIVERS) == set(consumption.OPEN)


def a_message(number: int, state: M = M.COMMITTED, created_ms: int = TEN, **values: Any) -> dict[str, Any]:
    base = dict.fromkeys(MESSAGE.names) | {
        "shard": 1,
        "id": number,
        "delay_ms": 0,
        "check_answer": "",
        "state": int(state),
    }
    base |= {
        "created_ms": created_ms,
        "decided_ms": created_ms + 10,
        "consumptions": [],
        "attempts": [],
        "topic": "order.paid",
    }
    return {**base, **values}


def a_consumption(
    state: C = C.ACKED, attempt: int = 1, after_ms: int = 100, of: int = TEN, subscription: int = 1
) -> tuple[Any, ...]:
    closed = of + 10 + after_ms if state in (C.ACKED, C.CANCELLED) else None
    values = {"subscription_no": subscription, "state": int(state), "attempt": attempt, "closed_ms": closed}
    return tuple(values.get(name) for name in CONSUMPTION.names)


def an_attempt(error: str) -> tuple[Any, ...]:
    values = {"subscription_no": 1, "attempt": 1, "at_ms": TEN, "error": error}
    return tuple(values.get(name) for name in ATTEMPT.names)


@pytest.fixture
def messages(spark: SparkSession) -> Any:
    rows = [
        a_message(1, consumptions=[a_consumption(after_ms=100)]),
        a_message(
            2,
            consumptions=[a_consumption(after_ms=300, attempt=3)],
            attempts=[an_attempt("code 17"), an_attempt("code 4")],
        ),
        a_message(3, consumptions=[a_consumption(C.FAILED, attempt=6)], attempts=[an_attempt("boom")]),
        a_message(
            4, consumptions=[a_consumption(C.CANCELLED), a_consumption(C.SCHEDULED, subscription=2)], delay_ms=50
        ),
        a_message(5, M.ROLLED_BACK, check_answer=DECIDED_BY_CHECK, decided_ms=TEN + 70),
        a_message(6, M.PREPARED, decided_ms=None, created_ms=TEN + HOUR_MS),
        a_message(7, M.CHECK_FAILED, decided_ms=None, created_ms=TEN + HOUR_MS - 1, shard=9),
        a_message(8, delay_ms=40, consumptions=[a_consumption(after_ms=1040)], topic="stock.moved"),
    ]
    return _frame(spark, rows)


def _frame(spark: SparkSession, rows: list[dict[str, Any]]) -> Any:
    schema = StructType([*MESSAGE.fields, StructField("topic", StringType())])
    return spark.createDataFrame([tuple(row[name] for name in schema.names) for row in rows], schema)


@pytest.fixture
def subscribers(spark: SparkSession) -> Any:
    return spark.createDataFrame([(1, "coupons.default")], "subscription_no int, subscriber string")


def test_production(messages: Any) -> None:
    paid, stock = figures.production(messages).collect()
    assert (paid.topic, paid.messages, paid.committed, paid.rolled_back, paid.undecided, paid.by_check) == (
        "order.paid",
        7,
        4,
        1,
        2,
        1,
    )
    assert (paid.decide_p50, paid.decide_p95, paid.decide_max) == (10, 70, 70)
    assert (stock.messages, stock.by_check) == (1, 0)
    hours = figures.production(messages, "hour_ms").where("topic = 'order.paid'").collect()
    assert [(row.hour_ms, row.messages) for row in hours] == [(TEN, 6), (TEN + HOUR_MS, 1)]


def test_consumption(messages: Any, subscribers: Any) -> None:
    rows = {
        (r.topic, r.subscriber): r for r in figures.consumption(figures.deliveries(messages, subscribers)).collect()
    }
    paid = rows["order.paid", "coupons.default"]
    assert (paid.deliveries, paid.acked, paid.failed, paid.cancelled, paid.under_way, paid.first_attempt) == (
        4,
        2,
        1,
        1,
        0,
        1,
    )
    assert (paid.attempts, paid.deliver_p50, paid.deliver_max, paid.life_max) == (11, 100, 300, 310)
    assert rows["order.paid", "subscription-2"].under_way == 1
    assert rows["order.paid", "subscription-2"].deliver_p50 is None
    assert rows["stock.moved", "coupons.default"].deliver_max == 1000  # the delay is not the delivery's


def test_times_that_cannot_be_are_counted_and_left_out(spark: SparkSession, subscribers: Any) -> None:
    """A clock was a year ahead, or far behind; half a second back is nothing."""
    year_ms = 500 * 24 * HOUR_MS
    odd = _frame(
        spark,
        [
            a_message(1, consumptions=[a_consumption(after_ms=100)]),
            a_message(2, decided_ms=TEN + year_ms, consumptions=[a_consumption(after_ms=100)]),
            a_message(3, decided_ms=TEN - 500, consumptions=[a_consumption(after_ms=year_ms)]),
        ],
    )
    (row,) = figures.production(odd).collect()
    assert (row.impossible, row.decide_p50, row.decide_max) == (1, 0, 10)
    delivered = figures.deliveries(odd, subscribers)
    (row,) = figures.consumption(delivered).collect()
    assert (row.impossible, row.deliver_max, row.acked) == (2, 100, 3)
    assert [each.deliveries for each in figures.latencies(delivered).collect()] == [1]


def test_failures_open_and_skew(messages: Any, subscribers: Any) -> None:
    assert [tuple(row) for row in figures.failures(messages, subscribers).collect()] == [
        ("order.paid", "coupons.default", "code #", 2),
        ("order.paid", "coupons.default", "boom", 1),
    ]
    assert [tuple(row) for row in figures.oldest_open(messages, subscribers).collect()] == [
        ("order.paid", "coupons.default", "a human reactivates: delivery gave up", 1, TEN),
        ("order.paid", "subscription-2", "under way", 1, TEN),
        ("order.paid", "", "a human decides: checks gave up", 1, TEN + HOUR_MS - 1),
        ("order.paid", "", "its producer decides", 1, TEN + HOUR_MS),
    ]
    assert [tuple(row) for row in figures.skew(messages).collect()] == [(1, 7, 6), (9, 1, 0)]


def test_latencies_by_step(messages: Any, subscribers: Any) -> None:
    rows = figures.latencies(figures.deliveries(messages, subscribers)).collect()
    assert [(row.topic, row.subscriber, figures.LATENCY_STEPS[row.step], row.deliveries) for row in rows] == [
        ("order.paid", "coupons.default", 100, 1),
        ("order.paid", "coupons.default", 300, 1),
        ("stock.moved", "coupons.default", 1000, 1),
    ]


def test_shards_by_time(messages: Any) -> None:
    assert [tuple(row) for row in figures.heat(messages, HOUR_MS).collect()] == [
        (1, TEN, 6),
        (1, TEN + HOUR_MS, 1),
        (9, TEN, 1),
    ]
    hours = [page.heat_step_ms(0, days * 24 * HOUR_MS) // HOUR_MS for days in (1, 7, 14, 28, 90)]
    assert hours == [1, 3, 6, 12, 24]


def test_the_heat_map_has_a_column_for_each_step_of_time() -> None:
    axes = Figure().add_subplot()
    page.heat_map(axes, [{"shard": 1, "at_ms": TEN + n * HOUR_MS, "messages": n + 1} for n in (0, 2, 5)])
    (mesh,) = axes.collections
    assert [n for n, value in enumerate(mesh.get_array()[1]) if value] == [0, 2, 5]


def test_two_periods_are_compared(messages: Any, subscribers: Any) -> None:
    before, now = figures.compared(messages, subscribers, TEN + HOUR_MS - 1).collect()
    assert (before.messages, before.committed, before.rolled_back, before.deliveries, before.failed) == (6, 5, 1, 6, 1)
    assert (before.acked, before.first_attempt, before.deliver_max) == (3, 2, 1000)
    assert (now.messages, now.undecided, now.deliveries) == (2, 2, None)
    assert [page.changed(*each) for each in ((6, 3), (3, 6), (5, 0), (0, 0), (None, 4))] == [
        "+100 %",
        "-50 %",
        "new",
        "",
        "",
    ]


def _report(jobs: Jobs, console: str = "") -> Report:
    return Report(
        jobs.spark,
        jobs.tables,
        jobs.archive,
        HadoopFolder(jobs.spark, jobs.settings.report.path),
        reconciled=HadoopFolder(jobs.spark, jobs.settings.reconcile.path),
        console=console,
    )


def test_verdicts_of_the_last_reconciliation_are_on_the_page(spark: SparkSession, filled: Any, folder: Path) -> None:
    center = filled(6)
    center.fill_ledgers()
    jobs = Jobs(spark, center, folder)
    jobs.run_reconcile()
    assert "Yes: the last reconciliation found no discrepancy." in _page_at(_report(jobs).run(START_MS).path)
    center.change(7, "UPDATE tmc_message_{nn} SET body = 'forged' WHERE message_key = 'k07-1'")
    jobs.run_reconcile()
    text = _page_at(_report(jobs, "https://console.example.com/").run(START_MS).path)
    assert "reconciliation found 1 discrepancy." in " ".join(text.split())
    (link,) = re.findall(r'href="(https://console.example.com/messages/[^"]+)">', text)
    assert link.rpartition("/")[2].startswith("2-2-07-")
    assert 'href="https://console.example.com/topics?topic=orders.paid"' in text


def _page_at(path: str) -> str:
    return Path(path, "report.html").read_text()


def test_each_message_counts_once_wherever_it_is(spark: SparkSession, filled: Any, folder: Path) -> None:
    """Archived and still hot, archived and removed, never archived."""
    jobs = Jobs(spark, filled(30), folder)
    jobs.run_archive(before_ms=START_MS + 15_000)
    jobs.center.change(7, f"DELETE FROM tmc_message_{{nn}} WHERE decided_ms < {START_MS + 10_000}")
    made = _report(jobs).run(START_MS)
    assert made.messages == 4 * 30
    assert sum(row["messages"] for row in made.tables["production"]) == 4 * 30
    kept = spark.read.parquet(f"{made.path}/consumption.parquet").collect()
    assert {(row.topic, row.subscriber): row.acked for row in kept} == {
        ("orders.paid", "c1.default"): 40,
        ("orders.paid", "c4.default"): 40,
        ("orders.shipped", "c2.default"): 40,
        ("orders.shipped", "c5.default"): 40,
        ("stock.moved", "c3.default"): 40,
    }
    assert _report(jobs).run(START_MS + 11_000, START_MS + 21_000).messages == 4 * 10


def test_the_page_is_whole_and_loads_nothing(spark: SparkSession, filled: Any, folder: Path) -> None:
    jobs = Jobs(spark, filled(3), folder)
    text = Path(_report(jobs).run(START_MS).path, "report.html").read_text()
    assert text.count("<svg") == 6
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "There is no result of a reconciliation yet" in text
    assert "orders.shipped" in text
    assert "c5.default" in text
    assert "mathdefault" not in text, "labels of axes are text"


def test_old_results_are_removed_but_never_the_newest(spark: SparkSession, tmp_path: Path) -> None:
    folder = HadoopFolder(spark, str(tmp_path))
    names = ["20260901T053000-aaaaaa", "20261001T053000-bbbbbb", "20261101T053000-cccccc", "_accepted"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text("{}")
    now_ms = when_ms("20261105T053000-dddddd")
    remove_old_runs(folder, now_ms, keep_days=0)
    assert folder.names() == names
    remove_old_runs(folder, now_ms, keep_days=40)
    assert folder.names() == names[1:]
    remove_old_runs(folder, now_ms, keep_days=1)
    assert folder.names() == names[2:]


def test_an_empty_time_has_a_page_too(spark: SparkSession, filled: Any, folder: Path) -> None:
    jobs = Jobs(spark, filled(0), folder)
    made = _report(jobs).run(START_MS)
    assert made.messages == 0
    assert "No messages in this time." in Path(made.path, "report.html").read_text()


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, ""),
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1.0 s"),
        (119_999, "120 s"),
        (120_000, "2.0 min"),
        (7_200_000, "2.0 h"),
        (172_800_000, "2.0 d"),
    ],
)
def test_durations_for_people(ms: int | None, shown: str) -> None:
    assert page.span(ms) == shown


def test_a_share_does_not_round_to_everything() -> None:
    assert [page.share(*each) for each in ((0, 0), (0, 5), (5, 5), (9999, 10_000))] == ["", "0 %", "100 %", "99.99 %"]


def _page_of(reason: str, subscriber: str = "s", verdicts: page.Verdicts | None = None) -> str:
    """The page of a time in which one try failed."""
    names = (
        "production",
        "production_by_hour",
        "consumption",
        "consumption_by_hour",
        "skew",
        "oldest_open",
        "comparison",
        "latencies",
        "heat",
    )
    tables: dict[str, Any] = {name: [] for name in names}
    failed = {"topic": "t", "subscriber": subscriber, "reason": reason, "attempts": 1}
    return page.page("t", {}, {**tables, "failures": [failed]}, verdicts)


def test_how_many_discrepancies_the_last_reconciliations_found() -> None:
    trend = [{"at_ms": TEN + n * HOUR_MS, "verdict": each, "count": n} for n in range(3) for each in ("lost", "ghost")]
    summary = {"consistent": False, "discrepancies": 4, "verdicts": {"lost": 2, "ghost": 2}}
    several = _page_of("x", verdicts=page.Verdicts(run="r", summary=summary, examples=[], trend=trend))
    assert "discrepancies in the last reconciliations" in several
    assert "lost</text>" in several
    one = _page_of("x", verdicts=page.Verdicts(run="r", summary=summary, examples=[], trend=trend[:2]))
    assert "discrepancies in the last reconciliations" not in one


def test_what_the_fonts_of_this_machine_lack_is_no_warning() -> None:
    """Cron would mail it; the page keeps text as text, and the reader's machine has the fonts."""
    assert "s: fell \U0001f389 \u6d88\u606f</text>" in _page_of("fell \U0001f389 \u6d88\u606f")


def test_names_on_the_page_are_text(spark: SparkSession) -> None:
    assert "<script" not in _page_of("<script>alert(1)</script>")


@pytest.mark.parametrize("reason", ["price $5 and $6", "cost $5_{}$ wrong", "bad $\\frac{$ x", "$\\nosuch$"])
def test_a_dollar_in_an_error_text_is_no_formula(reason: str) -> None:
    assert f"s: {reason}</text>" in _page_of(reason)


def test_open_messages_are_reported_whatever_their_age(spark: SparkSession, filled: Any, folder: Path) -> None:
    """A CHECK_FAILED message of a month ago, in a report about an hour that has nothing."""
    jobs = Jobs(spark, filled(3), folder)
    long_ago = START_MS - 30 * 24 * HOUR_MS
    jobs.center.change(
        7,
        f"UPDATE tmc_message_{{nn}} SET state = 4, decided_ms = NULL, created_ms = {long_ago} WHERE message_key = 'k07-1'",
    )
    made = _report(jobs).run(START_MS + HOUR_MS)
    assert made.messages == 0
    (row,) = [row for row in made.tables["oldest_open"] if row["subscriber"] == ""]
    assert (row["topic"], row["turn"], row["open"], row["oldest_ms"]) == (
        "orders.shipped",
        "a human decides: checks gave up",
        1,
        long_ago,
    )
    assert "a human decides: checks gave up" in Path(made.path, "report.html").read_text()


def test_failures_with_equal_labels_have_a_bar_each() -> None:
    axes = Figure().add_subplot()
    rows = [{"subscriber": "s", "reason": "x" * 40 + str(n), "attempts": 5 - n} for n in range(3)]
    page._failures(axes, rows)
    assert sorted(bar.get_y() for bar in axes.patches) == pytest.approx([-0.4, 0.6, 1.6])
    assert len({label.get_text() for label in axes.get_yticklabels()}) == 1


@pytest.mark.parametrize("hours", [1, 3])
def test_the_axis_of_time_is_as_long_as_the_hours_that_are_shown(hours: int) -> None:
    row = {"topic": "t", "messages": 1, "deliver_p50": 1, "deliver_p95": 1, "deliver_p99": 1}
    shown = [{**row, "hour_ms": TEN + n * HOUR_MS} for n in range(hours)]
    for draw in (page._volume, page._latency):
        axes = Figure().add_subplot()
        draw(axes, shown)
        low, high = axes.get_xlim()
        assert (high - low) * 24 == pytest.approx(hours, abs=0.1)


def test_control_characters_of_an_error_text_do_not_reach_the_picture() -> None:
    picture = _page_of("a\x00b\x1b[31mc\nd").rpartition("<svg")[2].partition("</svg>")[0]
    assert "s: a b [31mc d</text>" in picture
    assert not {"\x00", "\x1b"} & set(picture)
