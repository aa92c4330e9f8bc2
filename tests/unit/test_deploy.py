"""What is in deploy/: alert rules, their tests, the dashboard. promtool checks more where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tmc_cli.admin import app

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
RULE_TESTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yml").read_text())["tests"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/tmc.json").read_text())
PAGE = (ROOT / "docs/monitoring.md").read_text()
METRICS = (ROOT / "docs/telemetry.md").read_text() + (ROOT / "docs/pipeline.md").read_text()


def _series() -> dict[str, set[str]]:
    """The labels of each series by its name, from the pages that are compared with the metrics themselves."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(tmc_\w+)` \| (\w+) \| ([\w, ]*) \|", METRICS, re.MULTILINE):
        known = {label.strip() for label in labels.split(",")} - {""}
        if kind == "histogram":
            found |= {f"{name}_bucket": known | {"le"}, f"{name}_count": known, f"{name}_sum": known}
        else:
            found[name] = known
    return found


SERIES = _series()


def _expressions() -> Iterator[tuple[str, str]]:
    yield from ((name, rule["expr"]) for name, rule in RULES.items())
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


@pytest.mark.parametrize(("where", "expression"), list(_expressions()))
def test_an_expression_uses_series_and_labels_that_there_are(where: str, expression: str) -> None:
    names = re.findall(r"tmc_\w+", expression)
    assert names
    assert set(names) <= set(SERIES)
    grouped = {label.strip() for part in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in part.split(",")}
    selected = set(re.findall(r"(\w+)=~?!?\"", expression))
    assert grouped | selected <= {"instance", "job"} | set.union(*(SERIES[name] for name in names))


def test_every_alert_has_a_row_that_says_what_to_do() -> None:
    rows = re.findall(r"^\| `(Tmc\w+)` ", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(RULES)


def test_every_alert_has_a_test_in_which_it_comes_and_one_in_which_it_does_not() -> None:
    said: dict[str, set[bool]] = {}
    for test in RULE_TESTS:
        for each in test["alert_rule_test"]:
            said.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    assert said == {name: {True, False} for name in RULES}


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_how_bad_it_is(name: str) -> None:
    rule: dict[str, Any] = RULES[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]


def test_the_commands_of_the_page_are_commands() -> None:
    known = {command.name for command in app.registered_commands}
    assert set(re.findall(r"`tmc admin ([a-z-]+)", PAGE)) <= known


UNITS = {path.name: path.read_text() for path in sorted((ROOT / "deploy/systemd").iterdir())}


def test_each_timer_has_a_service_that_the_page_names() -> None:
    timers = {name.removesuffix(".timer") for name in UNITS if name.endswith(".timer")}
    services = {name.removesuffix(".service") for name in UNITS if name.endswith(".service")}
    assert services == timers | {"tmc-server", "tmc-console"}
    page = (ROOT / "docs/pipeline.md").read_text()
    assert timers == set(re.findall(r"^\| `(tmc-pipeline-\w+)` \|", page, re.MULTILINE))
    assert all(f"{timer}.timer" in page for timer in timers)


def test_units_are_understood_by_systemd(tmp_path: Path) -> None:
    """Where systemd is not installed, their keys are looked at."""
    for name, text in UNITS.items():
        (tmp_path / name).write_text(re.sub(r"/opt/tmc/\w+/bin/tmc", "/bin/true", text).replace("User=tmc\n", ""))
        assert set(re.findall(r"^(Exec\w+)=", text, re.MULTILINE)) <= {"ExecStart", "ExecStopPost"}
        # What runs after ExecStart has 90 seconds otherwise.
        assert "ExecStopPost" not in text or "\nTimeoutStopSec=6h\n" in text
        assert set(re.findall(r"^\[(\w+)\]", text, re.MULTILINE)) <= {"Unit", "Service", "Timer", "Install"}
    tool = shutil.which("systemd-analyze")
    if tool is not None:
        files = [str(tmp_path / name) for name in UNITS]
        checked = subprocess.run([tool, "verify", "--man=no", *files], capture_output=True, text=True, check=False)
        assert (checked.returncode, [line for line in checked.stderr.splitlines() if "tmc-" in line]) == (0, [])


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
