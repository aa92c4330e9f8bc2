"""The tables of docs/mistakes.md. Each is the data of one test module, which compares it with the page and can write it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
_END = "<!-- end of mistakes -->"


@dataclass(frozen=True, kw_only=True)
class Table:
    """source: the module, from the root of the repository.  rows: one cell per column."""

    source: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]

    def page(self, text: str) -> str:
        """The page with this table as it is now; the other tables as they are."""
        begin = f"<!-- mistakes: written by {self.source} -->"
        before, rest = text.split(begin)
        _, _, after = rest.partition(_END)
        lines = [begin, _line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows), _END]
        return before + "\n".join(lines) + after

    def write(self) -> None:
        PAGE.write_text(self.page(PAGE.read_text()))

    def is_on_the_page(self) -> bool:
        return self.page(PAGE.read_text()) == PAGE.read_text()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
