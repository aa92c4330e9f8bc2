"""TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket

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
