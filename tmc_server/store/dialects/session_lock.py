"""A lock that a session of the database server holds, for kinds of databases that have one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import sqlalchemy as sa

from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.dialects.hosts import Hosts


class SessionLock:
    """See contract.ExclusiveLock: it is held on a connection of its own, and ends with that.

    take: takes the lock, waiting for a while; returns False if another session keeps it.  is_free: looks.
    """

    def __init__(
        self,
        url: sa.URL,
        hosts: Hosts,
        engine: sa.Engine,
        take: Callable[[sa.Connection], bool],
        is_free: Callable[[sa.Connection], bool],
    ) -> None:
        self._where = url.render_as_string(hide_password=True)
        self._hosts = hosts
        self._engine = engine
        self._take = take
        self._is_free = is_free
        self._held: sa.Connection | None = None

    def hold(self) -> None:
        if self._held is not None and self._still_holds():
            return
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            taken = self._take(connection)
        except BaseException:
            connection.invalidate()
            raise
        if not taken:
            connection.invalidate()
            raise DatabaseTaken(
                f"Another server uses {self._where}: built-in delivery serves one server, stop the other."
            )
        self._held = connection

    def refuse_beside_another(self) -> None:
        with self._engine.connect() as connection:
            if not self._is_free(connection):
                raise DatabaseTaken(f"A server with built-in delivery uses {self._where}: stop it first.")

    def close(self) -> None:
        """It went with its connection."""

    def let_go(self) -> None:
        if self._held is not None:
            self._held.invalidate()
            self._held.close()
            self._held = None

    def _still_holds(self) -> bool:
        assert self._held is not None
        with suppress(sa.exc.DBAPIError):
            self._held.exec_driver_sql("SELECT 1")
            if self._hosts.leads(self._held):  # a lock on a former primary keeps nobody away
                return True
        self.let_go()
        return False
