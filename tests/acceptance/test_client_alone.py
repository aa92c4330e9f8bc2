"""The wheel without extras: a client whose `tmc` command works, and says what to install where it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import tmc_client
from tests.support.cluster import ROOT

pytestmark = pytest.mark.services
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    wheel = next(folder.glob("*.whl"))
    inside = str(folder / "venv" / "bin" / "python")
    subprocess.run([inside, "-m", "pip", "--disable-pip-version-check", "-q", "install", str(wheel)], check=True)
    (folder / "shop.py").write_text(
        "import sys\nimport tmc_client as tmc\n"
        "class Ends(tmc.Consumer):\n"
        "    def run(self):\n"
        "        print('it runs')\n"
        "consumer = Ends(tmc.connect('127.0.0.1:1', app='coupons'))\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TMC_", "PYTHON"))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "venv" / "bin" / "tmc"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean, cwd=folder)

    return run


def test_help_and_the_clients_commands_work(alone: Run) -> None:
    for arguments in (["--help"], ["consume", "--help"], ["health", "--help"]):
        done = alone(*arguments)
        assert (done.returncode, done.stdout[:6].lower(), done.stderr) == (0, "usage:", "")
    assert alone("health", "127.0.0.1:1").stderr.startswith("Nobody listens on 127.0.0.1:1")
    assert alone("consume", "shop:consumer").stdout == "it runs\n"


def test_the_version_is_that_of_the_distribution(alone: Run) -> None:
    done = alone("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tmc {tmc_client.__version__}\n", "")
    assert tmc_client.__version__ == re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "server"),
        ("dev", "server"),
        ("init", "server"),
        ("doctor", "server"),
        ("admin", "server"),
        ("pipeline", "pipeline"),
    ],
)
def test_a_command_that_needs_more_says_what_to_install(alone: Run, command: str, extra: str) -> None:
    done = alone(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tmc {command} needs ")
    assert done.stderr.endswith(f"which is not installed: pip install 'tmc-center[{extra}]'.\n")
    assert done.stderr.count("\n") == 1
