"""A private Consul agent (development mode) on free ports, stopped by its process id.

Debian 12 has no Consul; Debian 11 has 1.8.7. `scripts/install-consul` downloads that package from the mirror that apt
uses already and unpacks it beside the caches.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tmc_storm.services.cache import cache
from tmc_storm.services.ports import free_port
from tmc_storm.services.service import Service


def found() -> str | None:
    """Return the Consul of the PATH, or the one that scripts/install-consul unpacked; None, there is none."""
    unpacked = cache() / "consul" / "usr" / "bin" / "consul"
    return shutil.which("consul") or (str(unpacked) if unpacked.exists() else None)


def program() -> str:
    """Return the Consul to use. Raises FileNotFoundError."""
    path = found()
    if path is None:
        raise FileNotFoundError("there is no consul: run ./scripts/install-consul")
    return path


class Consul(Service):
    """One private agent; `address` is host:port of its HTTP interface."""

    def __init__(self, keep: bool = False, **settings: Any) -> None:
        """keep: it outlives this program.  settings: of the agent, beside its usual ones."""
        self.home = Path(tempfile.mkdtemp(prefix="tmc-consul-"))
        if not keep:
            atexit.register(self.stop)  # a test that fails half way leaves nothing behind
        (self.home / "agent.json").write_text(json.dumps(settings))
        self.port = free_port()
        self._ports = [free_port() for _ in range(3)]
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """An empty catalog every time: a development agent keeps nothing."""
        serf_lan, serf_wan, rpc = self._ports
        ports = [f"-http-port={self.port}", "-dns-port=-1", "-grpc-port=-1", f"-server-port={rpc}"]
        serf = [f"-serf-lan-port={serf_lan}", f"-serf-wan-port={serf_wan}"]
        here = ["-bind=127.0.0.1", "-client=127.0.0.1"]
        self._run(
            [
                program(),
                "agent",
                "-dev",
                *here,
                *ports,
                *serf,
                "-log-level=warn",
                f"-config-file={self.home}/agent.json",
            ]
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/v1/status/leader", timeout=1) as answer:
                return answer.read() not in (b'""', b"")
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
