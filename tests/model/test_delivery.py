"""Every state that one delivery can reach is visited: what counts is what a handler began or refused, and nothing else.

Without any one guard there is a counter-example; the shortest is printed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from tests.model.delivery import GUARDS, Delivery, broken, moves, start
from tmc_server.domain.consumption import ConsumptionState

Before = tuple[Delivery, str] | None


def explored(without: str = "") -> tuple[dict[Delivery, Before], Delivery | None]:
    """How each state was reached, breadth first, and the first broken one."""
    first = start()
    came_from: dict[Delivery, Before] = {first: None}
    waiting = deque([first])
    while waiting:
        life = waiting.popleft()
        for what, after in moves(life, without):
            if after not in came_from:
                came_from[after] = (life, what)
                if broken(after):
                    return came_from, after
                waiting.append(after)
    return came_from, None


def story(came_from: dict[Delivery, Before], life: Delivery) -> list[str]:
    found: list[str] = []
    while (before := came_from[life]) is not None:
        life, what = before
        found.append(what)
    return found[::-1]


def test_only_what_a_handler_began_or_refused_counts(note: Callable[[str], None]) -> None:
    came_from, breaks = explored()
    assert breaks is None, f"{broken(breaks)}: {story(came_from, breaks)}"
    assert len(came_from) > 1_000
    assert any(life.row.state is ConsumptionState.FAILED for life in came_from)
    note(f"{len(came_from)} states of one delivery were visited")


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_there_is_a_counter_example(guard: str) -> None:
    came_from, breaks = explored(without=guard)
    assert breaks is not None, f"without this nothing happens: {GUARDS[guard]}"
    print(f"without '{guard}': {broken(breaks)}", *story(came_from, breaks), sep="\n  ")
