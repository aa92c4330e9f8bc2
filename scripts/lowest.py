"""Print the lowest versions that pyproject.toml allows, as constraints for pip: EXTRA[,EXTRA].

What is a dependency of dependencies alone is left to pip.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[a-z0-9_,]+\])?>=([0-9][^,]*)")
_OWN = re.compile(r"tmc-center\[([a-z0-9_,]+)\]")


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield the requirements of the package and of these extras, also of the extras that they name."""
    optional = project["optional-dependencies"]
    yield from project["dependencies"]
    seen: set[str] = set()
    while extras:
        extra = extras.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in optional[extra]:
            if own := _OWN.fullmatch(requirement):
                extras += own[1].split(",")
            else:
                yield requirement


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lowest: dict[str, tuple[tuple[int, ...], str]] = {}
    for requirement in requirements(project, sys.argv[1].split(",")):
        if not (found := _REQUIREMENT.match(requirement)):
            raise SystemExit(f"{requirement} has no lowest version: write NAME>=VERSION")
        name, version = found[1].lower().replace("_", "-"), found[3].strip()
        number = tuple(int(part) for part in re.findall(r"\d+", version))
        lowest[name] = max(
            lowest.get(name, ((), "")), (number, version)
        )  # of several floors the highest is the one that is met
    for name, (_, version) in sorted(lowest.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
