"""A database on several servers, one of which takes writes: its URL names their hosts, and each new connection finds that one.

    mariadb+mysqldb://tmc:password@db1,db2:3306/tmc

Source: docs/failover.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from tmc_common.eventlog import EventLog

log = EventLog("tmc.store")

Connect = Callable[..., Any]
_ASKED_FOR_S = 1.0  # a connection that is kept asks its server for its role as often


class NoPrimary(Exception):
    """All hosts of a database answer, and none takes writes."""


class Hosts:
    """The hosts of one database; they share its port. Thread-safe.

    takes_writes: a query for whether its server does.
    """

    def __init__(self, url: sa.URL, takes_writes: str) -> None:
        self.names: Sequence[str] = tuple((url.host or "").split(","))
        self._order = self.names  # the one that took writes last comes first
        self._takes_writes = takes_writes
        self._switching = threading.Lock()

    @property
    def has_several(self) -> bool:
        """Return whether one of them can take over from another."""
        return len(self.names) > 1

    def lead(self, engine: sa.Engine, connect: Connect | None = None) -> None:
        """Let this engine connect to the host that takes writes, and leave the others, also where they are still up.

        connect: the driver's own function, unless it is given.
        """
        if self.has_several:
            event.listen(engine, "do_connect", partial(self._connect, connect or engine.dialect.loaded_dbapi.connect))
            event.listen(engine, "checkout", self._leave)
        elif connect is not None:
            event.listen(engine, "do_connect", lambda _dialect, _record, given, named: connect(*given, **named))

    def leads(self, connection: sa.Connection) -> bool:
        """Return whether a connection that is kept still leads to the host that takes writes."""
        if not self.has_several:
            return True
        info, now = connection.info, time.monotonic()
        if info["host"] != self._order[0]:
            return False
        if now - info["asked"] > _ASKED_FOR_S:
            info["asked"] = now
            try:
                return self.takes_writes(connection.connection.dbapi_connection)
            except connection.dialect.loaded_dbapi.Error:
                return False
        return True

    def _connect(
        self, connect: Connect, dialect: sa.Dialect, record: sa.pool.ConnectionPoolEntry, given: Any, named: Any
    ) -> Any:
        order = self._order
        host, connection = self._writable(order, connect, dialect.loaded_dbapi.Error, given, named)
        record.info.update(host=host, asked=time.monotonic())
        if host != order[0]:
            with self._switching:
                if self._order is order:  # else this answer may be older than another thread's
                    self._order = (host, *(each for each in order if each != host))
                    log.warning("database_switched", "%s takes the writes now, %s does not", host, order[0])
        return connection

    def _leave(self, _connection: object, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
        if record.info["host"] != self._order[0]:
            raise sa.exc.DisconnectionError  # it may be still up there, and what it reads may be old

    def _writable(
        self, order: Sequence[str], connect: Connect, failure: type[Exception], given: Any, named: Any
    ) -> tuple[str, Any]:
        """Connect to each in turn. Raises the driver's error of the first host that could not be asked; NoPrimary: all could."""
        first: Exception | None = None
        for host in order:
            try:
                connection = connect(*given, **{**named, "host": host})
            except failure as exc:
                first = first or exc
                continue
            try:
                if self.takes_writes(connection):
                    return host, connection
            except failure as exc:
                first = first or exc
            connection.close()
        raise first or NoPrimary(f"None of {', '.join(self.names)} takes writes: promote one.")

    def takes_writes(self, connection: Any) -> bool:
        """Ask the server of a driver's connection. Raises its errors."""
        cursor = connection.cursor()
        try:
            cursor.execute(self._takes_writes)
            (answer,) = cursor.fetchone()
        finally:
            cursor.close()
        connection.rollback()
        return bool(answer)

    def test(self, ping: Callable[[Any], object]) -> Callable[[Any], object]:
        """Return the test of a connection that rested. ping: raises if it is lost, which is enough where there is one host."""

        def is_still_ours(connection: Any) -> None:
            ping(connection)
            if self.has_several and not self.takes_writes(connection):
                raise sa.exc.DisconnectionError

        return is_still_ours
