"""Commands whose package is not installed: one sentence with what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RUN = """
import sys
missing, command = sys.argv[1:]
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
sys.argv = ["tmc", command]
from tmc_cli import main
main()
"""


def _run(missing: str, command: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", _RUN, missing, command]
    return subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("package", "command", "install"),
    [
        pytest.param("typer", "serve", "tmc-center[server]", id="serve"),
        pytest.param("alembic", "init", "tmc-center[server]", id="init"),
        pytest.param("tmc_console", "console", "tmc-center[console]", id="console"),
        pytest.param("tmc_storm", "storm", "tmc-center[storm]", id="storm"),
        pytest.param("tmc_pipeline", "pipeline", "tmc-center[pipeline]", id="pipeline"),
        pytest.param("sqlalchemy", "outbox", "tmc-client[outbox]", id="outbox"),
    ],
)
def test_a_package_that_is_not_installed_is_named(package: str, command: str, install: str) -> None:
    done = _run(package, command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tmc {command} needs {package}, which is not installed: pip install '{install}'.\n"


@pytest.mark.parametrize(("command", "extra"), [("serve", "server"), ("init", "server")])
def test_without_the_center_it_is_what_is_missing(command: str, extra: str) -> None:
    done = _run("tmc_server", command)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"tmc {command} needs the center, which is not installed: pip install 'tmc-center[{extra}]'.\n"
    )


@pytest.mark.parametrize("module", ["tmc_cli.serving", "tmc_server.app"])
def test_a_package_that_lacks_a_module_is_a_fault(module: str) -> None:
    assert "Traceback" in _run(module, "serve").stderr
