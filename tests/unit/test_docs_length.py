"""The pages stay short enough to be read: their words in all, and the words of a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"mutants.md", "mistakes.md", "faults.md"}
"""Pages that are written by a program."""
COMPARED = {"configuration.md", "errors.md", "logs.md", "operators.md", "telemetry.md"}
"""Pages whose tables other tests compare with the code, row by row: they are as long as what they list."""
WORDS_IN_ALL = 45_000
WORDS_OF_A_SENTENCE = 40


def prose(page: Path) -> str:
    """Return the text of a page without programs, addresses of links, and tables that are compared with the code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    if page.name in COMPARED:
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return text


def words(text: str) -> int:
    return sum(1 for word in text.split() if re.search(r"\w", word))


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs, list items and cells of tables; a semicolon or colon also ends one."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=\|)|(?<=\|)(?= )", text)
    return [each for block in blocks for each in re.split(r"(?<=[.!?:;])\)?\s+", " ".join(block.split()))]


def test_the_pages_have_few_words() -> None:
    by_page = {page.name: words(prose(page)) for page in PAGES if page.name not in GENERATED}
    assert sum(by_page.values()) <= WORDS_IN_ALL, sorted(by_page.items(), key=lambda each: each[1])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_no_sentence_is_too_long_to_follow(page: Path) -> None:
    assert [each for each in sentences(prose(page)) if words(each) > WORDS_OF_A_SENTENCE] == []
