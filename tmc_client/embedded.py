"""The library form: the center inside this process, for `tmc.connect("embedded+sqlite:///shop.db", app="shop")`.

Its server is the one that `tmc serve` runs, in one thread of this process and on a database of yours. It stops when the
last Center that uses it is closed. Forked children use the server of their parent as long as that runs. Needs
`tmc-center[server]`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tmc_client import errors
from tmc_common.plugins import installed

_SQLITE = "sqlite:///"


class RunningServer(Protocol):
    """address: host:port on loopback.  secret: the key of every app."""

    address: str
    secret: str

    @property
    def is_running(self) -> bool: ...
    def stop(self) -> None: ...


@dataclass(kw_only=True)
class _Shared:
    server: RunningServer
    users: int = 0


_RUNNING: dict[str, _Shared] = {}
_LOCK = threading.Lock()


class Hold:
    """One user's hold on the server of a database. database: its SQLAlchemy URL; those of one database share a server."""

    def __init__(self, database: str) -> None:
        self._database = _absolute(database)
        self._shared: _Shared | None = None

    def open(self) -> RunningServer:
        """The running server, started if there is none. Call it once.

        Raises InvalidRequest: it cannot start, or this is a forked child whose parent is gone.
        """
        with _LOCK:
            shared = _RUNNING.get(self._database)
            if shared is None or not shared.server.is_running:
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
            if not shared.users:
                if _RUNNING.get(self._database) is shared:
                    del _RUNNING[self._database]
                shared.server.stop()


def _in_child() -> None:
    """A thread of the parent may have held the lock. The parent's users count as one here, so nothing is ended twice."""
    global _LOCK
    _LOCK = threading.Lock()
    for shared in _RUNNING.values():
        shared.users += 1


os.register_at_fork(after_in_child=_in_child)


def _absolute(database: str) -> str:
    """The same text for the same SQLite file, wherever the program goes. Raises InvalidRequest."""
    if not database.startswith(("sqlite:", "mysql", "mariadb", "postgresql")):
        raise errors.InvalidRequest(
            "The center keeps its messages in SQLite, PostgreSQL, MariaDB or MySQL: give embedded+sqlite:///FILE, "
            "embedded+postgresql://USER:PASSWORD@HOST/DATABASE or embedded+mysql://USER:PASSWORD@HOST/DATABASE."
        )
    if not database.startswith(_SQLITE):
        return database
    path, mark, options = database.removeprefix(_SQLITE).partition("?")
    if path in ("", ":memory:"):
        return database
    return f"{_SQLITE}{Path(path).resolve()}{mark}{options}"


def _started(database: str) -> RunningServer:
    """Raises InvalidRequest."""
    try:
        server: RunningServer = entry_point("center")(database)
    except RuntimeError as exc:
        raise errors.InvalidRequest(f"The center inside this process cannot start. {exc}") from exc
    return server


def entry_point(name: str) -> Any:
    """Return what starts a center in this process. Raises InvalidRequest: the server is not installed."""
    try:
        return installed("tmc.embedded")[name].load()
    except (KeyError, ModuleNotFoundError) as exc:
        missing = getattr(exc, "name", None) or "the server"
        raise errors.InvalidRequest(
            f"A center inside this process needs {missing}: install tmc-center[server]."
        ) from exc
