"""The lines that `bench capacity` fits: those that the figures were made of, and none that falls."""

from __future__ import annotations

import pytest

from benchmarks.capacity_fit import FITTED, KEPT_BACK, fitted


def _costs(coefficients: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(coefficients, shape.load.terms, strict=True)) for shape in FITTED]


@pytest.mark.parametrize("coefficients", [[100.0, 50.0, 3.0, 2.0, 10.0], [700.0, 0.0, 1100.0, 0.0, 0.0]])
def test_lines_are_found(coefficients: list[float]) -> None:
    assert fitted(FITTED, _costs(coefficients)) == pytest.approx(coefficients, abs=0.01)


def test_nothing_gets_cheaper_by_growing() -> None:
    assert min(fitted(FITTED, _costs([500.0, 40.0, -3.0, 2.0, -10.0]))) == 0


def test_the_comparison_is_with_other_runs() -> None:
    assert set(FITTED).isdisjoint(KEPT_BACK)
    assert {shape.databases for shape in FITTED + KEPT_BACK} == {1, 2, 4}
