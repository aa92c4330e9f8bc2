"""The report as one HTML file: tables and pictures inside it, nothing loaded from anywhere."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
import matplotlib as mpl
import matplotlib.dates

mpl.use("svg")  # no screen
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tmc_pipeline.report.figures import LATENCY_STEPS

Rows = Sequence[Mapping[str, Any]]
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_MOST_COLUMNS = 96  # of the heat map
_SHARDS = 32
_HEAT = "YlGnBu"  # empty cells stay transparent, so it reads on light and dark paper
_MOST_LINES = 8  # in one picture; the rest is added up or left to the tables
_INK, _FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"  # the page's style sheet replaces them in the dark
_COLOURS = ("#2f6fab", "#d9822b", "#3f8f5b", "#b8433f", "#7a5aa6", "#8c6d46", "#c2679f", "#6b7280")
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _FAINT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "grid.color": _GRID,
    "svg.fonttype": "none",
    "svg.hashsalt": "tmc",
    "text.parse_math": False,  # names and error texts come from users: a $ in them is not a formula
}


def at(ms: int | None) -> str:
    """A moment for people."""
    return "" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}"


def span(ms: float | None) -> str:
    """A duration for people: 850 ms, 2.5 s, 3 min, 4.0 h, 2.1 d."""
    if ms is None:
        return ""
    for limit, size, unit in (
        (1000, 1, "ms"),
        (120_000, 1000, "s"),
        (7_200_000, 60_000, "min"),
        (172_800_000, 3_600_000, "h"),
    ):
        if ms < limit:
            return f"{ms / size:.0f} {unit}" if size == 1 or ms / size >= 100 else f"{ms / size:.1f} {unit}"
    return f"{ms / 86_400_000:.1f} d"


def share(part: int, whole: int) -> str:
    """Per cent, with as many digits as tell 99.99 from 100."""
    if not whole:
        return ""
    value = 100 * part / whole
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.2f} %"


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What the last reconciliation found. summary: its summary.json.  examples: verdict, message_id, subscriber, topic.

    trend: at_ms, verdict and count of the last runs.
    """

    run: str
    summary: Mapping[str, Any]
    examples: Rows
    trend: Rows = ()


def page(
    title: str,
    facts: Mapping[str, str],
    tables: Mapping[str, Rows],
    verdicts: Verdicts | None = None,
    console: str = "",
) -> str:
    """facts: of the run, by name.  tables: as made by figures.py, by name.  console: address for links; empty: none."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tmc_pipeline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"at": at, "span": span, "grouped": lambda number: "" if number is None else f"{number:,}"}
    environment.globals |= {"share": share, "changed": changed}
    return environment.get_template("report.html").render(
        title=title, facts=facts, pictures=_pictures(tables, verdicts), verdicts=verdicts, console=console, **tables
    )


def changed(now: float | None, before: float | None) -> str:
    """The difference to the period before: +12 %, -3 %, new; nothing where it cannot be said."""
    if now is None or before is None or (not now and not before):
        return ""
    return f"{100 * (now - before) / before:+.0f} %" if before else "new"


def heat_step_ms(from_ms: int, to_ms: int) -> int:
    """Return how much time one column of the heat map stands for: an hour, or more if there would be too many of them."""
    return next(
        (step * _HOUR_MS for step in (1, 3, 6, 12) if (to_ms - from_ms) / _HOUR_MS / step <= _MOST_COLUMNS), _DAY_MS
    )


def _pictures(tables: Mapping[str, Rows], verdicts: Verdicts | None) -> Mapping[str, str]:
    trend = verdicts.trend if verdicts is not None else ()
    several = len({row["at_ms"] for row in trend}) > 1
    return {
        "trend": _svg(lambda axes: _trend(axes, trend)) if several else "",
        "volume": _svg(lambda axes: _volume(axes, tables["production_by_hour"])),
        "latency": _svg(lambda axes: _latency(axes, tables["consumption_by_hour"])),
        "first_try": _svg(lambda axes: _first_try(axes, tables["consumption_by_hour"])),
        "spread": _svg(lambda axes: _spread(axes, tables["latencies"])),
        "heat": _svg(lambda axes: heat_map(axes, tables["heat"])),
        "failures": _svg(lambda axes: _failures(axes, tables["failures"])),
    }


def _svg(draw: Any) -> str:
    """Draw one chart as SVG. Settings are read when a figure is made and when it is saved: both use our style."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The SVG keeps text as text: which fonts this machine has does not matter, and cron would mail the warning.
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _label(text: str) -> str:
    """Text from users for a chart: one line, without characters that XML does not allow."""
    return "".join(each if each.isprintable() else " " for each in text)


