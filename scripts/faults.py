"""Writes docs/faults.md: what is expected of each kind of fault, and what a survey measured.

usage: faults.py [--check]. The figures come from docs/reports/survey-*.json, each the report.json of a `tmc storm --survey`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
EXPECTED = ROOT / "scripts" / "faults.toml"
REPORTS = ROOT / "docs" / "reports"
HEAD = """\
# Faults

What happens when something breaks, for each kind of fault that [`tmc storm`](storm.md) makes. `scripts/faults.py` writes
this page from `scripts/faults.toml` and the reports of surveys, in which each kind strikes once, alone, at three servers,
two databases, RabbitMQ and Consul. *Stalled* is how long no order was taken, or no service had any effect, around the
time of the fault; looked at twice a second.

"""


def row_of(kind: str, expected: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return what is expected of a kind, or of all kinds of its part. Raises KeyError."""
    return expected.get(kind) or expected[kind.partition(":")[0]]


def page() -> str:
    """Return the page."""
    expected = tomllib.loads(EXPECTED.read_text())
    surveys: dict[str, dict[str, Any]] = {
        path.stem.removeprefix("survey-"): {line["kind"]: line for line in json.loads(path.read_text())["kinds"]}
        for path in sorted(REPORTS.glob("survey-*.json"))
    }
    columns = "".join(f" {name}: lasted, orders stalled, effects stalled (s) |" for name in surveys)
    lines = [f"| fault | expected | tests beside the storm |{columns}", "| --- " * (3 + len(surveys)) + "|"]
    said: set[str] = set()
    kinds = {kind for survey in surveys.values() for kind in survey}.union(kind for kind in expected if ":" in kind)
    for kind in sorted(kinds):
        row = row_of(kind, expected)
        sentence = row["expected"] if row["expected"] not in said else "the same"
        said.add(row["expected"])
        tests = ", ".join(f"`{name}`" for name in row.get("test", "").split(", ") if name)
        figures = "".join(f" {_figures(survey.get(kind))} |" for survey in surveys.values())
        lines.append(f"| {kind} | {sentence} | {tests} |{figures}")
    return HEAD + "\n".join(lines) + "\n"


def _figures(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    return f"{line['longest_s']}, {line['orders_stalled_s']}, {line['effects_stalled_s']}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == page() else "docs/faults.md is old: run scripts/faults.py")
    PAGE.write_text(page())
