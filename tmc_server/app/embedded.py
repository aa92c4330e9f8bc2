"""A center inside a process of somebody else: its server in one thread, reached over loopback with a secret.

`tmc_client.embedded` finds `start`, and `tmc_client.testing` finds `start_manual`, under the entry point `tmc.embedded`,
so that the SDK imports nothing of the server.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from tmc_server.app.form import Form, in_one_process
from tmc_server.app.maintenance import CannotStart
from tmc_server.app.reaching import require_databases
from tmc_server.app.server import Server
from tmc_server.config import Config, ConfigError, load

log = logging.getLogger("tmc.app")

Result = TypeVar("Result")
_START_S = 120.0  # a schema on a slow database


class EmbeddedServer:
    """A server in a thread of this process. address: host:port.  secret: the key of every app, and of its operators."""

    def __init__(self, config: Config, form: Form) -> None:
        """Raises CannotStart."""
        self.secret = form.secret
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tmc-embedded", daemon=True)
        self._thread.start()
        self._stopping = asyncio.Event()
        try:
            self.server = self._run(Server.started(config, form))
        except BaseException:
            self._end()
            raise
        self.address = f"127.0.0.1:{self.server.port}"
        self._served = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        atexit.register(self.stop)

    async def _serve(self) -> None:
        """Until `stop`, or until the server cannot continue: then calls fail, and the log says why."""
        await self.server.run_until(self._stopping)
        await self.server.stop()

    def stop(self) -> None:
        """Answer the calls under way, store what is queued, end the thread. Idempotent."""
        atexit.unregister(self.stop)
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        try:
            self._served.result()
        finally:
            self._end()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def start(database: str) -> EmbeddedServer:
    """Start the center of this database. TMC_ environment variables configure the rest, as for `tmc dev`.

    database: SQLAlchemy URL of SQLite, MariaDB or MySQL. Raises CannotStart.
    """
    try:
        config = in_one_process(load(), database, port=0)
    except ConfigError as exc:
        raise CannotStart(str(exc)) from exc
    require_databases(config)
    return EmbeddedServer(config, Form(is_open=True, secret=secrets.token_urlsafe(32)))
