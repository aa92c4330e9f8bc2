"""Choose the server for the next call: bookkeeping only, no sockets and no threads.

A healthy server that does not answer a call within the deadline of the attempt becomes a suspect, and calls go to the
others. A suspect is probed after 1, 2, 4 ... 30 s, and one successful probe clears it. The back-off is reset only
when a call is answered in time, so a server that passes its probes but answers no calls is used less and less often.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

TRY_S = 1.0  # longer than any healthy answer takes
LONGEST_TRY_S = 2.0
FIRST_PROBE_S = 1.0
LONGEST_PROBE_S = 30.0


@dataclass(eq=False, kw_only=True)
class Server:
    """One server and its state.

    took_s: duration of its last answer.  pause_s: delay before the next probe; 0: its last call was answered in time.
    """

    address: str
    suspect: bool = False
    took_s: float = 0.0
    answered_at: float = -math.inf
    pause_s: float = 0.0
    probe_at: float = 0.0

    @property
    def patience_s(self) -> float:
        """Return how long to wait for its answer before asking another server too: twice the duration of its last one."""
        return max(TRY_S, 2 * self.took_s)

    @property
    def try_s(self) -> float:
        """Deadline of one attempt while the server is not a suspect."""
        return min(self.patience_s, LONGEST_TRY_S)


class Servers:
    """Thread-safe. addresses: at least one, each once."""

    def __init__(self, addresses: Sequence[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._servers = [Server(address=address) for address in addresses]
        self._turn = 0

    @property
    def only(self) -> Server | None:
        """The server when there is just one: nothing to choose."""
        return self._servers[0] if len(self._servers) == 1 else None

    def replace(self, addresses: Sequence[str]) -> None:
        """Replace the address list; servers that remain keep their state."""
        with self._lock:
            known = {server.address: server for server in self._servers}
            self._servers = [known.get(address) or Server(address=address) for address in addresses]

    def pick(self, tried: Collection[Server] = ()) -> Server | None:
        """The next healthy server, round-robin, that is not in `tried`. None: there is none, see `by_last_answer`."""
        with self._lock:
            servers = self._servers
            for step in range(len(servers)):
                server = servers[(self._turn + step) % len(servers)]
                if not server.suspect and server not in tried:
                    self._turn = (self._turn + step + 1) % len(servers)
                    return server
            return None

    def by_last_answer(self) -> list[Server]:
        """Return all servers, the one with the most recent answer (even a late one) first."""
        with self._lock:
            return sorted(self._servers, key=lambda server: -server.answered_at)

    def answered(self, server: Server, took_s: float) -> None:
        """Record an answer, including an error. A late answer does not clear a suspect."""
        with self._lock:
            server.took_s = took_s
            server.answered_at = self._monotonic()
            if took_s <= TRY_S:
                server.suspect = False
                server.pause_s = 0.0

    def unanswered(self, server: Server) -> None:
        """Record an attempt without an answer in time, or a server that is down or shutting down."""
        with self._lock:
            if not server.suspect:
                server.suspect = True
                self._wait_longer(server)

    def probed(self, server: Server, well: bool) -> None:
        """A probe was answered or not."""
        with self._lock:
            if well:
                server.suspect = False
            else:
                self._wait_longer(server)

    def due_probes(self) -> list[Server]:
        """Suspects that are due for a probe."""
        with self._lock:
            now = self._monotonic()
            return [server for server in self._servers if server.suspect and server.probe_at <= now]

    def next_probe_s(self) -> float | None:
        """Seconds until a probe is due. None: nobody is suspect."""
        with self._lock:
            times = [server.probe_at for server in self._servers if server.suspect]
            return max(0.0, min(times) - self._monotonic()) if times else None

    def _wait_longer(self, server: Server) -> None:
        server.pause_s = min(max(FIRST_PROBE_S, 2 * server.pause_s), LONGEST_PROBE_S)
        server.probe_at = self._monotonic() + server.pause_s
