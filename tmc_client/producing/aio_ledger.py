"""Ledger operations over an AsyncEngine: create the tables, resume unanswered submits, settle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from tmc_client import errors
from tmc_client.producing import ledger
from tmc_client.producing.ledger import answered, prepared_by, settle_statement, unsettled_after
from tmc_client.producing.producer import Prepared
from tmc_client.tables import ledger as ledger_table
from tmc_client.tables import raise_if_lacking

log = logging.getLogger("tmc_client.ledger")


async def create_tables(engine: AsyncEngine) -> None:
    """Create the ledger and inbox tables where they are missing. Safe to repeat, and for several processes at once."""
    _refuse_blocking(engine, "tmc_client.aio.create_tables()", "tmc_client.create_tables(engine)")
    await greenlet_spawn(ledger.create_tables_of, engine.sync_engine)


def _refuse_blocking(engine: object, asked_by: str, instead: str) -> None:
    """Raises InvalidRequest. asked_by, instead: calls, for the error message."""
    if not isinstance(engine, AsyncEngine):
        raise errors.InvalidRequest(
            f"{asked_by} takes an AsyncEngine, not {type(engine).__name__}: of create_async_engine(url), or use {instead}."
        )


async def settle(engine: sa.Engine, message_ids: Sequence[str]) -> None:
    """Mark answered messages. engine: the blocking side of an AsyncEngine."""
    try:
        async with AsyncEngine(engine).begin() as connection:
            await connection.execute(settle_statement(message_ids))
    except Exception as exc:
        log.warning("%d answered messages stay unsettled: %s", len(message_ids), exc, exc_info=True)


class Submit(Protocol):
    """AsyncCenter.submit."""

    def __call__(self, message: Prepared, *, timeout: timedelta) -> Awaitable[str]: ...


async def resume(submit: Submit, engine: AsyncEngine, timeout: timedelta = timedelta(seconds=30)) -> int:
    """See tmc_client.Center.resume."""
    _refuse_blocking(engine, "center.resume()", "the center of tmc_client.connect()")
    submitted, last = 0, ""
    while True:
        try:
            async with engine.connect() as connection:
                page = [prepared_by(row) for row in await connection.execute(unsettled_after(last))]
        except sa.exc.SQLAlchemyError as exc:
            await greenlet_spawn(raise_if_lacking, exc, engine.sync_engine, ledger_table)
            raise
        if not page:
            return submitted
        last = page[-1].message_id
        calls = (submit(message, timeout=timeout) for message in page)
        results = await asyncio.gather(*calls, return_exceptions=True)
        raised = (result if isinstance(result, BaseException) else None for result in results)
        done, failure = answered(zip((message.message_id for message in page), raised, strict=True))
        submitted += len(done)
        if done:
            async with engine.begin() as connection:
                await connection.execute(settle_statement(done))
        if failure is not None:
            raise failure
