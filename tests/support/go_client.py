"""The Go programs of tests/foreign, over the client in clients/go."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def built() -> Path:
    """Return the program, built once per run. Needs Go; its packages come from Go's module proxy."""
    program = Path(tempfile.mkdtemp(prefix="tmc-go-")) / "client"
    source = ROOT / "tests" / "foreign" / "go_client"
    subprocess.run(["go", "build", "-o", program, "."], cwd=source, check=True, timeout=900)
    return program
