"""A DNS server on loopback that knows one name, whose addresses a test changes."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

_A = 1
_STOP = b"stop"


class Dns:
    """port: over UDP.  addresses: what it answers to every question for an A record; to others, that there is none."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (asked := self._socket.recvfrom(512))[0] != _STOP:
            self._socket.sendto(self._answer(asked[0]), asked[1])

    def _answer(self, asked: bytes) -> bytes:
        end = asked.index(b"\0", 12) + 5  # of the name, its type and its class
        (kind,) = struct.unpack_from("!H", asked, end - 4)
        found = [socket.inet_aton(address) for address in self.addresses] if kind == _A else []
        header = asked[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0)
        records = b"".join(struct.pack("!HHHIH", 0xC00C, _A, 1, 0, 4) + address for address in found)
        return header + asked[12:end] + records

    def stop(self) -> None:
        self._socket.sendto(_STOP, ("127.0.0.1", self.port))
        self._thread.join(10)
        self._socket.close()
