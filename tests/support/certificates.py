"""A certificate for loopback, for a test's own TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def for_loopback(folder: Path, name: str = "cert.pem") -> tuple[Path, Path]:
    """Self-signed, for localhost and 127.0.0.1. Returns: certificate and key, as PEM files in this folder."""
    certificate, key = folder / name, folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
