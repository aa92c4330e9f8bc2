"""Programs that are killed, and started again when they end by themselves; faults that cannot be made or mended."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmc_storm.eventually import eventually
from tmc_storm.plan import Ending, Fault, Strike
from tmc_storm.services.program import Program, Supervisor
from tmc_storm.weather import StormBroken, Weather

_SLEEPS = "import sys, time; print('up', flush=True); time.sleep(600)"


def _lines(program_log: Path) -> int:
    return program_log.read_text().count("up")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def program(log: Path) -> Iterator[Program]:
    made = Program("sleeper", [sys.executable, "-c", _SLEEPS], {}, log)
    made.start()
    eventually(lambda: _lines(log) == 1)
    yield made
    made.kill()


def test_one_that_ends_by_itself_is_started_again(program: Program, log: Path) -> None:
    with Supervisor([program]):
        os.kill(program.pid, signal.SIGKILL)
        eventually(lambda: _lines(log) == 2)
    assert program.ends == [-signal.SIGKILL]


def test_one_that_is_killed_stays_so_until_it_is_started(program: Program, log: Path) -> None:
    program.kill()
    program.watch()
    assert (_lines(log), program.ends) == (1, [])
    program.start()
    eventually(lambda: _lines(log) == 2)


def test_a_suspended_one_can_be_killed(program: Program) -> None:
    program.suspend()
    eventually(lambda: Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    program.kill()
    assert not Path(f"/proc/{program.pid}").exists()


def test_settings_of_a_center_do_not_reach_it(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMC_CONSUL__AGENT", "consul.example:8500")
    program = Program("one", [sys.executable, "-c", "import os; print(sorted(os.environ))"], {"TMC_X": "y"}, log)
    program.start()
    eventually(lambda: log.read_text().endswith("]\n"))
    program.kill()
    assert "'TMC_X'" in log.read_text()
    assert "CONSUL" not in log.read_text()


def _strike(number: int, part: str) -> Strike:
    return Strike(number=number, at_s=0.0, kind="broken", part=part, lasts_s=0.0)


def _raising(_: random.Random) -> Ending:
    raise ProcessLookupError


def _unmendable(_: random.Random) -> Ending:
    def end() -> None:
        raise ValueError("still broken")

    return end


def test_a_fault_that_cannot_be_made_is_missed_and_one_that_cannot_be_mended_ends_the_storm() -> None:
    ended: list[str] = []
    faults = [
        Fault(kind="broken", part="gone", begin=_raising),
        Fault(kind="broken", part="well", begin=lambda _: lambda: ended.append("well")),
    ]
    weather = Weather(faults, [_strike(0, "gone"), _strike(1, "well")], 1)
    assert [one.strike.part for one in weather.rage(0.2)] == ended == ["well"]
    assert [one.strike.part for one in weather.missed] == ["gone"]
    with pytest.raises(StormBroken, match="still broken"):
        Weather([Fault(kind="broken", part="x", begin=_unmendable)], [_strike(0, "x")], 1).rage(0.2)
