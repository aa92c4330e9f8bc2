"""A center inside a process of somebody else: its server in one thread, reached over loopback with a secret.

`tmc_client.embedded` finds `start` under the entry point `tmc.embedded`, so that the SDK imports nothing of the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import weakref
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import uvloop
from sqlalchemy import make_url

from tmc_server.app.maintenance import CannotStart
from tmc_server.app.reaching import require_databases
from tmc_server.app.run_mode import RunMode, in_one_process
from tmc_server.app.server import Server
from tmc_server.config import Config, ConfigError, load

_START_S = 120.0  # a schema on a slow database
_LOOK_S = 0.1


class EmbeddedServer:
    """A server in a thread of this process. address: host:port.  secret: the key of every app, and of its operators.

    It stops by itself when the program ends: its thread is no daemon, so the interpreter waits for it.
    """

    def __init__(self, config: Config, mode: RunMode) -> None:
        """Raises CannotStart."""
        self.secret = mode.secret
        self._pid = os.getpid()
        started: Future[Server] = Future()
        self._thread = threading.Thread(target=self._run, args=(config, mode, started), name="tmc-embedded")
        _OURS.add(self._thread)
        self._thread.start()
        self.server = started.result(_START_S)
        self.address = f"127.0.0.1:{self.server.port}"

    def _run(self, config: Config, mode: RunMode, started: Future[Server]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(config, mode, started))

    async def _serve(self, config: Config, mode: RunMode, started: Future[Server]) -> None:
        """Serve until `stop`, until the program ends, or until the server cannot continue, as the log then says."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await Server.started(config, mode)
        except BaseException as exc:  # noqa: BLE001 - handed to the one who waits
            started.set_exception(exc)
            return
        started.set_result(server)
        watch = asyncio.create_task(self._watch())
        await server.run_until(self._stopping)
        watch.cancel()
        await server.stop()

    async def _watch(self) -> None:
        """An atexit function would come too late: it may start no thread, and stopping in order takes some."""
        while not _program_has_ended():
            await asyncio.sleep(_LOOK_S)
        self._stopping.set()

    @property
    def is_running(self) -> bool:
        """Return whether calls are served. A forked child cannot see more than whether its parent is there."""
        return self._thread.is_alive() if self.is_ours else os.getppid() == self._pid

    @property
    def is_ours(self) -> bool:
        """False in a forked child: its threads are those of the parent."""
        return self._pid == os.getpid()

    def stop(self) -> None:
        """Answer the calls under way, store what is queued, end the thread. Idempotent; nothing in a forked child."""
        if self.is_ours and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()


_OURS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _program_has_ended() -> bool:
    """Return whether the interpreter waits for nothing but embedded servers: they must not wait for one another."""
    return not any(thread.is_alive() and not thread.daemon for thread in threading.enumerate() if thread not in _OURS)


def _demand_own_file(database: str) -> None:
    """Raises CannotStart: an SQLite file with tables of the program, whose open transactions would hold up the center."""
    url = make_url(database)
    if url.get_backend_name() != "sqlite" or not Path(str(url.database)).exists():
        return
    with closing(sqlite3.connect(str(url.database))) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    foreign = sorted(name for name in names if not name.startswith(("tmc_", "sqlite_")))
    if foreign or names & {"tmc_ledger", "tmc_inbox", "tmc_outbox"}:
        raise CannotStart(
            f"{url.database} has tables of your program ({', '.join(foreign[:3]) or 'the ledger'}), and SQLite has one "
            "writer: an open transaction of yours would hold up the center that it calls. Give the center a file of its own."
        )


def start(database: str) -> EmbeddedServer:
    """Start the center of this database. TMC_ environment variables configure the rest, as for `tmc dev`.

    database: SQLAlchemy URL of SQLite, PostgreSQL, MariaDB or MySQL. Raises CannotStart.
    """
    try:
        config = in_one_process(load(), database, port=0)
    except ConfigError as exc:
        raise CannotStart(str(exc)) from exc
    require_databases(config)
    _demand_own_file(database)
    plain = config.model_copy(
        update={"tls": Config().tls, "delivery": Config().delivery, "rabbitmq": Config().rabbitmq}
    )
    return EmbeddedServer(plain, RunMode(is_open=True, secret=secrets.token_urlsafe(32)))
