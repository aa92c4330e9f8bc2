"""The table of hazards, docs/decisions/0052, names tests and mutants that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.mutants.run import mutants

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/decisions/0052-hazards-of-earlier-systems.md").read_text()
ROW = re.compile(r"^\| ([HW]\d+) \|[^|]+\|[^|]+\| `([\w.]+\.py)::([\w:]+)` \| ([\w-]+) \|$", re.MULTILINE)


def test_every_hazard_has_a_guard_a_test_and_a_mutant() -> None:
    assert [row[0] for row in ROW.findall(PAGE)] == [*(f"H{number}" for number in range(1, 26)), "W7", "W9"]


def test_the_tests_and_mutants_of_hazards_exist() -> None:
    known = {each.name for each in mutants()}
    for hazard, file, test, mutant in ROW.findall(PAGE):
        source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob(file))
        for name in test.split("::"):
            assert re.search(rf"(def|class) {name}\b", source), (hazard, name)
        assert mutant in known, (hazard, mutant)
