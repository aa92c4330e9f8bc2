"""Reports of a run: report.json for programs, and report.html, one file that shows everything."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import linear_regression
from typing import Any

import jinja2

from tmc_storm.judging import KINDS, Finding
from tmc_storm.observing import SAMPLE_S, Sample, Usage
from tmc_storm.plan import Strike
from tmc_storm.running import Kind, Options, Outcome
from tmc_storm.visit import Host
from tmc_storm.weather import Struck
from tmc_storm.world import Form, Store

_SHOWN_FINDINGS = 50  # of each kind
_AROUND_S = 2 * SAMPLE_S
_USAGES = 8  # a run that was looked at less often says nothing


@dataclass(frozen=True, kw_only=True)
class KindOfFault:
    """One line of the table.

    longest_s: how long one of them lasted.  orders_stalled_s, effects_stalled_s: the longest time without an order, or an
    effect at any service, of which one of them was a part.
    """

    kind: str
    count: int
    longest_s: float
    orders_stalled_s: float
    effects_stalled_s: float


def kinds_of(struck: Sequence[Struck], samples: Sequence[Sample]) -> list[KindOfFault]:
    """Sum up the strikes by kind. Faults overlap: a stall is charged to all that were under way meanwhile."""
    orders = list(_stalls([(sample.at_s, sample.orders) for sample in samples]))
    effects = list(_stalls([(sample.at_s, sample.effects) for sample in samples]))
    lines = []
    for kind in {one.strike.kind for one in struck}:
        of_kind = [one for one in struck if one.strike.kind == kind]
        lines.append(
            KindOfFault(
                kind=kind,
                count=len(of_kind),
                longest_s=round(max(one.ended_s - one.began_s for one in of_kind), 1),
                orders_stalled_s=_longest(of_kind, orders),
                effects_stalled_s=_longest(of_kind, effects),
            )
        )
    return sorted(lines, key=lambda line: (-line.effects_stalled_s, line.kind))


def _longest(struck: Sequence[Struck], stalls: Sequence[tuple[float, float]]) -> float:
    seen = [
        end - begin
        for begin, end in stalls
        for one in struck
        if begin <= one.ended_s + _AROUND_S and end >= one.began_s
    ]
    return round(max(seen, default=0.0), 1)


def _stalls(counts: Sequence[tuple[float, int]]) -> Iterator[tuple[float, float]]:
    """Yield when a count stopped and when it was seen to go on, in seconds. While nobody could count, it had stopped."""
    since: float | None = None
    for (before_s, before), (after_s, after) in itertools.pairwise(counts):
        if after == before or after_s - before_s > 3 * SAMPLE_S:
            since = before_s if since is None else since
        elif since is not None:
            yield since, before_s
            since = None
    if since is not None:
        yield since, counts[-1][0]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The resources of the longest run of a program in the end, and their growth per hour."""

    program: str
    minutes: float
    rss_mb: float
    rss_mb_per_hour: float
    threads: int
    threads_per_hour: float
    handles: int
    handles_per_hour: float


