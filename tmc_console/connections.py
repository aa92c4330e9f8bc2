"""The console's connections: silent ones end, and one peer has a part of them only.

uvicorn ends a connection that is idle after a response, but waits for ever for a first request, for the rest of a request,
and for the rest of a form.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 1_000
MOST_OF_A_PEER = 200
PATIENCE_S = 10.0


class PatientProtocol(H11Protocol):
    """A connection that has not sent a whole request after PATIENCE_S, or twice that, is closed."""

    _watching: asyncio.TimerHandle | None = None
    _incomplete: object = None  # the request that was incomplete at the last look; of none: the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, PatientProtocol)]
        peers = [each.client[0] for each in others if each.client is not None]
        if self.client is not None and peers.count(self.client[0]) > MOST_OF_A_PEER:
            transport.close()
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._watching = self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        cycle: Any = self.cycle
        awaits_one = cycle is None or cycle.response_complete
        incomplete = (cycle or self) if awaits_one or cycle.more_body else None
        if incomplete is not None and incomplete is (self if cycle is None else self._incomplete):
            self.transport.close()
        else:
            self._incomplete = incomplete
            self._look_later()
