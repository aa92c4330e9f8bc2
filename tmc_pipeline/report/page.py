"""The report as one HTML file: tables and pictures inside it, nothing loaded from anywhere."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import matplotlib as mpl
import matplotlib.dates

mpl.use("svg")  # no screen
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_HOUR_MS = 3_600_000
_MOST_LINES = 8  # in one picture; the rest is added up or left to the tables
_COLOURS = ("#2f6fab", "#d9822b", "#3f8f5b", "#b8433f", "#7a5aa6", "#8c6d46", "#c2679f", "#6b7280")
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e5e7eb",
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


def page(title: str, facts: Mapping[str, str], tables: Mapping[str, Rows]) -> str:
    """facts: of the run, by name.  tables: as made by figures.py, by name."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tmc_pipeline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"at": at, "span": span, "grouped": lambda number: "" if number is None else f"{number:,}"}
    environment.globals |= {"share": share}
    return environment.get_template("report.html").render(
        title=title, facts=facts, pictures=_pictures(tables), **tables
    )


def _pictures(tables: Mapping[str, Rows]) -> Mapping[str, str]:
    return {
        "volume": _svg(lambda axes: _volume(axes, tables["production_by_hour"])),
        "latency": _svg(lambda axes: _latency(axes, tables["consumption_by_hour"])),
        "skew": _svg(lambda axes: _skew(axes, tables["skew"])),
        "failures": _svg(lambda axes: _failures(axes, tables["failures"])),
    }


def _svg(draw: Any) -> str:
    """Draw one chart as SVG. Settings are read when a figure is made and when it is saved: both use our style."""
    with mpl.rc_context(_STYLE):
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
    """Every hour from the first to the last, also those in which nothing happened."""
    seen = [row["hour_ms"] for row in rows]
    return list(range(min(seen), max(seen) + 1, _HOUR_MS)) if seen else []


def _moments(hours: Iterable[int]) -> list[datetime]:
    return [datetime.fromtimestamp(hour / 1000, UTC) for hour in hours]


def _limit_to(axes: Axes, hours: Sequence[int]) -> None:
    """From the first hour to the end of the last one: around a single point matplotlib would show four years."""
    first, end = _moments([hours[0] - _HOUR_MS // 20, hours[-1] + _HOUR_MS])
    axes.set_xlim(mpl.dates.date2num(first), mpl.dates.date2num(end))


def _empty(axes: Axes, text: str = "nothing in this time") -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#6b7280", transform=axes.transAxes)


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
    axes.set_ylabel("decision to ack, ms\n(worst subscription)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.tick_params(axis="x", rotation=20)


def _skew(axes: Axes, rows: Rows) -> None:
    if not rows:
        _empty(axes)
        return
    axes.bar([row["shard"] for row in rows], [row["messages"] for row in rows], color=_COLOURS[0])
    axes.set_xlim(-0.6, 31.6)
    axes.set_xlabel("shard")
    axes.set_ylabel("messages")


def _failures(axes: Axes, rows: Rows) -> None:
    if not rows:
        _empty(axes, "no attempt failed in this time")
        return
    first = rows[:_MOST_LINES][::-1]
    places = range(len(first))  # by number: bars with equal labels would lie upon each other
    axes.barh(places, [row["attempts"] for row in first], color=_COLOURS[3])
    axes.set_yticks(places, [_label(f"{row['subscriber']}: {row['reason'][:40]}") for row in first])
    axes.set_xlabel("failed attempts")
