"""An asyncio engine that was used on another event loop before: found at the start, in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

import tmc_client as tmc
from tests.support.mariadb import MariaDB
from tests.support.postgresql import PostgreSQL
from tmc_client import aio

SAYS = r"connections of another event loop.*engine\.dispose\(\)"


@pytest.fixture(params=["asyncpg", "asyncmy"])
def engine(request: pytest.FixtureRequest, postgresql: PostgreSQL, mariadb: MariaDB) -> AsyncEngine:
    """With a connection in its pool that belongs to a loop which is closed."""
    url = postgresql.create("tmc_loops", "asyncpg")
    if request.param == "asyncmy":
        url = sa.make_url(mariadb.create("tmc_loops")).set(drivername="mysql+asyncmy").render_as_string(False)
    engine = create_async_engine(url)
    asyncio.run(aio.create_tables(engine))
    return engine


async def _check_inbox(engine: AsyncEngine) -> None:
    await tmc.SqlInbox(async_sessionmaker(engine)).check_async()


async def _send(engine: AsyncEngine) -> None:
    async with aio.connect("127.0.0.1:1", app="orders") as center, AsyncSession(engine) as session:
        async with center.transaction(session, prepare_first=True):
            pass


@pytest.mark.filterwarnings("ignore")  # of connections whose loop is closed: nobody can close them any more
@pytest.mark.parametrize("use", [_check_inbox, _send])
def test_connections_of_another_loop_are_named(engine: AsyncEngine, use: Callable[[AsyncEngine], object]) -> None:
    async def on_another_loop() -> None:
        with pytest.raises(tmc.InvalidRequest, match=SAYS):
            await use(engine)  # type: ignore[misc]

    asyncio.run(on_another_loop())


def test_an_engine_that_was_disposed_of_works_on_another_loop(postgresql: PostgreSQL) -> None:
    engine = create_async_engine(postgresql.create("tmc_loops", "asyncpg"))

    async def prepare() -> None:
        await aio.create_tables(engine)
        await engine.dispose()

    async def check() -> None:
        await _check_inbox(engine)
        await engine.dispose()

    asyncio.run(prepare())
    asyncio.run(check())
