"""A database on several servers, one of which takes writes: its URL names their hosts, and each new connection finds that one.

    mariadb+mysqldb://tmc:password@db1,db2:3306/tmc

Source: docs/failover.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from tmc_common.eventlog import EventLog

log = EventLog("tmc.store")

Connect = Callable[..., Any]


def has_several(url: sa.URL) -> bool:
    """Return whether one of its hosts can take over from another."""
    return "," in (url.host or "")


class Hosts:
    """The hosts of one database; they share its port. Thread-safe: the order is replaced as a whole.

    takes_writes: a query for whether its server does.  refusal: what the driver's error has in front of its text.
    """

    def __init__(self, url: sa.URL, takes_writes: str, refusal: tuple[int, ...] = ()) -> None:
        self._has_several = has_several(url)
        self._order = tuple((url.host or "").split(","))  # the one that took writes last comes first
        self._takes_writes = takes_writes
        self._refusal = refusal

    def lead(self, engine: sa.Engine, connect: Connect | None = None) -> None:
        """Let this engine connect to the host that takes writes, and leave the others, also where they are still up.

        connect: the driver's own function, unless it is given.
        """
        if self._has_several:
            event.listen(engine, "do_connect", partial(self._connect, connect or engine.dialect.loaded_dbapi.connect))
            event.listen(engine, "checkout", self._leave)
        elif connect is not None:
            event.listen(engine, "do_connect", lambda _dialect, _record, given, named: connect(*given, **named))

    def _connect(
        self, connect: Connect, dialect: sa.Dialect, record: sa.pool.ConnectionPoolEntry, given: Any, named: Any
    ) -> Any:
        host, connection = self._writable(connect, dialect.loaded_dbapi, given, named)
        record.info["host"] = host
        if host != self._order[0]:
            log.warning("database_switched", "%s takes the writes now, %s does not", host, self._order[0])
            self._order = (host, *(each for each in self._order if each != host))
        return connection

    def _leave(self, _connection: object, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
        if record.info["host"] != self._order[0]:
            raise sa.exc.DisconnectionError  # it may be still up there, and what it reads may be old

    def _writable(self, connect: Connect, driver: Any, given: Any, named: Any) -> tuple[str, Any]:
        """Connect to each in turn. Raises an error of the driver: of the last one that could not be asked, if there is one."""
        error = driver.OperationalError(*self._refusal, f"none of {', '.join(self._order)} takes writes")
        for host in self._order:
            try:
                connection = connect(*given, **{**named, "host": host})
                if self.takes_writes(connection):
                    return host, connection
                connection.close()
            except driver.Error as exc:
                error = exc
        raise error

    @property
    def counts(self) -> str:
        """Return a query for whether a connection still leads to the host that counts; with one host, if it leads anywhere."""
        return self._takes_writes if self._has_several else "SELECT 1"

    def takes_writes(self, connection: Any) -> bool:
        """Ask the server of a driver's connection."""
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
            if self._has_several and not self.takes_writes(connection):
                raise sa.exc.DisconnectionError

        return is_still_ours
