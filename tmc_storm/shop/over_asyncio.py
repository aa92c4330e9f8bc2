"""Transaction blocks on an event loop, for threads that wait for them."""

from __future__ import annotations

import asyncio
import threading

from sqlalchemy.ext.asyncio import AsyncSession

from tmc_storm.shop import books
from tmc_storm.shop.orders import ChangedMind, Order
from tmc_storm.shop.settings import ShopSettings


class AsyncBlocks:
    """A producer that is written for asyncio. Its loop has a thread, a connection to the center, and an engine of its own."""

    def __init__(self, settings: ShopSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncio", daemon=True)
        self._thread.start()
        self._center = settings.connect_async()
        self._engine = books.async_engine_of(settings.database)

    def send(self, order: Order) -> None:
        """Take an order in a block; each thread that waits has one open. Raises what the block raises."""
        asyncio.run_coroutine_threadsafe(self._send(order), self._loop).result()

    def close(self) -> None:
        """Finish what was begun."""
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _send(self, order: Order) -> None:
        is_slow = order.thinks_s > 0
        async with (
            AsyncSession(self._engine) as session,
            self._center.transaction(session, prepare_first=is_slow) as tx,
        ):
            tx.send(order.topic, order.body, key=order.key, delay=order.delay)
            await asyncio.sleep(order.thinks_s)  # perhaps for longer than its topic allows: then a check fences it
            await session.execute(books.sent.insert(), order.row())
            if order.is_undone:
                raise ChangedMind

    async def _close(self) -> None:
        await self._center.close()
        await self._engine.dispose()
