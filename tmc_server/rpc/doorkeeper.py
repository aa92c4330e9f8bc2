"""Limits unauthenticated connections: few calls per second each, and never all of the available connections.

gRPC hands over calls one by one, no matter who sends them, so a call without a key delays its neighbors by what it costs to
refuse it. A connection that sends more of them than an honest mistake would is answered late: its calls stay open, gRPC
takes no more of them than the streams that a connection may have, and its sender waits. Where that does not help, the worst are
closed; and when places get short, those beyond half of all that never showed a key.

gRPC does not let a server close one connection. It is closed from outside, by shutting down its socket, which is looked up
among our own file descriptors by the address of its peer; gRPC then sees that the peer is gone.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from tmc_common.eventlog import EventLog
from tmc_server.errors import RateLimited
from tmc_server.metrics import METRICS

log = EventLog("tmc.doorkeeper")

_FREE_PER_SECOND = 4.0  # calls without a key that are answered at once, per connection
_FREE_AT_ONCE = 5.0
# Each call differently: a thousand answered together would be a flood of their own. Below the SDK's usual timeout of 5 s, so
# that a caller with a wrong key learns about it.
_HOLD_S = (2.0, 4.5)
_MANY = 32  # calls of one connection at once are no mistake: the more, the longer each waits
_MOST_HELD = 10_000
_LEAST_HELD_S, _MOST_HELD_S = 0.1, 1.0  # of an app over a limit
_SHORT = 0.8  # of all connections in use: closed ones come back at once, so leave them while there is room
_GRACE_S = 1.0  # a connection this young may still show a key


class Connected(Protocol):
    """A call, as far as its connection is concerned."""

    def peer(self) -> str: ...
    def time_remaining(self) -> float | None: ...


class Doorkeeper:
    """Everything but `sweep` on the loop. connections: limits.connections.

    ports: where the server listens.  wake: have `sweep` run soon.
    """

    def __init__(
        self,
        connections: int,
        sockets: Sockets | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ports: set[int] = set()
        self.wake: Callable[[], None] = lambda: None
        self._connections = connections
        self._monotonic = monotonic
        self._proven: set[str] = set()
        self._patience: dict[str, tuple[float, float]] = {}  # calls that are still free, when
        self._held = 0
        self._held_of: dict[str, int] = {}
        self._worst: set[str] = set()
        self._since: dict[str, float] = {}
        self._sockets = sockets or Sockets()

    def showed_key(self, call: Connected) -> None:
        """A call of this connection was authenticated."""
        peer = call.peer()
        if peer not in self._proven:
            self._proven.add(peer)

    def proven(self, call: Connected) -> bool:
        """Return whether a call of this connection showed a valid key."""
        return call.peer() in self._proven

    async def admit(self, call: Connected) -> None:
        """Admit a call that needs no key: at once if its connection is proven, else like `hold_up`."""
        if not self.proven(call):
            await self.hold_up(call)

    async def hold_up(self, call: Connected) -> None:
        """Hold up a call without a key before it is answered: return at once, or late if its connection sends many of them."""
        peer = call.peer()
        now = self._monotonic()
        free, then = self._patience.get(peer, (_FREE_AT_ONCE, now))
        free = min(_FREE_AT_ONCE, free + (now - then) * _FREE_PER_SECOND) - 1
        self._patience[peer] = (max(free, min(free + 1, 0.0)), now)
        if free >= 0:
            return
        if self._held >= _MOST_HELD:
            if not self._worst:
                self.wake()
            self._worst.add(peer)
            return
        held = self._held_of.get(peer, 0)
        self._held_of[peer] = held + 1
        others = (
            0 if self.proven(call) else held
        )  # a program that stands in for many, such as the console, showed a key
        try:
            usual, left = random.uniform(*_HOLD_S), call.time_remaining()
            seconds = usual * (1 + others / _MANY)
            await self._hold(seconds if left is None else max(usual, min(seconds, left / 2)))
        finally:
            left = self._held_of.pop(peer) - 1
            if left:
                self._held_of[peer] = left

    async def hold_back(self, error: RateLimited, call: Connected) -> None:
        """Hold back an app that is over a limit until it may repeat. One that repeats at once costs others more."""
        seconds = min(max(error.retry_after_ms / 1000, _LEAST_HELD_S), _MOST_HELD_S)
        left = call.time_remaining()
        if left is not None:
            seconds = min(seconds, left / 2)
        if self._held < _MOST_HELD:
            await self._hold(seconds)
            error.retry_after_ms = max(1, error.retry_after_ms - round(seconds * 1000))

    async def _hold(self, seconds: float) -> None:
        self._held += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._held -= 1

    def offended(self, call: Connected) -> None:
        """The connection misbehaved: unless it is proven, its next calls are answered late, for half a minute."""
        if not self.proven(call):
            self._patience[call.peer()] = (-30 * _FREE_PER_SECOND, self._monotonic())

    def sweep(self) -> None:
        """Close what has to go, forget who is gone. From any thread, every second or so."""
        now = self._monotonic()
        proven, patience, since = list(self._proven), list(self._patience), list(self._since)  # before: others come now
        live = self._sockets.connections(self.ports)
        self._proven.difference_update([peer for peer in proven if peer not in live])
        for peer in patience:
            if peer not in live:
                del self._patience[peer]
        for peer in since:
            if peer not in live:
                del self._since[peer]
        for peer in live:
            self._since.setdefault(peer, now)
        unproven = sorted((peer for peer in live if peer not in self._proven), key=self._since.__getitem__)
        short_of_places = len(live) >= self._connections * _SHORT
        too_many = max(len(unproven) - self._connections // 2, 0) if short_of_places else 0
        old = [peer for peer in unproven if now - self._since[peer] >= _GRACE_S]
        worst, self._worst = self._worst, set()
        closed = sum(
            self._sockets.shut_down(live[peer], peer)
            for peer in {*old[:too_many], *(peer for peer in worst if peer in live and peer not in self._proven)}
        )
        if closed:
            METRICS.connections_closed.inc(closed)
            log.warning("connections_closed", "closed %d connections whose calls show no key", closed)


class Sockets:
    """The server's own sockets, as the operating system lists them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, str]] = {}  # inode: local port, peer

    def connections(self, ports: Collection[int]) -> dict[str, int]:
        """Peer, as gRPC writes it: file descriptor."""
        found: dict[str, int] = {}
        known: dict[int, tuple[int, str]] = {}
        for number in (int(path.name) for path in Path("/dev/fd").iterdir()):
            try:
                status = os.fstat(number)
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                local, peer = known[status.st_ino] = self._known.get(status.st_ino) or _ends(number)
                if local in ports and peer:
                    found[peer] = number
        self._known = known
        return found

    def shut_down(self, number: int, peer: str) -> bool:
        """Shut down the connection to `peer`, unless the descriptor belongs to another file by now."""
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                if peer_name(connection.getpeername()) != peer:
                    return False
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # gone by itself
            return False
        return True


def _ends(number: int) -> tuple[int, str]:
    """Local port and peer; nothing for what is no connection over IP."""
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return 0, ""
            return connection.getsockname()[1], peer_name(connection.getpeername())
    except OSError:
        return 0, ""


def peer_name(address: tuple[Any, ...]) -> str:
    """Return the name that gRPC gives to a peer. address: host, port."""
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
