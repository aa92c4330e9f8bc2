"""A folder for what is prepared once: an empty database, a downloaded agent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache() -> Path:
    """Return the folder that TMC_TEST_CACHE names, or one of this user's in the folder for temporary files.

    Raises PermissionError if somebody else made that one: what is in it would be run.
    """
    named = os.environ.get("TMC_TEST_CACHE")
    folder = Path(named or Path(tempfile.gettempdir()) / f"tmc-test-cache-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set TMC_TEST_CACHE to a folder of your own.")
    return folder
