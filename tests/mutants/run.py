"""Takes each guard out and demands a red test: a test that stays green without the guard proves nothing.

A mutant is a patch with two lines in front: `guard:` what is taken out, `test:` the one test that must fail for it. That
test has to fail by itself: an error in a fixture, or a test that does not run, is no proof. The table of results stands in
docs/reliability.md; `--check` only compares it with the patches, and sees that each still applies and has its test,
`--table` writes it. Names, or their beginnings, select some of them. `--no-control` leaves out the run without any
mutant, for a commit whose whole suite was just seen green.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants: written by scripts/mutants -->", "<!-- end of mutants -->"
PIPELINE_PYTHON = os.environ.get("TMC_PIPELINE_PYTHON", str(ROOT / ".venv-pipeline" / "bin" / "python"))
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*", "reports")


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    path: Path
    guard: str
    test: str

    @property
    def row(self) -> str:
        return f"| {self.path.stem} | {self.guard} | `{self.test.rpartition('::')[2]}` |"

    @property
    def has_its_test(self) -> bool:
        """By its names; whether it has that parameter turns out when it is run."""
        path, *names = self.test.partition("[")[0].split("::")
        text = (ROOT / path).read_text()
        return all(f"def {name}(" in text or f"class {name}" in text for name in names)


def mutants() -> list[Mutant]:
    found = []
    for path in sorted(Path(__file__).parent.glob("*.patch")):
        guard, test = path.read_text().splitlines()[:2]
        found.append(Mutant(path, guard.removeprefix("guard: "), test.removeprefix("test: ")))
    return found


def failed(tests: Iterable[str], patch: Path | None = None) -> list[str]:
    """Run the tests in a copy with the patch applied. Returns: the node ids of those that failed.

    Raises RuntimeError: the patch no longer applies, or a test did not run.
    """
    with tempfile.TemporaryDirectory(prefix="tmc-mutant-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        if patch is not None:
            subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={copy}", str(patch)], check=True, cwd=copy)
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


def table(found: list[Mutant]) -> str:
    rows = "\n".join(mutant.row for mutant in found)
    return f"{BEGIN}\n| mutant | the guard that is taken out | turns red |\n| --- | --- | --- |\n{rows}\n{END}"


def with_table(found: list[Mutant]) -> str:
    """The page as it is now, with this table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + table(found) + rest.split(END)[1]


def _outcome(mutant: Mutant) -> str:
    """red: the test failed, and only because of what it asserts."""
    try:
        nodes = failed([mutant.test], mutant.path)
    except (RuntimeError, subprocess.CalledProcessError) as exc:
        print(exc, file=sys.stderr)
        return "BROKEN"
    return "red" if nodes == [mutant.test] else "GREEN" if not nodes else "OTHER"


def main() -> None:
    found = mutants()
    if "--check" in sys.argv:
        for mutant in found:
            subprocess.run(["git", "apply", "--check", str(mutant.path)], check=True, cwd=ROOT)
            if not mutant.has_its_test:
                sys.exit(f"{mutant.path.name}: there is no test {mutant.test}")
        if with_table(found) != PAGE.read_text():
            sys.exit("docs/reliability.md does not list the mutants as they are: run scripts/mutants")
        return
    if "--table" in sys.argv:
        PAGE.write_text(with_table(found))
        return
    wanted = [name for name in sys.argv[1:] if name != "--no-control"]
    tried = [mutant for mutant in found if not wanted or any(mutant.path.name.startswith(name) for name in wanted)]
    if "--no-control" not in sys.argv and (red := failed(sorted({mutant.test for mutant in tried}))):
        sys.exit("red without any mutant, mend them first: " + ", ".join(red))
    survived = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, outcome in zip(tried, pool.map(_outcome, tried), strict=True):
            print(f"{outcome:<6}{mutant.path.stem}: {mutant.guard}", flush=True)
            if outcome != "red":
                survived.append(mutant)
    PAGE.write_text(with_table(found))
    print(f"{len(tried) - len(survived)} of {len(tried)} mutants were caught")
    if survived:
        sys.exit(1)


if __name__ == "__main__":
    main()
