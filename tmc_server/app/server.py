"""One server: what it starts and stops, in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

import sqlalchemy as sa
import uvloop

from tmc_common.addresses import is_loopback
from tmc_common.eventlog import EventLog
from tmc_server.app.maintenance import CannotStart, CannotStartYet, open_shards, said_by_database
from tmc_server.app.memory import keep_memory_small
from tmc_server.app.opening import OpenStore, open_store
from tmc_server.app.run_mode import SERVER, RunMode
from tmc_server.app.wiring import Wiring, wire
from tmc_server.certificates import CertificateUnusable
from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable, TmcError
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.migrate import CannotMigrate
from tmc_server.store.shard_map import ShardsElsewhere
from tmc_server.telemetry import MetricsEndpoint

log = EventLog("tmc.app")

Result = TypeVar("Result")
_BEAT_S = 1.0
_SHUTDOWN_S = 20.0  # for calls that run when the server stops
SAME_SIGNAL_S = 1.0  # a terminal and a supervisor may both pass on one wish to stop


class Server:
    """Serves from `started` to `stop`. dead: set when it cannot continue by itself."""

    def __init__(
        self,
        store: OpenStore,
        parts: Wiring,
        metrics: MetricsEndpoint,
        dead: asyncio.Event,
        *,
        is_manual: bool,
    ) -> None:
        self.store = store
        self.parts = parts
        self.metrics = metrics
        self._is_manual = is_manual
        self._dead = dead

    @classmethod
    async def started(cls, config: Config, mode: RunMode = SERVER) -> Server:
        """Start a server. Raises CannotStart."""
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        metrics = MetricsEndpoint(config.telemetry.listen)

        def die() -> None:
            loop.call_soon_threadsafe(dead.set)

        try:
            with ExitStack() as undo:
                shards = open_shards(config, clock=mode.clock)
                undo.callback(shards.close)
                metrics.start()  # a port that is taken ends the start before anything is leased or handed over
                undo.callback(metrics.stop)
                store = await _in_thread(open_store, config, shards, mode.is_open, undo)
                parts = wire(config, store, loop, mode, die)
                if parts.http is not None:
                    undo.callback(parts.http.close)
                server = cls(
                    store,
                    parts,
                    metrics,
                    dead,
                    is_manual=mode.is_manual,
                )
                await server._start()
                undo.pop_all()
        except StoreUnavailable as exc:
            raise CannotStartYet(said_by_database(exc)) from exc
        except sa.exc.SQLAlchemyError as exc:
            raise CannotStart(said_by_database(exc)) from exc
        except (TmcError, DatabaseTaken, CannotMigrate, ShardsElsewhere, CertificateUnusable, OSError) as exc:
            raise CannotStart(str(exc)) from exc
        log.info("server_started", "serving on port %d as node %s", server.port, store.nodes.lease)
        listens = [each for each in (config.server.listen, config.http.listen) if each]
        if not (mode.is_open or config.tls.certificate or all(map(is_loopback, listens))):
            log.warning("transport_not_encrypted", "keys travel in the clear: set [tls], or listen on loopback only")
        return server

    @property
    def port(self) -> int:
        return self.parts.grpc.port

    async def _start(self) -> None:
        parts = self.parts
        parts.commit.start()
        await _in_thread(self._take_up)
        await parts.grpc.server.start()
        await parts.grpc.set_serving(True)
        if parts.http is not None:
            parts.http.start()
        self.metrics.is_ready = True
        self._beat()
        if not self._is_manual:
            for duty in (*parts.duties, *parts.findable):
                duty.start()

    def _beat(self) -> None:
        """Show that the event loop runs, as long as it does."""
        self.metrics.beat()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _take_up(self) -> None:
        """Take leases, rescue what an earlier run left behind, and start the outlets, before the first call."""
        for keeping in self.parts.shard_keeping:
            keeping.take_up()
        self.parts.outlets.start()

    async def run_until(self, stopping: asyncio.Event) -> bool:
        """Serve until `stopping` is set (True), or until this server cannot continue by itself (False)."""
        waits = [asyncio.create_task(event.wait()) for event in (stopping, self._dead)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._dead.is_set():
            log.critical("server_failed", "this server cannot continue to serve")
        return not self._dead.is_set()

    async def stop(self) -> None:
        """Stop in order: accept no new calls, answer the open ones, store what is queued, then close everything."""
        parts, store = self.parts, self.store
        self.metrics.is_ready = False
        await parts.grpc.set_serving(False)
        for duty in parts.findable:
            await _in_thread(duty.stop)
        await _in_thread(parts.discovery.deregister)
        if parts.outlets.streams is not None:
            parts.outlets.streams.finish()  # consumers go elsewhere; a stream would outlast any grace
        parts.edge.finish_streams()
        await asyncio.gather(
            parts.grpc.server.stop(_SHUTDOWN_S), *([parts.http.stop(_SHUTDOWN_S)] if parts.http else [])
        )
        if parts.submission is not None:
            await _in_thread(parts.submission.stop)
        parts.administering.stop()
        for duty in parts.duties:
            await _in_thread(duty.stop)
        for checking in parts.checking:
            await _in_thread(checking.stop)
        for keeping in parts.shard_keeping:
            await _in_thread(keeping.release)
        clean = await _in_thread(parts.outlets.stop)
        await parts.outlets.answers.flush()
        await _in_thread(parts.checks.close)
        await _in_thread(parts.commit.stop)
        await _in_thread(store.release_slot, clean)
        await _in_thread(store.shards.close)
        self.metrics.stop()
        log.info("server_stopped", "stopped")


async def _in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run it in a thread of its own.

    asyncio.to_thread can begin nothing when the interpreter ends, which is when an embedded server stops.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as exc:  # noqa: BLE001 - handed to the one who waits
            future.set_exception(exc)

    threading.Thread(target=run, name="tmc-server").start()
    return await asyncio.wrap_future(future)


async def _serve(config: Config, mode: RunMode, on_started: Callable[[int], None]) -> bool:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    server = await Server.started(config, mode)
    on_started(server.port)
    first = loop.time()

    def on_signal() -> None:
        nonlocal first
        if not stopping.is_set():
            first = loop.time()
            stopping.set()
        elif loop.time() - first > SAME_SIGNAL_S:
            os._exit(130)  # a second signal: at once

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    well = await server.run_until(stopping)
    await server.stop()
    return well


def serve(config: Config, mode: RunMode = SERVER, on_started: Callable[[int], None] = lambda _port: None) -> None:
    """Run one server until SIGTERM or SIGINT. on_started: called with its port.

    Raises CannotStart; SystemExit(1) when a fault ended it.
    """
    keep_memory_small()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_serve(config, mode, on_started)):
            raise SystemExit(1)
