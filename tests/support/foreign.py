"""Processes in other languages, and the databases as their drivers take them."""

from __future__ import annotations

import atexit
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa


class Process:
    """A process that can be started again after a kill."""

    def __init__(self, command: Sequence[object], log: Path) -> None:
        self._command, self._log = [str(part) for part in command], log
        self.start()
        atexit.register(self._end)  # a test that fails half way leaves nothing behind

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, which it does well."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0, self._log.read_text()[-3000:]

    def said(self) -> str:
        """The end of what it wrote; it runs."""
        text = self._log.read_text()[-3000:]
        assert self._process.poll() is None, text
        return text


def for_go(url: sa.URL) -> tuple[str, str]:
    """Name of a driver of Go, and the address of this database as it takes it."""
    if url.get_backend_name() == "postgresql":
        return "pgx", f"postgres://{url.username}@{url.host}:{url.port}/{url.database}?sslmode=disable"
    return "mysql", f"{url.username}@tcp({url.host}:{url.port})/{url.database}"
