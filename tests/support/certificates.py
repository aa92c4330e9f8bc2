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


class Authority:
    """An authority of a test's own; its certificate is `ca.pem` in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=test authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
        )

    def issue(self, name: str, *names: str) -> tuple[Path, Path]:
        """names: as openssl writes them, DNS:center.example or IP:127.0.0.1. Returns: certificate and key."""
        self._openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
        )
        (self._folder / f"{name}.names").write_text(f"subjectAltName={','.join(names)}\n")
        self._openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            f"{name}.names",
            "-out",
            f"{name}.pem",
        )
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self._folder)
