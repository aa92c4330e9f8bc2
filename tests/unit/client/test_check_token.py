"""The app's check token: strangers at the check door hold up nobody while the center is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import tmc_client as tmc
from tmc_client.checks.token import CheckToken


class _Center:
    """Answers when it may. asked: calls so far."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.fails = False

    def unary(self, _path: str, _response: object) -> Callable[..., Any]:
        def call(_request: object, **_: object) -> Any:
            self.asked += 1
            self.is_asked.set()
            self.may_answer.wait(20)
            if self.fails:
                raise tmc.Unavailable("The center is away.")
            return SimpleNamespace(check_token="right")

        return call


@pytest.fixture
def center() -> _Center:
    return _Center()


@pytest.mark.parametrize("known", [False, True])
def test_one_stranger_waits_for_a_silent_center_and_others_are_answered_at_once(center: _Center, known: bool) -> None:
    seconds = [0.0]
    token = CheckToken(center, lambda: seconds[0])  # type: ignore[arg-type]
    if known:
        center.may_answer.set()
        assert token.is_right("right")
        center.may_answer.clear()
        center.is_asked.clear()
    before, seconds[0] = center.asked, 60.0
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(token.is_right, "wrong")
        assert center.is_asked.wait(60)
        seconds[0] += 60
        for _ in range(16):
            if known:
                assert not token.is_right("wrong")
            else:
                with pytest.raises(tmc.Unavailable):
                    token.is_right("wrong")
        assert center.asked == before + 1
        center.may_answer.set()
        assert not first.result(60)
    assert token.is_right("right")


def test_a_center_that_failed_is_asked_again_after_a_second(center: _Center) -> None:
    seconds = [0.0]
    token = CheckToken(center, lambda: seconds[0])  # type: ignore[arg-type]
    center.may_answer.set()
    center.fails = True
    for _ in range(16):
        with pytest.raises(tmc.Unavailable):
            token.is_right("right")
    assert center.asked == 1
    center.fails = False
    seconds[0] += 1
    assert token.is_right("right")
    assert center.asked == 2
