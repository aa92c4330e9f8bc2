"""The transaction block for an AsyncSession: the steps of tmc_client.transaction, awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from tmc_client.ledger import fenced, ledger_id_of, rows_for, settle_statement
from tmc_client.producer import Producer
from tmc_client.tables import ledger
from tmc_client.transaction import (
    BACKGROUND,
    SUBMIT_WAIT,
    Preparation,
    Records,
    begin_block,
    end_block,
    may_be_fenced,
    raise_after,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

log = logging.getLogger("tmc_client.transaction")


class AsyncTransaction(Records):
    """Use it with `async with`, once. See tmc_client.transaction for the order of the steps and what may raise."""

    def __init__(self, producer: Producer, session: AsyncSession, prepare_timeout: timedelta) -> None:
        super().__init__()
        self._producer = producer
        self._session = session
        self._prepare_timeout = prepare_timeout

    async def __aenter__(self) -> AsyncTransaction:
        begin_block(self._session.sync_session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_block(self._session.sync_session)
        if exc is not None:
            await self._session.rollback()
            return
        await self._write()
        await self._session.commit()
        await self._submit()

    async def _write(self) -> None:
        preparation: Preparation | None = None
        try:
            await self._session.flush()
            if not self.requests:
                return
            connection = await self._session.connection()
            ledger_id = await connection.run_sync(ledger_id_of)
            preparation = Preparation(self._producer, self.requests, ledger_id, self._prepare_timeout)
            await asyncio.wait(
                [asyncio.wrap_future(future) for future in preparation.futures],
                timeout=self._prepare_timeout.total_seconds(),
            )
            self.messages = preparation.collect()
            await connection.execute(ledger.insert(), rows_for(self.messages))
        except BaseException as exc:
            await self._session.rollback()
            raise_after(exc, preparation, await self._markers(exc))
            raise

    async def _markers(self, exc: BaseException) -> Sequence[str]:
        """See tmc_client.transaction."""
        engine = self._session.bind
        if not (self.messages and may_be_fenced(exc) and isinstance(engine, AsyncEngine)):
            return ()
        try:
            async with engine.connect() as connection:
                markers: Sequence[str] = (
                    (await connection.execute(fenced([m.message_id for m in self.messages]))).scalars().all()
                )
                return markers
        except sa.exc.SQLAlchemyError:
            return ()

    async def _submit(self) -> None:
        """Nothing raises here: the transaction is committed."""
        if not self.messages:
            return
        try:
            futures = {m.message_id: asyncio.wrap_future(self._producer.submit(m, BACKGROUND)) for m in self.messages}
            done, _ = await asyncio.wait(futures.values(), timeout=SUBMIT_WAIT.total_seconds())
            answered = [id_ for id_, future in futures.items() if future in done and future.exception() is None]
            engine = self._session.bind
            if answered and isinstance(engine, AsyncEngine):
                async with engine.begin() as connection:
                    await connection.execute(settle_statement(answered))
        except Exception as exc:  # noqa: BLE001 - the transaction is committed: its caller must not see an error
            log.warning("committed, the center answers later: %s", exc)