def _hours(rows: Rows) -> list[int]:
    """Return every hour from the first to the last, also those in which nothing happened."""
    seen = [row["hour_ms"] for row in rows]
    return list(range(min(seen), max(seen) + 1, _HOUR_MS)) if seen else []


def _moments(hours: Iterable[int]) -> list[datetime]:
    return [datetime.fromtimestamp(hour / 1000, UTC) for hour in hours]


def _limit_to(axes: Axes, hours: Sequence[int]) -> None:
    """Limit the axis to the time from the first hour to the end of the last one.

    Around a single point matplotlib would show four years.
    """
    first, end = _moments([hours[0] - _HOUR_MS // 20, hours[-1] + _HOUR_MS])
    axes.set_xlim(mpl.dates.date2num(first), mpl.dates.date2num(end))


def _empty(axes: Axes, text: str = "nothing in this time") -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=_FAINT, transform=axes.transAxes)


def _trend(axes: Axes, rows: Rows) -> None:
    """Draw how many discrepancies each of the last reconciliations found."""
    lines: dict[str, dict[int, int]] = {}
    for row in rows:
        lines.setdefault(row["verdict"], {})[row["at_ms"]] = row["count"]
    seen = {verdict: line for verdict, line in lines.items() if any(line.values())}
    times = sorted({row["at_ms"] for row in rows})
    for (verdict, line), color in zip(seen.items(), itertools.cycle(_COLOURS)):
        axes.plot(
            _moments(times), [line.get(at, 0) for at in times], marker="o", markersize=3, label=verdict, color=color
        )
    if not seen:
        axes.plot(_moments(times), [0] * len(times), marker="o", markersize=3, color=_COLOURS[2])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("discrepancies")
    if seen:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.tick_params(axis="x", rotation=20)


def _volume(axes: Axes, rows: Rows) -> None:
    hours = _hours(rows)
    if not hours:
        _empty(axes)
        return
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["topic"]] = totals.get(row["topic"], 0) + row["messages"]
    first = sorted(totals, key=lambda topic: -totals[topic])[: _MOST_LINES - 1]
    lines = {topic: dict.fromkeys(hours, 0) for topic in [*first, *(["others"] if len(totals) > len(first) else [])]}
    for row in rows:
        lines[row["topic"] if row["topic"] in first else "others"][row["hour_ms"]] += row["messages"]
    bottom = [0] * len(hours)
    width = 1 / 24 * 0.9
    for (topic, line), color in zip(lines.items(), _COLOURS, strict=False):
        values = [line[hour] for hour in hours]
        axes.bar(_moments(hours), values, width, bottom=bottom, label=_label(topic), color=color, align="edge")
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    _limit_to(axes, hours)
    axes.set_ylabel("messages per hour")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.tick_params(axis="x", rotation=20)


