"""The library form: the center inside this process, for `tmc.connect("embedded+sqlite:///shop.db", app="shop")`.

Its server is the one that `tmc serve` runs, in one thread of this process and on a database of yours. It stops when the
last Center that uses it is closed. Forked children use the server of their parent as long as that runs. Needs
`tmc-center[server]`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from tmc_client import errors
from tmc_common.plugins import installed


class EmbeddedServer(Protocol):
    """address: host:port on loopback.  secret: the key of every app."""

    address: str
    secret: str

    def stop(self) -> None: ...


@dataclass(kw_only=True)
class _Shared:
    server: EmbeddedServer
    users: int = 0
    pid: int = field(default_factory=os.getpid)


_RUNNING: dict[str, _Shared] = {}
_LOCK = threading.Lock()


class EmbeddedCenter:
    """One user of the center in this process. database: its SQLAlchemy URL; those of one URL share a server."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._shared: _Shared | None = None

    def open(self) -> EmbeddedServer:
        """The running server, started if there is none. Call it once. Raises InvalidRequest: it cannot start."""
        with _LOCK:
            shared = _RUNNING.get(self._database)
            if shared is None:
                shared = _RUNNING[self._database] = _Shared(server=_started(self._database))
            shared.users += 1
            self._shared = shared
            return shared.server

    def close(self) -> None:
        """Stop the server if nobody else here uses it. Idempotent."""
        with _LOCK:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.users -= 1
            if not shared.users and shared.pid == os.getpid():
                del _RUNNING[self._database]
                shared.server.stop()


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread of the parent may have held it


def _started(database: str) -> EmbeddedServer:
    """Raises InvalidRequest."""
    try:
        server: EmbeddedServer = entry_point("center")(database)
    except RuntimeError as exc:
        raise errors.InvalidRequest(f"The center inside this process cannot start. {exc}") from exc
    return server


def entry_point(name: str) -> Any:
    """What starts a center in this process. Raises InvalidRequest: the server is not installed."""
    try:
        return installed("tmc.embedded")[name].load()
    except (KeyError, ModuleNotFoundError) as exc:
        missing = getattr(exc, "name", None) or "the server"
        raise errors.InvalidRequest(
            f"A center inside this process needs {missing}: install tmc-center[server]."
        ) from exc
