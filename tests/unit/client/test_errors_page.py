"""The tree of errors in docs/sdk.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from tmc_client import errors

PAGE = Path(__file__).parents[3] / "docs/sdk.md"


_FOR_OTHERS = {"Reject", "Later", "MissingExtra", "Gone", "OutOfOrder"}
"""Exceptions that handlers raise, and errors that the SDK and the inbox deal with themselves."""


def test_the_page_shows_the_errors_under_their_bases() -> None:
    assert errors.__doc__ is not None
    (tree,) = re.findall(r"^```text\n(TmcError .*?)```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [f"    {line}" for line in tree.splitlines()] == errors.__doc__.splitlines()[2 : 2 + tree.count("\n")]
    made = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, errors.TmcError)}
    shown = {name: len(indent) // 4 for indent, name in re.findall(r"^([|` -]*)(\w+)", tree, re.MULTILINE)}
    for name, depth in shown.items():
        assert len(getattr(errors, name).__mro__) - len(errors.TmcError.__mro__) == depth
    assert set(shown) == made - _FOR_OTHERS
