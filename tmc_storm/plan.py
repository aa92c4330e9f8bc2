"""The plan of a storm says which fault strikes when. A seed repeats it, and it can be written down and played again in parts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Ending = Callable[[], object]

_MOST_AT_ONCE = 3
_NEW_KIND = 20  # how much likelier a kind is that did not strike yet


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that can break, at one place.

    kind: what a report counts, the same at all places.  part: faults of one part never overlap.
    begin: breaks it, by dice of its own, and returns what mends it.  longest_s: 0, it is over at once.
    heals_s: how long the part has to itself afterwards.  weight: how often its kind strikes, beside the others.
    """

    kind: str
    part: str
    begin: Callable[[random.Random], Ending]
    longest_s: float = 0.0
    heals_s: float = 1.0
    weight: float = 1.0


def once(strike: Callable[[random.Random], object]) -> Callable[[random.Random], Ending]:
    """Make a fault of something that is over at once."""

    def begin(dice: random.Random) -> Ending:
        strike(dice)
        return lambda: None

    return begin


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault at one time. at_s: from the beginning of the storm."""

    number: int
    at_s: float
    kind: str
    part: str
    lasts_s: float


def random_plan(faults: Sequence[Fault], *, seed: int, seconds: float, per_minute: float) -> list[Strike]:
    """Return strikes for this time at about this rate; every kind strikes, if there is time for all.

    No more than three things are broken at once, so that the others have work.
    """
    if not per_minute:
        return []
    dice = random.Random(seed)
    strikes: list[Strike] = []
    busy_until: defaultdict[str, float] = defaultdict(float)
    struck: set[str] = set()
    places = Counter(fault.kind for fault in faults)
    at_s = 0.5
    while at_s < seconds:
        broken = sum(strike.at_s + strike.lasts_s > at_s for strike in strikes[-100:])
        free = [
            fault
            for fault in faults
            if busy_until[fault.part] <= at_s and (not fault.longest_s or broken < _MOST_AT_ONCE)
        ]
        if free:
            weights = [fault.weight / places[fault.kind] * (1 if fault.kind in struck else _NEW_KIND) for fault in free]
            fault = dice.choices(free, weights)[0]
            lasts_s = round(dice.triangular(0.1, fault.longest_s, 0.3 * fault.longest_s), 2) if fault.longest_s else 0.0
            lasts_s = min(lasts_s, seconds - at_s)
            strikes.append(
                Strike(number=len(strikes), at_s=round(at_s, 2), kind=fault.kind, part=fault.part, lasts_s=lasts_s)
            )
            struck.add(fault.kind)
            busy_until[fault.part] = at_s + lasts_s + fault.heals_s
        at_s += dice.expovariate(per_minute / 60)
    return strikes


def literal_plan(
    nodes: Sequence[Fault], *, seed: int, seconds: float, interval_s: float, away_s: float
) -> list[Strike]:
    """Return the strikes of the founding documents: at every interval, 1 to all nodes, every count as often as the others."""
    dice = random.Random(seed)
    strikes: list[Strike] = []
    counts: list[int] = []
    at_s = interval_s / 2
    while at_s < seconds:
        if not counts:
            counts = dice.sample(range(1, len(nodes) + 1), len(nodes))
        for fault in dice.sample(nodes, counts.pop()):
            strikes.append(Strike(number=len(strikes), at_s=at_s, kind=fault.kind, part=fault.part, lasts_s=away_s))
        at_s += interval_s
    return strikes


def survey_plan(faults: Sequence[Fault], *, seed: int, calm_s: float) -> list[Strike]:
    """Return one strike of each kind, at its longest, with nothing else broken for so long before and after."""
    dice = random.Random(seed)
    kinds = sorted({fault.kind for fault in faults})
    strikes: list[Strike] = []
    at_s = calm_s
    for kind in dice.sample(kinds, len(kinds)):
        fault = dice.choice([fault for fault in faults if fault.kind == kind])
        strikes.append(
            Strike(number=len(strikes), at_s=round(at_s, 2), kind=kind, part=fault.part, lasts_s=fault.longest_s)
        )
        at_s += fault.longest_s + fault.heals_s + calm_s
    return strikes


def smaller(strikes: Sequence[Strike], fails: Callable[[Sequence[Strike]], bool]) -> list[Strike]:
    """Return fewer strikes with which it still fails: halves, then smaller pieces are left out (delta debugging)."""
    if fails([]):
        return []
    kept = list(strikes)
    pieces = 2
    while len(kept) >= 2:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(pieces * 2, len(kept))
    return kept
