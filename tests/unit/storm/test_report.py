"""Reports: what is summed up, and what is not in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tmc_storm.judging import Finding, Relation
from tmc_storm.observing import Sample, Usage
from tmc_storm.plan import Strike
from tmc_storm.report import growth_of, kinds_of, options_of, write
from tmc_storm.running import Options, Outcome
from tmc_storm.visit import Host
from tmc_storm.weather import Struck


def _struck(number: int, kind: str, began_s: float, ended_s: float) -> Struck:
    strike = Strike(number=number, at_s=began_s, kind=kind, part="server 1", lasts_s=ended_s - began_s)
    return Struck(strike=strike, began_s=began_s, ended_s=ended_s)


STRUCK = [_struck(0, "killed", 10.0, 13.0), _struck(1, "reset", 30.0, 30.0), _struck(2, "killed", 40.0, 41.0)]


def _samples() -> list[Sample]:
    """Orders go on all the time; there is no effect from 10.5 to 16, and nobody could count from 30 to 34."""
    seconds = [number / 2 for number in range(100) if not 60 < number < 68]
    return [
        Sample(at_s=at_s, orders=round(at_s * 10), effects=round(at_s * 10) if not 10.5 <= at_s <= 16 else 105)
        for at_s in seconds
    ]


def test_a_stall_is_charged_to_what_struck_when_it_began() -> None:
    lines = {line.kind: line for line in kinds_of(STRUCK, _samples())}
    killed, reset = lines["killed"], lines["reset"]
    assert (killed.count, killed.longest_s, killed.orders_stalled_s, killed.effects_stalled_s) == (2, 3.0, 0.0, 5.5)
    assert (reset.count, reset.longest_s, reset.orders_stalled_s, reset.effects_stalled_s) == (1, 0.0, 4.0, 4.0)


OPTIONS = Options(host=Host(address="center:1", token="secret-token"), seed=7, seconds=33.0)


def _usage(number: int, rss_mb: float, pid: int = 1) -> Usage:
    return Usage(at_s=number * 10.0, program="server 0", pid=pid, rss_mb=rss_mb, threads=9, handles=20)


def test_growth_is_that_of_the_longest_run_once_it_has_started() -> None:
    other_runs = [_usage(number, 500.0, pid=2) for number in range(9)]
    run = [_usage(number, 50.0 * number if number < 10 else 100.0 + number) for number in range(9, 49)]
    (grown,) = growth_of(other_runs + run)
    assert (grown.program, grown.minutes, grown.rss_mb) == ("server 0", 4.8, 148.0)
    assert (grown.rss_mb_per_hour, grown.threads_per_hour, grown.handles_per_hour) == (360.0, 0.0, 0.0)
    assert growth_of(other_runs[:3]) == []


def _outcome(*findings: Finding, settled_s: float | None = 2.5) -> Outcome:
    return Outcome(
        options=OPTIONS,
        struck=STRUCK,
        missed=["broker: a queue deleted at broker 0: 404"],
        samples=_samples(),
        usages=[],
        findings=findings,
        relations=[Relation(app="stock", committed=3, consumed=4, unconfirmed=1)],
        orders=3,
        effects=4,
        settled_s=settled_s,
        ends={"server 1": [1]},
    )


def test_a_report_says_everything_but_the_token(tmp_path: Path) -> None:
    write(_outcome(Finding(kind="lost", what="<b>key</b> at stock")), tmp_path)
    summary, page = json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.html").read_text()
    assert (summary["clean"], summary["found"]["lost"], summary["faults"]) == (False, 1, 3)
    assert "not clean" in page
    assert "&lt;b&gt;key" in page
    assert "the center at center:1" in page
    assert "secret-token" not in page + json.dumps(summary)
    assert options_of(tmp_path / "report.json", OPTIONS.host) == replace(
        OPTIONS, strikes=[one.strike for one in STRUCK]
    )
    with pytest.raises(ValueError, match="give --address, too"):
        options_of(tmp_path / "report.json", None)


@pytest.mark.parametrize(
    ("outcome", "is_clean"),
    [(_outcome(), True), (_outcome(settled_s=None), False), (_outcome(Finding(kind="early", what="")), False)],
)
def test_clean_is_nothing_found_and_everything_arrived(outcome: Outcome, is_clean: bool) -> None:
    assert outcome.is_clean is is_clean


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"strikes": [{"strike": {"number": 1}}]}'])
def test_what_is_no_report_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=r"no report\.json of this version"):
        options_of(tmp_path / "report.json", None)
