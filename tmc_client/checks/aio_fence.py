"""Answer checks from the ledger over an AsyncEngine, on a separate event loop with its own connections.

Checks arrive in threads of any server, and the program's own loop may be busy or not running at that moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from tmc_client import errors
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.checks.questions import Answer, Question
from tmc_client.forks import notice_fork, watch_forks


class AsyncLedgerAnswers:
    """Thread-safe. engine: only its address and settings are used, not its connections."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Raises InvalidRequest if `engine` is not an AsyncEngine."""
        if not isinstance(engine, AsyncEngine):
            raise errors.InvalidRequest(
                f"center.checks() takes the engine of the ledger's database, not {type(engine).__name__}: for a session "
                "give its engine."
            )
        self._answers = LedgerAnswers(engine.sync_engine)
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        self._reset()

    def answer(self, questions: Sequence[Question], *, fences: bool) -> list[Answer]:
        """See fence.LedgerAnswers. Call it from any thread."""
        work = greenlet_spawn(self._answers.answer, questions, fences=fences)
        return asyncio.run_coroutine_threadsafe(work, self._running()).result()

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
            asyncio.run_coroutine_threadsafe(greenlet_spawn(self._answers.close), loop).result()
            loop.call_soon_threadsafe(loop.stop)