def growth_of(usages: Sequence[Usage]) -> list[Growth]:
    """Fit a line to each program's longest run, without its first quarter: a program that starts grows."""
    runs: defaultdict[tuple[str, int], list[Usage]] = defaultdict(list)
    for usage in usages:
        runs[usage.program, usage.pid].append(usage)
    longest: dict[str, list[Usage]] = {}
    for (program, _), run in runs.items():
        longest[program] = max(longest.get(program, []), run, key=len)
    return [_growth(run[len(run) // 4 :]) for _, run in sorted(longest.items()) if len(run) >= _USAGES]


def _growth(run: Sequence[Usage]) -> Growth:
    def per_hour(values: Sequence[float]) -> float:
        return round(linear_regression([usage.at_s for usage in run], values).slope * 3600, 1)

    last = run[-1]
    return Growth(
        program=last.program,
        minutes=round((last.at_s - run[0].at_s) / 60, 1),
        rss_mb=last.rss_mb,
        rss_mb_per_hour=per_hour([usage.rss_mb for usage in run]),
        threads=last.threads,
        threads_per_hour=per_hour([usage.threads for usage in run]),
        handles=last.handles,
        handles_per_hour=per_hour([usage.handles for usage in run]),
    )


def write(outcome: Outcome, folder: Path) -> None:
    """Write report.json and report.html."""
    kinds = kinds_of(outcome.struck, outcome.samples)
    growth = growth_of(outcome.usages)
    options = dataclasses.asdict(outcome.options)
    del options["strikes"], options["host"]  # it has a token
    options["kind"] = outcome.options.kind.value
    summary = {
        "version": version("tmc-center"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_visit": outcome.options.host is not None,
        "traffic_share": _traffic_share(outcome),
        "clean": outcome.is_clean,
        "scene": outcome.options.scene,
        "options": options,
        "faults": len(outcome.struck),
        "kinds": [dataclasses.asdict(line) for line in kinds],
        "orders": outcome.orders,
        "effects": outcome.effects,
        "settled_s": outcome.settled_s,
        "found": {kind: sum(one.kind == kind for one in outcome.findings) for kind in KINDS},
        "findings": [dataclasses.asdict(one) for one in _shown(outcome.findings)],
        "relations": [dataclasses.asdict(one) | {"holds": one.holds} for one in outcome.relations],
        "missed": list(outcome.missed),
        "ends": outcome.ends,
        "growth": [dataclasses.asdict(one) for one in growth],
        "strikes": [dataclasses.asdict(one) for one in outcome.struck],
        "samples": [dataclasses.asdict(one) for one in outcome.samples],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tmc_storm"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html").render(
        outcome=outcome, summary=summary, kinds=kinds, growth=growth, timeline=_Timeline(outcome)
    )
    (folder / "report.html").write_text(page)


def _shown(findings: Sequence[Finding]) -> list[Finding]:
    by_kind = {kind: [one for one in findings if one.kind == kind] for kind in KINDS}
    return [one for of_kind in by_kind.values() for one in of_kind[:_SHOWN_FINDINGS]]


def _traffic_share(outcome: Outcome) -> float:
    """Return the share of the storm, 0 .. 1, in which services got messages."""
    last_s = max((one.ended_s for one in outcome.struck), default=float("inf"))
    steps = [
        after.effects > before.effects for before, after in itertools.pairwise(outcome.samples) if before.at_s < last_s
    ]
    return round(sum(steps) / len(steps), 2) if steps else 0.0


def options_of(report: Path, host: Host | None) -> Options:
    """Return the options of an earlier run with the strikes that it made, from its report.json.

    host: to visit again, if it was a visit. Raises OSError, ValueError.
    """
    try:
        found = json.loads(report.read_text())
        options = found["options"]
        if found["is_visit"] and host is None:
            raise ValueError(f"{report} is of a visit: give --address, too")
        form = options.pop("form")
        return Options(
            form=Form(**form | {"store": Store(form["store"])}),
            kind=Kind(options.pop("kind")),
            strikes=[Strike(**one["strike"]) for one in found["strikes"]],
            host=host,
            **options,
        )
    except (KeyError, TypeError, json.JSONDecodeError) as exc:
        raise ValueError(f"{report} is no report.json of this version") from exc


class _Timeline:
    """Coordinates of the picture, in pixels."""

    width, left, row, graph = 1200, 190, 14, 160

    def __init__(self, outcome: Outcome) -> None:
        self._first_s = min([0.0, *(sample.at_s for sample in outcome.samples)])
        last_s = max(
            [1.0, *(sample.at_s for sample in outcome.samples), *(one.ended_s for one in outcome.struck)],
        )
        self._scale = (self.width - self.left) / (last_s - self._first_s)
        self.parts = sorted({one.strike.part for one in outcome.struck})
        self.height = self.graph + self.row * len(self.parts) + 30
        self._rates = list(_rates(outcome.samples))
        self.highest = max([1.0, *(max(orders, effects) for _, orders, effects in self._rates)])
        self.ticks = [(self._x(second), f"{second:.0f} s") for second in _ticks(last_s)]
        self.orders = self._line(1)
        self.effects = self._line(2)
        self.bars = [
            {
                "x": self._x(one.began_s),
                "y": self.graph + 10 + self.row * self.parts.index(one.strike.part),
                "width": max(2.0, round((one.ended_s - one.began_s) * self._scale, 1)),
                "text": f"{one.strike.number}: {one.strike.kind}, {one.strike.part}, at {one.began_s:.1f} s "
                f"for {one.ended_s - one.began_s:.1f} s",
            }
            for one in outcome.struck
        ]

    def _x(self, at_s: float) -> float:
        return round(self.left + (at_s - self._first_s) * self._scale, 1)

    def _line(self, column: int) -> str:
        return " ".join(
            f"{self._x(rate[0])},{self.graph * (1 - rate[column] / self.highest):.1f}" for rate in self._rates
        )


def _rates(samples: Sequence[Sample]) -> Iterator[tuple[float, float, float]]:
    """Yield (seconds, orders per second, effects per second)."""
    for before, after in itertools.pairwise(samples):
        seconds = after.at_s - before.at_s
        yield after.at_s, (after.orders - before.orders) / seconds, (after.effects - before.effects) / seconds


def _ticks(last_s: float) -> Iterator[float]:
    step: Any = next(size for size in (5, 10, 30, 60, 300, 600, 1800, 36000) if last_s / size <= 12)
    second = 0
    while second <= last_s:
        yield second
        second += step
