"""A TCP proxy that misbehaves on request: what is between a client and a server in bad hours, without root rights.

Thread based, loopback only. Faults apply to connections that are open and to those that come later, until `pass_through`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from enum import Enum
from types import TracebackType

_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with zero seconds: close() sends RST


class _Mode(Enum):
    OPEN = "open"
    HOLE = "hole"
    MUTE = "mute"


class _Pair:
    """One accepted connection and its connection to the target; target is None while a black hole took the first."""

    def __init__(self, client: socket.socket, target: socket.socket | None) -> None:
        self.client = client
        self.target = target

    def sockets(self) -> list[socket.socket]:
        return [self.client] if self.target is None else [self.client, self.target]

    def close(self, reset: bool = False) -> None:
        for end in self.sockets():
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                # A thread that waits in recv keeps the socket open until it is woken; SHUT_RD wakes it and sends no FIN.
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()


class TcpProxy:
    """Listens on a port of this machine, 127.0.0.1 by default, and passes everything on to the target.

    accepted: connections taken so far; passed_bytes: towards the target so far. Faults: see the methods.
    """

    def __init__(self, target_host: str, target_port: int, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target = (target_host, target_port)
        self._condition = threading.Condition()
        self._mode = _Mode.OPEN
        self._delay_s = 0.0
        self._closed = False
        self._pairs: set[_Pair] = set()
        self.accepted = 0
        self.passed_bytes = 0
        self._listener = socket.create_server((host, port), backlog=256)
        self._host = host
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"proxy-{self.port}", daemon=True).start()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """host:port of this proxy."""
        return f"{self._host}:{self.port}"

    @property
    def open_connections(self) -> int:
        """Number of connections that are open now."""
        with self._condition:
            return len(self._pairs)

    def pass_through(self) -> None:
        """End every fault. What a black hole held back is delivered now, as TCP would after a repaired cable."""
        self._set(_Mode.OPEN, 0.0)

    def black_hole(self) -> None:
        """Deliver nothing in either direction and close nothing; new connections are accepted and get no answer."""
        self._set(_Mode.HOLE, 0.0)

    def mute(self) -> None:
        """Hold back what the target answers; what is sent to it arrives."""
        self._set(_Mode.MUTE, 0.0)

    def delay(self, seconds: float) -> None:
        """Hold each piece of data back for this long, in both directions."""
        self._set(_Mode.OPEN, seconds)

    def cut(self) -> None:
        """Close every open connection (FIN); new ones work."""
        self._drop(reset=False)

    def reset(self) -> None:
        """Reset every open connection (RST); new ones work."""
        self._drop(reset=True)

    def close(self) -> None:
        """Stop listening and close everything."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop(reset=False)

    def _set(self, mode: _Mode, delay_s: float) -> None:
        with self._condition:
            self._mode, self._delay_s = mode, delay_s
            self._condition.notify_all()

    def _drop(self, reset: bool) -> None:
        with self._condition:
            pairs, self._pairs = self._pairs, set()
            self._condition.notify_all()
        for pair in pairs:
            pair.close(reset)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            pair = _Pair(client, None)
            with self._condition:
                if self._closed:
                    client.close()
                    return
                self.accepted += 1
                self._pairs.add(pair)
            threading.Thread(target=self._serve, args=(pair,), daemon=True).start()

    def _serve(self, pair: _Pair) -> None:
        """Connect to the target (not while the hole is open) and pass both directions on."""
        if not self._may_pass(pair):
            return
        try:
            target = socket.create_connection(self._target, timeout=10)
            target.settimeout(None)
        except OSError:
            self._end(pair)
            return
        with self._condition:
            pair.target = target
            gone = pair not in self._pairs
        if gone:
            target.close()
            return
        for end in (pair.client, target):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(pair, target, pair.client), daemon=True)
        back.start()
        self._pump(pair, pair.client, target)

    def _pump(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        """One direction until either end is gone."""
        try:
            while data := source.recv(_CHUNK_BYTES):
                if self._delay_s:
                    time.sleep(self._delay_s)
                if not self._may_pass(pair, back=sink is pair.client):
                    return
                if sink is pair.target:
                    self.passed_bytes += len(data)  # first: whoever sees the answer sees the count
                sink.sendall(data)
        except OSError:
            pass
        if self._may_pass(pair, back=sink is pair.client):  # an end of stream is swallowed by a black hole as well
            self._end(pair)

    def _may_pass(self, pair: _Pair, *, back: bool = False) -> bool:
        """Wait while the hole is open. Returns False when the connection was dropped meanwhile.

        back: from the target to the client.
        """
        open_modes = (_Mode.OPEN,) if back else (_Mode.OPEN, _Mode.MUTE)
        with self._condition:
            self._condition.wait_for(lambda: self._mode in open_modes or pair not in self._pairs or self._closed)
            return pair in self._pairs and not self._closed

    def _end(self, pair: _Pair) -> None:
        with self._condition:
            self._pairs.discard(pair)
        pair.close()
