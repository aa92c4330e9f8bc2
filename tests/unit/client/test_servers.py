"""Which server takes a call: exact sequences on a clock that only tests move; the servers are functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tmc_client.connecting import connection as connections
from tmc_client.connecting.connection import Connection, Identity, addresses_of
from tmc_client.connecting.servers import LONGEST_PROBE_S, Server, Servers
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _servers(clock: _Clock, count: int = 2) -> tuple[Servers, list[Server]]:
    made = Servers([f"s{i}:1" for i in range(count)], clock)
    return made, [server for _ in range(count) if (server := made.pick()) is not None]


def test_well_servers_take_turns_and_a_suspect_is_passed_over() -> None:
    clock = _Clock()
    made, (a, b, c) = _servers(clock, 3)
    assert [made.pick() for _ in range(4)] == [a, b, c, a]
    made.unanswered(b)
    assert [made.pick() for _ in range(4)] == [c, a, c, a]
    assert made.pick([a]) is c
    assert made.pick([a, c]) is None


def test_a_suspect_is_probed_with_doubling_distance_and_comes_back_by_one_success() -> None:
    clock = _Clock()
    made, (a, b) = _servers(clock)
    made.unanswered(a)
    distances = []
    for _ in range(7):
        pause = made.next_probe_s()
        assert pause is not None
        distances.append(pause)
        assert made.due_probes() == []
        clock.now += pause
        assert made.due_probes() == [a]
        made.probed(a, well=False)
    assert distances == [1, 2, 4, 8, 16, 30, LONGEST_PROBE_S]
    made.probed(a, well=True)
    assert made.next_probe_s() is None
    assert {made.pick(), made.pick()} == {a, b}


def test_a_server_that_passes_probes_and_answers_no_calls_is_tried_ever_less() -> None:
    clock = _Clock()
    made, (a, _) = _servers(clock)
    distances = []
    for _ in range(6):
        made.unanswered(a)
        distances.append(made.next_probe_s())
        made.probed(a, well=True)
    assert distances == [1, 2, 4, 8, 16, 30]
    made.answered(a, took_s=0.01)
    made.unanswered(a)
    assert made.next_probe_s() == 1


def test_two_lanes_that_blame_the_same_server_count_once() -> None:
    made, (a, _) = _servers(_Clock())
    made.unanswered(a)
    made.unanswered(a)
    assert made.next_probe_s() == 1


def test_a_late_answer_does_not_clear_a_suspect_but_puts_it_first_among_suspects() -> None:
    clock = _Clock()
    made, (a, b) = _servers(clock)
    made.answered(a, 0.01)
    for server in (a, b):
        made.unanswered(server)
    clock.now += 5
    made.answered(b, took_s=3.0)
    assert made.pick() is None
    assert made.by_last_answer() == [b, a]
    assert (b.patience_s, b.try_s) == (6.0, 2.0)
    made.answered(a, took_s=0.01)
    assert made.pick() is a


def test_a_changed_list_keeps_what_is_known() -> None:
    made, (a, _) = _servers(_Clock())
    made.unanswered(a)
    made.replace(["s0:1", "s2:1"])
    assert [server.address for server in made.by_last_answer()] == ["s0:1", "s2:1"]
    picked = made.pick()
    assert picked is not None
    assert picked.address == "s2:1"


# -- calls over several servers ------------------------------------------------------------------------------------


class _Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "scripted"

    def trailing_metadata(self) -> tuple[()]:
        return ()


Behavior = Callable[[float], str]
"""timeout -> the answer; raises _Failure."""


class _Future:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []
        self.answer: str | _Failure | None = None
        self.was_cancelled = False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)
        if self.answer is not None:
            callback(self)

    def settle(self, answer: str | _Failure) -> None:
        self.answer = answer
        for callback in self.callbacks:
            callback(self)

    def cancelled(self) -> bool:
        return self.was_cancelled

    def cancel(self) -> None:
        self.was_cancelled = True

    def exception(self) -> _Failure | None:
        return self.answer if isinstance(self.answer, _Failure) else None

    def result(self) -> Any:
        if isinstance(self.answer, _Failure):
            raise self.answer
        return self.answer


class _Center:
    """Servers as scripts. tries: (address, timeout, patient) of each try in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, addresses: str) -> None:
        self.clock = _Clock()
        self.tries: list[tuple[str, float, bool]] = []
        self.scripts: dict[str, Behavior] = {}
        self.open: dict[str, _Future] = {}
        self.connection = Connection(addresses, Identity(app="orders"), monotonic=self.clock)
        monkeypatch.setattr(self.connection, "_method", lambda server, _path, _class: (self._raw(server.address), ()))
        monkeypatch.setattr(self.connection, "_prober", threading.current_thread())  # nobody probes

    def _raw(self, address: str) -> Any:
        center = self

        class Raw:
            def __call__(self, _request: Any, timeout: float, metadata: Any) -> str:
                center.tries.append((address, timeout, False))
                return center.scripts[address](timeout)

            def future(self, _request: Any, timeout: float, metadata: Any) -> _Future:
                center.tries.append((address, timeout, True))
                future = center.open[address] = _Future()
                try:
                    future.settle(center.scripts[address](timeout))
                except _Failure as exc:
                    future.settle(exc)
                except TimeoutError:
                    pass  # the test answers
                return future

        return Raw()

    def answers(self, text: str, after_s: float = 0.01) -> Behavior:
        def behave(timeout: float) -> str:
            self.clock.now += min(after_s, timeout)
            if after_s > timeout:
                raise _Failure(grpc.StatusCode.DEADLINE_EXCEEDED)
            return text

        return behave

    @staticmethod
    def is_away(_timeout: float) -> str:
        raise _Failure(grpc.StatusCode.UNAVAILABLE)

    def call(self, timeout: float = 10.0) -> Any:
        return self.connection.unary("/x", types_pb2.ItemError)(None, timeout=timeout)


