"""deploy/requirements.txt has what the image needs, in versions that are allowed, each with its hashes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "deploy/requirements.txt").read_text()
LOCKED = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def _allowed() -> list[Requirement]:
    """Return what the extras of the image ask for."""
    extras = re.search(r'^EXTRAS="([\w,]+)"$', (ROOT / "scripts/lock").read_text(), re.M)
    assert extras is not None
    command = [sys.executable, str(ROOT / "scripts/lowest.py"), "--ranges", extras[1]]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [Requirement(line) for line in printed.splitlines()]


def test_each_requirement_is_locked_in_a_version_that_is_allowed() -> None:
    locked = {canonicalize_name(name): version for name, version, _ in LOCKED.findall(LOCK)}
    assert len(_allowed()) > 20
    for requirement in _allowed():
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version} is locked; run ./scripts/lock"


def test_nothing_is_installed_without_a_hash() -> None:
    assert len(LOCKED.findall(LOCK)) == LOCK.count("==")
    installs = re.findall(r"pip install (.+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)
    assert len(installs) == 2
