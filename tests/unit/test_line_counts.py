"""What it costs in lines to have exactly-once effects: statements of examples/lines, imports and connect included."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tmc_storm.services.ports import free_port

ROOT = Path(__file__).parents[2]
LINES = ROOT / "examples" / "lines"


def _statements(name: str) -> int:
    tree = ast.parse((LINES / f"{name}.py").read_text())
    docstring = 1
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - docstring


PRODUCER = _statements("producer_with") - _statements("producer_without")
CHECK = _statements("producer_with_checks") - _statements("producer_with")
CONSUMER = _statements("consumer_with") - _statements("consumer_without")


def test_few_lines_more() -> None:
    assert (PRODUCER <= 4, CHECK <= 1, CONSUMER <= 4) == (True, True, True)


def test_the_page_has_these_counts() -> None:
    row = f"| more statements with us | {PRODUCER} | {CHECK} | {CONSUMER} |"
    assert row in (ROOT / "docs" / "databases.md").read_text()


@pytest.mark.parametrize("name", sorted(path.stem for path in LINES.glob("*_with*.py")))
def test_each_of_them_runs(name: str, tmp_path: Path) -> None:
    """As far as it runs without a center."""
    code = (LINES / f"{name}.py").read_text().replace("127.0.0.1:50061", f"127.0.0.1:{free_port()}")
    (tmp_path / f"{name}.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True, cwd=tmp_path, env=environment, timeout=60)
