"""TCP ports of servers that tests start, and their end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_PORTS = range(15_000, 32_000)  # below those that outgoing connections get, which would come between asking and using


_GIVEN = Path(tempfile.gettempdir()) / f"tmc-ports-{os.getuid()}"
_KEPT_S = 120.0


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago, and the next one too. No other process gets them soon."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if any(map(_was_given, (port, port + 1))):
            continue
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        _GIVEN.mkdir(exist_ok=True)
        for each in (port, port + 1):
            (_GIVEN / str(each)).touch()
        return port


def _was_given(port: int) -> bool:
    """Return whether a process of this user got it a moment ago: it binds it when the server that it is for has started."""
    try:
        return time.time() - (_GIVEN / str(port)).stat().st_mtime < _KEPT_S
    except FileNotFoundError:
        return False


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether something takes connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def end(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    """Send a signal and wait; a process that is still there after 20 s is killed."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(number)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
