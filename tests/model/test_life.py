"""Every state that one message can reach is visited: no invariant is broken, and what is owed can always still happen.

Without any one guard there is a counter-example; the shortest is printed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.model.life import GUARDS, Life, Transaction, broken, moves


@dataclass(frozen=True, kw_only=True)
class Explored:
    """came_from: for each state that was reached, the one before it and what happened; the first has none.

    breaks: the first state found that breaks an invariant, if any; nothing is looked for behind such states.
    """

    came_from: Mapping[Life, tuple[Life, str] | None]
    breaks: Life | None

    def story(self, life: Life) -> list[str]:
        """What happened on a shortest way to a state."""
        found: list[str] = []
        before = self.came_from[life]
        while before is not None:
            found.append(before[1])
            before = self.came_from[before[0]]
        return found[::-1]


def explored(without: str = "") -> Explored:
    """Breadth first, so that the first broken state has a shortest story."""
    start = Life()
    came_from: dict[Life, tuple[Life, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        life = waiting.popleft()
        for what, after in moves(life, without):
            if after not in came_from:
                came_from[after] = (life, what)
                if broken(after):
                    return Explored(came_from=came_from, breaks=after)
                waiting.append(after)
    return Explored(came_from=came_from, breaks=None)


@pytest.fixture(scope="module")
def everything() -> Explored:
    return explored()


def test_no_state_breaks_an_invariant(everything: Explored, note: Callable[[str], None]) -> None:
    assert everything.breaks is None, everything.story(everything.breaks)
    assert len(everything.came_from) > 10_000
    note(f"{len(everything.came_from)} states of one message were visited")


def test_what_is_owed_can_still_happen_in_every_state(everything: Explored) -> None:
    """A transaction that committed can still get its effect, unless an operator decided otherwise."""
    before: dict[Life, list[Life]] = {}
    for life in everything.came_from:
        for _, after in moves(life):
            before.setdefault(after, []).append(life)
    done = [life for life in everything.came_from if life.effects]
    reaches = set(done)
    waiting = deque(done)
    while waiting:
        for life in before.get(waiting.popleft(), ()):
            if life not in reaches:
                reaches.add(life)
                waiting.append(life)
    stuck = [
        life
        for life in everything.came_from
        if life.transaction is Transaction.COMMITTED and not life.by_operator and life not in reaches
    ]
    assert stuck == [], everything.story(stuck[0])


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_there_is_a_counter_example(guard: str) -> None:
    found = explored(without=guard)
    assert found.breaks is not None, f"without this nothing happens: {GUARDS[guard]}"
    print(f"without '{guard}': {broken(found.breaks)}", *found.story(found.breaks), sep="\n  ")
