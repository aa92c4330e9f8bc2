"""The Go programs of tests/foreign, over the client in clients/go."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def has_go() -> bool:
    """Return whether there is a Go that the client can be built with; its tests are not there without."""
    if shutil.which("go") is None:
        return False
    wanted = re.search(r"^go (\d+)\.(\d+)", (ROOT / "clients/go/go.mod").read_text(), re.MULTILINE)
    found = re.search(r"go(\d+)\.(\d+)", subprocess.run(["go", "version"], capture_output=True, text=True).stdout)
    assert wanted is not None
    return found is not None and tuple(map(int, found.groups())) >= tuple(map(int, wanted.groups()))


@functools.cache
def built() -> Path:
    """Return the program, built once per run. Needs Go; its packages come from Go's module proxy."""
    program = Path(tempfile.mkdtemp(prefix="tmc-go-")) / "client"
    source = ROOT / "tests" / "foreign" / "go_client"
    subprocess.run(["go", "build", "-o", program, "."], cwd=source, check=True, timeout=900)
    return program
