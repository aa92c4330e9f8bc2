"""The proxies of deploy/proxies in front of a center of the tests, with a certificate of the tests."""

from __future__ import annotations

import atexit
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from tests.support import certificates
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import end, free_port

DEPLOY = Path(__file__).parents[2] / "deploy" / "proxies"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # folders that nginx wants to write to


class Front:
    """`address` is that of the proxy; `certificate` the one to trust.

    strict: an address has a burst of 5 calls, and a call per second after it.
    """

    def __init__(self, kind: Literal["nginx", "envoy"], center: str, *, strict: bool = False) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"tmc-{kind}-"))
        atexit.register(self.close)
        self.port = free_port()
        self.address = f"localhost:{self.port}"
        self.certificate, key = certificates.for_loopback(self.home)
        source = DEPLOY / {"nginx": "nginx.conf", "envoy": "envoy.yaml"}[kind]
        folders = "".join(f"{name}_temp_path {self.home}/{name};" for name in _TEMPORARY)
        changes = {
            "listen 8443": f"listen 127.0.0.1:{self.port}",
            "access_log off;": f"access_log off; {folders}",
            "address: 0.0.0.0, port_value: 8443": f"address: 127.0.0.1, port_value: {self.port}",
            "address: 127.0.0.1, port_value: 50051": f"address: 127.0.0.1, port_value: {center.rpartition(':')[2]}",
            "server 127.0.0.1:50051": f"server {center}",
            f"/etc/{kind}/center.crt": str(self.certificate),
            f"/etc/{kind}/center.key": str(key),
        }
        if strict:
            changes |= {
                "rate=2000r/s": "rate=1r/s",
                "burst=4000": "burst=4",
                "max_tokens: 4000, tokens_per_fill: 2000": "max_tokens: 5, tokens_per_fill: 1",
            }
        text = source.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        made = self.home / source.name
        made.write_text(text)
        with open(self.home / "log", "wb") as log:
            self.process = subprocess.Popen(
                _nginx(made) if kind == "nginx" else _envoy(made), stdout=log, stderr=log, start_new_session=True
            )
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log()[-2000:]
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self) -> str:
        return (self.home / "log").read_text()

    def close(self) -> None:
        if hasattr(self, "process"):
            end(self.process, signal.SIGTERM)
        shutil.rmtree(self.home, ignore_errors=True)


def _nginx(configuration: Path) -> list[str]:
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    more = f"daemon off; pid {configuration.parent}/pid; error_log stderr warn;"
    return [binary, "-p", str(configuration.parent), "-e", "stderr", "-c", str(configuration), "-g", more]


def _envoy(configuration: Path) -> list[str]:
    binary = str(Path(sys.executable).parent / "envoy")
    return [binary, "-c", str(configuration), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
