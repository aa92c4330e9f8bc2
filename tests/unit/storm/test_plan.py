"""Plans: repeated by their seed, within their bounds, and made smaller."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

from tmc_storm.plan import Ending, Fault, Strike, literal_plan, random_plan, smaller, survey_plan


def _nothing(_: random.Random) -> Ending:
    return lambda: None


FAULTS = [
    Fault(kind=f"kind {number}", part=f"part {number % 7}", begin=_nothing, longest_s=3.0 * (number % 2))
    for number in range(30)
]


def test_a_seed_repeats_its_strikes() -> None:
    plans = [random_plan(FAULTS, seed=seed, seconds=600, per_minute=50) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_every_kind_strikes_at_about_the_rate() -> None:
    strikes = random_plan(FAULTS, seed=3, seconds=600, per_minute=50)
    assert {strike.kind for strike in strikes} == {fault.kind for fault in FAULTS}
    assert 400 <= len(strikes) <= 600
    assert [strike.number for strike in strikes] == list(range(len(strikes)))


def test_few_things_are_broken_at_once_and_no_part_twice() -> None:
    strikes = random_plan(FAULTS, seed=4, seconds=600, per_minute=120)
    for strike in strikes:
        meanwhile = [
            other for other in strikes if other.at_s <= strike.at_s < other.at_s + other.lasts_s and other.lasts_s
        ]
        assert len(meanwhile) <= 4  # three, and this one if it is over at once
        assert max(Counter(other.part for other in meanwhile).values(), default=0) <= 1
        assert strike.at_s + strike.lasts_s <= 600.01


def test_the_literal_form_kills_every_count_of_nodes() -> None:
    nodes = [Fault(kind="killed", part=f"node {number}", begin=_nothing) for number in range(10)]
    strikes = literal_plan(nodes, seed=1, seconds=1800, interval_s=180, away_s=5)
    assert sorted(Counter(strike.at_s for strike in strikes).values()) == list(range(1, 11))


def test_a_survey_strikes_each_kind_once_and_alone() -> None:
    strikes = survey_plan(FAULTS, seed=1, calm_s=5)
    assert sorted(strike.kind for strike in strikes) == sorted({fault.kind for fault in FAULTS})
    for before, after in itertools.pairwise(strikes):
        assert after.at_s >= before.at_s + before.lasts_s + 5


def _fails(*culprits: int) -> tuple[list[int], Callable[[Sequence[Strike]], bool]]:
    runs: list[int] = []

    def fails(strikes: Sequence[Strike]) -> bool:
        runs.append(len(strikes))
        return {strike.number for strike in strikes} >= set(culprits)

    return runs, fails


def test_what_is_left_of_a_failing_run_is_what_makes_it_fail() -> None:
    strikes = random_plan(FAULTS, seed=5, seconds=60, per_minute=60)
    assert smaller(strikes, lambda _: True) == []
    for culprits in ((7,), (3, 40), (0, 20, 21)):
        runs, fails = _fails(*culprits)
        kept = smaller(strikes, fails)
        assert [strike.number for strike in kept] == list(culprits)
        assert len(runs) < 100
