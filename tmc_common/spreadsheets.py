"""Texts in CSV files that a spreadsheet would evaluate as formulas."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a formula; the last four are full-width, which some spreadsheets take too."""


def cell_of(text: str) -> str:
    """The text for a cell: behind an apostrophe if it would be a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
