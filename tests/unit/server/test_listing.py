"""Pages of what is in memory."""

from __future__ import annotations

import pytest

from tmc_server.errors import InvalidField
from tmc_server.requests.listing import in_order, listed


def _pages(rows: list[int], size: int) -> list[list[int]]:
    pages, token = [], ""
    while True:
        page = listed(rows, in_order, size, token)
        pages.append(list(page.rows))
        if not page.next_token:
            return pages
        token = page.next_token


@pytest.mark.parametrize(
    ("count", "size", "pages"),
    [(0, 5, [0]), (4, 5, [4]), (5, 5, [5]), (6, 5, [5, 1]), (10, 5, [5, 5]), (11, 5, [5, 5, 1])],
)
def test_every_row_is_on_one_page_and_the_last_page_has_no_token(count: int, size: int, pages: list[int]) -> None:
    rows = list(range(count, 0, -1))
    found = _pages(rows, size)
    assert [len(page) for page in found] == pages
    assert [row for page in found for row in page] == sorted(rows)


def test_numbers_are_in_the_order_of_numbers() -> None:
    assert _pages([100, 9, 10, 1], 2) == [[1, 9], [10, 100]]


def test_rows_that_come_and_go_between_two_pages_move_no_others() -> None:
    first = listed([1, 2, 3, 4], in_order, 2, "")
    assert list(listed([0, 1, 3, 4], in_order, 2, first.next_token).rows) == [3, 4]


def test_no_size_is_a_hundred() -> None:
    assert len(listed(range(150), in_order, 0, "").rows) == 100


@pytest.mark.parametrize("token", ["x", ">", "5", " >5"])
def test_a_token_of_somebody_else_is_refused(token: str) -> None:
    with pytest.raises(InvalidField, match="page_token"):
        listed([1, 2], in_order, 1, token)


@pytest.mark.parametrize("size", [-1, 1001])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(InvalidField, match="page_size"):
        listed([1, 2], in_order, size, "")
