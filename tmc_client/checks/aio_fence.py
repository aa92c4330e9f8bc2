"""Answer checks from the ledger over an AsyncEngine, on a separate event loop with its own connections.

Checks arrive in threads of any server, and the program's own loop may be busy or not running at that moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from tmc_client import errors
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.checks.questions import Answer, Question
from tmc_client.forks import notice_fork, watch_forks

T = TypeVar("T")


class LoopBeside:
    """An event loop in a thread of its own, which starts with the first call. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call it where it may wait for asyncio's drivers. Call this from any other thread."""
        return asyncio.run_coroutine_threadsafe(greenlet_spawn(function), self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        notice_fork()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="tmc-checks-loop", daemon=True).start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class AsyncLedgerAnswers:
    """Thread-safe. engine: only its address and settings are used, not its connections.  loop: where they are made."""

    def __init__(self, engine: AsyncEngine, loop: LoopBeside, beside: dict[sa.Pool, sa.Engine]) -> None:
        """beside: see engines.engine_beside. Raises InvalidRequest if `engine` is not an AsyncEngine."""
        if not isinstance(engine, AsyncEngine):
            raise errors.InvalidRequest(
                f"center.checks() takes the engine of the ledger's database, not {type(engine).__name__}: for a session "
                "give its engine."
            )
        self._answers = LedgerAnswers(engine.sync_engine, beside)
        self._loop = loop

    def ledger_id(self) -> bytes:
        """See fence.LedgerAnswers. Call it from any thread."""
        return self._loop.run(self._answers.ledger_id)

    def answer(self, questions: Sequence[Question], *, fences: bool) -> list[Answer]:
        """See fence.LedgerAnswers. Call it from any thread."""
        return self._loop.run(partial(self._answers.answer, questions, fences=fences))

    def close(self) -> None:
        self._loop.run(self._answers.close)
