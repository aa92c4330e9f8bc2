"""./scripts/dev-services as a developer uses it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tmc_server.config import load

pytestmark = [pytest.mark.mariadb, pytest.mark.services]


def test_start_env_status_stop(tmp_path: Path) -> None:
    environment = os.environ | {"TMC_DEV_SERVICES": str(tmp_path / "services")}

    def call(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["./scripts/dev-services", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    assert (call("status").returncode, call("env").returncode) == (3, 3)
    try:
        started = call("start")
        assert started.returncode == 0, started.stderr
        assert started.stdout.count("runs") == 3
        assert call("start").stdout == started.stdout  # what runs is left alone
        exported = dict(line.removeprefix("export ").split("=", 1) for line in call("env").stdout.splitlines())
        config = load(None, exported)
        assert config.delivery.kind == "rabbitmq"
        assert len(exported["TMC_ADMIN_TOKEN"]) > 20
        doctor = subprocess.run(
            ["tmc", "doctor"], env=_with_path(exported), capture_output=True, text=True, check=False
        )
        assert doctor.returncode == 0, doctor.stdout
    finally:
        assert call("stop").returncode == 0
    assert call("status").stdout.count("stopped") == 3


def _with_path(exported: dict[str, str]) -> dict[str, str]:
    import sys

    return os.environ | exported | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
