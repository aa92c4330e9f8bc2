"""The Go client of tests/foreign, built as its users would build theirs: stubs from our protos, then the program."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROTOS = ROOT / "protos"


def built(folder: Path) -> Path:
    """Return the program, built in this folder. Needs Go; its packages come from Go's module proxy."""
    source = shutil.copytree(ROOT / "tests" / "foreign" / "go_client", folder / "go_client")
    files = [str(path.relative_to(_PROTOS)) for path in sorted(_PROTOS.rglob("*.proto"))]
    _run(ROOT, "scripts/generate", "--check")  # makes the environment of the compiler
    command = [
        f"{os.environ.get('TMC_PROTO_VENV', ROOT / '.venv-protos')}/bin/python",
        "-m",
        "grpc_tools.protoc",
        f"-I{_PROTOS}",
    ]
    for kind in ("go", "go-grpc"):
        plugin = _run(source, "go", "tool", "-n", f"protoc-gen-{kind}").strip()
        command += [f"--plugin=protoc-gen-{kind}={plugin}", f"--{kind}_out={source}", f"--{kind}_opt=module=go_client"]
        command += [f"--{kind}_opt=M{file}=go_client/tmcv1" for file in files]
    _run(source, *command, *files)
    _run(source, "go", "build", "-o", "client", ".")
    return source / "client"


def _run(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=900).stdout
