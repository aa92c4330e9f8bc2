"""An earlier state of this repository: that of the last tag; until there is one, that from before shards could move."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from tests.support.cluster import ROOT

_BEFORE_MOVES = "5b03e9e3"


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)


def _commit() -> str:
    """A clone without history has no other state than its own, which is taken then."""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD~1")
    if tag.returncode == 0:
        return tag.stdout.decode().strip()
    return _BEFORE_MOVES if _git("cat-file", "-e", _BEFORE_MOVES).returncode == 0 else "HEAD"


def unpack(folder: Path) -> str:
    """Write its files to this folder. Returns: its name."""
    commit = _commit()
    archive = _git("archive", commit)
    assert archive.returncode == 0, archive.stderr
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return commit
