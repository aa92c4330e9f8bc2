"""Wakes the relay that works, in whichever process it runs: LISTEN and NOTIFY of PostgreSQL, with psycopg.

A NOTIFY in the business transaction would be the usual way, and would make all commits of the database queue for one
lock. Here a thread notifies after the commit, once for all messages of a moment. What is lost with the process, or on
another database or driver, or behind a pooler, waits for the relay's next look, a second at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from tmc_client.forks import notice_fork, watch_forks

log = logging.getLogger("tmc_client.outbox")

_CHANNEL = "tmc_outbox"
_LISTEN_S = 1.0  # how soon `stop` is noticed
_AGAIN_S = 5.0


def can_ring(engine: sa.Engine) -> bool:
    return engine.dialect.name == "postgresql" and engine.dialect.driver == "psycopg"


def _is_pooled(connection: Any) -> bool:
    """Return whether a pooler such as PgBouncer is in between: what listens there may be given to anybody."""
    (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    return bool(process != connection.info.backend_pid)


class Bell:
    """Rings in a thread of its own, which starts with the first ring. Does nothing where there is no NOTIFY."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._works = can_ring(engine)
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        self._condition = threading.Condition()
        self._is_rung = self._closed = False
        self._thread: threading.Thread | None = None

    def ring(self) -> None:
        """Returns at once."""
        if not self._works:
            return
        notice_fork()
        with self._condition:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="tmc-outbox-bell", daemon=True)
                self._thread.start()
            self._is_rung = True
            self._condition.notify()

    def _run(self) -> None:
        while self._take():
            try:
                with self._engine.begin() as connection:
                    connection.execute(sa.text(f"NOTIFY {_CHANNEL}"))
            except Exception:  # also of what makes connections for the engine
                log.debug("the relay looks by itself", exc_info=True)

    def _take(self) -> bool:
        """Wait for a ring. Returns False: it is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_rung or self._closed)
            rung, self._is_rung = self._is_rung, False
            return rung

    def close(self) -> None:
        """Ring for what was committed, then end."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(5)


class Listener:
    """Calls `wake` in a thread of its own whenever a bell of this database rings."""

    def __init__(self, engine: sa.Engine, wake: Callable[[], object]) -> None:
        self._engine = engine
        self._wake = wake
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if can_ring(self._engine):
            self._thread = threading.Thread(target=self._run, name="tmc-outbox-listener", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as exc:
                log.warning("the relay looks every second until it hears again: %s", exc, exc_info=True)
                self._stopping.wait(_AGAIN_S)

    def _listen(self) -> None:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()  # a connection that listens goes to nobody else
        try:
            connection.rollback()
            connection.autocommit = True
            if _is_pooled(connection):
                log.info("this database is behind a pooler, where nobody can listen: the relay looks every second")
                self._stopping.set()
                return
            connection.execute(f"LISTEN {_CHANNEL}")
            self._wake()  # for what came before
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=_LISTEN_S, stop_after=1):
                    self._wake()
        finally:
            with suppress(Exception):  # it may be the reason
                connection.close()
