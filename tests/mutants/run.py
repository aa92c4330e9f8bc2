"""Takes each guard out and demands a red test: a test that stays green without the guard proves nothing.

A mutant is a patch with two lines in front: `guard:` what is taken out, `tests:` which tests must turn red. The table of
results stands in docs/reliability.md; `--check` only compares it with the patches, and sees that each still applies, `--table`
writes it. Names, or their beginnings, select some of them. `--no-control` leaves out the run without any mutant, for a
commit whose whole suite was just seen green.
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
COPIED = ("tmc_client", "tmc_pipeline", "tmc_server", "tests", "examples", "benchmarks", "pyproject.toml", "docs")


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    path: Path
    guard: str
    tests: tuple[str, ...]

    @property
    def row(self) -> str:
        names = ", ".join(f"`{test.rpartition('::')[2]}`" for test in self.tests)
        return f"| {self.path.stem} | {self.guard} | {names} |"


def mutants() -> list[Mutant]:
    found = []
    for path in sorted(Path(__file__).parent.glob("*.patch")):
        guard, tests = path.read_text().splitlines()[:2]
        found.append(Mutant(path, guard.removeprefix("guard: "), tuple(tests.removeprefix("tests: ").split())))
    return found


def turns_red(tests: Iterable[str], patch: Path | None = None) -> bool:
    """Run the tests in a copy with the patch applied. Raises when it no longer applies or the tests do not run."""
    with tempfile.TemporaryDirectory(prefix="tmc-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        if patch is not None:
            subprocess.run(
                ["git", "apply", "--unsafe-paths", f"--directory={folder}", str(patch)], check=True, cwd=folder
            )
        of_spark = [test for test in tests if test.startswith("tests/pipeline/")]
        others = [test for test in tests if test not in of_spark]
        runs = [(PIPELINE_PYTHON, of_spark), (sys.executable, others)]
        return any(_fails(python, which, folder, shown=patch is None) for python, which in runs if which)


def _fails(python: str, tests: list[str], folder: str, shown: bool) -> bool:
    """shown: what failed is printed."""
    command = [python, "-m", "pytest", "-x", "-q", "--timeout", "150", *tests]
    here = os.environ | {"PYTHONPATH": folder}  # programs that a test starts are those of the copy, too
    done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # neither green nor red: the tests did not run
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    if done.returncode == 1 and shown:
        print(done.stdout[-4000:], file=sys.stderr)
    return done.returncode == 1


def table(found: list[Mutant]) -> str:
    rows = "\n".join(mutant.row for mutant in found)
    return f"{BEGIN}\n| mutant | the guard that is taken out | turns red |\n| --- | --- | --- |\n{rows}\n{END}"


def with_table(found: list[Mutant]) -> str:
    """The page as it is now, with this table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + table(found) + rest.split(END)[1]


def main() -> None:
    found = mutants()
    if "--check" in sys.argv:
        for mutant in found:
            subprocess.run(["git", "apply", "--check", str(mutant.path)], check=True, cwd=ROOT)
        if with_table(found) != PAGE.read_text():
            sys.exit("docs/reliability.md does not list the mutants as they are: run scripts/mutants")
        return
    if "--table" in sys.argv:
        PAGE.write_text(with_table(found))
        return
    wanted = [name for name in sys.argv[1:] if name != "--no-control"]
    tried = [mutant for mutant in found if not wanted or any(mutant.path.name.startswith(name) for name in wanted)]
    if "--no-control" not in sys.argv and turns_red(sorted({test for mutant in tried for test in mutant.tests})):
        sys.exit("the tests are red without any mutant: mend them first")
    survived = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reds = pool.map(lambda mutant: turns_red(mutant.tests, mutant.path), tried)
        for mutant, red in zip(tried, reds, strict=True):
            print(f"{'red  ' if red else 'GREEN'} {mutant.path.stem}: {mutant.guard}", flush=True)
            if not red:
                survived.append(mutant)
    PAGE.write_text(with_table(found))
    print(f"{len(tried) - len(survived)} of {len(tried)} mutants were caught")
    if survived:
        sys.exit(1)


if __name__ == "__main__":
    main()
