"""Takes each guard out and demands a red test: a test that stays green without the guard proves nothing.

A mutant is a table in one of the TOML files here: `guard`, what is taken out; `test`, the one test that must fail for it; and
the edit, which puts `new` in the place of `old` in `file`, or several of them as `edits`. The test has to fail by itself: an
error in a fixture, or a test that does not run, is no proof. docs/mutants.md lists them all; `--check` only compares the page
with the mutants, and sees that each can be made and has its test, `--table` writes it. Names, or their beginnings, select
some of them. `--no-control` leaves out the run without any mutant, for a commit whose whole suite was just seen green.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mutants.md"
INTRODUCTION = """\
# Mutants

`./scripts/mutants` removes each of these guards in turn and verifies that the test fails without it. It writes this page.

| mutant | the guard that is taken out | turns red |
| --- | --- | --- |
"""
PIPELINE_PYTHON = os.environ.get("TMC_PIPELINE_PYTHON", str(ROOT / ".venv-pipeline" / "bin" / "python"))
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*", "reports")


@dataclass(frozen=True)
class Edit:
    """A change of a file: `old`, which stands in it once, becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Raises RuntimeError: the file is not there, does not have it, or more than once."""
        path = root / self.file
        if not path.exists():
            raise RuntimeError(f"there is no {self.file}")
        text = path.read_text()
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.file} has this {text.count(self.old)} times: {self.old}")
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A guard that is taken out, and the test that notices."""

    name: str
    guard: str
    test: str
    edits: Sequence[Edit]

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.guard} | `{self.test.rpartition('::')[2]}` |"

    @property
    def has_its_test(self) -> bool:
        """By its names; whether it has that parameter turns out when it is run."""
        path, *names = self.test.partition("[")[0].split("::")
        text = (ROOT / path).read_text()
        return all(f"def {name}(" in text or f"class {name}" in text for name in names)


def mutants() -> list[Mutant]:
    """All of them, in the order of their numbers."""
    tables: dict[str, dict[str, Any]] = {}
    for path in Path(__file__).parent.glob("*.toml"):
        found = tomllib.loads(path.read_text())
        if twice := tables.keys() & found.keys():
            sys.exit(f"{path.name}: {', '.join(twice)} are in another file, too")
        tables |= found
    return [
        Mutant(
            name=name,
            guard=table["guard"],
            test=table["test"],
            edits=[Edit(each["file"], each["old"], each["new"]) for each in table.get("edits", [table])],
        )
        for name, table in sorted(tables.items(), key=lambda item: int(item[0].partition("-")[0]))
    ]


def failed(tests: Iterable[str], edits: Sequence[Edit] = ()) -> list[str]:
    """Run the tests in a copy with these edits. Returns: the node ids of those that failed.

    Raises RuntimeError: an edit cannot be made, or a test did not run.
    """
    with tempfile.TemporaryDirectory(prefix="tmc-mutant-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        for edit in edits:
            edit.apply(copy)
        of_spark = [test for test in tests if test.startswith("tests/pipeline/")]
        others = [test for test in tests if test not in of_spark]
        runs = [(PIPELINE_PYTHON, of_spark), (sys.executable, others)]
        return [node for python, which in runs if which for node in _failed(python, which, copy)]


def _failed(python: str, tests: list[str], copy: Path) -> list[str]:
    results = copy / "failed.txt"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-p", "tests.mutants.recorder", "-q", "--timeout", "150", *tests]
    # programs that a test starts are those of the copy, too
    here = os.environ | {"PYTHONPATH": str(copy), "TMC_MUTANT_RESULTS": str(results)}
    done = subprocess.run(command, cwd=copy, env=here, capture_output=True, text=True)
    found = results.read_text().splitlines() if results.exists() else []
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(found):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return found


def page(found: Sequence[Mutant]) -> str:
    return INTRODUCTION + "".join(f"{mutant.row}\n" for mutant in found)


def _outcome(mutant: Mutant) -> str:
    """red: the test failed, and only because of what it asserts."""
    try:
        nodes = failed([mutant.test], mutant.edits)
    except RuntimeError as exc:
        print(exc, file=sys.stderr)
        return "BROKEN"
    return "red" if nodes == [mutant.test] else "GREEN" if not nodes else "OTHER"


def _trouble(mutant: Mutant) -> str:
    """Why it cannot be tried; "": it can."""
    with tempfile.TemporaryDirectory(prefix="tmc-mutant-") as folder:
        for source in filter(Path.exists, {ROOT / edit.file for edit in mutant.edits}):
            copied = Path(folder) / source.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copied)
        try:
            for edit in mutant.edits:
                edit.apply(Path(folder))
        except RuntimeError as exc:
            return str(exc)
    return "" if mutant.has_its_test else f"there is no test {mutant.test}"


def main() -> None:
    found = mutants()
    if "--check" in sys.argv:
        if broken := [f"{mutant.name}: {trouble}" for mutant in found if (trouble := _trouble(mutant))]:
            sys.exit("\n".join(broken))
        if page(found) != PAGE.read_text():
            sys.exit("docs/mutants.md does not list the mutants as they are: run ./scripts/mutants --table")
        return
    if "--table" in sys.argv:
        PAGE.write_text(page(found))
        return
    wanted = [name for name in sys.argv[1:] if name != "--no-control"]
    tried = [mutant for mutant in found if not wanted or any(mutant.name.startswith(name) for name in wanted)]
    if "--no-control" not in sys.argv and (red := failed(sorted({mutant.test for mutant in tried}))):
        sys.exit("red without any mutant, mend them first: " + ", ".join(red))
    survived = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, outcome in zip(tried, pool.map(_outcome, tried), strict=True):
            print(f"{outcome:<6}{mutant.name}: {mutant.guard}", flush=True)
            if outcome != "red":
                survived.append(mutant)
    PAGE.write_text(page(found))
    print(f"{len(tried) - len(survived)} of {len(tried)} mutants were caught")
    if survived:
        sys.exit(1)


if __name__ == "__main__":
    main()
