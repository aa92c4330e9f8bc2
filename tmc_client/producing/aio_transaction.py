"""The transaction block for an AsyncSession: the same steps, run in SQLAlchemy's greenlet, which awaits their I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.util import await_only

from tmc_client import errors
from tmc_client.local.loops import on_one_loop
from tmc_client.local.sessions import SessionTransaction
from tmc_client.producing.answered import Answered
from tmc_client.producing.block import Block, Writer
from tmc_client.producing.ledger import settle_statement
from tmc_client.producing.producer import Producer
from tmc_client.producing.transaction import CenterBlock, was_answered
from tmc_client.recording import Recorded

SettleLater = Callable[[asyncio.AbstractEventLoop, sa.Engine, str], None]


def opened(session: Any) -> AsyncSession:
    """Raises InvalidRequest: it is none."""
    found = session() if isinstance(session, async_scoped_session) else session
    if not isinstance(found, AsyncSession):
        raise errors.InvalidRequest(
            f"center.transaction() takes an AsyncSession, not {type(session).__name__}: for a Session connect with "
            "tmc_client.connect(), of an async_sessionmaker make a session first."
        )
    return found


class Awaited(Block[Any]):
    """Used with `async with`."""

    _session: AsyncSession

    def __enter__(self) -> NoReturn:
        raise TypeError("Write `async with center.transaction(session) as tx`: this center is an asyncio one.")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        with on_one_loop("each event loop"):
            await self._session.run_sync(lambda _: self._begin())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with on_one_loop("each event loop"):
            await self._session.run_sync(lambda _: self._end(exc))


class AsyncRecordedTransaction(Awaited, Recorded):
    """See recording."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(SessionTransaction(session.sync_session))
        self._session = session


class AsyncTransaction(Awaited, CenterBlock):
    """Use it with `async with`, once. See tmc_client.producing.transaction for the order of the steps and what may raise."""

    def __init__(
        self,
        producer: Producer,
        settle: SettleLater,
        session: AsyncSession,
        prepare_timeout: timedelta,
        fallback: Writer | None = None,
        answered: Answered | None = None,
        prepare_first: bool | timedelta = False,
    ) -> None:
        super().__init__(
            producer, SessionTransaction(session.sync_session), prepare_timeout, fallback, answered, prepare_first
        )
        self._session = session
        self._settle_on = settle
        self._loop = asyncio.get_running_loop()

    def _until_done(self, futures: Sequence[Future[Any]], limit: timedelta) -> None:
        await_only(_all_done(futures, limit))

    def _settle(self, submits: Mapping[str, Future[Any]]) -> None:
        answered = []
        for message_id, submit in submits.items():
            if not submit.done():
                submit.add_done_callback(partial(self._settle_one, message_id))
            elif was_answered(message_id, submit):
                answered.append(message_id)
        if self._engine is None:
            self._answered.add(self._ledger_id, answered)
        elif answered:
            with self._engine.begin() as connection:
                connection.execute(settle_statement(answered))

    def _settle_in(self, engine: sa.Engine, message_id: str) -> None:
        self._settle_on(self._loop, engine, message_id)


async def _all_done(futures: Sequence[Future[Any]], limit: timedelta) -> None:
    waiting = [asyncio.wrap_future(future) for future in futures]
    for future in waiting:
        future.add_done_callback(_seen)
    await asyncio.wait(waiting, timeout=limit.total_seconds())


def _seen(done: asyncio.Future[Any]) -> None:
    """Retrieve the error, or asyncio would log it as never retrieved; callers read it from the wrapped future."""
    if not done.cancelled():
        done.exception()
