"""Django's connections in the threads of handlers: nobody ends a request there, so nobody closes what has broken."""

from __future__ import annotations

import threading
import time

from django.db import close_old_connections, connections

_RESTED_S = 30.0  # a server, or something on the way, may have closed a connection that was idle for longer


class _Thread(threading.local):
    used = 0.0  # monotonic seconds


_thread = _Thread()


def before_handler() -> None:
    """Close connections that a server has closed meanwhile: Django then makes new ones."""
    close_old_connections()
    if time.monotonic() - _thread.used > _RESTED_S:
        for connection in connections.all(initialized_only=True):
            if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
                connection.close()


def after_handler() -> None:
    """Close connections that broke in the handler, or are older than CONN_MAX_AGE."""
    _thread.used = time.monotonic()
    close_old_connections()