def _latency(axes: Axes, rows: Rows) -> None:
    measured = [row for row in rows if row["deliver_p50"] is not None]
    hours = _hours(measured)
    if not hours:
        _empty(axes, "nothing was delivered in this time")
        return
    for name, color in (("p50", _COLOURS[2]), ("p95", _COLOURS[1]), ("p99", _COLOURS[3])):
        worst: dict[int, int] = {}
        for row in measured:
            worst[row["hour_ms"]] = max(worst.get(row["hour_ms"], 0), row[f"deliver_{name}"])
        values = [worst.get(hour, float("nan")) for hour in hours]
        axes.plot(_moments(hours), values, marker="o", markersize=3, label=name, color=color)
    _limit_to(axes, hours)
    axes.set_yscale("symlog", linthresh=1)  # some take less than a millisecond
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: span(value))  # powers of ten would be formulas
    axes.set_ylabel("decision to ack\n(worst subscription)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.tick_params(axis="x", rotation=20)


def _first_try(axes: Axes, rows: Rows) -> None:
    """Draw, of each hour's acked deliveries, the share that needed one attempt: of all, and of the worst subscription."""
    acked = [row for row in rows if row["acked"]]
    hours = _hours(acked)
    if not hours:
        _empty(axes, "nothing was delivered in this time")
        return
    every, worst = dict.fromkeys(hours, float("nan")), dict.fromkeys(hours, float("nan"))
    for hour in {row["hour_ms"] for row in acked}:
        mine = [row for row in acked if row["hour_ms"] == hour]
        every[hour] = 100 * sum(row["first_attempt"] for row in mine) / sum(row["acked"] for row in mine)
        worst[hour] = min(100 * row["first_attempt"] / row["acked"] for row in mine)
    for name, line, color in (("all", every, _COLOURS[2]), ("worst\nsubscription", worst, _COLOURS[1])):
        axes.plot(_moments(hours), list(line.values()), marker="o", markersize=3, label=name, color=color)
    _limit_to(axes, hours)
    axes.set_ylim(0, 103)
    axes.set_ylabel("first try, %")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.tick_params(axis="x", rotation=20)


def _spread(axes: Axes, rows: Rows) -> None:
    """One line of squares per subscription: how many of its deliveries took how long."""
    totals: dict[tuple[str, str], int] = {}
    for row in rows:
        totals[row["topic"], row["subscriber"]] = totals.get((row["topic"], row["subscriber"]), 0) + row["deliveries"]
    if not totals:
        _empty(axes, "nothing was delivered in this time")
        return
    first = sorted(totals, key=lambda each: -totals[each])[:_MOST_LINES][::-1]
    steps = len(LATENCY_STEPS)
    shares = [[float("nan")] * steps for _ in first]
    for row in rows:
        name = (row["topic"], row["subscriber"])
        if name in first:
            shares[first.index(name)][row["step"]] = 100 * row["deliveries"] / totals[name]
    mesh = axes.pcolormesh(range(steps + 1), range(len(first) + 1), shares, cmap=_HEAT, vmin=0, vmax=100)
    axes.figure.colorbar(mesh, ax=axes, label="% of its deliveries")
    axes.set_xticks(range(steps), [span(limit) for limit in LATENCY_STEPS], rotation=45, ha="right")
    axes.set_yticks([n + 0.5 for n in range(len(first))], [_label(f"{topic}: {name}") for topic, name in first])
    axes.grid(visible=False)


def heat_map(axes: Axes, rows: Rows) -> None:
    """Shards by time: a dark line is a shard with more messages than others, a dark column a time with more."""
    if not rows:
        _empty(axes)
        return
    times = sorted({row["at_ms"] for row in rows})
    step = math.gcd(*(b - a for a, b in itertools.pairwise(times))) or _HOUR_MS
    columns = list(range(times[0], times[-1] + 1, step))
    cells = [[float("nan")] * len(columns) for _ in range(_SHARDS)]
    for row in rows:
        cells[row["shard"]][(row["at_ms"] - times[0]) // step] = row["messages"]
    edges = mpl.dates.date2num(_moments([*columns, columns[-1] + step]))
    mesh = axes.pcolormesh(edges, range(_SHARDS + 1), cells, cmap=_HEAT, vmin=0)
    axes.figure.colorbar(mesh, ax=axes, label="messages")
    axes.xaxis_date()
    axes.set_ylabel("shard")
    axes.tick_params(axis="x", rotation=20)
    axes.grid(visible=False)


def _failures(axes: Axes, rows: Rows) -> None:
    if not rows:
        _empty(axes, "no attempt failed in this time")
        return
    first = rows[:_MOST_LINES][::-1]
    places = range(len(first))  # by number: bars with equal labels would lie upon each other
    axes.barh(places, [row["attempts"] for row in first], color=_COLOURS[3])
    axes.set_yticks(places, [_label(f"{row['subscriber']}: {row['reason'][:40]}") for row in first])
    axes.set_xlabel("failed attempts")
