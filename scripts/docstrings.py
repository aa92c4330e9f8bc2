"""Refuses docstrings of functions that begin with a fragment: the first sentence says what the function does or returns."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FRAGMENT = re.compile(
    r"(After|And|Are|Around|As|Asked|At|Before|Between|Beyond|By|Called|Compared|Did|Does|Few|For|From|Has|How|If|In|Is|Its|Judged|Like|Made|Must|Not|Of|On|Once|Only|Others|Over|Rolled"
    r"|Their|Those|Through|To|Under|Until|Up|Was|What|Whatever|When|Where|Whether|Which|Who|Whom|Whose|Why|With|Without)\b"
)


def fragments() -> Iterator[str]:
    for path in sorted(ROOT.glob("tmc_*/**/*.py")):
        if "protocol" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = FRAGMENT.match(ast.get_docstring(node) or "")
                if first is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: a sentence does not begin with {first[0]!r}"


found = list(fragments())
print(*found, sep="\n", end="\n" if found else "")
sys.exit(bool(found))
