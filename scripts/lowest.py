"""Print the lowest versions that both distributions allow, as constraints for pip: [--ranges] EXTRA[,EXTRA] of the center.

--ranges: what is allowed, instead of the lowest. What is a dependency of dependencies alone is left to pip.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[a-z0-9_,]+\])?>=([0-9][^,]*)")
_OWN = re.compile(r"(tmc-center|tmc-client)\[([a-z0-9_,]+)\]")
_ROOT = Path(__file__).parents[1]
_PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((_ROOT / folder / "pyproject.toml").read_text())["project"]
    for name, folder in {"tmc-center": ".", "tmc-client": "clients/python"}.items()
}


def requirements(extras: str) -> Iterator[str]:
    """Yield the requirements of the center and of these extras, also of the extras that they name."""
    yield from _PROJECTS["tmc-client"]["dependencies"]
    waiting = [("tmc-center", extra) for extra in extras.split(",")]
    seen: set[tuple[str, str]] = set()
    while waiting:
        project, extra = waiting.pop()
        if (project, extra) in seen:
            continue
        seen.add((project, extra))
        for requirement in _PROJECTS[project]["optional-dependencies"][extra]:
            if own := _OWN.fullmatch(requirement):
                waiting += [(own[1], each) for each in own[2].split(",")]
            else:
                yield requirement


def main() -> None:
    if sys.argv[1] == "--ranges":
        print("\n".join(sorted(set(requirements(sys.argv[2])))))
        return
    lowest: dict[str, tuple[tuple[int, ...], str]] = {}
    for requirement in requirements(sys.argv[1]):
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