def test_a_hung_server_costs_one_try_and_then_none(monkeypatch: pytest.MonkeyPatch) -> None:
    center = _Center(monkeypatch, "a:1,b:1")
    center.scripts = {"a:1": center.answers("a", after_s=1e9), "b:1": center.answers("b")}
    assert [center.call() for _ in range(5)] == ["b"] * 5
    assert center.tries[:2] == [("a:1", 1.0, False), ("b:1", 1.0, False)]
    assert [address for address, _, _ in center.tries] == ["a:1"] + ["b:1"] * 5


def test_a_server_that_is_away_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    center = _Center(monkeypatch, "a:1,b:1")
    center.scripts = {"a:1": center.is_away, "b:1": center.answers("b")}
    before = center.clock.now
    assert center.call() == "b"
    assert center.clock.now - before == pytest.approx(0.01)


def test_a_center_that_is_slow_everywhere_gets_no_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer takes three seconds: the first call costs one try per server, later ones are made just once."""
    center = _Center(monkeypatch, "a:1,b:1")
    center.scripts = {"a:1": center.answers("a", after_s=3), "b:1": center.answers("b", after_s=3)}
    assert [center.call() for _ in range(3)] == ["a"] * 3
    assert [(address, patient) for address, _, patient in center.tries] == [
        ("a:1", False),
        ("b:1", False),
        ("a:1", True),
        ("a:1", True),
        ("a:1", True),
    ]
    assert center.tries[2][1] == 8.0  # what is left of the caller's own deadline


def test_two_servers_at_most_work_on_a_call_while_none_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.Server, "patience_s", 0.01)
    center = _Center(monkeypatch, "a:1,b:1,c:1")

    def hangs(timeout: float) -> str:
        raise TimeoutError

    def late(timeout: float) -> str:
        raise _Failure(grpc.StatusCode.DEADLINE_EXCEEDED)

    center.scripts = dict.fromkeys(("a:1", "b:1", "c:1"), late)
    with pytest.raises(_Failure):
        center.call()
    del center.tries[:]
    center.scripts = dict.fromkeys(("a:1", "b:1", "c:1"), hangs)

    def answer_late() -> None:
        eventually(lambda: len(center.tries) >= 2)
        center.open[center.tries[1][0]].settle("late, but here")

    threading.Timer(0.3, answer_late).start()  # thirty times the patience: enough for a third server to be asked
    assert center.call() == "late, but here"
    assert [patient for _, _, patient in center.tries] == [True, True]
    assert center.open[center.tries[0][0]].was_cancelled


def test_the_callers_own_short_deadline_says_nothing_about_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    center = _Center(monkeypatch, "a:1,b:1")
    center.scripts = {"a:1": center.answers("a", after_s=0.5), "b:1": center.answers("b", after_s=0.5)}
    for _ in range(4):
        with pytest.raises(_Failure):
            center.call(timeout=0.2)
    assert [address for address, _, _ in center.tries] == ["a:1", "b:1", "a:1", "b:1"]


def test_a_single_server_keeps_the_full_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    center = _Center(monkeypatch, "a:1")
    center.scripts = {"a:1": center.answers("a", after_s=8)}
    assert center.call() == "a"
    assert center.tries == [("a:1", 10.0, False)]


def test_all_away_is_said_at_once_and_asked_again_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    center = _Center(monkeypatch, "a:1,b:1")
    center.scripts = {"a:1": center.is_away, "b:1": center.is_away}
    for _ in range(2):
        with pytest.raises(_Failure):
            center.call()
    assert [address for address, _, _ in center.tries] == ["a:1", "b:1"] * 2


@pytest.mark.parametrize("address", ["", "center", "http://center:1", "a:1,b", "a:x"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        addresses_of(address)
    assert addresses_of("a:1, b:2,a:1") == ["a:1", "b:2"]
