"""A storm that cannot find a planted bug proves nothing: guards are taken out one by one, and `tmc storm` has to notice.

One of them in CI, all by `--long`, two minutes each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.run import NOT_COPIED, ROOT, mutants
from tests.support.dose import LONG

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services, pytest.mark.timeout(400)]

PLANTED = [
    ("406-inbox-down", "sqlite"),
    ("05-give-back-counts", "mariadb"),
    ("09-lost-commit", "mariadb"),
    ("13-inbox-note", "sqlite"),
    ("14-ledger-fence", "sqlite"),
    ("21-rescue-uncounted", "mariadb"),
    ("22-returned-is-confirmed", "mariadb"),
    ("23-lost-connection", "mariadb"),
    ("29-unreached-counts", "sqlite"),
    ("31-fence", "postgresql"),
    ("139-line-lock", "mariadb"),
    ("141-next-in-line", "sqlite"),
    ("143-out-of-order-effect", "sqlite"),
    ("235-outbox-rolled-back", "sqlite"),
]


@pytest.mark.parametrize(("name", "store"), PLANTED if LONG else PLANTED[:1])
def test_a_planted_bug_is_found(name: str, store: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    for mutant in mutants():
        if mutant.name == name:
            for edit in mutant.edits:
                edit.apply(copy)
    report = tmp_path / "report"
    options = ["--minutes", "2", "--seed", "1", "--store", store, "--report", str(report)]
    command = [sys.executable, "-m", "tmc_cli", "storm", *options]
    done = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    summary = json.loads((report / "report.json").read_text())
    print(name, summary["found"], summary["settled_s"], summary["findings"][:3])
    assert summary["settled_s"] is None or any(summary["found"].values())
