"""FastAPI and SQLAlchemy's asyncio. Checks are mounted into the application.

The center finds them by check_address=, and over HTTP, after:
tmc admin set-check order.paid --kind http --option path=/tmc/checks --option batch=true
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import tmc_client as tmc
from tmc_client import aio

ADDRESS = os.environ.get("TMC_ADDRESS", "127.0.0.1:50051")
engine = create_async_engine(os.environ.get("SHOP_URL", "sqlite+aiosqlite:///shop.db"))
center = aio.connect(ADDRESS, app="orders", check_address=os.environ.get("SHOP_ADDRESS", ""))


async def prepare_database() -> None:
    await aio.create_tables(engine)
    async with engine.begin() as connection:
        for table in ("paid", "coupon"):
            await connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table} (number INTEGER)"))


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    await prepare_database()
    await center.resume(engine)  # what a crash left behind
    yield
    await center.close()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
app.mount("/tmc", center.checks(engine).asgi())  # POST /tmc/checks


@app.post("/orders/{number}/pay")
async def pay(number: int) -> str:
    async with AsyncSession(engine) as session, center.transaction(session) as tx:
        await session.execute(sa.text("INSERT INTO paid VALUES (:number)"), {"number": number})
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")
    return "paid"


def consume() -> None:
    consumer = tmc.Consumer(tmc.connect(ADDRESS, app="coupons"))

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(async_sessionmaker(engine)))
    async def give_coupon(paid: dict[str, int], session: AsyncSession) -> None:
        await session.execute(sa.text("INSERT INTO coupon VALUES (:number)"), {"number": paid["order"]})

    consumer.run()


async def prepare_consumer() -> None:
    await prepare_database()
    await engine.dispose()  # its connections belong to this event loop, and the consumer has its own


if __name__ == "__main__":
    import asyncio

    asyncio.run(prepare_consumer())
    consume()
