"""The tree of errors in docs/sdk.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from tmc_client import errors

PAGE = Path(__file__).parents[3] / "docs/sdk.md"


def test_the_page_shows_every_error_under_its_base() -> None:
    assert errors.__doc__ is not None
    (tree,) = re.findall(r"^```text\n(TmcError .*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [f"    {line}" for line in tree.splitlines()] == errors.__doc__.splitlines()[2 : 2 + tree.count("\n")]
    shown = {name: len(indent) // 4 for indent, name in re.findall(r"^([|` -]*)(\w+)", tree, re.MULTILINE)}
    for name, depth in shown.items():
        assert len(getattr(errors, name).__mro__) - len(errors.TmcError.__mro__) == depth
