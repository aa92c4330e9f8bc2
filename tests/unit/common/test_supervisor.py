"""Processes that a supervisor keeps running."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tmc_storm.eventually import eventually

SUPERVISE = """
import os, sys
from tmc_common.supervisor import Supervisor
child = ["-c", "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(int(sys.argv[2]))", *sys.argv[1:3]]
sys.exit(Supervisor([(child, os.environ)]).run())
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_ends_is_replaced_however_it_ended(tmp_path: Path, code: int) -> None:
    """SIGTERM from somebody else ends a consumer well: it is missing all the same."""
    started = tmp_path / "started"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(started), str(code)])
    try:
        eventually(lambda: started.exists() and len(started.read_text()) >= 2)
    finally:
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 0


def test_settings_that_are_refused_end_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISE, str(tmp_path / "started"), "2"], check=False, timeout=60)
    assert done.returncode == 2
    assert (tmp_path / "started").read_text() == "x"
