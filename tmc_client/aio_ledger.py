"""The ledger's chores over an AsyncEngine: make the tables, submit what an earlier run left behind."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from tmc_client import errors
from tmc_client.aio import AsyncCenter
from tmc_client.ledger import ledger_id_of, refused, settle_statement, unsettled_after
from tmc_client.tables import metadata


async def create_tables(engine: AsyncEngine) -> None:
    """Create the ledger and inbox tables where they are missing. Safe to repeat."""

    def create(connection: sa.Connection) -> None:
        metadata.create_all(connection)
        ledger_id_of(connection)

    async with engine.begin() as connection:
        await connection.run_sync(create)


async def resume(center: AsyncCenter, engine: AsyncEngine, timeout: timedelta = timedelta(seconds=30)) -> int:
    """See tmc_client.Center.resume."""
    submitted, last = 0, ""
    while True:
        async with engine.connect() as connection:
            ids = list((await connection.execute(unsettled_after(last))).scalars())
        if not ids:
            return submitted
        last = ids[-1]
        answered = []
        for message_id in ids:
            try:
                await center.submit(message_id, timeout=timeout)
            except errors.Gone:
                answered.append(message_id)
            except errors.TmcError as exc:
                refused(message_id, exc)
            else:
                answered.append(message_id)
        submitted += len(answered)
        if answered:
            async with engine.begin() as connection:
                await connection.execute(settle_statement(answered))
