"""Doses that commits take in turn: one at a time, and none is left out for good."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import dose


def _commit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dose, "LONG", False)
    done = subprocess.CompletedProcess([], 0, stdout=text)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_more: done)


def test_commits_take_one_each_and_together_all(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()
    for number in range(20):
        _commit(f"{number:040x}\n", monkeypatch)
        (one,) = dose.in_turn("x", ["a", "b", "c"])
        assert dose.in_turn("x", ["a", "b", "c"]) == [one]
        taken.add(one)
    assert taken == {"a", "b", "c"}


def test_two_kinds_do_not_go_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = set()
    for number in range(40):
        _commit(f"{number:040x}\n", monkeypatch)
        pairs.add((*dose.in_turn("x", ["a", "b"]), *dose.in_turn("another", ["a", "b"])))
    assert len(pairs) == 4


def test_without_git_there_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dose, "LONG", False)
    monkeypatch.setenv("PATH", "")
    assert len(dose.in_turn("x", ["a", "b"])) == 1


def test_a_long_run_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dose, "LONG", True)
    assert dose.in_turn("x", ["a", "b"]) == ["a", "b"]
