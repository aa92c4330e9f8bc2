"""scripts/test itself: its exit status is what CI believes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tmc_storm.eventually import eventually

ROOT = Path(__file__).parents[2]
LANES = {
    "acceptance": "tests/acceptance",
    "integration": "tests/integration",
    "others": "tests/unit",
    "pipeline": "tests/pipeline",
}


def _environment(checkout: Path, failing: str = "", slow: str = "") -> dict[str, str]:
    lanes = {"FAILING": LANES.get(failing, ""), "SLOW": LANES.get(slow, "")}
    return {"PATH": os.environ["PATH"], "HOME": str(checkout), "TMPDIR": str(checkout), **lanes}


def _run(checkout: Path, failing: str = "", slow: str = "") -> subprocess.CompletedProcess[str]:
    script = ["bash", str(checkout / "scripts/test")]
    environment = _environment(checkout, failing, slow)
    return subprocess.run(script, env=environment, text=True, capture_output=True, timeout=60)


def test_every_test_is_in_a_lane() -> None:
    _, _, lanes = (ROOT / "scripts/test").read_text().partition("lanes=()")
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [path for path in files if not any(str(parent) in lanes.split() for parent in (path, *path.parents))]
    assert missing == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """scripts/test among stand-ins: nothing is installed, and pytest only says which tests it was given."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts/test", scripts)
    (scripts / "common").write_text(
        'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\nVENV=$PWD/venv\nsay() { printf "%s\\n" "$*" >&2; }\n'
    )
    (scripts / "services").write_text("")
    (scripts / "pipeline-services").write_text("PIPELINE_VENV=$VENV\n")
    pytest_itself = tmp_path / "venv/bin/pytest"
    pytest_itself.parent.mkdir(parents=True)
    pytest_itself.write_text(
        '#!/bin/bash\necho "ran $*"\nif [ "$1" = "$SLOW" ]; then sleep 0.5; fi\n'
        'if [ "$SLOW" = all ]; then touch "began-${1##*/}"; exec sleep 50; fi\n[ "$1" != "$FAILING" ]\n'
    )
    pytest_itself.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("slow", LANES)
def test_a_green_run_ends_with_status_0_whichever_lane_is_the_last(checkout: Path, slow: str) -> None:
    done = _run(checkout, slow=slow)
    assert done.returncode == 0, done.stderr
    for tests in LANES.values():
        assert f"ran {tests}" in done.stdout


@pytest.mark.parametrize("failing", LANES)
def test_one_failing_lane_fails_the_run_and_the_others_still_run(checkout: Path, failing: str) -> None:
    done = _run(checkout, failing=failing)
    assert done.returncode == 1
    for tests in LANES.values():
        assert f"ran {tests}" in done.stdout
    assert not list(checkout.glob("tmp.*")), "the lanes' logs are left behind"


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_who_stops_it_stops_what_it_installs(checkout: Path) -> None:
    (checkout / "scripts/pipeline-services").write_text("touch began-installing; sleep 500; PIPELINE_VENV=$VENV\n")
    script = ["bash", str(checkout / "scripts/test")]
    with (checkout / "log").open("w") as log:
        running = subprocess.Popen(
            script, env=_environment(checkout), cwd=checkout, stdout=log, stderr=log, start_new_session=True
        )
    eventually(lambda: (checkout / "began-installing").exists())
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 143
    eventually(lambda: str(checkout) not in _working_folders(), seconds=20)


def _working_folders() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended
            found.add(os.readlink(process))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_who_stops_it_stops_all_lanes(checkout: Path, number: signal.Signals, code: int) -> None:
    script = ["bash", str(checkout / "scripts/test")]
    environment = _environment(checkout) | {"SLOW": "all"}
    with (checkout / "log").open("w") as log:
        running = subprocess.Popen(script, env=environment, stdout=log, stderr=log, start_new_session=True)
    eventually(lambda: len(list(checkout.glob("began-*"))) == len(LANES))
    running.send_signal(number)
    assert running.wait(20) == code
    eventually(lambda: not _has_processes(running.pid))
    assert not list(checkout.glob("tmp.*"))
