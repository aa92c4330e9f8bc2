"""TCP ports of servers that tests start, and their end."""

from __future__ import annotations

import random
import signal
import socket
import subprocess

_PORTS = range(15_000, 32_000)  # below those that outgoing connections get, which would come between asking and using


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago, and the next one too."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port


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
