"""Connections of HTTP servers: silent ones end, there are not too many, and one peer has a part of them only.

uvicorn ends a connection that is idle after a response, but waits for ever for a first request, for the rest of a request or
a form, and for a client that does not read.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from tmc_common.addresses import HostPort

MOST_OF_A_PEER = 200
PATIENCE_S = 10.0


def listen(address: str) -> socket.socket:
    """Listen on host:port, port 0 for a free one. Raises OSError."""
    place = HostPort.parse(address)
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listening = socket.create_server((place.host, place.port), family=family)
    except OSError as exc:
        raise OSError(f"Cannot listen on {address}: {exc.strerror}.") from exc
    # uvicorn sends head and body apart: without this, the body waits until the client has acknowledged the head, 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class PatientProtocol(H11Protocol):
    """A connection is closed whose client has not sent a whole request, or read on, for PATIENCE_S, or twice that."""

    most = 1_000  # connections; further ones are closed, those that are open go on
    most_of_a_peer = MOST_OF_A_PEER
    _watching: asyncio.TimerHandle | None = None
    _waits_for: object = None  # at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.state()
        if self.is_one_too_many():
            transport.close()
        else:
            self._waits_for = self._client_owes()
            self._look_later()

    def state(self) -> dict[str, Any]:
        """Return what the connection adds to the scope of its requests, as `state`."""
        return {}

    def is_one_too_many(self) -> bool:
        """Return whether there are more connections than there may be, of all or of its peer."""
        if len(self.connections) > self.most:
            return True
        others = [each for each in self.connections if isinstance(each, PatientProtocol)]
        peers = [each.client[0] for each in others if each.client is not None]
        return self.client is not None and peers.count(self.client[0]) > self.most_of_a_peer

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except LocalProtocolError:  # nonsense behind a request that is answered already: uvicorn answers it again
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._waits_for = None  # the client reads on
        super().resume_writing()

    def _look_later(self) -> None:
        self._watching = self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        before, self._waits_for = self._waits_for, self._client_owes()
        if self._waits_for is not None and self._waits_for == before:
            self.transport.abort()  # closing would wait until the client has read
        else:
            self._look_later()

    def _client_owes(self) -> object:
        """Return what the client has to do, another value whenever it did some of it. None: it waits for us, or rests.

        It has to read, or to send the rest of a request, or its next one, of which it has sent a part; or its first one.
        """
        cycle: Any = self.cycle
        unread = self.transport.get_write_buffer_size()
        if unread:
            return cycle, unread
        if cycle is None or cycle.more_body:
            return cycle, 0
        rests = self.timeout_keep_alive_task is not None  # until uvicorn ends it
        return (cycle, 0) if cycle.response_complete and not rests else None
