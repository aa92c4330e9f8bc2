"""How much of a test is run: all of it by `./scripts/test --long`, in CI what a commit can wait for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

LONG = bool(os.environ.get("TMC_TEST_LONG"))
T = TypeVar("T")


def in_turn(name: str, doses: Sequence[T]) -> Sequence[T]:
    """One of several long doses of the same kind, chosen by the commit; all of them by `--long`.

    name: of the kind, so that two kinds do not go in step.
    """
    if LONG:
        return doses
    with suppress(FileNotFoundError):  # without git, or without a history, always the same one
        command = ["git", "rev-parse", "HEAD"]
        name += subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return [doses[int(sha256(name.encode()).hexdigest(), 16) % len(doses)]]
