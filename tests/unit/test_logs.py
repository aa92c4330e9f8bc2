"""The names of log events: documented, with their levels, and in every JSON line."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.unit.common.test_printable import logged
from tmc_common.eventlog import EventLog

ROOT = Path(__file__).parents[2]
PACKAGES = ("tmc_common", "tmc_server")
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def _written() -> dict[str, set[str]]:
    """Levels by event name, of all calls of an EventLog."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Name("partial"), args=[ast.Attribute(ast.Name("log"), level), name]):
                        pass
                    case ast.Call(func=ast.Attribute(ast.Name("log"), level), args=[name, *_]):
                        pass
                    case _:
                        continue
                assert level in LEVELS, f"{path}: log.{level}"
                assert isinstance(name, ast.Constant), f"{path}, line {node.lineno}: the event's name is no literal"
                found[name.value].add("error" if level == "exception" else level)
    return found


def test_every_event_is_documented_with_its_level() -> None:
    page = (ROOT / "docs" / "logs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| ", page.split("<!-- events")[1], re.M)
    assert {name: set(levels.split(", ")) for name, levels in rows} == _written()
    assert [name for name, _ in rows] == sorted(name for name, _ in rows)


def test_nothing_of_the_center_logs_without_a_name() -> None:
    named = ROOT / "tmc_common" / "eventlog.py"
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")} - {named}
    assert not [path for path in files if re.search(r"^log = logging\.", path.read_text(), re.M)]


def test_a_json_line_has_the_name_and_a_line_of_text_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def say() -> None:
        EventLog("tmc.test").warning("broker_lost", "the broker is away: %r", OSError("gone"))

    line = json.loads(logged(monkeypatch, "json", say))
    assert (line["event_name"], line["event"]) == ("broker_lost", "the broker is away: OSError('gone')")
    assert "broker_lost" not in logged(monkeypatch, "text", say)


def test_records_of_other_libraries_need_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.loads(logged(monkeypatch, "json", lambda: logging.getLogger("alembic").warning("hello")))
    assert "event_name" not in line
